"""From settings to parts: the same settings give the same model, and a saved one is taken up as it was."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.assemble import assemble, dialect_label, gold_turns, make_collector, pick_tasks, with_dialect
from agentrl.checkpoint import save_checkpoint
from agentrl.config import Config, load_config
from agentrl.engines.base import Sampling
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, UnknownNameError, UsageError
from agentrl.registry import make
from agentrl.tasks import TaskList
from agentrl.types import Task


def tiny(*overrides: str) -> Config:
    small = ["model.hidden=16", "model.layers=1", "model.heads=2", "rollout.concurrency=2", "rollout.turn_tokens=8"]
    return load_config(overrides=[*small, "rollout.episode_tokens=64", *overrides])


def test_same_seed_same_model() -> None:
    one, same, other = (assemble(tiny(f"run.seed={seed}")) for seed in (1, 1, 2))
    weights = [dict(parts.model.named_parameters()) for parts in (one, same, other)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert any(not torch.equal(value, weights[2][name]) for name, value in weights[0].items())
    assert one.tokenizer.get_vocab() == same.tokenizer.get_vocab()
    assert one.renderer.tokenizer is one.tokenizer


def test_engine_has_weights_of_its_own() -> None:
    parts = assemble(tiny())
    before = asyncio.run(parts.engine.generate((5, 6, 7), Sampling(max_tokens=4), seed=1))
    with torch.no_grad():
        for weights in parts.model.parameters():
            weights.zero_()
    assert asyncio.run(parts.engine.generate((5, 6, 7), Sampling(max_tokens=4), seed=1)) == before


def test_saved_model_is_taken_up_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tiny()
    parts = assemble(config)
    save_checkpoint(tmp_path / "it", parts.model, parts.tokenizer, state={})
    again = [assemble(config, tmp_path / "it"), assemble(tiny(f"model.path={tmp_path / 'it'}"))]
    for other in again:
        loaded = dict(other.model.named_parameters())
        assert all(torch.equal(weights, loaded[name]) for name, weights in parts.model.named_parameters())
        text = "What is 12 + 30? 3.5 é"
        assert other.tokenizer(text)["input_ids"] == parts.tokenizer(text)["input_ids"]
    assert capfd.readouterr() == ("", ""), "no bars and notes of libraries between ours"


def test_dtype_and_threads() -> None:
    before = torch.get_num_threads()
    parts = assemble(tiny("model.dtype=bfloat16", "run.threads=1"))
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
    sampled = parts.engine._model
    assert {weights.dtype for weights in sampled.parameters()} == {sampled.dtype} == {torch.bfloat16}
    assert {weights.dtype for weights in parts.model.parameters()} == {torch.float32}
    assert {buffer.dtype for buffer in sampled.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    ("override", "kind", "wanted"),
    [
        ("model.device=tpu7", ConfigError, "there is no device 'tpu7' here"),
        ("model.template_args.enable_thinking=false", ConfigError, "no variable 'enable_thinking' to set"),
        ("model.heads=3", ConfigError, "model.heads=3 in model.hidden=16"),
        ("model.heads=16", ConfigError, "model.heads=16 in model.hidden=16"),
        ("model.hidden=15", ConfigError, "model.heads=2 in model.hidden=15"),
        ("model.path=/no/such/folder", UsageError, "no tokenizer can be loaded from '/no/such/folder'"),
        ("env.id=agentrl/Arithmetic-v9", UnknownNameError, "did you mean 'agentrl/Arithmetic-v0'?"),
    ],
)
def test_what_can_not_be_assembled(override: str, kind: type[Exception], wanted: str) -> None:
    with pytest.raises(kind) as caught:
        assemble(tiny(override))
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("hidden", "heads"), [(2, 1), (8, 1), (8, 2), (24, 4), (12, 6)])
def test_any_allowed_shape_works(hidden: int, heads: int) -> None:
    parts = assemble(tiny(f"model.hidden={hidden}", f"model.heads={heads}"))
    done = asyncio.run(parts.engine.generate((5, 6, 7), Sampling(max_tokens=4), seed=1))
    assert len(done.token_ids) == 4


def test_collector_plays_the_split_it_is_asked_for(tokenizer: Any) -> None:
    from agentrl.render import Renderer

    config = tiny("env.args.level=2")
    collector = make_collector(config, Renderer(tokenizer), split="test")
    assert collector.env.split == "test"
    assert pick_tasks(collector.env, 2, first=3)[0].id == "test-2:3"
    collector.close()
    with pytest.raises(UnknownNameError, match="no split is called 'exam'"):
        make_collector(config, Renderer(tokenizer), split="exam")


def test_native_dialect_is_that_of_the_models_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    taught = copy.deepcopy(tokenizer)
    taught.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        '[TOOL_CALLS] [{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}]'
        "{% endfor %}{{ eos_token }}{% endfor %}"
    )
    taught.save_pretrained(tmp_path)
    config = tiny("env.args.dialect=native", f"model.path={tmp_path}")
    assert with_dialect(config).env.args == {"dialect": "native-mistral"}
    assert with_dialect(tiny("env.args.dialect=native"), tmp_path).env.args == {"dialect": "native-mistral"}
    assert dialect_label(with_dialect(config)).startswith("native-mistral ")
    assert with_dialect(tiny("env.args.dialect=xml")) == tiny("env.args.dialect=xml")
    with pytest.raises(ConfigError, match="needs a model that was taught to call tools"):
        with_dialect(tiny("env.args.dialect=native"))


class Seven(ToolEnv):
    """Seven tasks, in order."""

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id=str(number), prompt="?") for number in range(7)])


def test_finite_tasks_begin_again() -> None:
    assert [task.id for task in pick_tasks(Seven(), 5, first=5)] == ["5", "6", "0", "1", "2"]
    with pytest.raises(ConfigError, match="the test learns from gold episodes, and Seven has no gold player: do so"):
        gold_turns(Seven(), Seven().task_set[0], "the test learns", "do so")


@pytest.mark.parametrize("step", [1, 3, 7, 20])
def test_a_seed_shuffles_every_pass_through_finite_tasks(step: int) -> None:
    env = Seven()

    def order(seed: int) -> list[str]:
        return [task.id for at in range(0, 70, step) for task in pick_tasks(env, step, first=at, seed=seed)][:70]

    passes = [order(3)[at : at + 7] for at in range(0, 70, 7)]
    assert all(sorted(one) == list("0123456") for one in passes), "every task once a pass"
    assert len(set(map(tuple, passes))) > 7 and list("0123456") not in passes
    assert order(3) == [task.id for task in pick_tasks(env, 70, seed=3)], "however many a step takes, from the start on"
    assert order(4) != order(3)
    assert pick_tasks(env, 7, first=-7, seed=3) != pick_tasks(env, 7, first=0, seed=3)


def test_endless_tasks_come_by_index_whatever_the_seed() -> None:
    env = make("agentrl/Arithmetic-v0")
    assert [task.id for task in pick_tasks(env, 3, first=5, seed=1)] == [env.task_set[at].id for at in (5, 6, 7)]


def test_gold_turns_are_the_environments_own() -> None:
    env = make("agentrl/Arithmetic-v0")
    task = env.task_set[0]
    assert gold_turns(env, task, "it learns", "do") == tuple(env.gold(task))
