"""Plan the runs of a sweep: every combination of the varied settings for every seed, after one warm start a seed."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.config import Config, load_config
from agentrl.errors import ConfigError, UsageError
from agentrl.runs.settings import read_config, settings_of

_OWN = {
    "run.name": "each run is named after its settings",
    "run.dir": "use --out",
    "run.seed": "use --seeds",
    "optim.steps": "use --tokens",
    "optim.max_sampled_tokens": "use --tokens",
}
_DEFAULTS = ("eval.every=0",)
"""Only the beginning and the end are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """Arguments of ``agentrl sweep``."""

    preset: str | None
    """The preset that every run begins with."""
    config: Path | None
    """A TOML file laid over it."""
    overrides: Sequence[str]
    """``section.key=value`` each, for all runs."""
    vary: Sequence[str]
    """``section.key=value,value`` each; the sweep trains every combination of values. ``a.b+c.d=1+2,3+4`` varies two
    settings together."""
    seeds: str
    """Whole numbers with commas between them."""
    tokens: int
    """Sampled tokens that end the training of a run."""
    out: Path
    """The folder of the sweep."""
    target: float | None = None
    """Success until which sampled tokens are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of the sweep."""

    values: tuple[str, ...] | None
    """The value of each varied setting; None for a warm start."""
    seed: int
    """Seed of the run."""
    folder: Path
    """Its run folder."""
    words: tuple[str, ...]
    """The command line of agentrl that begins it."""
    config: Config
    """The settings of that command line."""
    after: str = ""
    """Name of the warm start that the run begins with; empty where there is none."""

    @property
    def name(self) -> str:
        """The name of the run and its folder."""
        return self.folder.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """All runs of a sweep."""

    out: Path
    """The folder of the sweep."""
    keys: tuple[str, ...]
    """The varied settings."""
    seeds: tuple[int, ...]
    """Each combination of values is trained once for each seed."""
    tokens: int
    """Sampled tokens that end the training of a run."""
    target: float | None
    """Success until which sampled tokens are compared."""
    runs: tuple[SweepRun, ...]
    """The runs in their order: seed by seed, so that a sweep that was stopped has complete comparisons."""


def make_plan(request: SweepRequest) -> SweepPlan:
    """Plan the runs; nothing is written.

    Raises:
        UsageError: a setting is unknown, invalid or set by the sweep, or a folder holds a run with other settings.
    """
    if request.tokens < 1:
        raise ConfigError(f"--tokens is {request.tokens}: give each run at least 1 token to learn from")
    if not request.vary:
        raise ConfigError("say what to compare, for example --vary algo.loss=ctpo,ppo_clip")
    varied = _varied(request.vary)
    seeds = _seeds(request.seeds)
    single = [key for keys in varied for key in keys.split("+")]
    _refuse_own([*request.overrides, *(f"{key}=" for key in single)])
    base = load_config(preset=request.preset, path=request.config, overrides=[*_DEFAULTS, *request.overrides])
    if base.sft.steps:
        _refuse_shared(single)
    if request.target is not None and not base.eval.every:
        raise ConfigError("--target wants evaluations on the way to it: add --set eval.every=10")
    request = replace(request, out=request.out.resolve())
    settings = {
        values: [f"{key}={value}" for pair in zip(varied, values, strict=True) for key, value in _split(*pair)]
        for values in itertools.product(*varied.values())
    }
    runs = [run for seed in seeds for run in _runs_of_seed(request, seed, settings, warm=base.sft.steps > 0)]
    for run in runs:
        _check(run)
    return SweepPlan(
        out=request.out,
        keys=tuple(varied),
        seeds=seeds,
        tokens=request.tokens,
        target=request.target,
        runs=tuple(runs),
    )


def _runs_of_seed(
    request: SweepRequest, seed: int, settings: Mapping[tuple[str, ...], Sequence[str]], *, warm: bool
) -> Iterator[SweepRun]:
    after, start = "", ()
    if warm:
        after = f"warm-start-seed{seed}"
        yield _run(request, seed, after, ["optim.steps=0"])
        start = (f"model.path={json.dumps(str(request.out / after / 'checkpoints' / 'step-000000'))}", "sft.steps=0")
    # Every step samples at least one token, so this number of steps never ends a run before its tokens do.
    budget = (f"optim.steps={request.tokens}", f"optim.max_sampled_tokens={request.tokens}")
    for name, (values, varied) in zip(_names(list(settings)), settings.items(), strict=True):
        run = _run(request, seed, f"{name}seed{seed}", [*start, *budget, *varied])
        yield replace(run, values=values, after=after)


def _run(request: SweepRequest, seed: int, name: str, settings: Iterable[str]) -> SweepRun:
    overrides = [*_DEFAULTS, *request.overrides, f"run.dir={json.dumps(str(request.out))}", *settings]
    source = ["--preset", request.preset] if request.preset is not None else []
    if request.config is not None:
        source.append(str(request.config))
    sets = [word for override in overrides for word in ("--set", override)]
    return SweepRun(
        values=None,
        seed=seed,
        folder=request.out / name,
        words=("train", *source, "--name", name, "--seed", str(seed), *sets),
        config=load_config(
            preset=request.preset,
            path=request.config,
            overrides=[*overrides, f'run.name="{name}"', f"run.seed={seed}"],
        ),
    )


def _varied(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    varied: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, listed = text.partition("=")
        # A comma before which a bracket is open belongs to a list.
        values = tuple(value.strip() for value in re.split(r",(?![^\[{]*[\]}])", listed))
        if not equals or not all(values):
            raise ConfigError(f"--vary {text!r} varies nothing: write section.key=value,value")
        taken = [name for keys in varied for name in keys.split("+")]
        names = key.split("+")
        if len({*taken, *names}) < len(taken) + len(names) or len(set(values)) < len(values):
            raise ConfigError(f"--vary {text!r} names a setting or a value for the second time: leave it out")
        if len(names) > 1 and any(len(value.split("+")) != len(names) for value in values):
            raise ConfigError(f"--vary {text!r} varies {len(names)} settings together: give each value as many parts")
        varied[key] = values
    return varied


def _split(keys: str, values: str) -> list[tuple[str, str]]:
    """Split settings that are varied together, each with its value."""
    names = keys.split("+")
    # The value of a single setting may contain a plus sign, as 1e+4 does.
    return list(zip(names, values.split("+") if len(names) > 1 else [values], strict=True))


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--seeds is {text!r}: write whole numbers with commas between them") from error
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text!r} names a seed for the second time: leave it out")
    return seeds


def _names(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the beginning of the names of each row's runs; rows whose names would be equal are numbered."""
    plain = ["".join(re.sub(r"\W+", "-", value, flags=re.ASCII).strip("-") + "-" for value in row) for row in rows]
    taken = {"warm-start-"}
    names: list[str] = []
    for number, name in enumerate(plain, start=1):
        clash = name in taken or not name[0].isalnum()
        names.append(f"row{number}-{name}" if clash else name)
        taken.add(names[-1])
    return names


def _refuse_own(overrides: Iterable[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in _OWN:
            raise ConfigError(f"the sweep sets {key} itself: leave it out ({_OWN[key]})")


def _refuse_shared(keys: Iterable[str]) -> None:
    for key in keys:
        if key.startswith(("sft.", "model.")):
            raise ConfigError(
                f"{key} can't be varied, since all runs of a seed share one warm start: begin with --set sft.steps=0, "
                "or sweep each value by itself"
            )


def _check(run: SweepRun) -> None:
    if not (run.folder / "config.toml").is_file():
        return
    planned, saved = settings_of(run.config), settings_of(read_config(run.folder))
    different = [key for key in {**saved, **planned} if planned.get(key) != saved.get(key)]
    if different:
        key = different[0]
        raise UsageError(
            f"{str(run.folder)!r} holds a run with other settings ({key} is {saved.get(key)!r} there and "
            f"{planned.get(key)!r} here): choose another --out"
        )
