"""A task set of verifiers that can't be lifted."""

import verifiers.v1 as vf

__all__ = ["Needy"]


class NeedyTask(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True

    @vf.reward(weight=1.0)
    async def several(self, trace) -> dict[str, float]:
        return {"a": 1.0, "b": 0.0}

    @vf.reward(weight=1.0)
    async def files(self, trace, runtime) -> float:
        return 1.0

    @vf.stop
    async def enough(self, trace) -> bool:
        return True

    async def setup(self, trace, runtime) -> None:
        return None


class Needy(vf.Taskset[NeedyTask]):
    def load(self):
        yield NeedyTask(vf.TaskData(prompt="Do something."))
