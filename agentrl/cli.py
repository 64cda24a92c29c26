"""The command line: ``agentrl new | list | play | check-env | train | sft | eval | report | doctor | sandbox``.

Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 the run failed, 2 what was
asked for is not there, 130 interrupted.
"""

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError, ConfigError, UsageError
from agentrl.sandboxes import SandboxError

_TRAIN = """examples:
  agentrl train --preset quickstart
  agentrl train my.toml --name second-try --set optim.lr=1e-4 --set algo.advantage=group_mean
  agentrl train --resume runs/second-try
"""
_SFT = """examples:
  agentrl sft --preset quickstart --name warm
  agentrl sft my.toml --set sft.steps=200
"""
_EVAL = """examples:
  agentrl eval runs/quickstart
  agentrl eval runs/quickstart --greedy --tasks 500 --out episodes.jsonl
  agentrl eval runs/quickstart/checkpoints/step-000000 --attempts 8
  agentrl eval path/to/model --preset quickstart --set rollout.turn_tokens=512
"""
_NEW = """examples:
  agentrl new my_env
  agentrl new word_games --dir ~/code/word-games --namespace jo
"""
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
  agentrl check-env my_package:me/Trivia-v0 --json
  agentrl check-env me/Trivia-v0 --tokenizer Qwen/Qwen3-0.6B --dialect fence
"""
_REPORT = """examples:
  agentrl report runs/quickstart
"""
_DOCTOR = """examples:
  agentrl doctor
  agentrl doctor --sandbox
  agentrl doctor --sandbox --json
"""
_SANDBOX = """examples:
  agentrl sandbox build-image
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; the process's own by default.

    Returns:
        The exit code.
    """
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _fail(error, 2)
    except (AgentRLError, SandboxError) as error:
        return _fail(error, 1)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "rich", "safetensors", "tokenizers"):
            raise
        return _fail(f"{error.name} is not installed: pip install 'agentrl[train]'", 2)
    except BrokenPipeError:
        if not _reader_left():
            raise
        return 141
    except KeyboardInterrupt as error:
        if argv is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends here: nothing is left to interrupt
        return _fail(str(error) or "interrupted", 130)


def _reader_left() -> bool:
    """Whether whoever read standard output, such as head, has seen enough; then the rest goes nowhere."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    left = any(event & select.POLLERR for _, event in pipe.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left


def _fail(reason: object, code: int) -> int:
    """Give the reason in one line, whatever a library's part of it looks like."""
    print("agentrl:", *str(reason).split(), file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentrl",
        description="Train LLM agents to reason with sandboxed tools.",
        epilog="examples:\n  agentrl train --preset quickstart\n  agentrl eval runs/quickstart\n  agentrl new my_env\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    train = _command(commands, "train", _train, "train an agent; makes a run folder", _TRAIN)
    _config_arguments(train)
    train.add_argument("--resume", metavar="RUN", type=Path, help="go on with a run folder from its last checkpoint")
    sft = _command(commands, "sft", _sft, "the warm start alone: learn oracle episodes", _SFT)
    _config_arguments(sft)
    _eval_arguments(_command(commands, "eval", _eval, "evaluate a run, a checkpoint or a model", _EVAL))
    new = _command(commands, "new", _new, "write a package with an environment of your own", _NEW)
    new.add_argument("name", metavar="NAME", help="the package's name, such as my_env")
    new.add_argument("--dir", type=Path, help="the folder to write, new or empty (default: ./NAME)")
    new.add_argument("--namespace", default="me", help="what the environment's id begins with (default: me)")
    listing = _command(commands, "list", _list, "list environments and presets, or say what one is made of", _LIST)
    listing.add_argument("env", metavar="ID", nargs="?", help="an environment's id: say more about this one")
    listing.add_argument("--json", action="store_true", help="write JSON")
    play = _command(commands, "play", _play, "play an environment yourself, in the agent's place", _PLAY)
    play.add_argument("env", metavar="ID", help="an environment's id; 'agentrl list' names them")
    play.add_argument("--task", metavar="ID", help="which task (default: one drawn by --seed)")
    play.add_argument("--seed", type=int, help="seeds the episode (default: another one each time)")
    play.add_argument("--split", help="which tasks (default: the environment's own choice)")
    play.add_argument("--dialect", help="how tool calls are written (default: the environment's own choice)")
    check = _command(commands, "check-env", _check, "check that an environment keeps its contract", _CHECK)
    check.add_argument("env", metavar="ID", help="an environment's id; 'agentrl list' names them")
    check.add_argument(
        "--tokenizer", metavar="PATH", help="check tokens too, with this tokenizer: a folder or hub name"
    )
    check.add_argument("--dialect", metavar="NAME", help="how tool calls are written (default: the environment's own)")
    check.add_argument("--json", action="store_true", help="write JSON")
    report = _command(commands, "report", _report, "write a run's report.html anew", _REPORT)
    report.add_argument("path", metavar="RUN", type=Path, help="a run folder")
    doctor = _command(
        commands, "doctor", _doctor, "say what works on this machine, and what stands in the way", _DOCTOR
    )
    doctor.add_argument("--sandbox", action="store_true", help="look at the sandboxes alone")
    doctor.add_argument("--json", action="store_true", help="write JSON")
    sandbox = _command(commands, "sandbox", _sandbox, "prepare the sandboxes of the docker back end", _SANDBOX)
    sandbox.add_argument("action", choices=["build-image"], help="build the image that the docker back end runs")
    return parser


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    examples: str,
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", nargs="?", type=Path, help="a TOML file of settings")
    command.add_argument("--preset", help="begin with a preset; 'agentrl list' names them")
    command.add_argument("--name", help="name of the run; one that is taken is an error")
    command.add_argument("--seed", type=int, help="seeds weights, tasks and sampling")
    _set_argument(command)


def _set_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a setting"
    )


def _eval_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", help="a run folder, a checkpoint in one, or a model's folder or name")
    command.add_argument("--config", type=Path, help="settings for a model that is in no run folder")
    command.add_argument("--preset", help="preset for a model that is in no run folder")
    command.add_argument("--split", help="which tasks (default: the run's eval.split)")
    command.add_argument("--tasks", type=int, help="how many tasks (default: the run's eval.tasks)")
    command.add_argument("--attempts", type=int, help="episodes per task, for pass@k")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="take the most probable token")
    how.add_argument("--temperature", type=float, help="sample at this temperature")
    command.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
    command.add_argument("--out", type=Path, help="write the episodes here: .jsonl or .jsonl.zst")
    command.add_argument("--force", action="store_true", help="evaluate in another dialect than the run's own")
    command.add_argument("--json", action="store_true", help="write the result as JSON")
    _set_argument(command)


def _train(arguments: argparse.Namespace) -> int:
    from agentrl import pipeline
    from agentrl.display import Display

    if arguments.resume is None:
        return _new_run(arguments, sft_only=False)
    if arguments.config or arguments.preset or arguments.overrides or arguments.name or arguments.seed is not None:
        raise ConfigError("--resume goes on with the run's own settings: leave the other options out")
    print(pipeline.resume(arguments.resume, Display()))
    return 0


def _sft(arguments: argparse.Namespace) -> int:
    return _new_run(arguments, sft_only=True)


def _new_run(arguments: argparse.Namespace, *, sft_only: bool) -> int:
    from agentrl.config import load_config

    if arguments.config is None and arguments.preset is None:
        raise ConfigError("say what to do: give a TOML file, or --preset quickstart")
    overrides = list(arguments.overrides)
    if arguments.name is not None:
        overrides.append(f"run.name={json.dumps(arguments.name)}")
    if arguments.seed is not None:
        overrides.append(f"run.seed={arguments.seed}")
    config = load_config(preset=arguments.preset, path=arguments.config, overrides=overrides)
    from agentrl import pipeline
    from agentrl.display import Display

    print(pipeline.train(config, Display(), numbered=arguments.name is None, sft_only=sft_only))
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from agentrl import evaluation
    from agentrl.display import Display

    request = evaluation.Request(
        path=arguments.path,
        config=arguments.config,
        preset=arguments.preset,
        overrides=tuple(_eval_overrides(arguments)),
        seed=arguments.seed,
        out=arguments.out,
        force=arguments.force,
    )
    display = Display()
    result = evaluation.run(request, display)
    if arguments.json:
        print(json.dumps(result.row()))
    else:
        display.evaluation(str(arguments.path), result)
    return 0


def _eval_overrides(arguments: argparse.Namespace) -> list[str]:
    chosen = {
        "split": None if arguments.split is None else json.dumps(arguments.split),
        "tasks": arguments.tasks,
        "attempts": arguments.attempts,
        "temperature": 0.0 if arguments.greedy else arguments.temperature,
    }
    return [*arguments.overrides, *(f"eval.{key}={value}" for key, value in chosen.items() if value is not None)]


def _new(arguments: argparse.Namespace) -> int:
    from agentrl.scaffold import create

    print(create(arguments.name, folder=arguments.dir, namespace=arguments.namespace).next_steps)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from agentrl import listing
    from agentrl.terminal import Terminal

    found = listing.overview() if arguments.env is None else listing.details(arguments.env)
    if arguments.json:
        print(json.dumps(found))
    elif arguments.env is None:
        listing.show_overview(Terminal())
    else:
        listing.show_details(found, Terminal())
    return 0


def _play(arguments: argparse.Namespace) -> int:
    from agentrl.play import Request, play
    from agentrl.terminal import Terminal

    chosen = {name: getattr(arguments, name) for name in ("env", "task", "seed", "split", "dialect")}
    play(Request(**chosen), Terminal())
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from agentrl.checker import check_env

    began = time.monotonic()

    def say(what: str) -> None:
        if time.monotonic() - began > 2:  # a short check needs no company
            print(f"checking {what} …", file=sys.stderr)

    found = check_env(arguments.env, dialect=arguments.dialect, tokenizer=arguments.tokenizer, say=say)
    print(json.dumps(found.row()) if arguments.json else found)
    return 0 if found.ok else 1


def _report(arguments: argparse.Namespace) -> int:
    from agentrl.runfolder import read_config
    from agentrl.viewer import write_report

    if not arguments.path.is_dir():
        read_config(arguments.path)  # names the nearest run
    print(write_report(arguments.path).resolve())
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from agentrl import doctor

    found = doctor.diagnose(sandbox_only=arguments.sandbox, say=lambda text: print(text, file=sys.stderr))
    if arguments.json:
        print(json.dumps(found.row()))
    else:
        doctor.show(found)
    return 0 if found.ok else 1


def _sandbox(arguments: argparse.Namespace) -> int:
    from agentrl.sandboxes.docker_image import build_image

    print(build_image())
    return 0


if __name__ == "__main__":
    sys.exit(main())
