"""The part of verifiers 0.4.0 that the adapter uses, in the forms that it uses; ``test_real.py`` plays the real one."""

import hashlib
import importlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

T = TypeVar("T")


class TaskError(Exception):
    pass


class Message(BaseModel):
    role: str = ""
    content: str


SystemMessage = UserMessage = AssistantMessage = Message


class AgentConfig(BaseModel):
    pass


class SingleAgentEnv:
    pass


class TasksetConfig(BaseModel, extra="forbid"):
    id: str
    task: Any = None


class TaskData(BaseModel):
    prompt: str = ""
    system_prompt: str | None = None
    image: str | None = None
    workdir: str | None = None
    skills: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()

    @property
    def prompt_text(self) -> str:
        return self.prompt


@dataclass
class MessageNode:
    parent: int | None
    message: Message
    sampled: bool


@dataclass
class Trace:
    task: Any
    agent: Any
    nodes: list[MessageNode] = field(default_factory=list)
    rewards: dict[str, Any] = field(default_factory=dict)

    @property
    def last_reply(self) -> str:
        return self.nodes[-1].message.content


def reward(weight: float) -> Any:
    def mark(fn: Any) -> Any:
        fn.reward, fn._vf_weight = True, weight
        return fn

    return mark


def stop(fn: Any) -> Any:
    fn.stop = True
    return fn


class Task(Generic[T]):
    NEEDS_CONTAINER: ClassVar[bool] = False
    config = SimpleNamespace(judges=[])

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def key(self) -> str:
        return hashlib.sha256(self.data.model_dump_json().encode()).hexdigest()

    def hooks(self, kind: str) -> list[Any]:
        return [fn for name in dir(type(self)) if getattr(fn := getattr(self, name), kind, False) is True]

    async def setup(self, trace: Any, runtime: Any) -> None: ...
    async def finalize(self, trace: Any, runtime: Any) -> None: ...
    async def stage_verifier(self, trace: Any, runtime: Any) -> None: ...
    def runtime_env(self) -> dict[str, str]:
        return {}

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []

    async def score(self, trace: Trace) -> None:
        for fn in self.hooks("reward"):
            if "runtime" in fn.__code__.co_varnames:
                continue
            try:
                result = await fn(trace)
            except Exception as error:
                raise TaskError(f"task {type(self).__name__} scoring: {type(error).__name__}: {error}") from error
            scores = result if isinstance(result, dict) else {fn.__name__: result}
            trace.rewards |= {name: SimpleNamespace(score=float(score)) for name, score in scores.items()}


class Taskset(Generic[T]):
    def __init__(self, config: TasksetConfig) -> None:
        self.config = config

    def take(self, limit: int) -> list[Any]:
        return list(self.load())[:limit]  # type: ignore

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []


def taskset_config_type(taskset_id: str) -> type[TasksetConfig]:
    return TasksetConfig


def load_taskset(config: TasksetConfig) -> Any:
    module = importlib.import_module(config.id)
    return getattr(module, module.__all__[0])(config)


def environment_class(taskset_id: str) -> type[SingleAgentEnv]:
    return SingleAgentEnv
