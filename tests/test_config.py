"""Settings: what is unknown or wrong is said in one sentence, and what is written can be read again."""

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentrl.config import Config, load_config, parse_config, presets, with_overrides
from agentrl.config.settings import in_full
from agentrl.errors import ConfigError, UsageError

MAX_SETTINGS = 70


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert text and "\n" not in text
    return text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[optimm]\nsteps = 3", "unknown setting 'optimm'; did you mean 'optim'?"),
        ("[optim]\nstep = 3", "unknown setting 'optim.step'; did you mean 'optim.steps'?"),
        ("[optim]\nzzz = 3", "unknown setting 'optim.zzz'; choose one of betas, "),
        ("optim = 3", "setting 'optim' is 3: "),
        ("[optim]\nsteps = '3'", "setting 'optim.steps' is '3': Input should be a valid integer"),
        ("[optim]\nsteps = -1", "greater than or equal to 0"),
        ("[optim]\nlr = inf", "is inf: Input should be a finite number; agentrl config optim says more"),
        ("[optim]\nbetas = [0.9, 1.0]", "setting 'optim.betas.1' is 1.0: Input should be less than 1"),
        ("[model]\ndtype = 'float16'", "no dtype is called 'float16'; did you mean 'bfloat16'?"),
        ("[run]\nname = '../elsewhere'", "setting 'run.name' is '../elsewhere'"),
        ("[env.args.level.a]\nb = 1", "setting 'env.args.level' is {'a': {'b': 1}}: Input should be text, a number"),
        ("[env.args]\ndata = {a = [[1]]}", "or a list of whole numbers or of texts, or a table of these"),
        ("[algo]\nloss_options = {power = {a = 1}}", "setting 'algo.loss_options.power' is {'a': 1}: Input should be"),
        ("[log]\nto = ['wandb', 3]", "setting 'log.to' is ['wandb', 3]: Input should be a valid dictionary"),
        ("[log.to.wandb]\nmode = {a = 1}", "setting 'log.to.wandb' is {'a': 1}: Input should be text, a number"),
        ("[env.args]\nsplit = 'a'", "setting 'env.args.split' has no effect"),
        ("[env.mix.a]\nid = 'b'\nargs = {split = 'c'}", "setting 'env.mix.a.args.split' has no effect"),
        ("[env.mix.a]\nid = 'b'\nwait = 0", "unknown setting 'env.mix.a.wait'; did you mean 'env.mix.a.weight'?"),
        ("[env.mix.a]\nid = 'b'\nargs = {l = {m = {n = 1}}}", "setting 'env.mix.a.args.l' is {'m': {'n': 1}}: Input"),
        ("[env.mix.'a/b']\nid = 'b'", "is 'a/b': String should match pattern"),
        ("[env]\nid = 'z'\n[env.mix.a]\nid = 'b'", "give each its id and args there, and no env.id or env.args"),
        ("[rollout]\noverlap = 'lagged'", "no overlap is called 'lagged'; did you mean 'lag'?"),
        ("[rollout.truncated]\ntern = 'end'", "unknown setting 'rollout.truncated.tern'; did you mean 'rollout.trunca"),
        ("[rollout.plan.options]\na = {b = 1}", "setting 'rollout.plan.options.a' is {'b': 1}: Input should be text"),
        ("[algo]\ncorrection = 'row'", "no correction is called 'row'; choose one of none, prefix, sequence, token"),
        ("[algo]\nrejection = {row = [0.5, 2]}", "Input should be 'token', 'sequence' or 'geometric'"),
        ("[algo.rejection]\ntoken = [0.5]", "setting 'algo.rejection.token.1' is [0.5]: Field required"),
        ("[optim", "is not TOML: "),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, wanted: str) -> None:
    path = tmp_path / "it.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(path=path)
    assert wanted in one_sentence(caught.value)


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    for path, wanted in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=wanted) as caught:
            load_config(path=path)
        assert str(path) in one_sentence(caught.value)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(path=tmp_path / "bytes.toml")


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("optim.steps", "write section.key=value"),
        ("steps=3", "write section.key=value"),
        ("optim.stepz=3", "did you mean 'optim.steps'?"),
        ("optim.steps=", "setting 'optim.steps' is ''"),
        ("optim.steps.more=1", "setting 'optim.steps' is {'more': 1}"),
        ("optim.=3", "unknown setting 'optim.'"),
        ("optim.steps=3\n[algo]", "holds a character that can't be printed"),
        ('env.args.data={"train": "a"}', 'is not TOML: write tables as {key = "value"}, text in quotes'),
        ("env.args.levels=[1", "is not TOML: "),
        ("model.path=\udcff", "holds a character that can't be printed"),
    ],
)
def test_bad_overrides(override: str, wanted: str) -> None:
    for attempt in (lambda: load_config(overrides=[override]), lambda: with_overrides(Config(), [override])):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert wanted in one_sentence(caught.value)


@pytest.mark.parametrize("name", presets())
def test_presets_parse_and_keep_their_values(name: str) -> None:
    config, settings = load_config(preset=name), in_full(tomllib.loads(presets()[name]))
    base = load_config(preset=settings.pop("base")) if "base" in settings else Config()
    wanted = base.model_dump(mode="json")
    for section, values in settings.items():
        for key, value in values.items():
            old = wanted[section][key]
            wanted[section][key] = {**old, **value} if isinstance(old, dict) else value
    assert config.model_dump(mode="json") == wanted
    assert config.run.name == name


def test_later_words_win(tmp_path: Path) -> None:
    path = tmp_path / "it.toml"
    path.write_text("[optim]\nsteps = 7\nlr = 1\n[env.args]\nlevel = 2\nturns = 3")
    words = ["optim.lr=2e-4", "env.args.level=[4, 5]", "env.args.word=plain text", "optim.betas=[0.5, 0]"]
    config = load_config(preset="quickstart", path=path, overrides=words)
    assert (config.optim.steps, config.optim.lr, config.optim.betas) == (7, 2e-4, (0.5, 0.0))
    logged = with_overrides(with_overrides(config, ["log.to=['tensorboard']"]), ["log.to.wandb.mode=offline"]).log.to
    assert logged == {"tensorboard": {}, "wandb": {"mode": "offline"}}
    args = load_config(preset="quickstart").env.args
    assert config.env.args == args | {"level": [4, 5], "turns": 3, "word": "plain text"}
    assert config.model.tiny == load_config(preset="quickstart").model.tiny
    run = config.run.model_copy(update={"name": "other"})
    assert with_overrides(config, ["run.name=other"]) == config.model_copy(update={"run": run})


@pytest.mark.parametrize(
    ("words", "overlap"),
    [
        (["rollout.overlap=lag"], ("lag", 3)),
        (["rollout.overlap.staleness=2"], ("inflight", 2)),
        (['rollout.overlap={mode="lag",staleness=2}'], ("lag", 2)),
        (["rollout.overlap=lag", "rollout.overlap.staleness=2"], ("lag", 2)),
        (["rollout.overlap.staleness=2", "rollout.overlap=lag"], ("lag", 2)),
    ],
)
def test_a_text_may_stand_for_a_table(tmp_path: Path, words: list[str], overlap: tuple[str, int]) -> None:
    path = tmp_path / "it.toml"
    path.write_text("rollout = {overlap = 'inflight', plan = 'other'}\nalgo = {correction = 'token'}")
    before = ["rollout.overlap.staleness=3"]
    config = load_config(path=path, overrides=before)
    assert (config.rollout.plan.name, config.algo.correction.kind, config.algo.correction.cap) == ("other", "token", 5)
    for changed in (with_overrides(config, words), load_config(path=path, overrides=[*before, *words])):
        assert (changed.rollout.overlap.mode, changed.rollout.overlap.staleness) == overlap
        assert written_and_read(changed) == changed


@pytest.mark.parametrize(
    ("words", "name", "options"),
    [
        (["engine.name=transformers"], "transformers", {}),
        (["engine.options.slots=4", "engine.name=transformers"], "transformers", {"slots": 4}),
        (["engine.name=vllm", "engine.options.eager=true"], "vllm", {"memory": 0.25, "eager": True}),
        (["engine.options.memory=0.5"], "vllm", {"memory": 0.5}),
    ],
)
def test_options_are_those_of_one_engine(tmp_path: Path, words: list[str], name: str, options: object) -> None:
    engine = load_config(preset="qwen3-4b-tir", overrides=words).engine
    assert (engine.name, engine.options) == (name, options)
    assert with_overrides(load_config(preset="qwen3-4b-tir"), words).engine == engine
    (tmp_path / "it.toml").write_text(f"[engine]\nname = '{name}'\n")
    of_file = load_config(preset="qwen3-4b-tir", path=tmp_path / "it.toml").engine
    assert of_file.options == ({"memory": 0.25} if name == "vllm" else {})


def written_and_read(config: Config) -> Config:
    return parse_config(tomllib.loads(tomli_w.dumps(config.model_dump(mode="json"))))


def test_a_mix_comes_in_the_order_of_names(tmp_path: Path) -> None:
    path = tmp_path / "it.toml"
    path.write_text("[env.mix.b]\nid = 'x'\n[env.mix.a]\nid = 'y'\nweight = 3\n[versions]\npython = '3.12'")
    config = load_config(path=path, overrides=["env.mix.b.args.level=2"])
    assert [(name, env.id, env.args, env.weight) for name, env in config.env.played.items()] == [
        ("a", "y", {}, 3.0),
        ("b", "x", {"level": 2}, 1.0),
    ]
    assert written_and_read(config) == config
    assert {*Config().env.played} == {""}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def test_tables_in_the_environments_arguments(tmp_path: Path) -> None:
    path = tmp_path / "it.toml"
    path.write_text('[env.args]\ndata = {train = "a.parquet", test = "b.jsonl"}\n[env.args.columns]\nprompt = "text"')
    config = load_config(path=path, overrides=["env.args.data.test=c.jsonl", "env.args.data_split={train = 'all'}"])
    args = {"data": {"train": "a.parquet", "test": "c.jsonl"}, "columns": {"prompt": "text"}}
    assert config.env.args == args | {"data_split": {"train": "all"}}


scalars = st.one_of(texts, st.booleans(), st.integers(-(2**63), 2**63 - 1))
plain = scalars | st.lists(st.integers(-9, 9)) | st.lists(texts)


names = texts.filter(lambda text: text != "split")


@given(st.dictionaries(names, plain | st.dictionaries(texts, plain, max_size=3), max_size=4), texts)
def test_config_round_trip(args: dict[str, Any], path: str) -> None:
    config = parse_config({"env": {"args": args}, "model": {"path": path}, "optim": {"lr": 3e-7}})
    again = written_and_read(config)
    assert again == config
    read, written = ({name: type(value) for name, value in table.items()} for table in (again.env.args, args))
    assert read == written


def test_an_option_of_an_advantage_may_be_without_end() -> None:
    config = load_config(overrides=["algo.advantage_options.pool=inf"])
    again = written_and_read(config)
    assert again == config and again.algo.advantage_options == {"pool": float("inf")}
    for value in ("nan", "-inf"):
        with pytest.raises(ConfigError, match=r"setting 'algo\.advantage_options\.pool' is "):
            load_config(overrides=[f"algo.advantage_options.pool={value}"])


def leaves(model: type[BaseModel]) -> list[str]:
    """Names of the settings in ``model``; a field that holds models counts by their fields."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if is_model(kind)]
        names += [f"{name}.{leaf}" for kind in inner for leaf in leaves(kind)] if inner else [name]
    return names


def is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def test_settings_stay_few() -> None:
    settings = leaves(Config)
    assert {"optim.lr", "env.mix.weight", "lora.rank"} <= {*settings}, "in tables of tables too"
    # What belongs together is a table in its section, and one setting.
    tables = {".".join(name.split(".")[:2]) for name in settings}
    assert len(tables) <= MAX_SETTINGS and len(settings) <= MAX_SETTINGS + 10, settings
