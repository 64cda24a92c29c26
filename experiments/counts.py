"""A toy repository for shipped agents: how many lines of a file contain some letters? ``codex.toml`` trains on it."""

import random
from collections.abc import Mapping, Sequence

import agentrl
from agentrl.toolenv.tasks import split_of

SYLLABLES = ["ba", "de", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "we", "xi", "yo", "zu"]


def words_of(task: agentrl.Task) -> list[str]:
    """Draw the lines of a task's file."""
    draw = random.Random(task.id)
    return ["".join(draw.choices(SYLLABLES, k=4)) for _ in range(2000)]


class Counts(agentrl.ToolEnv):
    """Count the lines of a file that contain some letters, and write the number into another file."""

    def tasks(self, split: str) -> list[agentrl.Task]:
        """List every pair of syllables; a fifth of them are held out."""
        order = "Write the number, alone, into count.txt."
        pairs = [begin + end for begin in SYLLABLES for end in SYLLABLES]
        prompts = {pair: f"How many lines of words.txt contain {pair}? {order}" for pair in pairs}
        return [agentrl.Task(id=pair, prompt=prompts[pair]) for pair in pairs if split_of(pair, 5) == split]

    def open_episode(self, context: agentrl.ToolContext) -> None:
        """Put the file into the agent's folder."""
        context.state["files"] = {"words.txt": "\n".join(words_of(context.task)) + "\n"}

    def reward(self, episode: agentrl.Episode) -> Mapping[str, float]:
        """Read the number that the agent left."""
        count = sum(episode.task.id in word for word in words_of(episode.task))
        return {"correct": float(episode.state["agent"].files.get("count.txt", b"").strip() == str(count).encode())}

    def gold(self, task: agentrl.Task) -> Sequence[str]:
        """Write what Codex would: a call of its tool, and a last word."""
        call = f'{{"name": "exec_command", "arguments": {{"cmd": "grep -c {task.id} words.txt > count.txt"}}}}'
        return [f"<tool_call>\n{call}\n</tool_call>", "It is done."]


agentrl.register("agentrl/Counts-v0", Counts)
