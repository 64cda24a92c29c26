"""``agentrl plan`` and ``agentrl train --dry-run``: what a run needs, said before a weight is loaded."""

import copy
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config, presets
from agentrl.runs.assemble import task_source
from agentrl.train.step import check_training_config

from .conftest import Command

pytestmark = pytest.mark.usefixtures("here", "one_thread")

SMALL = ["run.threads=1", "model.tiny.hidden=32", "model.tiny.layers=2", "model.tiny.heads=4", "rollout.concurrency=2"]
TIR = [name for name in presets() if name.endswith("-tir")]


def settings(*overrides: str) -> list[str]:
    return [word for setting in (*SMALL, *overrides) for word in ("--set", setting)]


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Path:
    """A Qwen3 model without weights: its config and a tokenizer."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "bare")
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template += "{% if enable_thinking is defined and not enable_thinking %}{% endif %}"
    thinking.save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


@pytest.mark.slow
def test_plan_of_the_tiny_model(command: Command) -> None:
    lines = command("plan", "--preset", "quickstart", *settings()).out.splitlines()
    assert [line.split()[0] for line in lines] == ["memory"] * 10 + ["in", "a"]
    assert lines[-1].startswith("a step    24576 tokens at most, and no times: they are estimated for a GPU only")
    printed = command("plan", "--preset", "quickstart", "--memory", "0.01", "--json", *settings(), code=1)
    row = json.loads(printed.out)
    assert row["fits"] is False and row["limit"] == int(0.01 * 2**30) and row["total"] == sum(row["memory"].values())
    assert row["remedy"].startswith("process is the first that does not fit, and all does not even with ")
    assert not list(Path().iterdir()), "a plan writes nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("qwen3-4b-tir", 512 * 8), ("qwen3-8b-tir", 128 * 4)])
def test_dry_run_needs_a_config_and_a_tokenizer_but_no_weights_and_no_vllm(
    name: str, rows: int, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert load_config(preset=name).engine.name == "vllm"
    Path("mine.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n{"problem": "2 + 2?", "answer": "4"}\n')
    data = 'env.args.data={train = "mine.jsonl", test = "mine.jsonl"}'
    words = [f"model.path={folder}", "model.device=cpu", "env.args.skip_bad_rows=false"]
    chosen = [word for setting in (*words, data) for word in ("--set", setting)]
    Path("other.jsonl").write_text('{"problem": "3 + 1?", "answer": "4"}\n')
    chosen[-1] = data.replace('test = "mine', 'test = "other')
    dry_run = partial(command, "train", "--preset", name, "--dry-run", *chosen)
    assert "on a CPU vLLM computes heads of 32, 64, 80, " in dry_run(code=2).err
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "head_dim": 32}))
    *lines, lacking = dry_run(code=1).out.splitlines()
    assert lacking == "missing   engine 'vllm' needs vllm: pip install 'agentrl[vllm]'"
    assert lines[0] == "tasks     2 train and 1 test of agentrl/MathPython-v0, in the dialect fence"
    most = load_config(preset=name).rollout.episode_tokens
    assert re.fullmatch(
        rf"prompt    .* tokens, the first; a row has at most {most}, all rows of an episode \d+", lines[1]
    )
    assert lines[2].startswith("memory ") and f"a step    {rows * most} tokens at most" in lines[-1]
    assert not Path("runs").exists()


def test_a_folder_without_a_config_is_named(folder: Path, command: Command) -> None:
    (folder / "config.json").unlink()
    printed = command("plan", "--preset", "quickstart", *settings(f"model.path={folder}"), code=2)
    assert "no model's config can be read from" in printed.err


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("optim.max_tokens=1", "optim.max_tokens=1 can't hold an episode of rollout.episode_tokens=192"),
        ("engine.name=vlm", "no engine is called 'vlm'; did you mean 'vllm'?"),
        ("engine.name=openai", "engine 'openai' only evaluates"),
        ("rollout.overlap.spare=1", "rollout.overlap.spare cancels groups by the clock"),
        ("engine.options.slots=many", "engine.options.slots is 'many': give a number above 0"),
        ("engine.options.slots=0", "engine.options.slots is 0: give a number above 0"),
    ],
)
def test_what_no_run_can_follow_has_no_plan(override: str, why: str, command: Command) -> None:
    assert why in command("train", "--dry-run", *settings(override), "--preset", "quickstart", code=2).err


@pytest.mark.parametrize("name", TIR)
def test_presets_keep_what_the_papers_say(name: str) -> None:
    config = load_config(preset=name)
    check_training_config(config)
    args = config.env.args
    assert (args["max_turns"], args["max_chars"], config.model.dtype) == (5, 256, "bfloat16")
    assert config.optim.lr == (1e-5 if config.lora.rank else 1e-6), "the paper's for all weights"
    batch = (config.rollout.tasks, config.rollout.group_size, config.optim.minibatches, config.optim.epochs)
    assert batch == {"qwen3-4b-tir": (512, 8, 16, 1), "qwen3-8b-tir": (128, 4, 1, 1)}[name]
    # The environment takes all of them; without the data it plays its sample.
    source = task_source(config.model_copy(update={"env": config.env.model_copy(
        update={"args": {key: value for key, value in args.items() if key != "data"}})}), "train")  # fmt: skip
    assert source._env.max_turns == 5 and source._env.tools[0].max_chars == 256


@pytest.mark.parametrize("name", [name for name in presets() if name.startswith("qwen3")])
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    text = presets()[name]
    for line in text.splitlines():
        if " = " in line and not line.startswith(("name", "base", "id", "args", "device", "#")):
            assert "#" in line and any(word in line for word in ("[paper", "[code", "[ours]", "all of AIME")), line
