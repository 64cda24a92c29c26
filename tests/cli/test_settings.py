"""``agentrl config``: every setting with its meaning, in a file that is read as the very settings it shows."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from agentrl.algos import ADVANTAGES, LOSSES
from agentrl.cli.settings import explained
from agentrl.config import AlgoSettings, Config, load_config, parse_config, presets
from agentrl.errors import ConfigError, UnknownNameError
from agentrl.runs.settings import settings_of

from .conftest import Command

NAMES = [(section, key) for section, field in Config.model_fields.items() for key in field.annotation.model_fields]  # type: ignore[union-attr]


@pytest.mark.parametrize("what", [None, *presets()])
def test_what_is_printed_is_read_again(what: str | None, tmp_path: Path) -> None:
    path = tmp_path / "it.toml"
    path.write_text(explained(what))
    assert load_config(path=path) == load_config(preset=what)
    assert [(section, key) for section, keys in tomllib.loads(path.read_text()).items() for key in keys] == NAMES


@pytest.mark.parametrize("section", Config.model_fields)
def test_a_section_alone(section: str) -> None:
    assert tomllib.loads(explained(section)) == {section: Config().model_dump(mode="json")[section]}


def test_each_setting_has_meaning_kind_and_default() -> None:
    lines = explained("quickstart").splitlines()
    settings = [at for at, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(settings) == len(settings_of(Config()))
    for at in settings:
        start = max(index for index in range(at) if not lines[index].startswith("#"))
        comment = " ".join(line.removeprefix("# ") for line in lines[start + 1 : at])
        assert re.fullmatch(r"[A-Z].*\. .*; default .+", comment), lines[at]
        assert "``" not in comment and len(lines[at]) < 120
    at = lines.index("turn_tokens = 32")
    assert lines[at - 2 : at] == ["# Most sampled tokens of a turn.", "# a whole number, at least 1; default 256"]
    at = lines.index('turn = "end"')
    assert lines[at - 1] == '# "answer" or "end" or "continue"; default "end"'


def test_command_prints_it(command: Command) -> None:
    assert command("config", "optim").out == explained("optim")
    with pytest.raises(UnknownNameError, match="choose one of algo, engine, env, eval"):
        explained("zzz")


def test_names_of_algorithms_are_those_of_the_table() -> None:
    for key, table in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        assert get_args(get_args(AlgoSettings.model_fields[key].annotation)[0]) == tuple(table)


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ({"model": {"lora": True}}, "'model.lora'; set lora.rank"),
        ({"model": {"load_in_4bit": True}}, "'model.load_in_4bit'; there is no quantization"),
        ({"engine": {"kind": "vllm"}}, "choose one of name, options"),
        ({"rollout": {"use_vllm": True}}, "set engine.name to 'transformers' or 'vllm'"),
        ({"run": {"gpus": 8}}, "set run.ranks, the processes, each with a device"),
        ({"log": {"wandb": True}}, "set log.to, for example log.to=['tensorboard']"),
        ({"algo": {"kl_loss_coef": 0.1}}, "weighs algo.kl_coef"),
        ({"algo": {"entropy_bonus": 0.1}}, "weighs algo.entropy_coef"),
        ({"rollout": {"dynamic_sampling": True}}, "set rollout.plan.refills"),
        ({"optim": {"batch_size": 4}}, "set rollout.tasks and group_size, optim.minibatches"),
        ({"optim": {"learning_rate": 4}}, "set optim.lr"),
        ({"rollout": {"num_generations": 4}}, "set rollout.group_size"),
        ({"rollout": {"top_p": 0.9}}, "sampled from the policy's whole distribution"),
        ({"optim": {"stepz": 4}}, "did you mean 'optim.steps'?"),
    ],
)
def test_settings_of_other_trainers_get_an_answer(setting: dict[str, object], wanted: str) -> None:
    with pytest.raises(ConfigError, match="unknown setting ") as caught:
        parse_config(setting)
    assert wanted in str(caught.value) and "\n" not in str(caught.value)
