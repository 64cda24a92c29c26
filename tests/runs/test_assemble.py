"""From settings to parts: the same settings give the same model, and a saved one is taken up as it was."""

import asyncio
import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import Config, load_config
from agentrl.engines.base import Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import ConfigError, UnknownNameError, UsageError
from agentrl.render.renderer import Renderer
from agentrl.rollout.plan import EpisodeSpec
from agentrl.runs.assemble import Parts, make_collector, task_mix, task_source, with_dialect
from agentrl.runs.assemble import assemble as assemble_for
from agentrl.runs.checkpoint import save_checkpoint
from agentrl.types import Message


def tiny(*overrides: str) -> Config:
    small = ("model.tiny.hidden=16", "model.tiny.layers=1", "model.tiny.heads=2")
    short = ("rollout.concurrency=2", "rollout.turn_tokens=8", "rollout.episode_tokens=64")
    return load_config(overrides=[*small, *short, *overrides])


def assemble(config: Config, path: Path | None = None, *, fleet: bool = False) -> Parts:
    return assemble_for(config, task_source(config, "train"), path, fleet=fleet)


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
    sampled = parts.engine._compute._model
    assert {weights.dtype for weights in sampled.parameters()} == {sampled.dtype} == {torch.bfloat16}
    assert {weights.dtype for weights in parts.model.parameters()} == {torch.float32}
    assert {buffer.dtype for buffer in sampled.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    ("override", "kind", "wanted"),
    [
        ("model.device=tpu7", ConfigError, "there is no device 'tpu7' here"),
        ("model.device=meta", ConfigError, "there is no device 'meta' here"),
        ("engine.options.max_length=0", ConfigError, "an engine needs room for at least one token"),
        ("engine.options.max_length=long", ConfigError, "engine 'transformers' can't be made with engine.options"),
        ("engine.options.sluts=3", ConfigError, "engine 'transformers' can't be made with engine.options: "),
        ("engine.options.slots=0", ConfigError, "slots is 0: an engine needs at least one"),
        ("engine.name=vlm", UnknownNameError, "no engine is called 'vlm'; did you mean 'vllm'?"),
        ("model.template_args.enable_thinking=false", ConfigError, "no variable 'enable_thinking' to set"),
        ("model.tiny.heads=3", ConfigError, "model.tiny.heads=3 in model.tiny.hidden=16"),
        ("model.path=/no/such/folder", UsageError, "no tokenizer can be loaded from '/no/such/folder'"),
        ("env.id=agentrl/Arithmetic-v9", UnknownNameError, "did you mean 'agentrl/Arithmetic-v0'?"),
    ],
)
def test_what_can_not_be_assembled(override: str, kind: type[Exception], wanted: str) -> None:
    with pytest.raises(kind) as caught:
        assemble(tiny(override))
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


def test_a_fleet_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "agentrl.rollout.ray_fleet", raising=False)
    assert assemble(tiny("fleet.name=ray")).engine, "whoever does not train needs none"
    with pytest.raises(ConfigError, match=r"^fleet 'ray' needs ray: pip install 'agentrl\[ray\]'$"):
        assemble(tiny("fleet.name=ray"), fleet=True)


@pytest.mark.parametrize(("hidden", "heads"), [(2, 1), (8, 1), (8, 2), (24, 4), (12, 6)])
def test_any_allowed_shape_works(hidden: int, heads: int) -> None:
    parts = assemble(tiny(f"model.tiny.hidden={hidden}", f"model.tiny.heads={heads}"))
    done = asyncio.run(parts.engine.generate((5, 6, 7), Sampling(max_tokens=4), seed=1))
    assert len(done.token_ids) == 4


def test_collector_plays_the_split_it_is_asked_for(tokenizer: Any) -> None:
    config = tiny("env.args.level=2")
    source = task_source(config, "test")
    (task,) = source.pick(1, start=3)
    assert task.id == "test-2:3" and (source.split, source.best_return, source.has_tools) == ("test", 1.0, True)
    collector = make_collector(config, Renderer(tokenizer), split="test")
    specs = [[EpisodeSpec(task_id=task.id, seed=0)]]
    collected = asyncio.run(collector.collect(specs, ScriptedEngine([[5]]), Sampling()))
    assert collected.groups[0].task_id == task.id
    collector.close()
    with pytest.raises(UnknownNameError, match="no split is called 'exam'"):
        task_source(config, "exam")


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
    assert task_source(with_dialect(config), "train").dialect.label.startswith("native-mistral ")
    mix = "env.mix={a={id='agentrl/Arithmetic-v0', args={dialect='native'}}, b={id='agentrl/Math-v0'}}"
    mixed = with_dialect(tiny(mix, f"model.path={tmp_path}"))
    assert [env.args for env in mixed.env.played.values()] == [{"dialect": "native-mistral"}, {}]
    with pytest.raises(ConfigError, match="task_mix gives the tasks of all"):
        task_source(mixed, "train")
    # A template that describes tools describes to each environment its own.
    described = Renderer(taught, {}, task_mix(mixed, "train").dialects[0].template_tools)
    assert described.describing(*described._given[1:]) is described  # pyright: ignore[reportPrivateUsage]
    prompts = [writer.prompt([Message(role="user", content="x")]) for writer in (described, described.describing([]))]
    assert ["python" in taught.decode(prompt.token_ids) for prompt in prompts] == [True, False]
    assert with_dialect(tiny("env.args.dialect=xml")) == tiny("env.args.dialect=xml")
    with pytest.raises(ConfigError, match="needs a model that was taught to call tools"):
        with_dialect(tiny("env.args.dialect=native"))
