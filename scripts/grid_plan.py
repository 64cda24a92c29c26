"""Which runs a grid has: every pair of the varied settings for every seed, each seed after one warm start."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.config import Config, load_config
from agentrl.errors import ConfigError, UsageError
from agentrl.pipeline import check_run
from agentrl.runfolder import read_config

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
class Request:
    """What the command line asks for."""

    preset: str | None
    """The preset that every run begins with."""
    config: Path | None
    """A TOML file laid over it."""
    overrides: Sequence[str]
    """``section.key=value`` each, for all runs."""
    vary: Sequence[str]
    """``section.key=value,value`` each; every pair of values is a setting of the grid."""
    seeds: str
    """Whole numbers with commas between them."""
    tokens: int
    """Sampled tokens that end the training of a run."""
    out: Path
    """The folder of the grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the grid."""

    values: tuple[str, ...] | None
    """The value of each varied setting; None for a warm start."""
    seed: int
    """Of the run."""
    folder: Path
    """Its run folder."""
    words: tuple[str, ...]
    """The command line of agentrl that begins it."""
    config: Config
    """What that command line comes to."""
    after: str = ""
    """Name of the warm start that must be done before; empty where there is none."""

    @property
    def name(self) -> str:
        """The name of the run and its folder."""
        return self.folder.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All runs of a grid."""

    out: Path
    """The folder of the grid."""
    keys: tuple[str, ...]
    """The varied settings."""
    rows: tuple[tuple[str, ...], ...]
    """The values of those in each row of the table."""
    seeds: tuple[int, ...]
    """One run of each row for each of them."""
    tokens: int
    """Sampled tokens that end the training of a run."""
    runs: tuple[Run, ...]
    """The runs in their order: seed by seed, so that a grid that was stopped has whole comparisons."""


def make_plan(request: Request) -> Plan:
    """Work out the runs and check every one of them; nothing is written.

    Raises:
        UsageError: a setting is unknown, invalid or the grid's own, or a run of other settings is in its place.
    """
    if request.tokens < 1:
        raise ConfigError(f"--tokens is {request.tokens}: give each run at least 1 token to learn from")
    if not request.vary:
        raise ConfigError("say what to compare, for example --vary algo.loss=ctpo,ppo_clip")
    varied = _varied(request.vary)
    seeds = _seeds(request.seeds)
    _refuse_own([*request.overrides, *(f"{key}=" for key in varied)])
    base = load_config(preset=request.preset, path=request.config, overrides=[*_DEFAULTS, *request.overrides])
    if base.sft.steps:
        _refuse_shared(varied)
    request = replace(request, out=request.out.resolve())
    rows = tuple(itertools.product(*varied.values()))
    settings = {values: [f"{key}={value}" for key, value in zip(varied, values, strict=True)] for values in rows}
    runs = [run for seed in seeds for run in _runs_of_seed(request, seed, settings, warm=base.sft.steps > 0)]
    for run in runs:
        _check(run)
    return Plan(out=request.out, keys=tuple(varied), rows=rows, seeds=seeds, tokens=request.tokens, runs=tuple(runs))


def _runs_of_seed(
    request: Request, seed: int, settings: Mapping[tuple[str, ...], Sequence[str]], *, warm: bool
) -> Iterator[Run]:
    after, start = "", ()
    if warm:
        after = f"warm-start-seed{seed}"
        yield _run(request, seed, after, ["optim.steps=0"])
        start = (f"model.path={json.dumps(str(request.out / after / 'checkpoints' / 'step-000000'))}", "sft.steps=0")
    # Every step samples a token at least, so that many steps are more than enough.
    budget = (f"optim.steps={request.tokens}", f"optim.max_sampled_tokens={request.tokens}")
    for name, (values, varied) in zip(_names(list(settings)), settings.items(), strict=True):
        run = _run(request, seed, f"{name}seed{seed}", [*start, *budget, *varied])
        yield replace(run, values=values, after=after)


def _run(request: Request, seed: int, name: str, settings: Iterable[str]) -> Run:
    overrides = [*_DEFAULTS, *request.overrides, f"run.dir={json.dumps(str(request.out))}", *settings]
    source = ["--preset", request.preset] if request.preset is not None else []
    if request.config is not None:
        source.append(str(request.config))
    sets = [word for override in overrides for word in ("--set", override)]
    return Run(
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
        if key in varied or len(set(values)) < len(values):
            raise ConfigError(f"--vary {text!r} names a setting or a value for the second time: leave it out")
        varied[key] = values
    return varied


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--seeds is {text!r}: write whole numbers with commas between them") from error
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text!r} names a seed for the second time: leave it out")
    return seeds


def _names(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """What the names of a row's runs begin with; rows that look alike as names are told apart by their number."""
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
            raise ConfigError(f"the grid sets {key} itself: leave it out ({_OWN[key]})")


def _refuse_shared(keys: Iterable[str]) -> None:
    for key in keys:
        if key.startswith(("sft.", "model.")):
            raise ConfigError(
                f"{key} can't be varied, since all runs of a seed share one warm start: begin with --set sft.steps=0, "
                "or make a grid of each value"
            )


def _check(run: Run) -> None:
    check_run(run.config)
    if not (run.folder / "config.toml").is_file():
        return
    here, there = (dict(_flat(config.model_dump(mode="json"))) for config in (run.config, read_config(run.folder)))
    different = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    if different:
        key = different[0]
        raise UsageError(
            f"{str(run.folder)!r} holds a run with other settings ({key} is {there.get(key)!r} there and "
            f"{here.get(key)!r} here): choose another --out"
        )


def _flat(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value
