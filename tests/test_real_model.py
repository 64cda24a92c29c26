"""SmolLM2-135M-Instruct, a real language model: the tokens that transformers samples, five updates, a resumed run."""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.cli import main
from agentrl.engines import make_engine
from agentrl.engines.base import Completion, Engine, Sampling
from agentrl.models.load import load_model
from agentrl.runs.folder import checkpoints, read_jsonl
from agentrl.runs.records import read_episodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MADE = Path(__file__).parents[1] / "models" / "smollm2-135m"
RUN = (
    "rollout.tasks=2", "rollout.group_size=2", "rollout.turn_tokens=32", "sft.steps=8", "sft.tasks=16",
    "sft.episodes=4", "sft.lr=1e-4", "eval.tasks=2", "eval.every=0", "save.every=3", "save.keep=9",
    "save.episodes_every=1", "optim.steps=5",
)  # fmt: skip


@pytest.fixture
def folder(require: Callable[[bool, str], None]) -> str:
    """The model's."""
    require((MADE / "model.safetensors").exists(), "needs models/smollm2-135m: scripts/get_smollm2.sh makes it")
    return str(MADE)


@pytest.mark.parametrize("name", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.filterwarnings("ignore")
def test_greedy_turns_are_those_of_generate(folder: str, name: str, require: Callable[[bool, str], None]) -> None:
    require(name != "vllm" or find_spec("vllm") is not None, "needs vLLM: pip install 'agentrl[vllm]'")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = [f"Tom has {7 * n + 3} {what}. {'Why? ' * (n % 7)}" for n in range(25) for what in ("apples", "Vögel")]
    chats = [[{"role": "user", "content": one}] for one in asked]
    prompts = [tuple(tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"]) for one in chats]
    greedy = Sampling(temperature=0.0, max_tokens=8, stop_ids=frozenset({tokenizer.eos_token_id}))

    async def sample(engine: Engine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt, greedy, seed=0) for prompt in prompts))

    with closing(make_engine(name, load_model(folder), {"slots": 16, "max_length": 256})) as engine:
        ours = asyncio.run(sample(engine))
    for prompt, done in zip(prompts, ours, strict=True):
        with torch.no_grad():
            row = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        assert done.token_ids == tuple(row.tolist()), tokenizer.decode(prompt)


def test_it_trains_and_a_resumed_run_ends_as_a_whole_one(folder: str, here: Path) -> None:
    settings = [f"--set={setting}" for setting in (f"model.path={folder}", *RUN)]
    assert main(["train", "--preset", "smollm2-135m", "--name", "whole", *settings]) == 0
    whole, killed = here / "runs" / "whole", here / "runs" / "killed"
    rows = read_jsonl(whole / "metrics.jsonl")
    assert len(rows) == 5 and max(row["logp_diff_max"] for row in rows) < 1e-3
    # A kill between the last row and its checkpoint leaves this folder.
    shutil.copytree(whole, killed)
    shutil.rmtree(checkpoints(killed)[-1])
    assert main(["train", "--resume", "runs/killed"]) == 0
    first, second = (checkpoints(run)[-1] for run in (whole, killed))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    played = [read_episodes(run / "episodes" / "step-000005.jsonl.zst") for run in (whole, killed)]
    assert [one.trajectory.segments for one in played[0]] == [one.trajectory.segments for one in played[1]]
    assert main(["export", "runs/whole", "exported"]) == 0
    exported: Any = AutoModelForCausalLM.from_pretrained("exported")
    trained: Any = AutoModelForCausalLM.from_pretrained(first)
    assert all(map(torch.equal, exported.parameters(), trained.parameters()))
