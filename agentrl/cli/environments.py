"""``agentrl new | list | play | check-env``: create, list, play and check environments."""

import argparse
import json
import shlex
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from agentrl.cli.command import add_command, without_native
from agentrl.errors import EnvContractError

_NEW = """examples:
  agentrl new my_env
  agentrl new word_games --dir ~/code/word-games --namespace jo
"""
_NEXT = """{env_id} is in {folder}; continue with:
  cd {folder}
  pip install -e .
  agentrl play {env_id}
  agentrl check-env {env_id}
  agentrl train train.toml --name first"""
_LIST = """examples:
  agentrl list
  agentrl list agentrl/Arithmetic-v0
  agentrl list --json
"""
_PLAY = """examples:
  agentrl play agentrl/Arithmetic-v0
  agentrl play agentrl/Arithmetic-v0 --split test --task test-1:7 --seed 3
  printf ':gold\\n:gold\\n' | agentrl play agentrl/Arithmetic-v0
"""
_CHECK = """examples:
  agentrl check-env agentrl/Arithmetic-v0
  agentrl check-env 'my_package:me/Trivia-v0?level=3' --json
  agentrl check-env me/Trivia-v0 --tokenizer Qwen/Qwen3-0.6B --dialect fence
"""


_ID = "ID[?KEY=VALUE&…]"
_ID_HELP = "an environment's id, with arguments if need be; 'agentrl list' names them"


def add_commands(commands: Any) -> None:
    """Add the commands of this family to argparse's subparsers."""
    new = add_command(commands, "new", _new, "write a package with an environment of your own", _NEW)
    new.add_argument("name", metavar="NAME", help="the package's name, such as my_env")
    new.add_argument("--dir", type=Path, help="the folder to write, new or empty (default: ./NAME)")
    new.add_argument("--namespace", default="me", help="namespace of the environment's id (default: me)")
    listing = add_command(commands, "list", _list, "list environments and presets, or describe one environment", _LIST)
    listing.add_argument("env", metavar=_ID, nargs="?", help="an environment's id: describe this one")
    listing.add_argument("--json", action="store_true", help="write JSON")
    play = add_command(commands, "play", _play, "play an environment yourself, in the agent's place", _PLAY)
    play.add_argument("env", metavar=_ID, help=_ID_HELP)
    play.add_argument("--task", metavar="ID", help="id of the task (default: one drawn by --seed)")
    play.add_argument("--seed", type=int, help="seed of the episode (default: a new one each time)")
    play.add_argument("--split", help="split of the tasks (default: the environment's own choice)")
    play.add_argument("--dialect", help="how tool calls are written (default: the environment's own choice)")
    check = add_command(commands, "check-env", _check, "check that an environment keeps its contract", _CHECK)
    check.add_argument("env", metavar=_ID, help=_ID_HELP)
    check.add_argument(
        "--tokenizer", metavar="PATH", help="check tokens too, with this tokenizer: a folder or hub name"
    )
    check.add_argument("--tasks", metavar="N", type=int, default=3, help="number of tasks to play (default: 3)")
    check.add_argument("--dialect", metavar="NAME", help="how tool calls are written (default: the environment's own)")
    check.add_argument("--json", action="store_true", help="write JSON")


def _new(arguments: argparse.Namespace) -> int:
    from agentrl.cli.scaffold import create

    folder = arguments.dir or Path(arguments.name)
    env_id, quoted = create(arguments.name, folder, arguments.namespace), shlex.quote(str(folder))
    print(_NEXT.format(env_id=env_id, folder=quoted))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from agentrl.cli import listing
    from agentrl.config import parse_env
    from agentrl.runs.progress import Display

    facts = listing.overview() if arguments.env is None else listing.details(*parse_env(arguments.env))
    if arguments.json:
        print(json.dumps(facts))
    else:
        show = listing.show_overview if arguments.env is None else listing.show_details
        show(facts, Display(sys.stdout))
    return 0


def _play(arguments: argparse.Namespace) -> int:
    from agentrl.cli.play import play_by_hand
    from agentrl.config import parse_env
    from agentrl.runs.progress import Display

    env_id, options = parse_env(arguments.env)
    chosen = {name: value for name in ("split", "dialect") if (value := getattr(arguments, name)) is not None}
    play_by_hand(env_id, Display(sys.stdout), task=arguments.task, seed=arguments.seed, **{**options, **chosen})
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from agentrl.config import parse_env
    from agentrl.runs.progress import Display
    from agentrl.toolenv.checker import CHECKS, check_env
    from agentrl.toolenv.registry import make
    from agentrl.toolenv.tools.python import open_sandboxes

    env_id, options = parse_env(arguments.env)
    # What is wrong with the environment is the checker's to report.
    with suppress(EnvContractError), closing(make(env_id, **without_native(options))) as env:
        open_sandboxes(env.tools)
    with Display().phase("checking", len(CHECKS)) as bar:
        report = check_env(
            env_id,
            arguments=options,
            tasks=arguments.tasks,
            dialect=arguments.dialect,
            tokenizer=arguments.tokenizer,
            say=bar.advance,
        )
    print(json.dumps(report.row()) if arguments.json else report)
    return 0 if report.ok else 1
