#!/usr/bin/env python3
"""Compare settings: one training run for every pair of the varied values and every seed, and one table of them all.

All runs of a seed begin with the same warm start and end after the same number of sampled tokens. The table goes to
standard output and, as JSON, to grid.json in the grid's folder. The grid can be stopped with Ctrl-C, or killed, at any
moment: the same command goes on with it, leaves out what is done, and tries again what failed.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grid_plan import Plan
    from grid_work import Start

_EXAMPLES = """examples:
  grid.py --preset quickstart --vary algo.advantage=otb,otb_loo,group_mean --vary algo.loss=ctpo,gspo,ppo_clip
  grid.py --preset quickstart --vary rollout.group_size=4,8 --seeds 0,1 --tokens 30000 --out runs/groups --dry-run
  grid.py my.toml --set env.args.level=2 --vary optim.lr=1e-4,3e-4 --jobs 2

exit codes: 0 all runs are done, 1 some failed, 2 what was asked for is not there, 130 interrupted
"""


def say(text: str) -> None:
    """Progress and errors go to standard error: standard output holds the table alone."""
    print("grid:", *text.split(), file=sys.stderr, flush=True)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="grid.py", description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", type=Path, help="a TOML file of settings")
    parser.add_argument("--preset", help="begin with a preset; 'agentrl list' names them")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE,VALUE",
        help="compare these; may be repeated",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change all runs",
    )
    parser.add_argument("--seeds", default="0,1,2", help="one run of each setting for each (default: 0,1,2)")
    parser.add_argument("--tokens", type=int, default=60_000, help="sampled tokens a run (default: 60000)")
    parser.add_argument("--out", type=Path, default=Path("runs/grid"), help="the grid's folder (default: runs/grid)")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and write nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, start: "Start | None" = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; the process's own by default.
        start: starts the process of a run, where it shall not be a new Python's.

    Returns:
        The exit code.
    """
    arguments = parsed(argv)
    # As in the runs' processes: an environment of the user's own lies in the current folder.
    sys.path.append(os.getcwd())
    try:
        return _run(arguments, start)
    except ModuleNotFoundError as error:
        if error.name not in ("agentrl", "pydantic", "torch", "transformers", "rich", "safetensors", "tokenizers"):
            raise
        say(f"{error.name} is not installed for {sys.executable}: pip install 'agentrl[train]', or use another Python")
        return 2
    except KeyboardInterrupt:
        say("stopped; the same command goes on")
        return 130


def _run(arguments: argparse.Namespace, start: "Start | None") -> int:
    from grid_plan import Request, make_plan

    from agentrl.errors import AgentRLError, ConfigError

    try:
        if arguments.config is None and arguments.preset is None:
            raise ConfigError("say what to do: give a TOML file, or --preset quickstart")
        if arguments.jobs < 1:
            raise ConfigError(f"--jobs is {arguments.jobs}: do at least 1 run at a time")
        request = Request(
            preset=arguments.preset,
            config=arguments.config,
            overrides=arguments.overrides,
            vary=arguments.vary,
            seeds=arguments.seeds,
            tokens=arguments.tokens,
            out=arguments.out,
        )
        return _work(arguments, make_plan(request), start)
    except AgentRLError as error:
        say(str(error))
        return 2


def _work(arguments: argparse.Namespace, plan: "Plan", start: "Start | None") -> int:
    from grid_table import table
    from grid_work import Grid, start_process

    grid = Grid(plan, arguments.jobs, say, start or start_process)
    if arguments.dry_run:
        for run in plan.runs:
            print(f"{run.name} ({grid.state(run)}): agentrl {shlex.join(run.words)}")
        return 0
    grid.work()
    print(table(plan, grid.ends))
    return int(any(end.exit_code for end in grid.ends.values()))


if __name__ == "__main__":
    sys.exit(main())
