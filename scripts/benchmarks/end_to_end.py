"""Sampled-and-trained tokens per second of the whole training loop, against TRL's GRPOTrainer or another checkout.

Each side is loaded once, in a process of its own, and they take turns: a batch here, a batch there, so that whatever
else the machine does meets all alike. Same model, prompts, number of episodes, lengths, learning rate and updates. The
first batch is left out. Only sampled tokens count: no prompts, no padding. Rates are of processor time.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import IO, Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
DEFAULT_VENV = Path.home() / ".cache" / "agentrl" / "trl"
EXAMPLES = """examples:
  end_to_end.py                            both workloads against TRL (the first time TRL is installed: minutes)
  end_to_end.py --workload ragged          one of them
  end_to_end.py --beside ../before         against another checkout as well
  end_to_end.py --model models/smollm2-135m --threads 2      a real model: 32 episodes of 64 tokens, one update
  end_to_end.py --quick --without-trl      does it still run? seconds
"""
SHORTEST = 16
"""Tokens of a ragged episode that are sampled before a stop token may end it."""
Load = dict[str, Any]
"""What all sides train on: ``model`` (a folder), ``tasks``, ``group_size``, ``longest``, ``stop_ids``, ``updates``."""
Step = dict[str, Any]
"""One batch: processor ``seconds``, the ``lengths`` of its episodes, and seconds of its ``phases``."""


def reward_of(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone, so that no two episodes of a group are alike."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).digest(), "big") / 2**32


def prompts(load: Load) -> list[str]:
    """Return the user's messages."""
    return [f"Write what comes to mind about the number {number}." for number in range(1000, 1000 + 8 * load["tasks"])]


class Turns:
    """A side's end of the conversation: it waits for its turn on stdin and reports each batch on stdout."""

    def __init__(self) -> None:
        # Whatever else the process prints goes to stderr from now on.
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Report that the last batch is done, and wait; False where there is to be no other."""
        print(file=self._reports, flush=True)
        return sys.stdin.readline() == "step\n"

    def report(self, began: float, lengths: list[int], phases: dict[str, float]) -> None:
        """Report a batch that began at that processor time."""
        step = {"seconds": time.process_time() - began, "lengths": lengths, "phases": phases}
        print(json.dumps(step), end="", file=self._reports)


def parts_of(load: Load) -> tuple[Any, Any, Any]:
    """Return environment, renderer and engine of our side: TRL's has no agentrl to import."""
    from dataclasses import replace

    from agentrl.engines.rng import derive_seed
    from agentrl.engines.transformers import TransformersEngine
    from agentrl.render.renderer import Renderer
    from agentrl.toolenv.base import ToolEnv
    from agentrl.toolenv.tasks import TaskList
    from agentrl.types import Task

    class Talk(ToolEnv):
        """One turn, whatever it says; the reward is a hash of it."""

        def __init__(self, *, split: str = "train") -> None:
            super().__init__(split=split, max_turns=1)

        def tasks(self, split: str) -> Any:
            return TaskList([Task(id=str(number), prompt=prompt) for number, prompt in enumerate(prompts(load))])

        def reward(self, episode: Any) -> dict[str, float]:
            return {"correct": reward_of(episode.final)}

    class Stopping(Renderer):
        stop_ids = tuple(load["stop_ids"])

        def describing(self, *_: Any) -> Renderer:
            """Return itself, which no environment may replace by one that stops elsewhere."""
            return self

    class Patient(TransformersEngine):
        """Samples the first tokens whatever they are, then continues until a stop token."""

        async def generate(self, prompt_ids: Any, sampling: Any, *, seed: int) -> Any:
            if not sampling.stop_ids:
                return await super().generate(prompt_ids, sampling, seed=seed)
            opening = replace(sampling, max_tokens=SHORTEST, stop_ids=())
            head = await super().generate(prompt_ids, opening, seed=seed)
            rest = replace(sampling, max_tokens=sampling.max_tokens - SHORTEST)
            tail = await super().generate(prompt_ids + head.token_ids, rest, seed=derive_seed(seed, "rest"))
            return replace(tail, token_ids=head.token_ids + tail.token_ids, logprobs=head.logprobs + tail.logprobs)

    return Talk, Stopping, Patient


def ours(load: Load, turns: Turns) -> None:
    """Train with agentrl: the real trainer, collector and engine, on an environment without tools."""
    import asyncio
    import copy

    from transformers import AutoTokenizer

    import agentrl
    from agentrl.config import parse_config
    from agentrl.models.load import load_model
    from agentrl.runs.assemble import make_collector, task_mix
    from agentrl.train.groups import Collecting
    from agentrl.train.sharded import make_learner
    from agentrl.train.step import Trainer

    talk, stopping, patient = parts_of(load)
    agentrl.register("benchmark/Talk-v0", talk)
    episodes = load["tasks"] * load["group_size"]
    rollout = {"tasks": load["tasks"], "group_size": load["group_size"], "turn_tokens": load["longest"]}
    rollout |= {"truncated": {"turn": "answer"}, "episode_tokens": load["longest"] + 128, "concurrency": episodes}
    config = parse_config(
        {
            "env": {"id": "benchmark/Talk-v0"},
            "model": {"path": load["model"]},
            "rollout": rollout,
            "optim": {"minibatches": load["updates"], "lr": 1e-6},
        }
    )
    model = load_model(load["model"])
    collector = make_collector(config, stopping(AutoTokenizer.from_pretrained(load["model"])), split="train")
    engine = patient(copy.deepcopy(model), slots=episodes, max_length=2 * load["longest"] + 128)
    learner = make_learner(config, model)
    trainer = Trainer(config, learner, Collecting(config, task_mix(config, "train"), collector, engine))

    async def train() -> None:
        await trainer.sync(0)
        number = 0
        while turns.wait():
            number, began = number + 1, time.process_time()
            result = await trainer.step(number)
            phases = {name: result.metrics[f"seconds_{name}"] for name in ("generate", "score", "update", "sync")}
            turns.report(began, [episode.n_sampled for episode in result.trajectories], phases)

    asyncio.run(train())
    collector.close()


def trl(load: Load, turns: Turns) -> None:
    """Train with TRL: its defaults, but for what the workload says and what only costs time."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Watch(TrainerCallback):
        """Takes turns at the borders between batches."""

        lengths: list[int]
        began = 0.0
        # As our phases: milliseconds of the clock, sampling and scoring together.
        phases: dict[str, float]

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not turns.wait()
            self.began, self.clock, self.phases = time.process_time(), time.perf_counter(), {"generate": 0.0}

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % load["updates"] == 0:
                update = time.perf_counter() - self.clock - self.phases["generate"]
                turns.report(self.began, self.lengths, {**self.phases, "update": update})
                self.on_train_begin(args, state, control)

    class Timed(GRPOTrainer):
        """Measures the time before each update: TRL samples and scores in it."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            began = time.perf_counter()
            try:
                return super()._prepare_inputs(generation_batch)
            finally:
                watch.phases["generate"] += time.perf_counter() - began

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        watch.lengths = [len(ids) for ids in completion_ids]
        return [reward_of(messages[0]["content"]) for messages in completions]

    tokenizer, watch = AutoTokenizer.from_pretrained(load["model"]), Watch()
    model = AutoModelForCausalLM.from_pretrained(load["model"], attn_implementation="sdpa")
    model.generation_config.eos_token_id = load["stop_ids"] or tokenizer.eos_token_id
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts(load)]
        Timed(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(output_dir=folder, **trl_settings(load)),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[watch],
        ).train()


def trl_settings(load: Load) -> dict[str, Any]:
    """Return the settings of TRL's trainer for a workload."""
    options = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    options |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    return options | {
        "max_steps": 1_000_000,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": load["tasks"] * load["group_size"] // load["updates"],
        "gradient_accumulation_steps": 1,
        "steps_per_generation": load["updates"],
        "num_generations": load["group_size"],
        "max_completion_length": load["longest"],
        "generation_kwargs": {"min_new_tokens": SHORTEST if load["stop_ids"] else load["longest"]},
        "temperature": 1.0,
        "beta": 0.0,
    }


class Side:
    """A process that trains one batch for each line on its stdin."""

    def __init__(self, python: Path, kind: str, checkout: Path, load: Load, threads: int, log: IO[str]) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
        env |= {"PYTHONPATH": str(checkout)}
        self._log = log
        command = [python, "-P", HERE, "--side", kind, json.dumps(load)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        self._process: Any = subprocess.Popen(command, env=env, **pipes)
        self._answer()

    def step(self) -> Step:
        """Have it train one batch."""
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def close(self) -> None:
        """Have it stop."""
        self._process.communicate()

    def _answer(self) -> str:
        if line := self._process.stdout.readline():
            return line
        self._process.wait()
        self._log.seek(0)
        sys.exit(f"a side failed:\n{self._log.read()[-4000:]}")


def workloads(args: argparse.Namespace, folder: Path) -> dict[str, Load]:
    """Return what is trained on; without ``--model`` save a model of 4 layers and width 128 with random weights.

    Each of its tokens is about equally likely: with six that stop, the length of an episode is about geometric.
    """
    if args.model:
        real = {"model": str(args.model.resolve()), "tasks": 8, "group_size": 4, "updates": 1}
        return {"fixed": {**real, "longest": 8 if args.quick else 64, "stop_ids": []}}
    from agentrl.models.tiny import make_model, make_tokenizer

    texts = (f"system\nuser\nassistant\ntool Write what comes to mind: {number * 7919}" for number in range(500))
    tokenizer = make_tokenizer([*texts, HERE.read_text()])
    make_model(tokenizer, hidden=128, layers=4, heads=4, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    load = {"model": str(folder), "tasks": 2 if args.quick else 8, "group_size": 4 if args.quick else 8, "updates": 2}
    stops = [*range(len(tokenizer) - 6, len(tokenizer))]
    loads = {
        "ragged": {**load, "longest": 24 if args.quick else 256, "stop_ids": stops},
        "fixed": {**load, "longest": 20 if args.quick else 128, "stop_ids": []},
    }
    return loads if args.workload == "both" else {args.workload: loads[args.workload]}


def trl_python(folder: Path) -> Path:
    """Return the Python of the environment that holds TRL; make it where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import trl"], capture_output=True).returncode:
        say(f"installing TRL into {folder}")
        venv.create(folder, with_pip=True)
        packages = ["torch", "transformers", "trl", "datasets", "accelerate"]
        pip = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *packages]
        subprocess.run(pip, check=True)
    return python


def play(load: Load, args: argparse.Namespace) -> Iterator[dict[str, Step]]:
    """Train batches by turns, and yield those of each round by side; the first round is skipped."""
    kinds = {"agentrl": (Path(sys.executable), "ours", ROOT)}
    kinds |= {str(folder): (Path(sys.executable), "ours", folder.resolve()) for folder in args.beside}
    if not args.without_trl:
        kinds["TRL"] = (trl_python(args.venv), "trl", Path("/nowhere"))
    with ExitStack() as stack:
        logs = {name: stack.enter_context(tempfile.TemporaryFile("w+")) for name in kinds}
        sides = {name: Side(*kind, load, args.threads, logs[name]) for name, kind in kinds.items()}
        for side in sides.values():
            stack.callback(side.close)
        for number in range(1 + args.steps):
            taken = {name: side.step() for name, side in sides.items()}
            rates = ", ".join(f"{name} {rate_of(step):.0f}" for name, step in taken.items())
            say(f"batch {number} of {args.steps}: {rates} tokens a second")
            if number:
                yield taken


def rate_of(step: Step) -> float:
    """Sampled-and-trained tokens per second of processor time."""
    return sum(step["lengths"]) / step["seconds"]


def report(name: str, rounds: Sequence[dict[str, Step]]) -> str:
    """Tabulate each side's rate, our rate over it round by round, and where its time goes."""
    lines = []
    for side in rounds[0]:
        steps = [taken[side] for taken in rounds]
        ratios = [rate_of(taken["agentrl"]) / rate_of(taken[side]) for taken in rounds]
        lengths = [length for step in steps for length in step["lengths"]]
        phases = ", ".join(
            f"{phase} {1e3 * median(step['phases'][phase] for step in steps):.0f}" for phase in steps[0]["phases"]
        )
        lines.append(
            f"| {name} | {side} | {median(map(rate_of, steps)):.0f} | {median(ratios):.2f} "
            f"[{min(ratios):.2f}-{max(ratios):.2f}] | {mean(lengths):.0f}, {min(lengths)}-{max(lengths)} | {phases} |"
        )
    return "\n".join(lines)


def say(text: str) -> None:
    """Print progress to stderr: stdout holds the table alone."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, or one of its sides."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=["ragged", "fixed", "both"], default="both")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a real model, with a workload of its own")
    parser.add_argument("--steps", type=int, default=5, help="measured batches of each side (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="of each side (default 1)")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], metavar="FOLDER", help="other checkouts")
    parser.add_argument("--quick", action="store_true", help="few and short episodes: a test that all runs, no timing")
    parser.add_argument("--without-trl", action="store_true", help="nothing is installed")
    parser.add_argument("--venv", type=Path, default=DEFAULT_VENV, help=f"where TRL lives (default {DEFAULT_VENV})")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.side:
        {"ours": ours, "trl": trl}[args.side[0]](json.loads(args.side[1]), Turns())
        return
    with tempfile.TemporaryDirectory() as folder:
        tables = [report(name, [*play(load, args)]) for name, load in workloads(args, Path(folder)).items()]
    head = (
        "workload",
        "side",
        "tokens a second",
        "agentrl over it [pairs]",
        "tokens of an episode",
        "ms of its phases",
    )
    print("\n".join((f"| {' | '.join(head)} |", "|---" * len(head) + "|", *tables)))


if __name__ == "__main__":
    main()
