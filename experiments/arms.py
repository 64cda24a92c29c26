"""Arms of parts C to F of PLAN.md, and the settings of a learning run.

A unit is a mapping with all that names a run: part, purpose, arm, rewards, group size, learning rate, seed, steps, and
the settings that differ from ``BASE``. It is in the run's row as it is.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sum_sandbox import BACKEND

Unit = dict[str, Any]
Setting = str | int | float

PRESET = "quickstart"
BASE: Mapping[str, Any] = {
    "run.threads": 1,
    "env.sandbox": BACKEND,
    "sft.steps": 0,
    "rollout.tasks": 32,
    "rollout.group_size": 4,
    "algo.loss": "reinforce",
    "algo.loss_options.aggregate": "seq_mean_token_sum",
    "optim.minibatches": 1,
    "optim.epochs": 1,
    "optim.warmup": 0,
    "optim.schedule": "constant",
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.0,
    "optim.max_grad_norm": 1000.0,
    "eval.tasks": 200,
    "eval.every": 0,
    "save.every": 5,
    "save.keep": 1,
    "save.episodes_every": 1000,
}
"""What all learning runs share, over the preset."""
WARM: Mapping[str, Any] = {"run.threads": 1, "sft.steps": 130, "eval.split": "train", "eval.tasks": 400}
"""The warm start, over the preset; it is evaluated on training tasks."""
SIGNED = "signed:agentrl/SignedArithmetic-v0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to learn."""

    name: str
    """As in the plan."""
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    """What differs from ``BASE``."""
    rewards: str = "0/1"
    """Or -1/1."""
    group_size: int = 4
    """Episodes of a task."""

    def unit(self, part: str, purpose: str, *, lr: float, seed: int, steps: int) -> Unit:
        """Name a run of the arm."""
        return {
            "part": part,
            "purpose": purpose,
            "arm": self.name,
            "rewards": self.rewards,
            "group_size": self.group_size,
            "lr": lr,
            "seed": seed,
            "steps": steps,
            "settings": dict(self.settings),
        }


def _advantage(name: str, **options: Setting) -> dict[str, Setting]:
    return {"algo.advantage": name, **{f"algo.advantage_options.{key}": value for key, value in options.items()}}


OTB, CARRY = (
    Arm(name="otb", settings=_advantage("otb")),
    Arm(name="otb carry", settings=_advantage("otb", tail="carry")),
)
POOLED = Arm(name="otb_pooled", settings=_advantage("otb_pooled"))
SHRUNK = Arm(name="otb pool 1", settings=_advantage("otb", tail="carry", pool=1.0))
"""The own group, itself included, and one mean episode of the others."""
WHOLE = Arm(name="ogb pooled", settings=_advantage("ogb", pool=1e9))
"""One baseline for a whole episode: β of the step's other groups. Rows can't hold an infinite pool; this is as good."""
VARIANTS = (SHRUNK, WHOLE)
"""Arms of D that have their rate from POOLED."""
MEAN, GRPO = Arm(name="group_mean", settings=_advantage("group_mean")), Arm(name="grpo", settings=_advantage("grpo"))
NONE = Arm(name="none", settings=_advantage("none"))
GRPO_32 = Arm(name="grpo at 32", settings=_advantage("grpo"), group_size=32)
OTB_SIGNED = Arm(name="otb", settings=_advantage("otb"), rewards="-1/1")
NONE_SIGNED = Arm(name="none", settings=_advantage("none"), rewards="-1/1")
LEARNING = (OTB, CARRY, POOLED, MEAN, GRPO, NONE, GRPO_32, OTB_SIGNED, NONE_SIGNED)
"""The nine arms of parts C and D."""
SAME_SIGNED = tuple(Arm(name=arm.name, settings=arm.settings, rewards="-1/1") for arm in (CARRY, POOLED, MEAN, GRPO))
"""Arms that only see differences of rewards, for the check D0."""

LOSSES: Mapping[str, Mapping[str, Setting]] = {
    "ctpo": {"algo.loss": "ctpo"},
    "ctpo power 0": {"algo.loss": "ctpo", "algo.loss_options.power": 0.0},
    "gspo": {"algo.loss": "gspo"},
    "ppo_clip": {"algo.loss": "ppo_clip"},
    "cispo": {"algo.loss": "cispo"},
    "reinforce": {"algo.loss": "reinforce"},
    "cppo": {"algo.loss": "cppo"},
}


def _passes(loss: str, passes: int) -> Arm:
    updates: dict[str, Setting] = {"optim.minibatches": 16, "optim.epochs": passes}
    return Arm(
        name=f"{loss}, {passes} pass{'es' * (passes > 1)}", settings={**POOLED.settings, **LOSSES[loss], **updates}
    )


UPDATING = tuple(_passes(loss, passes) for loss in LOSSES for passes in (1, 4))
"""The fourteen arms of part E."""


def _stale(arm: Arm, loss: str, staleness: int) -> Arm:
    lag: dict[str, Setting] = {"rollout.overlap.mode": "lag", "rollout.overlap.staleness": staleness}
    settings = {**arm.settings, **LOSSES[loss], "optim.minibatches": 4, **(lag if staleness else {})}
    return Arm(name=f"{arm.name}, {loss}, staleness {staleness}", settings=settings)


STALE: Mapping[str, tuple[Arm, str, str]] = {
    stale.name: (stale, arm.name, _passes(loss, 1).name)
    for staleness in (0, 2, 8)
    for arm in (GRPO, POOLED)
    for loss in ("ppo_clip", "ctpo")
    for stale in [_stale(arm, loss, staleness)]
}
"""The twelve arms of part F, each with the arms of C and of E that it has its rate from."""


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as ``section.key=value``."""
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


def settings_of(unit: Unit) -> dict[str, Any]:
    """List all settings of a learning run but those of its folder and its weights."""
    size = unit["group_size"]
    return {
        **BASE,
        **unit["settings"],
        **({"env.id": SIGNED} if unit["rewards"] == "-1/1" else {}),
        "rollout.tasks": BASE["rollout.tasks"] * BASE["rollout.group_size"] // size,
        "rollout.group_size": size,
        "optim.lr": unit["lr"],
        "optim.steps": unit["steps"],
        "run.seed": unit["seed"],
    }
