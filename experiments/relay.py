"""``agentrl/Relay-v0``: pass on ten lines of digits, a call each. An episode is long, and a slip anywhere loses it."""

import random
from collections.abc import Mapping, Sequence
from functools import partial

import agentrl
from agentrl.toolenv.tasks import GeneratedTasks, stable_hash

ENV_ID = "agentrl/Relay-v0"


def lines_of(task: agentrl.Task) -> list[str]:
    """Return the lines of a task."""
    return task.answer.split()


@agentrl.tool
def send(line: str, context: agentrl.ToolContext) -> str:
    """Pass on a line of digits, and get the next one."""
    lines, sent = lines_of(context.task), context.state.setdefault("sent", [])
    sent.append(line)
    if len(sent) == len(lines):
        context.end()
        return "done"
    return lines[len(sent)]


class Relay(agentrl.ToolEnv):
    """The tool answers each call with the next line, whatever was sent; the reward is 1 where all lines were right.

    Args:
        lines: how many.
        length: digits of each.
    """

    instructions = "Pass on each line."
    tools = (send,)

    def __init__(self, *, lines: int = 10, length: int = 40, split: str = "train") -> None:
        super().__init__(split=split, dialect="hermes", max_turns=lines)
        self._make = partial(_task, lines, length)

    def tasks(self, split: str) -> GeneratedTasks:
        """Return tasks without end; those of another split begin with other lines."""
        return GeneratedTasks(split, partial(self._make, split))

    def reward(self, episode: agentrl.Episode) -> Mapping[str, float]:
        """Return 1 where every line was passed on."""
        return {"correct": float(episode.state.get("sent", []) == lines_of(episode.task))}

    def gold(self, task: agentrl.Task) -> Sequence[str]:
        """Pass on each line."""
        return [self.dialect.render("send", {"line": line}) for line in lines_of(task)]


def _task(lines: int, length: int, split: str, index: int) -> agentrl.Task:
    draw = random.Random(stable_hash(f"{split} {index}"))
    drawn = ["".join(draw.choices("0123456789", k=length)) for _ in range(lines)]
    return agentrl.Task(id=f"{split}-{index}", prompt=drawn[0], answer=" ".join(drawn))


agentrl.register(ENV_ID, Relay)
