"""``agentrl sweep``: compare settings."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from agentrl.cli.command import add_command, add_config_arguments, check_config, load_torch
from agentrl.errors import ConfigError

_SWEEP = """examples:
  agentrl sweep --preset quickstart --vary algo.advantage=otb,otb_loo,group_mean --vary algo.loss=ctpo,gspo,ppo_clip
  agentrl sweep --preset quickstart --vary rollout.group_size=4,8 --seeds 0,1 --out runs/groups --dry-run
  agentrl sweep my.toml --set env.args.level=2 --vary optim.lr=1e-4,3e-4 --tokens 30000 --jobs 2
  agentrl sweep --preset quickstart --vary rollout.tasks+rollout.group_size=16+4,8+8 --set eval.every=5 --target 0.9

All runs of a seed begin with the same warm start and end after the same number of sampled tokens. The table is printed,
and written to sweep.json and sweep.html in the sweep's folder. The page also has the learning curves in one chart.
Settings joined by + are varied together: above, the product of tasks and group size stays the same. A sweep can be
stopped with Ctrl-C, or killed, at any moment. The same command resumes it: it skips finished runs and retries failed
ones. The exit code is 0 if all runs are done, and 1 if some failed.
"""


def add_commands(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    text = "compare settings: train every pair of values with several seeds"
    sweep = add_command(commands, "sweep", _sweep, text, _SWEEP)
    add_config_arguments(sweep)
    sweep.add_argument(
        "--vary", action="append", default=[], metavar="SECTION.KEY=VALUE,VALUE", help="compare these; may be repeated"
    )
    sweep.add_argument("--seeds", default="0,1,2", help="seeds; each setting runs once for each (default: 0,1,2)")
    sweep.add_argument("--tokens", type=int, default=60_000, help="sampled tokens of a run (default: 60000)")
    sweep.add_argument(
        "--target", type=float, help="also compare the tokens needed for this held-out success, such as 0.9"
    )
    sweep.add_argument("--out", type=Path, default=Path("runs/sweep"), help="the sweep's folder (default: runs/sweep)")
    sweep.add_argument("--jobs", type=int, default=1, help="how many runs at a time (default: 1)")
    sweep.add_argument("--dry-run", action="store_true", help="list the runs and write nothing")


def _sweep(arguments: argparse.Namespace) -> int:
    check_config(arguments)
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs is {arguments.jobs}: do at least 1 run at a time")
    from agentrl.eval.sweep.plan import SweepRequest, make_plan

    names = ("preset", "config", "overrides", "vary", "seeds", "tokens", "out", "target")
    request = SweepRequest(**{name: getattr(arguments, name) for name in names})
    # The plan comes before the import of PyTorch, so that a mistake in the request is reported at once.
    plan = make_plan(request)
    load_torch()
    from agentrl.eval.pages import write_page
    from agentrl.eval.sweep.table import curves, sections, table
    from agentrl.eval.sweep.work import Sweep, start_process
    from agentrl.runs.progress import Display
    from agentrl.train.run import check_run

    # All runs are checked before the first begins: a sweep must not fail after hours on settings that never fitted.
    for run in plan.runs:
        check_run(run.config)
    sweep = Sweep(plan, arguments.jobs, Display().say, start_process)
    if arguments.dry_run:
        for run in plan.runs:
            print(f"{run.name} ({sweep.state(run)}): agentrl {shlex.join(run.words)}")
        return 0
    sweep.work()
    write_page(plan.out / "sweep.html", plan.out.name, sections(plan, sweep.ends), curves(plan))
    print(table(plan, sweep.ends))
    return int(any(end.exit_code for end in sweep.ends.values()))
