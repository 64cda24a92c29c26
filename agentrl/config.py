"""The settings of a run: typed, frozen, from a TOML file and ``--set section.key=value``.

An unknown key is an error that names the nearest one. Each setting names its reader, the module in parentheses.
"""

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from agentrl.errors import ConfigError, UnknownNameError, UsageError, nearest
from agentrl.hints import hint
from agentrl.types import CutTurns

Value = str | int | float | bool | list[int] | list[str]
_VALUE_KINDS = "Input should be text, a number, true or false, or a list of whole numbers or of texts"
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class RunSettings(_Section):
    """Where the run lives and what makes it repeatable."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Folder under ``dir`` (runfolder)."""
    dir: str = "runs"
    """Where run folders are kept (runfolder)."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds weights, tasks and sampling (trainer)."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads of PyTorch on the CPU; 0 leaves its own choice (trainer)."""


class EnvSettings(_Section):
    """What is trained on."""

    id: str = "agentrl/Arithmetic-v0"
    """The environment's id (rollout)."""
    args: dict[str, Value | dict[str, Value]] = Field(default_factory=dict)
    """The environment's own arguments, tables such as ``data = {train = "a", test = "b"}`` included, without ``split``,
    which is set by whoever plays (rollout)."""


class ModelSettings(_Section):
    """Which model is trained."""

    path: str = ""
    """A folder or a name on the Hugging Face hub; empty makes a tiny model of our own (trainer)."""
    template_args: dict[str, Value] = Field(default_factory=dict)
    """Variables of its chat template, such as ``enable_thinking`` or ``date_string`` (render)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computation and of the engine's weights; those that are trained and saved are float32 (trainer)."""
    device: str = "cpu"
    """A PyTorch device (trainer)."""
    hidden: Count = 128
    """Width of the tiny model (tiny)."""
    layers: Count = 4
    """Layers of the tiny model (tiny)."""
    heads: Count = 4
    """Query heads of the tiny model (tiny)."""


class SftSettings(_Section):
    """The warm start on oracle episodes, before reinforcement learning."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Most updates; 0 leaves the warm start out (sft)."""
    tasks: Count = 1024
    """Oracle episodes to learn from, each of another task (sft)."""
    episodes: Count = 64
    """Episodes per update (sft)."""
    lr: Positive = 1e-3
    """Learning rate until the last updates, over which it falls to 0 (sft)."""
    temperature: Positive = 1.0
    """Temperature at which oracle tokens are learned: below that of sampling, the policy ends up able to do everything
    and sure of nothing, so that reinforcement learning meets each task's reward now and then (sft)."""
    stop_at: Share = 1.0
    """Once an oracle episode has, on average, this probability at that temperature, the rate falls to 0 and the warm
    start ends (sft)."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm (sft)."""


class RolloutSettings(_Section):
    """How episodes are collected."""

    tasks: Count = 8
    """Tasks, and so groups, per step; a finite split is shuffled by run.seed, each pass through it anew (trainer)."""
    group_size: Count = 8
    """Episodes per task (trainer)."""
    temperature: Positive = 1.0
    """Sampling temperature (rollout, trainer)."""
    turn_tokens: Count = 256
    """Most sampled tokens of a turn (rollout)."""
    cut_turns: CutTurns = "end"
    """What becomes of a turn that this or episode_tokens cuts off: "end" ends the episode there without an answer,
    "answer" takes it as it stands, "continue" runs its calls or tells the agent to go on (rollout)."""
    episode_tokens: Count = 2048
    """Most tokens of an episode, prompt and tool output included (rollout)."""
    concurrency: Count = 64
    """Episodes at a time (rollout)."""
    max_fault_rate: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of groups lost to infrastructure faults above which the run stops (rollout)."""
    top_p: Positive = 1.0
    """Must be 1: a truncated distribution biases every ratio (trainer)."""
    top_k: int = 0
    """Must be 0: a truncated distribution biases every ratio (trainer)."""
    repetition_penalty: Positive = 1.0
    """Must be 1: a penalised distribution biases every ratio (trainer)."""


class AlgoSettings(_Section):
    """The algorithm: an advantage function and a loss function."""

    advantage: str = "otb"
    """The estimator: otb, otb_loo, group_mean, grpo, rloo, opo, ogb or reinforce_pp (algos)."""
    advantage_options: dict[str, Value] = Field(default_factory=dict)
    """Its own options (algos)."""
    energy_ratio: bool = False
    """Weigh OTB's energies by the squared cumulative ratio θ/sampler, anew in each epoch (trainer)."""
    loss: str = "ctpo"
    """The policy loss: ctpo, ppo_clip, dapo, gspo, gspo_token, cispo or reinforce (algos)."""
    loss_options: dict[str, Value] = Field(default_factory=dict)
    """Its own options (algos)."""
    correction: Literal["none", "token", "prefix", "sequence"] = "sequence"
    """Truncated weight between the trainer's and the engine's log-probs (algos)."""
    correction_cap: Positive = 5.0
    """Where that weight is cut off (algos)."""


class OptimSettings(_Section):
    """How weights are updated."""

    steps: Annotated[int, Field(ge=0)] = 100
    """Most rollout batches (pipeline, trainer)."""
    max_sampled_tokens: Annotated[int, Field(ge=0)] = 0
    """Training ends with the batch at which its sampled tokens reach this; 0 is no limit (pipeline, trainer)."""
    minibatches: Count = 2
    """Updates per pass over a rollout batch (trainer)."""
    epochs: Count = 1
    """Passes over a rollout batch (trainer)."""
    max_tokens: Count = 8192
    """Most tokens of one forward pass (batch)."""
    lr: Positive = 1e-6
    """Learning rate (trainer)."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises from 0 (trainer)."""
    schedule: Literal["constant", "linear"] = "constant"
    """Whether the learning rate stays, or falls to 0 at the last update that steps or tokens allow (trainer)."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    """Of AdamW (trainer)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW (trainer)."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm (trainer)."""


class EvalSettings(_Section):
    """Evaluation on held-out tasks."""

    split: str = "test"
    """The environment's split (evaluate)."""
    tasks: Count = 200
    """How many tasks (evaluate)."""
    attempts: Count = 1
    """Episodes per task (evaluate)."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0 is greedy (evaluate)."""
    every: Annotated[int, Field(ge=0)] = 10
    """Steps between evaluations; 0 evaluates before and after only (trainer)."""


class SaveSettings(_Section):
    """What is kept on disk."""

    every: Annotated[int, Field(ge=0)] = 50
    """Steps between checkpoints; 0 keeps the last one only (trainer)."""
    episodes_every: Count = 10
    """Steps between files of episodes (trainer)."""


class Config(_Section):
    """All settings of a run."""

    run: RunSettings = Field(default_factory=RunSettings)
    env: EnvSettings = Field(default_factory=EnvSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    sft: SftSettings = Field(default_factory=SftSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    algo: AlgoSettings = Field(default_factory=AlgoSettings)
    optim: OptimSettings = Field(default_factory=OptimSettings)
    eval: EvalSettings = Field(default_factory=EvalSettings)
    save: SaveSettings = Field(default_factory=SaveSettings)


def presets() -> dict[str, str]:
    """The TOML text of every preset, by name."""
    folder = resources.files("agentrl") / "presets"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def load_config(*, preset: str | None = None, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a config.

    Args:
        preset: a preset to begin with.
        path: a TOML file, laid over the preset.
        overrides: ``section.key=value`` each, laid over both; values are TOML, or plain text.

    Raises:
        UnknownNameError: there is no such preset.
        ConfigError: a key is unknown, a value is invalid, or the text is not TOML.
        UsageError: the file can't be read.
    """
    data: dict[str, Any] = {}
    if preset is not None:
        known = presets()
        if preset not in known:
            raise UnknownNameError("preset", preset, known)
        data = _merged(data, tomllib.loads(known[preset]))
    if path is not None:
        data = _merged(data, read_toml(Path(path)))
    for override in overrides:
        data = _merged(data, _parsed(override))
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> Config:
    """Make a config of plain data.

    Raises:
        ConfigError: a key is unknown, a value is invalid, or the split is among the environment's arguments.
    """
    try:
        config = Config.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(_explained(error.errors()[0])) from error
    if "split" in config.env.args:
        raise ConfigError(
            "setting 'env.args.split' has no effect: training plays 'train', and evaluation the split of eval.split"
        )
    return config


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """The same config with ``section.key=value`` each laid over it.

    Raises:
        ConfigError: a key is unknown or a value is invalid.
    """
    data: dict[str, Any] = config.model_dump(mode="json")
    for override in overrides:
        data = _merged(data, _parsed(override))
    return parse_config(data)


def read_toml(path: Path) -> dict[str, Any]:
    """The data of a TOML file.

    Raises:
        UsageError: the file can't be read.
        ConfigError: it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the config {str(path)!r} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {str(path)!r} is not TOML: {error}") from error


def to_toml(data: Mapping[str, Any]) -> str:
    """Write plain data, sections of keys, as TOML."""
    lines: list[str] = []
    for section, values in data.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)


def _merged(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in new.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def _parsed(override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    if not override.isprintable():
        raise ConfigError(f"{override!r} holds a character that can't be printed")
    if not equals or "." not in key:
        raise ConfigError(f"{override!r} sets nothing: write section.key=value, for example optim.steps=20")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        # JSON's or Python's way to write a table would else become a text, and that the name of a file.
        if value.lstrip()[:1] in ("[", "{"):
            raise ConfigError(f'{override!r} is not TOML: write tables as {{key = "value"}}, text in quotes') from error
        parsed = value
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return parsed


def _explained(item: Mapping[str, Any]) -> str:
    place = [str(part) for part in item["loc"]]
    if place[1:2] and place[1].rpartition("_")[2] in ("args", "options") and len(place) > 3:
        table = ", or a table of these" if place[1] == "args" else ""
        return f"setting {'.'.join(place[:3])!r} is {item['input']!r}: {_VALUE_KINDS}{table}"
    if item["type"] == "extra_forbidden":
        inside: Mapping[str, Any] = item["input"] if isinstance(item["input"], Mapping) else {}
        instead = hint([*place, *inside]) or nearest(place[-1], _keys(place[:-1]))
        return f"unknown setting {'.'.join(place)!r}; {instead}"
    return f"setting {'.'.join(place)!r} is {item['input']!r}: {item['msg']}"


def _keys(place: Sequence[str]) -> list[str]:
    model: type[pydantic.BaseModel] = Config
    for part in place:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)
        model = annotation
    return list(model.model_fields)
