"""The command line: help with examples, and one sentence with exit code 2 for whatever is not there."""

import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.config import load_config
from agentrl.runs.folder import RunFolder

from ..conftest import python
from .conftest import LOADING, refused

pytestmark = pytest.mark.usefixtures("here")


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is said in place of what a command does."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


COMMANDS = (
    *("new", "list", "play", "check-env", "train", "eval", "config", "view", "sweep", "plan"),
    *("doctor", "sandbox", "compare", "replay", "probe"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_of_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, command, "--help")
    assert f"examples:\n  agentrl {command}" in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"agentrl {importlib.metadata.version('agentrl')}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "--help")
    assert all(f"\n    {command}" in shown for command in COMMANDS)
    assert "examples:\n  agentrl train --preset quickstart" in shown


QUICK = ("--preset", "quickstart")


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ((), "the following arguments are required: command: agentrl --help lists what there is"),
        (("trian",), "invalid choice: 'trian' (choose from"),
        (("train", "--prset", "x"), "agentrl train has no option '--prset'; did you mean '--preset'?"),
        (("eval", "x", "y"), "agentrl eval takes no 'y': agentrl eval --help lists what it takes"),
        (("eval", "x", "--tasks", "no"), "argument --tasks: invalid int value: 'no'"),
        (("train",), "give a TOML file, or --preset quickstart"),
        (("train", "--preset", "quikstart"), "no preset is called 'quikstart'; did you mean 'quickstart'?"),
        (("train", "quickstart"), "there is no file 'quickstart'; did you mean --preset quickstart?"),
        (("plan", *QUICK, "optim.lr=1"), "there is no file 'optim.lr=1'; did you mean --set optim.lr=1?"),
        (("train", "none.toml"), "the config 'none.toml' can't be read: No such file"),
        (("train", *QUICK, "--set", "env.args.level=9"), "level is 9: choose from 1 to 5"),
        (("train", *QUICK, "--set", "env.args.split=tset"), "'env.args.split' has no effect: training plays"),
        (("config", "quikstart"), "no section or preset is called 'quikstart'; did you mean 'quickstart'?"),
        (("train", *QUICK, "--set", "overlap=1"), "write section.key=value, did you mean rollout.overlap=1?"),
        (("train", *QUICK, "--set", "model.path=nobody/nothing"), "there is no folder 'nobody/nothing' here"),
        (("train", *QUICK, "--name", 'a"\n'), "setting 'run.name' is"),
        (("train", *QUICK, "--seed", "-1"), "setting 'run.seed' is -1"),
        (("train", "--resume", "runs/none"), "there is no run in 'runs/none'; there are none yet"),
        (("train", "--resume", "runs/none", "--seed", "3"), "leave all options out but --set"),
        (("sandbox",), "the following arguments are required: action: agentrl sandbox --help lists"),
        (("sandbox", "serve", "--limits", "cpu_s=x"), "--limits takes NAME=VALUE with the names cpu_s, wall_factor"),
        (("sandbox", "serve", "--limit", "0"), "--limit and --silence must be positive"),
        (("doctor", "--sandbox", "remote:nowhere"), "write remote:http://HOST:PORT,http://HOST:PORT"),
        (("plan", *QUICK, "--memory", "0"), "--memory is 0: give the GiB"),
        (("eval", "none"), "there is no run in 'none'"),
        (("eval", "nobody/nothing"), "say with --config or --preset how to evaluate it"),
        (("eval", "nobody/nothing", *QUICK, "--out", "x.jsonl"), "names a file: name a folder"),
        (("eval", "nobody/nothing", *QUICK, "--out", "/proc/x"), "can't be written"),
        (("eval", "a/b", *QUICK, "--env", "x="), "names no set"),
        (("eval", *QUICK), "say what to evaluate: either a run"),
        (("eval", "a/b", *QUICK, "--engine", "openai", "--model", "m"), "say what to evaluate: either a run"),
        (("view", "runs/none"), "there is no run in 'runs/none'"),
        (("list", "agentrl/Arithmetic-v0?levl=3"), "it has no argument 'levl'; did you mean 'level'?"),
        (("check-env", "agentrl/Arithmetic-v0?level"), "'level' in 'agentrl/Arithmetic-v0?level' sets nothing: write"),
        (("check-env", "agentrl/Arithmetic-v0?level=[9]"), "level is [9]: choose from 1 to 5"),
        (("play", "agentrl/Arithmetic-v0", "--task", "train-99"), "no task is called 'train-99'"),
        (("play", "agentrl/Arithmetic-v0", "--seed", "-1"), "seed is -1"),
        (("play", "os:system"), "'os', before the colon of the id 'os:system', is Python's own"),
        (("new", "My-Env"), "'My-Env' can't be a package's name"),
    ],
)
def test_what_is_not_there(argv: tuple[str, ...], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert wanted in refused(capsys, *argv)


@pytest.fixture
def run(here: Path) -> Path:
    """A run that has ended before its first checkpoint."""
    RunFolder.create(load_config(preset="quickstart", overrides=["run.name=mine"]), numbered=False).close()
    return Path("runs/mine")


def checkpoint(run: Path) -> None:
    """One without a model."""
    path, state = run / "checkpoints" / "step-000020", '{"step": 20, "updates": 0}'
    path.mkdir(parents=True)
    (path / "trainer.json").write_text(state)
    (path / "SHA256SUMS").write_text(f"{hashlib.sha256(state.encode()).hexdigest()}  trainer.json\n")


def test_run_that_is_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the run 'runs/mine' has no checkpoint yet" in refused(capsys, "eval", "runs/mine")
    for command in (("eval",), ("train", "--resume"), ("view",)):
        assert "did you mean 'runs/mine'?" in refused(capsys, *command, "runs/mime")
    assert "use --set instead" in refused(capsys, "eval", "runs/mine", "--preset", "quickstart")
    checkpoint(run)
    wrong = "runs/mine/checkpoints/step-000200"
    assert f"there is no checkpoint '{wrong}'; did you mean 'step-000020'?" in refused(capsys, "eval", wrong)
    assert "no tokenizer can be loaded" in refused(capsys, "eval", "runs/mine")
    folder, _ = RunFolder.resume(run)
    with folder:
        assert "is in use by process" in refused(capsys, "train", "--resume", "runs/mine")


def test_evaluation_in_another_dialect_is_refused_unless_forced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agentrl.runs.assemble import task_source

    config = load_config(preset="quickstart", overrides=["run.name=mine"])
    label = task_source(config, "train").dialect.label
    RunFolder.create(config, numbered=False, made_by={"dialect": label}).close()
    checkpoint(here / "runs" / "mine")
    for path in ("runs/mine", "runs/mine/checkpoints/step-000020"):
        words = refused(capsys, "eval", path, "--set", "env.args.dialect=hermes")
        assert f"was trained in dialect '{label}' and would be evaluated in 'hermes " in words and "--force" in words
        other = ("--set", "env.args.dialect=hermes", "--force")
        assert "no tokenizer can be loaded" in refused(capsys, "eval", path, *other), "it goes on to the model"
        assert "no tokenizer can be loaded" in refused(capsys, "eval", path)
    config = load_config(preset="quickstart", overrides=["run.name=other"])
    RunFolder.create(config, numbered=False, made_by={"dialect": "fence 0"}).close()
    checkpoint(here / "runs" / "other")
    assert f"in dialect 'fence 0' and would be evaluated in '{label}'" in refused(capsys, "eval", "runs/other")


def test_what_needs_no_model_is_said_before_pytorch_is_loaded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.cli.runs.loading_torch", lambda _: pytest.fail("too late"))
    monkeypatch.setattr("agentrl.cli.evaluation.loading_torch", lambda _: pytest.fail("too late"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["export", "runs/mine", "model"]) == 2
    checkpoint(run)
    settings = ["algo.loss=ppo", "algo.advantage=grpo2", "engine.name=vlm", "engine.name=vllm", "fleet.name=ray"]
    settings += ["env.id=agentrl/Arithmetik-v0", "env.args.levle=3", "env.args.dialect=hermse"]
    for setting in (*settings, 'log.to=["nowhere:write"]'):
        assert main(["train", *QUICK, "--set", setting]) == 2
    assert main(["train", *QUICK, "--name", "mine"]) == 2
    for setting in ("optim.steps=5", "algo.loss=cppo"):
        assert main(["train", "--resume", "runs/mine", "--set", setting]) == 2
    wrong = ("a/b", *QUICK, "--env", "agentrl/Arithmetik-v0")
    for words in (("a/b", *QUICK, "--engine", "vllm"), ("runs/mime",), ("a/b", *QUICK, "--env", "x="), ("a/b",), wrong):
        assert main(["eval", *words]) == 2


def test_model_folder_needs_settings(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "plain").mkdir()
    (here / "plain" / "config.json").write_text("{}")
    (here / "config.toml").write_text("[run]\n")
    assert "say with --config or --preset" in refused(capsys, "eval", "plain")
    assert "no tokenizer can be loaded from 'plain'" in refused(capsys, "eval", "plain", *QUICK)


@pytest.mark.parametrize(
    ("extra", "argv"),
    [
        ("torch", ("train", *QUICK)),
        pytest.param("transformers", ("eval", "a/b", *QUICK), marks=pytest.mark.slow),
        pytest.param("torch", ("eval", "a/b", *QUICK), marks=pytest.mark.ci),
        pytest.param("transformers", ("train", *QUICK), marks=pytest.mark.ci),
        ("jinja2", ("view", ".")),
    ],
)
def test_missing_extra_is_named_with_its_remedy(here: Path, extra: str, argv: tuple[str, ...]) -> None:
    code = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.split(".")[0] == {extra!r} else self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
from agentrl.cli import main
assert main(["list"]) == 0
sys.exit(main({list(argv)!r}))
"""
    done = python("-c", code, status=2)
    words = LOADING if extra == "transformers" else ""
    assert done.stderr == f"{words}agentrl: {extra} is not installed: pip install 'agentrl[train]'\n"
    assert "agentrl/Arithmetic-v0" in done.stdout and not list(here.iterdir())


def test_module_runs_as_a_program_too() -> None:
    done = python("-m", "agentrl", "list", "quickstart", status=2)
    assert done.stdout == "" and done.stderr.startswith(
        "agentrl: 'quickstart' is a preset, no environment: agentrl config quickstart prints"
    )


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["list"], ["list", "--json"]])
def test_who_reads_along_may_stop(argv: list[str]) -> None:
    code = f"import sys; from agentrl.cli import main; sys.stdin.readline(); sys.exit(main({argv}))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert (process.wait(), process.stderr.read()) == (141, "")


def test_a_broken_pipe_elsewhere_is_no_reader_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        raise BrokenPipeError

    monkeypatch.setattr("agentrl.cli.listing.overview", breaks)
    with pytest.raises(BrokenPipeError):
        main(["list", "--json"])
