"""The table of algorithms: an algorithm is an advantage function and a loss function, each chosen by name.

A special case is a call with other arguments: ``grpo`` is ``group_mean`` with ``std=True``. Wherever a name is wanted,
``module:name`` stands for a function of the user's own. Shapes: ``S`` sampled tokens of all rows end to end, ``R``
rows, ``starts`` [R+1] the offset of each row, ``group`` [R].

Example:
    >>> credit = advantage("otb", rewards, energy, starts, group, tail="carry")
    >>> loss("ctpo", logp, old_logp, credit, starts, power=0.5).loss.backward()
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.algos import advantages as _advantages
from agentrl.algos import losses as _losses
from agentrl.algos.advantages import Terms
from agentrl.algos.aggregate import AGGREGATES, Aggregate
from agentrl.algos.losses import LossOut
from agentrl.errors import AgentRLError, ConfigError, UnknownNameError, nearest
from agentrl.named import resolve

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "Algorithm",
    "advantage",
    "aggregation",
    "algorithm",
    "check_options",
    "loss",
    "pools",
    "terms",
]

Kind = Literal["advantage", "loss"]
_INPUTS: Mapping[Kind, tuple[str, ...]] = {
    "advantage": ("rewards", "energy", "starts", "group"),
    "loss": ("logp", "old_logp", "advantages", "starts"),
}
"""What a function may take before its options, by these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row of the table."""

    function: Callable[..., Any]
    """The function that computes it."""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """Options that differ from the function's own defaults; the caller's options replace them."""
    compares: bool = True
    """True for an advantage that compares the episodes of a group: a group of one episode then has no baseline."""
    terms: Callable[..., Terms] | None = None
    """Computes the terms of the result from the same arguments; None without a baseline for each token."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the function's positional arguments, in order."""
        return self._names(inspect.Parameter.POSITIONAL_OR_KEYWORD)

    @property
    def known_options(self) -> tuple[str, ...]:
        """Names of the options that the function takes."""
        return self._names(inspect.Parameter.KEYWORD_ONLY)

    def _names(self, kind: object) -> tuple[str, ...]:
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(parameter.name for parameter in parameters if parameter.kind is kind)


_otb = partial(Algorithm, function=_advantages.otb, terms=_advantages.otb_terms)
ADVANTAGES: Mapping[str, Algorithm] = MappingProxyType({
    "otb": _otb(),
    "otb_loo": _otb(options={"leave_one_out": True}),
    "otb_pooled": _otb(options={"pool": math.inf, "tail": "carry"}),
    "otb_episode": _otb(options={"pool": math.inf, "tail": "carry", "energy_kind": "episode"}),
    "group_mean": Algorithm(function=_advantages.group_mean),
    "grpo": Algorithm(function=_advantages.group_mean, options={"std": True}),
    "rloo": Algorithm(function=_advantages.rloo),
    "opo": Algorithm(function=_advantages.opo),
    "ogb": Algorithm(function=_advantages.ogb),
    "reinforce_pp": Algorithm(function=_advantages.reinforce_pp, compares=False),
    "none": Algorithm(function=_advantages.none, compares=False),
})  # fmt: skip
"""Every advantage estimator by its name in a config."""

LOSSES: Mapping[str, Algorithm] = MappingProxyType({
    "ctpo": Algorithm(function=_losses.ctpo),
    "cppo": Algorithm(function=_losses.cppo),
    "ppo_clip": Algorithm(function=_losses.ppo_clip),
    "dapo": Algorithm(function=_losses.ppo_clip, options={"clip_high": 0.28, "aggregate": "token_mean"}),
    "gspo": Algorithm(function=_losses.gspo),
    "gspo_token": Algorithm(function=_losses.gspo, options={"token_form": True}),
    "cispo": Algorithm(function=_losses.cispo),
    "reinforce": Algorithm(function=_losses.reinforce),
})  # fmt: skip
"""Every loss by its name in a config."""


ENERGY_WEIGHTS = ("old", "cumulative")
"""Words that a config has for the option ``weights`` of an advantage, before there are tensors."""


def advantage(
    name: str, rewards: Tensor, energy: Tensor | None, starts: Tensor, group: Tensor, **options: object
) -> Tensor:
    """Credit every sampled token of a step, complete groups together.

    Args:
        name: A name of ``ADVANTAGES``.
        rewards: Reward of each token, 0 except on a turn's last one [S].
        energy: Token energy [S]; may be None for an estimator that does not read it.
        starts: Offset of each row [R+1].
        group: Task instance of each row [R].
        options: Keyword options of the estimator.

    Returns:
        The advantage of each token [S].

    Raises:
        UnknownNameError: an estimator that does not exist.
        ConfigError: an option that it does not take.
        ValueError: the energy is missing, or what the estimator itself raises.
    """
    if energy is None and "energy" in algorithm("advantage", name).inputs:
        raise ValueError(f"advantage {name!r} needs the energy of each token")
    return _call("advantage", name, {"rewards": rewards, "energy": energy, "starts": starts, "group": group}, options)


def terms(
    name: str, rewards: Tensor, energy: Tensor, starts: Tensor, group: Tensor, **options: object
) -> Terms | None:  # fmt: skip
    """Compute the terms of an advantage, called as ``advantage`` is; None without a baseline for each token."""
    entry = algorithm("advantage", name, options)
    if entry.terms is None:
        return None
    # The terms' function has no defaults: those of the estimator's signature are the only ones.
    defaults = entry.function.__kwdefaults__ or {}
    return entry.terms(rewards, energy, starts, group, **{**defaults, **entry.options, **options})


def pools(name: str, options: Mapping[str, object]) -> bool:
    """Return True if an advantage takes baselines from the step's other groups, so that a group may be of one row."""
    return bool({**algorithm("advantage", name).options, **options}.get("pool"))


def loss(
    name: str, logp: Tensor, old_logp: Tensor, advantages: Tensor, starts: Tensor, **options: object
) -> LossOut:  # fmt: skip
    """Compute the policy loss of a pack of rows.

    Args:
        name: A name of ``LOSSES``.
        logp: Log-prob of each token under the policy being optimised [S], in nats.
        old_logp: Log-prob at the start of the batch [S], in nats.
        advantages: Advantage of each token [S].
        starts: Offset of each row [R+1].
        options: Keyword options of the loss.

    Returns:
        The loss and its metrics.

    Raises:
        UnknownNameError: a loss that does not exist.
        ConfigError: an option that it does not take, or a value out of range.
        ValueError: shapes that do not fit, or numbers that are not finite.
    """
    inputs = {"logp": logp, "old_logp": old_logp, "advantages": advantages, "starts": starts}
    out = _call("loss", name, inputs, options)
    return LossOut(*out) if isinstance(out, tuple) else LossOut(out, {})


def aggregation(name: str, options: Mapping[str, object]) -> Aggregate:
    """Return the aggregation that ``loss(name, …, **options)`` will use, for ``aggregate.pack_shares``.

    Args:
        name: A name of ``LOSSES``.
        options: The options that the loss will be called with.

    Returns:
        One of ``aggregate.AGGREGATES``.

    Raises:
        UnknownNameError: a loss or an aggregation that does not exist.
        ConfigError: an option that the loss does not take.
    """
    entry = algorithm("loss", name, options)
    default = inspect.signature(entry.function).parameters["aggregate"].default
    chosen = {"aggregate": default, **entry.options, **options}["aggregate"]
    # Returning the table's own literal narrows the option's type from object without a cast.
    for aggregate in AGGREGATES:
        if aggregate == chosen:
            return aggregate
    raise UnknownNameError("aggregation", str(chosen), AGGREGATES)


def algorithm(kind: Kind, name: str, options: Mapping[str, object] = MappingProxyType({})) -> Algorithm:
    """Return a row of the table, or one for the user's own function.

    Args:
        kind: Which part of the table.
        name: A name of that part, or ``module:name``.
        options: Options that the function will be called with.

    Raises:
        UnknownNameError: a name that does not exist.
        ConfigError: the function can't be imported, does not take what such a function gets, or not one of the options.
    """
    entry = resolve(kind, ADVANTAGES if kind == "advantage" else LOSSES, name)
    if not isinstance(entry, Algorithm):
        entry = Algorithm(function=entry, compares=False)
        other = [argument for argument in entry.inputs if argument not in _INPUTS[kind]]
        # The trainer passes weights, and weighs packs by what the loss averages over.
        lacking = {"weights", "aggregate"} - {*entry.known_options} if kind == "loss" else ()
        if other or lacking:
            fault = f"takes {other[0]!r}" if other else f"has no option {min(lacking)!r}"
            shape = f"({', '.join(_INPUTS[kind])}, *, {'weights, aggregate, ' * (kind == 'loss')}…)"
            raise ConfigError(f"{kind} {name!r} {fault}: it must be a function of {shape}, its own options at the end")
    for option in options:
        if option not in entry.known_options:
            raise ConfigError(f"{kind} {name!r} has no option {option!r}; {nearest(option, entry.known_options)}")
    return entry


def check_options(kind: Kind, name: str, options: Mapping[str, object]) -> None:
    """Try a config's choice on five tokens, so that an invalid one fails before anything has been sampled.

    Args:
        kind: Which part of the table.
        name: A name of that part, or ``module:name``.
        options: The options as the config gives them, without tensors.

    Raises:
        UnknownNameError: a name or a kind that does not exist.
        ConfigError: an unknown option, a value out of range or of the wrong type, or a function that raises an error
            or returns anything but a loss or advantages.
    """
    # Two groups of two episodes; the members of the second have equal returns, as is common.
    starts, group = torch.tensor([0, 2, 3, 4, 5]), torch.tensor([0, 0, 1, 1])
    rewards, ones = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), torch.ones(5)
    logp = torch.tensor([-1.0, -2.0, -0.5, -0.1, -3.0], requires_grad=True)
    try:
        if kind == "advantage":
            wanted = f"{rewards.dtype} [S], one for each sampled token"
            if "weights" in options:
                if options["weights"] not in ENERGY_WEIGHTS:
                    raise UnknownNameError("energy weight", str(options["weights"]), ENERGY_WEIGHTS)
                options = {**options, "weights": ones}
            fault = _fault(advantage(name, rewards, ones, starts, group, **options), rewards)
        else:
            wanted = f"a scalar of {logp.dtype} with a gradient by logp, perhaps with a dict of scalars"
            fault = _loss_fault(loss(name, logp, logp.detach(), rewards - 0.5, starts, weights=ones, **options), logp)
    except AgentRLError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise ConfigError(
            f"{kind} {name!r} fails on a batch of five tokens, as with an option of the wrong type: {error!r}"
        ) from error
    if fault:
        raise ConfigError(f"{kind} {name!r} must return finite numbers, {wanted}, and not {fault}")


def _call(kind: Kind, name: str, inputs: Mapping[str, object], options: Mapping[str, object]) -> Any:
    entry = algorithm(kind, name, options)
    return entry.function(*(inputs[argument] for argument in entry.inputs), **{**entry.options, **options})


def _loss_fault(out: LossOut, logp: Tensor) -> str:
    """Describe what is wrong with a loss or a metric; empty where nothing is."""
    if fault := _fault(out.loss, logp.sum()):
        return fault
    (gradient,) = torch.autograd.grad(out.loss, logp, allow_unused=True) if out.loss.requires_grad else (None,)
    if gradient is None or not gradient.isfinite().all():
        return f"the gradient {gradient}"
    return next((f"{name}={value}" for name, value in out.metrics.items() if not math.isfinite(float(value))), "")


def _fault(result: object, like: Tensor) -> str:
    """Describe a result that is not finite, or no tensor of the shape and type of ``like``; empty where it is one."""
    if not isinstance(result, Tensor):
        return f"a {type(result).__name__}"
    if (result.shape, result.dtype) != (like.shape, like.dtype):
        return f"{result.dtype} {list(result.shape)}"
    return "" if result.isfinite().all() else "nan or inf"
