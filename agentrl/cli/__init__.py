"""The command line: each family of commands has a file here.

Results go to standard output, progress and errors to standard error. Exit codes: 0 success, 1 the run failed, 2 the
request can't be carried out as asked, 130 interrupted, 141 the reader of standard output left, 143 terminated.

A command imports its modules only when it runs, so that ``agentrl --help`` is quick and works on the base install.
"""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from agentrl import __version__
from agentrl.cli import environments, episodes, evaluation, machine, plan, runs, sweep, view
from agentrl.errors import AgentRLError, Terminated, UsageError, nearest
from agentrl.sandboxes import SandboxError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; the process's own by default.

    Returns:
        The exit code.
    """
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            raise UsageError(_unknown(unknown[0], arguments.parser))
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where a broken pipe is still handled below
        return code
    except UsageError as error:
        return _fail(error, 2)
    except (AgentRLError, SandboxError) as error:
        return _fail(error, 1)
    except ModuleNotFoundError as error:
        # Only packages of the extras: any other missing module is a bug and keeps its traceback.
        if error.name not in ("torch", "transformers", "safetensors", "tokenizers", "jinja2", "markupsafe"):
            raise
        return _fail(f"{error.name} is not installed: pip install 'agentrl[train]'", 2)
    except BrokenPipeError:
        # If another pipe broke, such as one to a sandbox, that is a bug.
        if not _reader_left():
            raise
        return 141
    except KeyboardInterrupt as error:
        if argv is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends here: nothing is left to interrupt
        return _fail(str(error) or "interrupted", 143 if isinstance(error, Terminated) else 130)


def _reader_left() -> bool:
    """Return True if the reader of standard output, such as head, has closed it; the rest is then discarded."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    left = any(event & select.POLLERR for _, event in pipe.poll(0))
    if left:
        # Python flushes standard output at exit, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left


def _fail(reason: object, code: int) -> int:
    """Print the reason on one line, even where it holds a library's message of several lines."""
    print("agentrl:", *str(reason).split(), file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """Turns a mistake into one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise a mistake in the words of the command line."""
        raise UsageError(f"{message}: {self.prog} --help lists what there is")


def _unknown(word: str, command: argparse.ArgumentParser) -> str:
    """Return a sentence about a word that a command does not take, with the remedy."""
    if not word.startswith("-"):
        return f"{command.prog} takes no {word!r}: {command.prog} --help lists what it takes"
    options = command._option_string_actions  # pyright: ignore[reportPrivateUsage]
    return f"{command.prog} has no option {word!r}; {nearest(word.partition('=')[0], options)}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="agentrl",
        description="Train LLM agents to reason with sandboxed tools.",
        epilog="examples:\n  agentrl train --preset quickstart\n  agentrl eval runs/quickstart\n  agentrl new my_env\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"agentrl {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for family in (runs, evaluation, view, plan, episodes, sweep, environments, machine):
        family.add_commands(commands)
    return parser
