"""Wall time of training with groups played beside learning, and without: ``rollout.overlap`` off, lag and inflight.

All modes train the same tiny model for as many steps. Each turn's tool sleeps so long, on average, that without overlap
a step waits for tools as long as it computes, which short runs find out first. The modes take turns.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import gymnasium
from measures import command_line, say

from agentrl.config import Config, load_config
from agentrl.eval.pages import table
from agentrl.rollout.mix import TaskMix
from agentrl.runs.assemble import assemble, make_collector, task_mix
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.train.overlap import make_source
from agentrl.train.sharded import make_learner
from agentrl.train.step import Trainer
from agentrl.types import Task

EXAMPLES = """examples:
  async.py                    6 steps of 8 x 8 episodes of 4 turns
  async.py --steps 12 --rounds 3
  async.py --tool-seconds 0.2 the tools' time as it is given, not as it is measured
  async.py --quick            does it still run? seconds
"""
MODES: Mapping[str, Sequence[str]] = {
    "off": (),
    "lag": ("rollout.overlap=lag",),
    "inflight, 1": ("rollout.overlap=inflight",),
    "inflight, 2": ("rollout.overlap=inflight", "rollout.overlap.staleness=2"),
    "inflight, 2, 2 spare": ("rollout.overlap=inflight", "rollout.overlap.staleness=2", "rollout.overlap.spare=2"),
}


class Slow(ToolEnv):
    """An environment whose answers come slowly and have nothing of interest.

    Args:
        split: any.
        turns: of each episode.
        seconds: mean time of a turn's tool.
    """

    def __init__(self, *, split: str = "train", turns: int = 4, seconds: float = 0.0) -> None:
        super().__init__(split=split, max_turns=turns)
        self.seconds = seconds

    def tasks(self, split: str) -> TaskList:
        """Return 64 tasks."""
        return TaskList([Task(id=f"{split}:{n}", prompt=f"Write about {n}.") for n in range(64)])

    def reward(self, episode: Episode) -> dict[str, float]:
        """Something that every text gets more or less of."""
        return {"correct": sum(map(ord, episode.final)) % 5 / 4}

    def gold(self, task: Task) -> list[str]:
        """Answer with the task's number: the tiny model's vocabulary comes from here."""
        return [task.id]

    def step(self, action: str) -> Any:
        """Take a time that is uniform around its mean."""
        time.sleep(self.seconds * 2 * self.np_random.random())
        return super().step(action)


def config_of(args: argparse.Namespace, mode: str, seconds: float) -> Config:
    """The settings of a mode."""
    return load_config(
        overrides=[
            *("env.id=benchmark/Slow-v0", f"env.args.turns={args.turns}", f"env.args.seconds={seconds}"),
            *(
                f"model.tiny.hidden={args.hidden}",
                "model.tiny.layers=2",
                "run.threads=1",
                "algo.loss=ctpo",
                "optim.lr=1e-4",
            ),
            *(f"rollout.tasks={args.tasks}", f"rollout.group_size={args.group}", f"rollout.turn_tokens={args.turn}"),
            *("rollout.truncated.turn=continue", "rollout.concurrency=256", f"optim.steps={args.steps}"),
            *("rollout.max_fault_rate=0", *MODES[mode]),
        ]
    )


def measured(config: Config, mix: TaskMix) -> tuple[float, float, list[dict[str, float]]]:
    """Train, and give the seconds of all steps, by the clock and of the processor, and their rows."""
    parts = assemble(config, mix)
    collector = make_collector(config, parts.renderer, split="train")
    trainer = Trainer(config, make_learner(config, parts.model), make_source(config, mix, collector, parts.engine))

    async def run() -> list[dict[str, float]]:
        await trainer.sync(0)
        return [(await trainer.step(number)).metrics for number in range(1, config.optim.steps + 1)]

    began, spent = time.perf_counter(), time.process_time()
    rows = asyncio.run(run())
    seconds, spent = time.perf_counter() - began, time.process_time() - spent
    collector.close()
    parts.engine.close()
    return seconds, spent, rows


def tool_seconds(args: argparse.Namespace) -> float:
    """Find the mean time of a turn's tool by which ``off`` waits as long as it computes."""
    seconds, short = 0.25, argparse.Namespace(**{**vars(args), "steps": 2})
    for _ in range(0 if args.quick else 3):
        config = config_of(short, "off", seconds)
        wall, spent, _ = measured(config, task_mix(config, "train"))
        # On a loaded machine waiting for a core counts as waiting for tools: they take too little time then.
        seconds *= spent / (wall - spent)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command_line(__doc__, EXAMPLES)
    parser.add_argument("--steps", type=int, default=6, help="of each run (default 6)")
    parser.add_argument("--tasks", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--group", type=int, default=8, help="episodes of a task (default 8)")
    parser.add_argument("--turns", type=int, default=4, help="of an episode (default 4)")
    parser.add_argument("--turn", type=int, default=16, help="tokens of a turn (default 16)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model (default 128)")
    parser.add_argument("--rounds", type=int, default=2, help="of all modes (default 2)")
    parser.add_argument("--tool-seconds", type=float, help="mean of a turn's tool; by default measured")
    parser.add_argument("--quick", action="store_true", help="few and short episodes: a test that all runs, no timing")
    args = parser.parse_args(arguments)
    if args.quick:
        args.steps, args.tasks, args.group, args.turns, args.turn, args.hidden, args.rounds = 3, 2, 2, 2, 4, 16, 1
    gymnasium.register("benchmark/Slow-v0", entry_point=lambda **options: Slow(**options))
    tool = args.tool_seconds
    if tool is None:
        tool = tool_seconds(args)
    say(f"a turn's tool takes {tool:.3g} s on average")
    walls: dict[str, list[float]] = {mode: [] for mode in MODES}
    spent: dict[str, list[float]] = {mode: [] for mode in MODES}
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode in MODES:
            config = config_of(args, mode, tool)
            seconds, cpu, some = measured(config, task_mix(config, "train"))
            say(f"{mode}: {seconds:.1f} s")
            walls[mode].append(seconds)
            spent[mode].append(cpu)
            rows[mode] += some
    lines: list[tuple[str, ...]] = []
    for mode, seconds in walls.items():
        ratio = median(off / own for off, own in zip(walls["off"], seconds, strict=True))
        stale = [row["staleness_mean"] for row in rows[mode]]
        most = max(row["staleness_max"] for row in rows[mode])
        waited = fmean(row.get("seconds_waited", row["seconds_generate"]) for row in rows[mode])
        wall, busy = (" / ".join(f"{each:.1f}" for each in some) for some in (seconds, spent[mode]))
        lines.append((mode, wall, busy, f"{ratio:.2f}", f"{fmean(stale):.2f}, {most}", f"{waited:.2f}"))
    head = ("overlap", "wall s (each round)", "CPU s", "as fast as off", "staleness mean, max", "s waited a step")
    print(table(head, lines))


if __name__ == "__main__":
    main()
