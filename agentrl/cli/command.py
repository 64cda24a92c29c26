"""What the command families have in common: how a command is added to the parser."""

import argparse
from collections.abc import Callable
from typing import Any

Run = Callable[[argparse.Namespace], int]
"""Does what a command was asked for; gives the exit code."""


def add_command(commands: Any, name: str, run: Run, text: str, examples: str) -> argparse.ArgumentParser:
    """Add a command whose help says what it does and gives examples.

    Args:
        commands: argparse's subparsers.
        name: of the command.
        run: does it; gives the exit code.
        text: what it does, without a capital letter and a full stop.
        examples: lines that begin with ``examples:``.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command
