"""Helpers of the command families: add commands and settings to the parser, and check the settings."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError
from agentrl.sandboxes import SandboxUnavailable

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.runs.progress import Display

_WITHOUT = "--set env.id=agentrl/Countdown-v0 --set 'env.args={level=1,tool=false}'"
"""Settings of an environment that needs no sandbox."""
Run = Callable[[argparse.Namespace], int]
"""Carries out a command; returns the exit code."""


def add_command(commands: Any, name: str, run: Run, text: str, examples: str) -> argparse.ArgumentParser:
    """Add a command with a description and examples in its help.

    Args:
        commands: argparse's subparsers.
        name: the command's name.
        run: carries it out; returns the exit code.
        text: its description, without a capital letter and a full stop.
        examples: lines that begin with ``examples:``.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run, parser=command)
    return command


def add_config_arguments(command: argparse.ArgumentParser) -> None:
    """Add a run's settings: a TOML file, a preset and ``--set``."""
    command.add_argument("config", nargs="?", type=Path, help="a TOML file of settings")
    command.add_argument("--preset", help="begin with a preset; 'agentrl list' names them")
    add_set_argument(command)


def add_set_argument(command: argparse.ArgumentParser) -> None:
    """Add ``--set``."""
    command.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a setting"
    )


def check_config(arguments: argparse.Namespace) -> None:
    """Require a TOML file or a preset to begin with.

    Raises:
        ConfigError: there is neither a TOML file nor a preset, or one, or a setting, stands in place of the file.
    """
    from agentrl.config import presets

    if arguments.config is None and arguments.preset is None:
        raise ConfigError("say what to do: give a TOML file, or --preset quickstart")
    if arguments.config is not None and not arguments.config.exists():
        name = str(arguments.config)
        option = "--preset" if name in presets() else "--set" if "=" in name else ""
        if option:
            raise ConfigError(f"there is no file {name!r}; did you mean {option} {name}?")


def check_parts(config: "Config", *, plays: bool = True) -> None:
    """Check that everything a run chooses by name is installed, before PyTorch is loaded.

    Args:
        config: the run's settings.
        plays: the run plays episodes, and so needs the sandboxes of its environments.

    Raises:
        UsageError: an environment, an engine, a fleet or a logger is missing.
        ConfigError: an environment does not take its arguments.
        SandboxUnavailable: an environment runs programs, and no sandbox can be opened here.
    """
    from agentrl.engines import check_trains
    from agentrl.runs.loggers import check_loggers

    try:
        # Actors elsewhere have sandboxes of their own.
        check_envs(config, plays=plays and config.fleet.name == "local")
    except SandboxUnavailable as error:
        raise SandboxUnavailable(f"{error}; or train without programs: {_WITHOUT}", remedy=error.remedy) from error
    check_trains(config.engine.name)
    check_loggers(config.log.to)
    for sentence in missing_parts(config):
        raise ConfigError(sentence)


def check_envs(config: "Config", *, plays: bool = True) -> None:
    """Make each environment once, which reads no data, to check that it exists and takes its arguments.

    Args:
        config: the settings.
        plays: episodes will be played here: open the sandboxes that they need.

    Raises:
        UsageError: an environment or its sandbox can't be imported, or there is none of its name.
        ConfigError: it does not take its arguments.
        SandboxUnavailable: an environment runs programs, and no sandbox can be opened here.
    """
    from agentrl.toolenv.registry import make
    from agentrl.toolenv.tools.python import open_sandboxes, shared_sandbox, use_backend

    use_backend(config.env.sandbox)
    for env in config.env.played.values():
        with closing(make(env.id, **without_native(env.args))) as made:
            if plays:
                open_sandboxes(made.tools)
    if plays and config.rollout.driver.name == "agent":
        shared_sandbox(backend="local")  # an agent's program runs in the same namespaces


def without_native(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment's arguments without the native dialect, which only a model's tokenizer defines."""
    from agentrl.toolenv.dialects import NATIVE

    return {key: value for key, value in arguments.items() if (key, value) != ("dialect", NATIVE)}


def missing_parts(config: "Config") -> list[str]:
    """Return a sentence for each of engine and fleet whose package is not installed here."""
    from agentrl.engines import missing_package

    chosen = (("engine", config.engine.name), ("fleet", config.fleet.name))
    return [sentence for what, name in chosen if (sentence := missing_package(what, name))]


@contextmanager
def loading_torch(display: "Display") -> Generator[None]:
    """Announce the import of PyTorch within the block: it takes some seconds, and more on a busy machine."""
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is not None:
        display.say("loading PyTorch …")
    with display.doing("loading PyTorch"):
        yield
