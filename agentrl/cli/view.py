"""``agentrl view``: runs and episodes as one page, to look through and to compare."""

import argparse
from pathlib import Path
from typing import Any

from agentrl.cli.command import add_command
from agentrl.errors import UsageError

_VIEW = """examples:
  agentrl view runs/first
  agentrl view runs/first --all --out first.html
  agentrl view runs/first/episodes/step-000040.jsonl.zst
  agentrl view evals/before evals/after
  agentrl view runs/otb-0 runs/otb-1 runs/mean-0 runs/mean-1

The page is one file that loads nothing: open it in a browser. With two sources, episodes of one task stand side by
side, and pairs with different outcomes come first. Runs that differ only in their seed are one line with a band.
"""


def add_commands(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    view = add_command(commands, "view", _view, "write a page of runs and their episodes, token by token", _VIEW)
    view.add_argument(
        "paths",
        metavar="RUN|EVALUATION|FILE",
        nargs="+",
        type=Path,
        help="folders, or files of episodes (.jsonl[.zst])",
    )
    view.add_argument("--out", type=Path, help="the page (default: view.html in the run folder, or here)")
    view.add_argument(
        "--all", action="store_true", help="show all saved steps of a run, not only the first and the last"
    )


def _view(arguments: argparse.Namespace) -> int:
    from agentrl.runs.report import write_view
    from agentrl.runs.settings import read_config

    for path in arguments.paths:
        if not path.exists():
            read_config(path)  # raises, and suggests the nearest run
    alone = len(arguments.paths) == 1 and arguments.paths[0].is_dir()
    out = arguments.out or (arguments.paths[0] if alone else Path()) / "view.html"
    if out.is_dir() or out.suffix != ".html":
        raise UsageError(f"--out {out} is no name of a page: give one that ends in .html")
    write_view(arguments.paths, out, every=arguments.all)
    print(out.resolve())
    return 0
