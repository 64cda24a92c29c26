"""A task of Inspect's: sums with a tool; the sample called broken fails in the task's own code."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import match
from inspect_ai.solver import Generate, TaskState, generate, solver, use_tools
from inspect_ai.tool import Tool, tool


@tool
def add() -> Tool:
    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: the first.
            y: the second.
        """
        return x + y

    return execute


@solver
def check():
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.sample_id == "broken":
            raise RuntimeError("the task is broken")
        return state

    return solve


@task
def sums() -> Task:
    samples = [Sample(id=name, input="What is 17 + 25? Use the tool.", target="42") for name in ("sum", "broken")]
    return Task(dataset=MemoryDataset(samples), solver=[use_tools(add()), generate(), check()], scorer=match())
