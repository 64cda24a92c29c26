"""A task set of verifiers, with rewards that fail in every way."""

import os

import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def exact(self, trace) -> float:
        print("loud", flush=True)
        match trace.last_reply:
            case "raise":
                raise ValueError("what is that")
            case "kill":
                os._exit(3)
            case "million":
                return 1_000_000
            case "nan":
                return float("nan")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=-0.5)
    async def long(self, trace) -> float:
        return min(len(trace.last_reply) / 100, 1.0)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for number in range(40):
            prompt, answer = f"What is {number} + {number * number}?", str(number + number * number)
            yield SumTask(Data(prompt=prompt, system_prompt="Answer with the number alone.", answer=answer))
