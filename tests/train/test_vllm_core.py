"""A run whose vLLM dies or hangs at any instant goes on, or stops with a sentence: with a core in this process.

It is as mute as the real one: of a call that was under way when it died nothing comes back.
"""

import asyncio
import copy
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file

from agentrl.engines.base import Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import FaultRateError
from agentrl.train.step import StepResult

from .conftest import Make, Small, steps_of

INSTANTS = [
    *(("generate", 1), ("pause", 1), ("generate", 2), ("load", 1), ("generate", 3), ("name", 1), ("generate", 2)),
    *(("resume", 1), ("generate", 3), ("generate", 1)),
]
"""In each step another: which call the core dies or hangs in, and which of those with the same weights."""
SETTINGS = ("optim.minibatches=1", "rollout.turn_tokens=4", "rollout.tasks=2", "rollout.group_size=2")


OnCore = Callable[..., Small]


class DeadError(Exception):
    """As vLLM's."""

    def __str__(self) -> str:
        return "the core is dead"


class Core:
    """Samples with our own engine, from the file of weights, until it dies."""

    model: ClassVar[Any]
    instants: ClassVar[list[tuple[str, int]]]
    started: ClassVar[int]
    owner: ClassVar[Any]
    flying: ClassVar[int]
    clock: ClassVar[float] = 0.0
    sent: ClassVar[dict[str, Any]] = {}
    """Weights that came by no file."""
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=64, block_size=32))

    def __init__(self, arguments: Any) -> None:
        self.file = f"{arguments.model}/model.safetensors"
        self.errored, self.joined, self.loads, self.calls = False, False, 0, list[str]()
        self.engine = TransformersEngine(copy.deepcopy(Core.model), slots=12, max_length=256)
        self.weights = list(load_file(self.file).items())
        Core.started += 1

    @classmethod
    def from_engine_args(cls, arguments: Any, stat_loggers: object) -> "Core":
        return cls(arguments)

    async def at(self, call: str) -> None:
        self.calls.append(call)
        now, often = (call, self.calls.count(call)), len(Core.instants) > len(INSTANTS)
        # Again and again, or once with the same weights: and no episode twice, which may have two versions in flight.
        if Core.instants[:1] == [now] and (often or (Core.owner._may_die and self.loads >= Core.flying)):
            del Core.instants[0]
            self.calls.append("died")
            if len(Core.instants) % 2:
                asyncio.get_running_loop().call_later(0.005, self.shutdown)
            else:  # it hangs, and for longer than anybody waits
                Core.clock += 1e4
        if "died" in self.calls:
            await asyncio.Event().wait()

    async def generate(self, prompt: Any, params: Any, _: str, **__: object) -> AsyncIterator[Any]:
        if self.errored:
            raise DeadError
        if self.weights:
            await self.engine.load_weights(self.weights, -1)
            self.weights.clear()
        how = {"temperature": params.temperature, "max_tokens": params.max_tokens, "stop_ids": params.stop_token_ids}
        done = await self.engine.generate(tuple(prompt["prompt_token_ids"]), Sampling(**how), seed=params.seed)
        await self.at("generate")
        pairs = zip(done.token_ids, done.logprobs, strict=True)
        answer = SimpleNamespace(token_ids=done.token_ids, finish_reason=done.finish)
        answer.logprobs = [{token: SimpleNamespace(logprob=logprob)} for token, logprob in pairs]
        spans = ((0, done.version), *done.swaps)
        names = [(start, "default" if version < 0 else str(version)) for start, version in spans]
        answer.weight_versions = [SimpleNamespace(start=start, version=name) for start, name in names]
        yield SimpleNamespace(outputs=[answer])

    async def pause_generation(self, **_: object) -> None:
        await self.at("pause")

    async def init_weight_transfer_engine(self, _: object) -> None:
        self.joined = True

    async def start_weight_update(self) -> None:
        assert self.joined

    async def update_weights(self, _: object) -> None:
        await self.at("load")

    async def finish_weight_update(self, version: str) -> None:
        await self.at("name")
        self.weights.clear()
        await self.engine.load_weights(list(Core.sent.items()) or load_file(self.file).items(), int(version))

    async def resume_generation(self) -> None:
        await self.at("resume")
        self.calls.clear()
        self.loads += 1

    def shutdown(self) -> None:
        self.errored = True


def info(*fields: Any, rank: int = 0) -> tuple[Any, ...]:
    return (*fields, rank)


class Direct:
    """As the trainer's side of vLLM's CUDA IPC and NCCL."""

    infos: ClassVar[list[tuple[Any, ...]]]

    @classmethod
    def trainer_init(cls, info: tuple[Any, ...], *, client: Any, source: Any) -> "Direct":
        Direct.infos.append(info)
        made = cls()
        made.client, made.source = client, source
        client.init_weight_transfer_engine({})
        return made

    client: Any
    source: Any

    def send_weights(self) -> None:
        assert [meta[0] for meta in self.source.metadata()] == [name for name, _ in self.source]
        self.client.start_weight_update()
        Core.sent = dict(self.source)
        self.client.update_weights({})
        self.client.finish_weight_update()


@pytest.fixture
def on_core(monkeypatch: pytest.MonkeyPatch) -> OnCore:
    """Put a run on vLLM's engine around a core of ours."""
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"AsyncEngineArgs": SimpleNamespace},
        "vllm.sampling_params": {"SamplingParams": SimpleNamespace, "RequestOutputKind": SimpleNamespace(FINAL_ONLY=1)},
        "vllm.v1.engine.async_llm": {"AsyncLLM": Core, "EngineDeadError": DeadError, "EngineGenerateError": DeadError},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": object},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
        "vllm.model_executor.model_loader.reload": {},
        "vllm.utils.network_utils": {"get_open_port": lambda: 7},
    }
    transfer = {
        "base": {
            **dict.fromkeys(("WeightTransferInitRequest", "WeightTransferUpdateRequest"), SimpleNamespace),
            "ParamMeta": info,
        },
        "ipc_engine": {
            **{"IPCWeightTransferEngine": object, "IPCTrainerWeightTransferEngine": Direct},
            "IPCTrainerInitInfo": info,
        },
        "nccl_engine": {
            "NCCLTrainerWeightTransferEngine": Direct,
            "NCCLTrainerInitInfo": info,
        },
    }
    parts |= {f"vllm.distributed.weight_transfer.{name}": members for name, members in transfer.items()}
    monkeypatch.delitem(sys.modules, "agentrl.engines.vllm_weights", raising=False)
    for name, members in parts.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "agentrl.engines.vllm", raising=False)
    engine: Any = import_module("agentrl.engines.vllm")
    for name in ("vllm", "vllm_weights"):
        monkeypatch.delitem(sys.modules, f"agentrl.engines.{name}")
    monkeypatch.setattr(engine, "_GLANCE_S", 0.005)
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: Core.clock))
    monkeypatch.setattr(Core, "sent", {})
    Core.started, Core.instants, Direct.infos = 0, [], []

    def put(run: Small, backend: str = "file") -> Small:
        Core.model = run.parts.model
        monkeypatch.setattr(engine, "choose_backend", lambda *_: backend)  # pyright: ignore[reportUnknownLambdaType]
        monkeypatch.setattr(engine, "engine_cards", lambda *_: [1, 2])  # pyright: ignore[reportUnknownLambdaType]
        Core.owner = engine.VllmEngine(run.parts.model, slots=12, max_length=256, weights_on="cpu")
        return run.on(Core.owner)

    return put


def played(run: Small) -> list[StepResult]:
    Core.flying = int(run.config.rollout.overlap.mode == "inflight")
    with closing(run.parts.engine):
        return steps_of(run, run.config.optim.steps)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "lag", "inflight"])
def test_a_core_that_dies_at_any_instant_holds_up_no_run(small: Make, on_core: OnCore, mode: str) -> None:
    Core.instants = [*INSTANTS]
    steps = len(INSTANTS) * (2 if mode == "inflight" else 1) + 3
    results = played(on_core(small(*SETTINGS, f"rollout.overlap={mode}", f"optim.steps={steps}")))
    assert not Core.instants and Core.started == 1 + len(INSTANTS)
    assert all(result.metrics["groups_lost"] == 0 and result.metrics["logp_diff_max"] < 1e-4 for result in results)
    assert sum(result.metrics["faults"] for result in results) > 0


@pytest.mark.parametrize("mode", ["off", "lag", "inflight"])
def test_a_core_that_dies_again_and_again_ends_the_run(small: Make, on_core: OnCore, mode: str) -> None:
    Core.instants = [("generate", 2)] * 100
    with pytest.raises(FaultRateError, match=r"; the last fault: vLLM (has died twice|failed: the core is dead)"):
        played(on_core(small(*SETTINGS, f"rollout.overlap={mode}")))


@pytest.mark.parametrize(("backend", "info"), [("ipc", (0,)), ("nccl", ("127.0.0.1", 7, 3, 0))])
def test_weights_that_come_by_no_file(small: Make, on_core: OnCore, backend: str, info: tuple[Any, ...]) -> None:
    run = on_core(small(*SETTINGS, "optim.steps=3"), backend)
    assert all(result.metrics["logp_diff_max"] < 1e-4 for result in played(run))
    assert Direct.infos == [info] and Core.sent.keys() == dict(run.parts.model.named_parameters()).keys()
    Core.instants = [("generate", 2)] * 100
    with pytest.raises(FaultRateError, match="vLLM has died and its weights are in no file: go on from the last"):
        played(on_core(small(*SETTINGS), backend))
