"""The settings of a run: typed and frozen. Each description ends with its readers, the modules in parentheses."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field

from agentrl.types import CutTurns

Value = str | int | float | bool | list[int] | list[str]
Infinity = Annotated[float, Field(ge=math.inf, allow_inf_nan=True)]
Arguments = dict[str, Value | dict[str, Value]]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
RejectionLevel = Literal["token", "sequence", "geometric"]
Advantage = Literal[
    "otb", "otb_loo", "otb_pooled", "otb_episode", "group_mean", "grpo", "rloo", "opo", "ogb", "reinforce_pp", "none"
]
Loss = Literal["ctpo", "cppo", "ppo_clip", "dapo", "gspo", "gspo_token", "cispo", "reinforce"]
Own = Annotated[str, Field(pattern=":")]
TinySize = Literal["hidden", "layers", "heads"]


def _without_options(names: object) -> object:
    """Turn a list of names into a table."""
    if not isinstance(names, list):
        return names
    listed: list[object] = names
    return {name: {} for name in listed} if all(isinstance(name, str) for name in listed) else listed


SHORT_FORMS = {"rollout": {"overlap": "mode", "plan": "name", "driver": "name"}, "algo": {"correction": "kind"}}
"""Tables that may be written as one text, by section, each with the key that the text is the value of."""


def in_full(data: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the short forms in plain data by tables, so that other data can be merged into them."""
    full = {**data}
    for section, keys in SHORT_FORMS.items():
        if isinstance(table := full.get(section), Mapping):
            texts = {name: {key: table[name]} for name, key in keys.items() if isinstance(table.get(name), str)}
            full[section] = {**table, **texts}
    return full


class _Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class RunSettings(_Section):
    """The run's folder, and what makes it repeatable."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Folder under ``dir`` (runfolder)."""
    dir: str = "runs"
    """The folder of all run folders (runfolder)."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds weights, tasks and sampling (trainer)."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """PyTorch's threads on the CPU; 0 leaves the choice to PyTorch (trainer)."""
    deterministic: bool = False
    """Make a resumed run end in the same bytes as an uninterrupted one: use repeatable kernels only, and the trainer's
    log-probs instead of the engine's, whose rounding may depend on timing (trainer)."""
    ranks: Count = 1
    """Processes, each with a GPU of its own where there are GPUs, over which the trained weights are sharded
    (trainer)."""


class MixedEnv(_Section):
    """One of the environments of a run that has several."""

    id: str
    """The environment's id (rollout)."""
    args: Arguments = Field(default_factory=dict)
    """The environment's own arguments (rollout)."""
    weight: Positive = 1.0
    """Its share of a run's tasks, relative to the weights of the others (rollout)."""


class EnvSettings(_Section):
    """The environments to train on."""

    id: str = "agentrl/Arithmetic-v0"
    """The environment's id (rollout)."""
    args: Arguments = Field(default_factory=dict)
    """The environment's own arguments, such as ``data = {train = "a", test = "b"}``. ``split`` is not among them:
    training and evaluation set it (rollout)."""
    sandbox: Literal["auto", "local", "docker"] | Own = "auto"
    """The back end of all programs, where ``args`` names no other: Linux namespaces, containers, the first of the two
    that works here, ``remote:URL,URL`` for servers, or ``module:name`` for one of your own (rollout)."""
    mix: dict[EnvName, MixedEnv] = Field(default_factory=dict)
    """Several environments instead of ``id`` and ``args``: a table ``[env.mix.NAME]`` with ``id``, ``args`` and
    ``weight`` for each. A step's tasks are shared out by weight, and each environment is evaluated separately
    (rollout)."""

    @property
    def played(self) -> Mapping[str, MixedEnv]:
        """The environments of the run by name, in the order of names; of a run that has one, its name is empty."""
        return dict(sorted(self.mix.items())) or {"": MixedEnv(id=self.id, args=self.args)}


class ModelSettings(_Section):
    """The model to train."""

    path: str = ""
    """A folder or a name on the Hugging Face hub; empty makes a tiny model (trainer)."""
    template_args: dict[str, Value] = Field(default_factory=dict)
    """Variables of its chat template, such as ``enable_thinking`` or ``date_string`` (render)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation and of the engine's weights; the trained and saved weights are float32 (trainer)."""
    device: str = "cpu"
    """A PyTorch device (trainer)."""
    tiny: dict[TinySize, Count] = Field(default_factory=dict)
    """Sizes of the tiny model: width, layers and query heads; the default is ``{hidden = 128, layers = 4, heads = 4}``
    (tiny)."""


class SftSettings(_Section):
    """The warm start on oracle episodes, before reinforcement learning."""

    steps: Whole = 0
    """Most updates; 0 skips the warm start (sft)."""
    tasks: Count = 1024
    """Oracle episodes to learn from, each of another task (sft)."""
    episodes: Count = 64
    """Episodes per update (sft)."""
    lr: Positive = 1e-3
    """Learning rate until the last updates, over which it falls to 0 (sft)."""
    temperature: Positive = 1.0
    """Temperature at which oracle tokens are learned. Below the sampling temperature, the policy stays uncertain enough
    to sample every form of answer sometimes (sft)."""
    stop_at: Share = 1.0
    """When the average oracle episode has this probability at that temperature, the learning rate falls to 0 and the
    warm start ends (sft)."""


class TruncatedSettings(_Section):
    """What becomes of turns and episodes that turn_tokens, episode_tokens or a limit of turns cuts off."""

    turn: CutTurns = "end"
    """How to treat a turn that turn_tokens or episode_tokens cuts off: "end" ends the episode without an answer,
    "answer" takes the turn as the answer, "continue" runs its calls or asks the agent to continue (rollout)."""
    mask: bool = False
    """Mask truncated episodes in the updates; they still count in their groups' baselines (trainer)."""
    penalty: Whole = 0
    """DAPO's overlong penalty: over so many tokens before the end of turn_tokens and episode_tokens, the reward falls
    by up to 1; 0 for no penalty (trainer)."""


class OverlapSettings(_Section):
    """Playing groups of later steps while the trainer learns; ``overlap = "lag"`` sets the mode alone."""

    mode: Literal["off", "lag", "inflight"] = "off"
    """When the engine gets new weights: "lag" waits until all groups are complete, "inflight" swaps while episodes are
    played; "off" plays one step at a time (trainer)."""
    staleness: Count = 1
    """By how many steps the sampling weights are older than the trained ones: exactly so many with "lag", at most so
    many with "inflight" (trainer)."""
    spare: Whole = 0
    """Groups that a step begins beyond rollout.tasks. The slowest ``spare`` groups are cancelled, which favours short
    episodes. Only with "inflight" (trainer)."""


class PlanSettings(_Section):
    """Which tasks a step plays; ``plan = "uniform"`` sets the name alone."""

    name: str = "uniform"
    """Name of the plan that picks the tasks: "uniform" shuffles them, "success" prefers those that are solved
    sometimes; ``module:name`` for your own (rollout)."""
    options: dict[str, Value] = Field(default_factory=dict)
    """Its own options, such as ``prior``, ``floor`` and ``forget`` of "success" (rollout)."""
    refills: Whole = 0
    """DAPO's dynamic sampling: how often a step replaces groups whose episodes all have the same return by groups of
    further tasks; their tokens count (trainer)."""


class DriverSettings(_Section):
    """Who plays an episode; ``driver = "step"`` sets the name alone."""

    name: str = "step"
    """Name of the driver, or ``module:Class`` for your own: "step" plays an environment turn by turn, and
    "agent" lets a program play that speaks to an endpoint (rollout)."""
    options: Arguments = Field(default_factory=dict)
    """Its own options; of "step" ``history``, which is what the agent is shown of its past (rollout)."""


class RolloutSettings(_Section):
    """How episodes are collected."""

    tasks: Count = 8
    """Tasks, and so groups, per step; run.seed shuffles a finite split anew in each pass (trainer)."""
    group_size: Count = 8
    """Episodes per task (trainer)."""
    temperature: Positive = 1.0
    """Sampling temperature (rollout, trainer)."""
    turn_tokens: Count = 256
    """Most sampled tokens of a turn (rollout)."""
    episode_tokens: Count = 2048
    """Most tokens of an episode, prompt and tool output included; where it has several rows, of each (rollout)."""
    total_tokens: Whole = 0
    """Most tokens of all rows of an episode together; 0 for four times episode_tokens (rollout)."""
    concurrency: Count = 64
    """Most episodes at a time, for each actor of a fleet (rollout)."""
    max_fault_rate: Below1 = 0.01
    """Share of groups lost to infrastructure faults above which the run stops (rollout)."""
    truncated: TruncatedSettings = Field(default_factory=TruncatedSettings)
    overlap: OverlapSettings = Field(default_factory=OverlapSettings)
    plan: PlanSettings = Field(default_factory=PlanSettings)
    driver: DriverSettings = Field(default_factory=DriverSettings)


class EngineSettings(_Section):
    """The engine, which samples the tokens."""

    name: str = "transformers"
    """Name of the engine, or ``module:name`` for one of your own (engines)."""
    options: dict[str, Value] = Field(default_factory=dict)
    """Its own options, such as slots, the number of episodes in its key-value cache (engines)."""


class FleetSettings(_Section):
    """The processes that play and sample episodes."""

    name: Literal["local", "ray"] = "local"
    """The run's own process, or actors on a Ray cluster, each with environments and an engine (fleet)."""
    options: Arguments = Field(default_factory=dict)
    """Options of Ray: actors, address, patience, and each actor's cpus, gpus and resources (fleet)."""


class CorrectionSettings(_Section):
    """Truncated importance weight trainer/engine of the tokens; ``correction = "token"`` sets the kind alone."""

    kind: Literal["none", "token", "prefix", "sequence"] = "sequence"
    """Which ratio is the weight of a token: its own, that of the tokens up to it, or that of the episode (algos)."""
    cap: Positive = 5.0
    """Upper bound of that weight, and of the cumulative one of energies (algos)."""


class AlgoSettings(_Section):
    """The algorithm: an advantage function and a loss function."""

    advantage: Advantage | Own = "otb_episode"
    """The estimator, or ``module:name`` for one of your own (algos)."""
    advantage_options: dict[str, Value | Infinity] = Field(default_factory=dict)
    """Its own options. For OTB, ``weights`` weighs energies by a squared ratio: "old" uses the importance weight
    old/sampler of ``correction``, as OTB's released code does; "cumulative" the product of the ratios θ/sampler, in
    each epoch anew (algos, trainer)."""
    loss: Loss | Own = "ctpo"
    """The policy loss, or ``module:name`` for one of your own (algos)."""
    loss_options: dict[str, Value] = Field(default_factory=dict)
    """Its own options (algos)."""
    rejection: dict[RejectionLevel, Annotated[tuple[float, float], Field(strict=False)]] = Field(default_factory=dict)
    """Smallest and largest ratio trainer/engine of probabilities that is trained on: of each "token", of the
    "sequence", or of its "geometric" mean, as in ``rejection = {geometric = [0.999, 1.001]}`` (trainer)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty in the loss, estimated by k3; the reference is the model before reinforcement learning
    (algos)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss; a positive weight raises the entropy (algos)."""
    correction: CorrectionSettings = Field(default_factory=CorrectionSettings)


class OptimSettings(_Section):
    """The updates of the weights."""

    steps: Whole = 100
    """Most training steps, each with one batch of rollouts (pipeline, trainer)."""
    max_sampled_tokens: Whole = 0
    """Training ends after the step in which its sampled tokens reach this; 0 is no limit (pipeline, trainer)."""
    minibatches: Count = 2
    """Updates per pass over a rollout batch (trainer)."""
    epochs: Count = 1
    """Passes over a rollout batch (trainer)."""
    max_tokens: Count = 8192
    """Most tokens of one forward pass (batch)."""
    lr: Positive = 1e-6
    """Learning rate (trainer)."""
    warmup: Whole = 0
    """Updates over which the learning rate rises from 0 (trainer)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after its warmup: constant, or falling to 0 at the last update that steps or tokens allow
    (trainer)."""
    betas: Annotated[tuple[Below1, Below1], Field(strict=False)] = (0.9, 0.95)
    """AdamW's betas (trainer)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay (trainer)."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm, also in the warm start (trainer, sft)."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass instead of keeping them: slower, but less memory
    (trainer)."""


class LoraSettings(_Section):
    """Low-rank adapters, which reinforcement learning trains instead of all weights; the warm start trains all."""

    rank: Whole = 0
    """Rank of each adapter; 0 trains all weights (trainer)."""
    alpha: Positive = 32.0
    """An adapter's output is scaled by alpha/rank (trainer)."""
    targets: list[str] = Field(default_factory=list)
    """Linear layers that get an adapter, by the last part of their names, such as "q_proj"; empty for all (trainer)."""


class EvalSettings(_Section):
    """Evaluation on held-out tasks."""

    split: str = "test"
    """The environment's split (evaluate)."""
    tasks: Count = 200
    """Number of tasks of each environment (evaluate)."""
    attempts: Count = 1
    """Episodes per task (evaluate)."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0 is greedy (evaluate)."""
    every: Whole = 10
    """Steps between evaluations; 0 evaluates only before and after training (trainer)."""


class SaveSettings(_Section):
    """The files that a run saves."""

    every: Whole = 50
    """Steps between checkpoints; 0 saves only the last one (trainer)."""
    keep: Whole = 0
    """Number of newest checkpoints to keep, besides that of step 0; 0 keeps all (trainer)."""
    episodes_every: Count = 10
    """Steps between files of episodes (trainer)."""


class LogSettings(_Section):
    """The trackers that get metrics, besides the run's JSONL files."""

    to: Annotated[dict[str, dict[str, Value]], BeforeValidator(_without_options)] = Field(default_factory=dict)
    """Any of ``tensorboard``, ``wandb``, ``trackio``, and ``module:name`` for your own function. A list, or a table
    with options, such as ``{wandb = {project = "tools"}}`` (loggers)."""


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

    @pydantic.model_validator(mode="before")
    @classmethod
    def _in_full(cls, data: Any) -> Any:
        return in_full(data) if isinstance(data, Mapping) else data

    def updated(self, **sections: Mapping[str, object]) -> "Config":
        """Copy the settings with some replaced, as in ``config.updated(optim={"steps": 5})``; values aren't checked."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)
