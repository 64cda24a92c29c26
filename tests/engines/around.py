"""An engine around another: tests override what they look at."""

from typing import Any

from agentrl.engines.base import Completion, Engine, Sampling

Heard = tuple[tuple[int, ...], Sampling, int, Completion]


class Around:
    """Passes everything on."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.exact, self.rounding = engine, engine.exact, engine.rounding

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        return await self.engine.generate(prompt_ids, sampling, seed=seed)

    async def load_weights(self, named_tensors: Any, version: int) -> None:
        await self.engine.load_weights(named_tensors, version)

    def close(self) -> None:
        self.engine.close()


class Overheard(Around):
    """Remembers each prompt, how and with which seed it was asked, and what came."""

    def __init__(self, engine: Engine, heard: list[Heard] | None = None) -> None:
        super().__init__(engine)
        self.heard: list[Heard] = [] if heard is None else heard

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        completion = await super().generate(prompt_ids, sampling, seed=seed)
        self.heard.append((prompt_ids, sampling, seed, completion))
        return completion
