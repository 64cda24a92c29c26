"""Questions on elements, answered with the help of a table that the agent can search."""

import gymnasium

from agentrl import Episode, Task, ToolEnv, ToolError, tool

ELEMENTS = {"gold": "Au", "iron": "Fe", "lead": "Pb", "silver": "Ag", "sodium": "Na", "tin": "Sn"}


@tool
def look_up(name: str) -> str:
    """Find the symbol of a chemical element.

    Args:
        name: its English name.
    """
    if name not in ELEMENTS:
        raise ToolError(f"the table has no element {name!r}")
    return ELEMENTS[name]


class Trivia(ToolEnv):
    instructions = "Answer with the symbol alone."
    tools = (look_up,)

    def tasks(self, split: str) -> list[Task]:
        names = sorted(ELEMENTS)[:4] if split == "train" else sorted(ELEMENTS)[4:]
        return [Task(id=name, prompt=f"Which symbol does {name} have?", answer=ELEMENTS[name]) for name in names]

    def reward(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final.strip() == episode.task.answer)}

    def gold(self, task: Task) -> list[str]:
        return [self.dialect.render("look_up", {"name": task.id}), task.answer]


gymnasium.register("examples/Trivia-v0", entry_point=Trivia)
