"""``agentrl sweep``: compare settings."""

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.cli.command import add_command, add_config_arguments, check_config, check_envs, loading_torch
from agentrl.errors import ConfigError

_SWEEP = """examples:
  agentrl sweep --preset quickstart --vary algo.advantage=otb,otb_loo,group_mean --vary algo.loss=ctpo,gspo,ppo_clip
  agentrl sweep --preset quickstart --vary rollout.group_size=4,8 --seeds 0,1 --out runs/groups --dry-run
  agentrl sweep my.toml --set eval.every=5 --vary rollout.tasks+rollout.group_size=16+4,8+8 --tokens 30000 --jobs 2

Settings joined by + are varied together. Every run ends after the same number of sampled tokens. The table is printed,
and sweep.json has each run; agentrl view draws the learning curves of several run folders. A sweep can be stopped with
Ctrl-C, or killed, at any moment, and the same command resumes it. The exit code is 0 if all runs are done, and 1 if
some failed.
"""


def add_commands(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    text = "compare settings: train every pair of values with several seeds"
    sweep = add_command(commands, "sweep", _sweep, text, _SWEEP)
    add_config_arguments(sweep)
    about = "compare these; may be repeated"
    sweep.add_argument("--vary", action="append", required=True, metavar="SECTION.KEY=VALUE,VALUE", help=about)
    sweep.add_argument("--seeds", type=_seeds, default="0,1,2", help="each setting runs once for each (default: 0,1,2)")
    sweep.add_argument("--tokens", type=int, default=60_000, help="sampled tokens of a run (default: 60000)")
    sweep.add_argument("--out", type=Path, default=Path("runs/sweep"), help="the sweep's folder (default: runs/sweep)")
    sweep.add_argument("--jobs", type=int, default=1, help="how many runs at a time (default: 1)")
    sweep.add_argument("--dry-run", action="store_true", help="list the runs and write nothing")


def _seeds(text: str) -> list[int]:
    return list(dict.fromkeys(map(int, text.split(","))))


def _sweep(arguments: argparse.Namespace) -> int:
    check_config(arguments)
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs is {arguments.jobs}: do at least 1 run at a time")
    from agentrl.eval.sweep import SweepRequest, check_folders, plan_runs, result_of, sweep

    names = ("preset", "config", "overrides", "vary", "seeds", "tokens", "out")
    # The plan comes before the import of PyTorch, so that a mistake in the request is reported at once.
    runs = plan_runs(SweepRequest(**{name: getattr(arguments, name) for name in names}))
    for run in runs:  # what varies may be the environment
        check_envs(run.config, plays=not arguments.dry_run and result_of(run) is None)
    from agentrl.runs.progress import Display

    display = Display()
    with loading_torch(display):
        from agentrl.train.run import check_run, settled

    # All runs are checked before the first begins: a sweep must not fail after hours on settings that never fitted.
    for run in runs:
        check_run(run.config)
    check_folders(runs, partial(settled, display=display))
    if arguments.dry_run:
        for run in runs:
            state = "done" if result_of(run) else "resumes" if run.has_begun else "new"
            print(f"{run.folder.name} ({state}): agentrl {shlex.join(run.words)}")
        return 0
    table, failed = sweep(runs, arguments.jobs, display.say)
    print(table)
    return int(failed > 0)
