"""The settings of a run: typed and frozen. Each names its reader, the module in parentheses."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import pydantic
from pydantic import BeforeValidator, Field

from agentrl.types import CutTurns

Value = str | int | float | bool | list[int] | list[str]
Infinity = Annotated[float, Field(ge=math.inf, allow_inf_nan=True)]
Arguments = dict[str, Value | dict[str, Value]]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
RejectionLevel = Literal["token", "sequence", "geometric"]
Advantage = Literal["otb", "otb_loo", "otb_pooled", "group_mean", "grpo", "rloo", "opo", "ogb", "reinforce_pp", "none"]
Loss = Literal["ctpo", "cppo", "ppo_clip", "dapo", "gspo", "gspo_token", "cispo", "reinforce"]
TinySize = Literal["hidden", "layers", "heads"]


def _without_options(names: object) -> object:
    """Turn a list of names into a table."""
    if not isinstance(names, list):
        return names
    listed: list[object] = names
    return {name: {} for name in listed} if all(isinstance(name, str) for name in listed) else listed


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
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of PyTorch on the CPU; 0 leaves its own choice (trainer)."""
    deterministic: bool = False
    """Learn from the trainer's log-probs in place of the engine's, whose rounding may depend on the clock, and use
    repeatable kernels only: a run that was killed and resumed ends in the bytes of one that was not (trainer)."""
    ranks: Count | Annotated[tuple[Count, Count], Field(strict=False)] = 1
    """Processes, and on GPUs as many devices, over which the weights in training are sharded; of ``[8, 2]`` every 2
    share a pack's tokens, for long episodes (trainer)."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.ranks if isinstance(self.ranks, int) else self.ranks[0]

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that share a pack's tokens."""
        return 1 if isinstance(self.ranks, int) else self.ranks[1]


class MixedEnv(_Section):
    """One of the environments of a run that has several."""

    id: str
    """The environment's id (rollout)."""
    args: Arguments = Field(default_factory=dict)
    """The environment's own arguments (rollout)."""
    weight: Positive = 1.0
    """Its share of a run's tasks, beside the weights of the others (rollout)."""


class EnvSettings(_Section):
    """What is trained on."""

    id: str = "agentrl/Arithmetic-v0"
    """The environment's id (rollout)."""
    args: Arguments = Field(default_factory=dict)
    """The environment's own arguments, tables such as ``data = {train = "a", test = "b"}`` included, without ``split``,
    which is set by whoever plays (rollout)."""
    mix: dict[EnvName, MixedEnv] = Field(default_factory=dict)
    """Several environments in place of ``id`` and ``args``, a table ``[env.mix.NAME]`` with ``id``, ``args`` and
    ``weight`` for each: a step's tasks are shared out by weight, and each is evaluated on its own (rollout)."""

    @property
    def played(self) -> Mapping[str, MixedEnv]:
        """The environments of the run by name, in the order of names; of a run that has one, its name is empty."""
        return dict(sorted(self.mix.items())) or {"": MixedEnv(id=self.id, args=self.args)}


class ModelSettings(_Section):
    """Which model is trained."""

    path: str = ""
    """A folder, a GGUF file or a name on the Hugging Face hub; empty makes a tiny model of our own (trainer)."""
    template_args: dict[str, Value] = Field(default_factory=dict)
    """Variables of its chat template, such as ``enable_thinking`` or ``date_string`` (render)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computation and of the engine's weights; those that are trained and saved are float32 (trainer)."""
    device: str = "cpu"
    """A PyTorch device (trainer)."""
    tiny: dict[TinySize, Count] = Field(default_factory=dict)
    """Sizes of the tiny model: width, layers and query heads, ``{hidden = 128, layers = 4, heads = 4}`` where they are
    not given (tiny)."""


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
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Tokens before the end of turn_tokens and episode_tokens over which an episode's reward falls by up to 1, as
    DAPO's does; 0 for no penalty (trainer)."""
    spare: Annotated[int, Field(ge=0)] = 0
    """Groups that a step begins beyond ``tasks``; of all these the last to end are cancelled, which favours short
    episodes. With "inflight" alone (trainer)."""
    refills: Annotated[int, Field(ge=0)] = 0
    """How often in a step groups whose episodes all have one return are left out for groups of further tasks, DAPO's
    dynamic sampling; their tokens count (trainer)."""
    overlap: Literal["off", "lag", "inflight"] = "off"
    """Whether groups of later steps are played while the trainer learns: "lag" swaps weights when all are played,
    "inflight" while episodes go on (trainer)."""
    max_staleness: Count = 1
    """With overlap, by how many steps weights that sample are older than those that learn: so many with "lag", and at
    most so many with "inflight" (trainer)."""
    concurrency: Count = 64
    """Most episodes at a time, of each actor in a fleet; fewer where the engine's cache is full (rollout)."""
    max_fault_rate: Below1 = 0.01
    """Share of groups lost to infrastructure faults above which the run stops (rollout)."""


class EngineSettings(_Section):
    """What samples the tokens."""

    name: str = "transformers"
    """Engine, by name (engines)."""
    options: dict[str, Value] = Field(default_factory=dict)
    """Its own options, such as slots, the episodes whose keys and values it keeps (engines)."""


class FleetSettings(_Section):
    """Where episodes are played and sampled."""

    name: Literal["local", "ray"] = "local"
    """The run's own process, or actors on a Ray cluster, each with environments and an engine (fleet)."""
    options: Arguments = Field(default_factory=dict)
    """Ray's own: actors, address, patience, and what each actor asks for, cpus, gpus and resources (fleet)."""


class AlgoSettings(_Section):
    """The algorithm: an advantage function and a loss function."""

    advantage: Advantage = "otb"
    """The estimator (algos)."""
    advantage_options: dict[str, Value | Infinity] = Field(default_factory=dict)
    """Its own options (algos)."""
    energy_ratio: Literal[False, True, "old"] = False
    """Weigh OTB's energies by a squared ratio: "old" by the weight old/sampler of ``correction``, as its released code
    does; true by the cumulative ratio θ/sampler, anew in each epoch (trainer)."""
    loss: Loss = "ctpo"
    """The policy loss (algos)."""
    loss_options: dict[str, Value] = Field(default_factory=dict)
    """Its own options (algos)."""
    correction: Literal["none", "token", "prefix", "sequence"] = "sequence"
    """Truncated weight between the trainer's and the engine's log-probs (algos)."""
    correction_cap: Positive = 5.0
    """Where that weight is cut off (algos)."""
    rejection: dict[RejectionLevel, Annotated[tuple[float, float], Field(strict=False)]] = Field(default_factory=dict)
    """Smallest and largest ratio of those log-probs that is trained on, of each "token", of the whole "sequence", or
    its "geometric" mean: ``rejection = {geometric = [0.999, 1.001]}`` (trainer)."""
    mask_truncated: bool = False
    """Leave episodes that a limit cut off out of the updates, not out of their groups' baselines (trainer)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight in the loss of the KL, estimated by k3, to the weights that reinforcement learning began with (algos)."""
    entropy_coef: float = 0.0
    """Weight in the loss of the policy's entropy, which a positive one raises (algos)."""


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
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Whether the learning rate stays after its warmup, or falls to 0 at the last update that steps or tokens allow
    (trainer)."""
    betas: Annotated[tuple[Below1, Below1], Field(strict=False)] = (0.9, 0.95)
    """Of AdamW (trainer)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW (trainer)."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm, in the warm start too (trainer, sft)."""
    average: Below1 = 0.0
    """Decay per update of an exponential average of the weights, which is evaluated and saved as the model in place of
    those that are trained; 0 keeps none (trainer)."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them: slower, less memory
    (trainer)."""


class LoraSettings(_Section):
    """Low-rank adapters, trained by reinforcement learning in place of all weights; the warm start trains all."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Of each adapter; 0 trains all weights (trainer)."""
    alpha: Positive = 32.0
    """An adapter's product counts alpha/rank times (trainer)."""
    targets: list[str] = Field(default_factory=list)
    """Linear layers that get one, by the last part of their names, such as "q_proj"; empty for all of them
    (trainer)."""


class EvalSettings(_Section):
    """Evaluation on held-out tasks."""

    split: str = "test"
    """The environment's split (evaluate)."""
    tasks: Count = 200
    """How many tasks, of each environment (evaluate)."""
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
    keep: Annotated[int, Field(ge=0)] = 0
    """How many checkpoints to keep, the newest ones, beside that of step 0; 0 keeps all (trainer)."""
    episodes_every: Count = 10
    """Steps between files of episodes (trainer)."""


class LogSettings(_Section):
    """Where metrics go beside the run's JSONL files."""

    to: Annotated[dict[str, dict[str, Value]], BeforeValidator(_without_options)] = Field(default_factory=dict)
    """Any of ``tensorboard``, ``wandb``, ``trackio``, and ``module:function`` for functions of your own, each called
    with a row's numbers by name and its step: a list, or a table with the options of each, such as ``{wandb =
    {project = "tools", mode = "offline"}}`` (loggers)."""


class Config(_Section):
    """All settings of a run."""

    run: RunSettings = Field(default_factory=RunSettings)
    env: EnvSettings = Field(default_factory=EnvSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    sft: SftSettings = Field(default_factory=SftSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    fleet: FleetSettings = Field(default_factory=FleetSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    algo: AlgoSettings = Field(default_factory=AlgoSettings)
    optim: OptimSettings = Field(default_factory=OptimSettings)
    lora: LoraSettings = Field(default_factory=LoraSettings)
    eval: EvalSettings = Field(default_factory=EvalSettings)
    save: SaveSettings = Field(default_factory=SaveSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    def updated(self, **sections: Mapping[str, object]) -> "Config":
        """Copy the settings with some replaced, as in ``config.updated(optim={"steps": 5})``; values aren't checked."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)
