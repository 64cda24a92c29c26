"""``agentrl new``: a package that keeps its contract as it is, and not one file where a name won't do."""

import ast
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cli.scaffold import create
from agentrl.config import load_config
from agentrl.errors import UsageError

from ..conftest import python
from .conftest import Command

pytestmark = pytest.mark.usefixtures("here")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_is_written(here: Path, command: Command) -> None:
    lines = command("new", "my_env").out.splitlines()
    names = (".gitignore", "README.md", "my_env/__init__.py", "my_env/env.py", "pyproject.toml")
    assert files(here) == [f"my_env/{name}" for name in (*names, "tests/test_my_env.py", "train.toml")]
    assert lines[0] == "me/MyEnv-v0 is in my_env; continue with:"
    assert [line.split()[0] for line in lines[1:]] == ["cd", "pip", "agentrl", "agentrl", "agentrl"]
    project = tomllib.loads(Path("my_env/pyproject.toml").read_text())["project"]
    assert project["name"] == "my-env" and project["entry-points"] == {"agentrl.envs": {"my_env": "my_env"}}
    assert load_config(path="my_env/train.toml").env.id == "me/MyEnv-v0"
    assert len(Path("my_env/my_env/env.py").read_text().splitlines()) <= 40
    for name in files(here):
        assert "$" not in Path(name).read_text(), name
    os.umask(mask := os.umask(0))
    assert Path("my_env").stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.slow
def test_every_package_is_tidy_and_keeps_the_contract(here: Path) -> None:
    names = ("my_env", "a", "x1_2__y", "mapping", "task", "tool_env", "list_envs", "sequence")
    made = {f"{name}:{create(name, Path(name), 'Some-1')}": name for name in names}
    settings = ["--isolated", "--line-length", "120", "--quiet"]
    for command in (["check", *settings, "--select", "E,F,I,UP,B"], ["format", *settings, "--check"]):
        python("-W", "error", "-m", "ruff", *command, *names)
    code = f"""
import sys, agentrl
for env_id, folder in {made}.items():
    sys.path.insert(0, folder)
    report = agentrl.check_env(env_id)
    assert report.ok, (env_id, report)
"""
    python("-W", "error", "-c", code)


@pytest.mark.slow
def test_its_own_tests_pass(here: Path) -> None:
    create("my_env", here / "my_env")
    tests = ("-W", "error", "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider")
    assert "3 passed" in python(*tests, folder=here / "my_env").stdout


BAD = (
    *("", "My_Env", "1env", "_env", "my-env", "my env", "my.env", "über", "../env", "/etc", "a/b", "~", ".", ".."),
    *("-x", "env\n", "a\x00", "$name", "%s", "{0}", "x" * 51, "x" * 10**6, "class", "none", "true", "match", "import"),
    *("os", "json", "agentrl", "tests", "pytest", "gymnasium", "torch"),
)


NAMESPACES = ("", "a/b", "a:b", "../x", "agentrl", "a b", "x" * 51, "me\n", '"', "-x")
FOLDERS = ("file/in/it", "a\x1bb", "x" * 300, "null\x00")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"name": name}, "a package's name|choose another name") for name in BAD),
        *(({"namespace": namespace}, "the namespace") for namespace in NAMESPACES),
        *(({"folder": Path(folder)}, "can't be (written|printed)") for folder in FOLDERS),
    ],
)
def test_what_will_not_do(wrong: dict[str, Any], message: str, here: Path) -> None:
    (here / "file").write_text("")
    options: dict[str, Any] = {"name": "my_env", "folder": here / "new"}
    with pytest.raises(UsageError, match=message) as caught:
        create(**options | wrong)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400
    assert [path.name for path in here.iterdir()] == ["file"]


@given(st.text(max_size=12) | st.from_regex(r"[a-z_]{1,12}", fullmatch=True))
def test_any_name_is_written_or_refused(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("names")
    try:
        env_id = create(name, folder / "new")
    except UsageError:
        assert not list(folder.iterdir())
        return
    assert re.fullmatch(r"me/[A-Z][A-Za-z0-9]*-v0", env_id)
    for path in folder.rglob("*.py"):
        ast.parse(path.read_text())
    for path in folder.rglob("*.toml"):
        tomllib.loads(path.read_text())


def test_a_folder_that_is_there(here: Path) -> None:
    (here / "my_env").mkdir()
    create("my_env", Path("my_env"))  # an empty folder will do
    before = files(here)
    with pytest.raises(UsageError, match="'my_env' exists already and is no empty folder"):
        create("my_env", Path("my_env"))
    (here / "file").write_text("")
    (here / "link").symlink_to("nowhere")
    for taken in ("file", "link", "my_env/tests"):
        with pytest.raises(UsageError, match="exists already"):
            create("other", Path(taken))
    assert files(here) == sorted([*before, "file"]) and (here / "link").is_symlink()


def test_another_folder(here: Path, command: Command) -> None:
    printed = command("new", "my_env", "--dir", "some where/deep", "--namespace", "jo").out
    assert "jo/MyEnv-v0 is in 'some where/deep'" in printed and "cd 'some where/deep'" in printed
    assert (here / "some where" / "deep" / "my_env" / "env.py").is_file()
    assert not list(here.rglob("*.tmp"))


def test_disk_that_fills_up_leaves_nothing(here: Path) -> None:
    code = (
        "import resource, signal\nfrom pathlib import Path\nfrom agentrl.errors import UsageError\n"
        "from agentrl.cli.scaffold import create\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))\n"
        "try:\n    create('my_env', Path('my_env'))\nexcept UsageError as error:\n    print(error)\n"
    )
    done = python("-W", "error", "-B", "-c", code)
    assert done.stdout == "the folder 'my_env' can't be written: File too large\n", done.stderr
    assert not list(here.iterdir())
