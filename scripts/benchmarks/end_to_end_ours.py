"""Our side of ``end_to_end.py``: the real trainer, collector and engine on an environment without tools."""

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from end_to_end_common import Step, Stopwatch, Turns, Workload, reward_of, workload_from
from transformers import AutoTokenizer

import agentrl
from agentrl.assemble import Parts, make_collector
from agentrl.config import Config, parse_config
from agentrl.engines.base import Completion, Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.env import Episode, ToolEnv
from agentrl.policy import load_model
from agentrl.render import Renderer
from agentrl.rng import derive_seed
from agentrl.tasks import TaskList
from agentrl.trainer import StepResult, Trainer
from agentrl.types import Task

ENV_ID = "benchmark/Talk-v0"
PROMPT_TOKENS = 128
"""Room for the prompt within the token budget of an episode."""


class Talk(ToolEnv):
    """One turn, whatever it says; the reward is a hash of it."""

    def __init__(self, *, prompts: list[str], split: str = "train") -> None:
        super().__init__(split=split, max_turns=1)
        self._prompts = prompts

    def tasks(self, split: str) -> TaskList:
        """One task per prompt."""
        return TaskList([Task(id=str(number), prompt=prompt) for number, prompt in enumerate(self._prompts)])

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """A hash of the only turn."""
        return {"correct": reward_of(episode.final)}


class StoppingRenderer(Renderer):
    """Ends a turn at any of the workload's stop tokens."""

    def __init__(self, tokenizer: object, stop_ids: tuple[int, ...]) -> None:
        self._stop_ids = stop_ids
        super().__init__(tokenizer)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The workload's stop tokens."""
        return self._stop_ids


class PatientEngine(TransformersEngine):
    """Samples the first ``shortest`` tokens whatever they are, then goes on until a stop token."""

    shortest: int = 0

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Two requests in a row, the second on the first one's parked slot."""
        if not sampling.stop_ids:
            return await super().generate(prompt_ids, sampling, seed=seed)
        opening = replace(sampling, max_tokens=self.shortest, stop_ids=())
        first = await super().generate(prompt_ids, opening, seed=seed)
        closing = replace(sampling, max_tokens=sampling.max_tokens - self.shortest)
        rest = await super().generate(prompt_ids + first.token_ids, closing, seed=derive_seed(seed, "rest"))
        return replace(rest, token_ids=first.token_ids + rest.token_ids, logprobs=first.logprobs + rest.logprobs)


def settings(load: Workload) -> Config:
    """The run's settings: the defaults, but for what the workload says."""
    return parse_config(
        {
            "env": {"id": ENV_ID, "args": {"prompts": load.prompts}},
            "model": {"path": load.model},
            "rollout": {
                "tasks": load.tasks,
                "group_size": load.group_size,
                "turn_tokens": load.longest,
                "cut_turns": "answer",
                "episode_tokens": load.longest + PROMPT_TOKENS,
                "concurrency": load.episodes,
            },
            "optim": {"minibatches": load.updates, "lr": load.lr},
        }
    )


def assembled(load: Workload, config: Config) -> Parts:
    """The parts of a run, with the workload's stop tokens and shortest length."""
    tokenizer = AutoTokenizer.from_pretrained(load.model)
    model = load_model(load.model)
    engine = PatientEngine(
        copy.deepcopy(model), slots=load.episodes, max_length=config.rollout.episode_tokens + config.rollout.turn_tokens
    )
    engine.shortest = load.shortest
    return Parts(
        model=model, tokenizer=tokenizer, renderer=StoppingRenderer(tokenizer, load.stop_ids), engine=engine
    )  # fmt: skip


def measured(result: StepResult, watch: Stopwatch) -> Step:
    """The step as both sides report it."""
    names = ("generate", "score", "credit", "update", "sync")
    phases = {name: result.metrics[f"seconds_{name}"] for name in names}
    # Environments run in threads while the engine goes on, so this is no part of the sum.
    phases["tools, all episodes"] = result.metrics["seconds_tools_summed"]
    lengths = [trajectory.n_sampled for trajectory in result.trajectories]
    return watch.step(lengths, len(result.trajectories[0].segments[0].token_ids), phases)


async def train(trainer: Trainer, turns: Turns) -> None:
    """One training step per turn."""
    number = 0
    while turns.mine():
        number += 1
        watch = Stopwatch()
        result = await trainer.step(number)
        turns.report(measured(result, watch))


def main() -> None:
    """Take part in a benchmark."""
    load = workload_from(None, "Trains with agentrl.")
    turns = Turns()
    torch.set_num_threads(load.threads)
    agentrl.register(ENV_ID, Talk)
    config = settings(load)
    parts = assembled(load, config)
    collector = make_collector(config, parts.renderer, split="train")
    turns.ready()
    asyncio.run(train(Trainer(config, parts, collector), turns))
    collector.close()


if __name__ == "__main__":
    main()
