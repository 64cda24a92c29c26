"""Installed distributions that offer environments: Gymnasium knows them, and none is loaded before it is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.scaffold import create

from ..conftest import ROOT, python
from .offers import offer


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages: what ``agentrl new`` writes, as pip installs it."""
    folder = tmp_path_factory.mktemp("installed")
    create("my_env", source := folder / "source")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return folder / "site"


def run(
    code: str, *folders: Path, cwd: Path, options: tuple[str, ...] = ("-W", "error")
) -> subprocess.CompletedProcess[str]:
    return python(*options, "-c", code, folder=cwd, PYTHONPATH=os.pathsep.join(map(str, (*folders, ROOT))))


NEWCOMER = "import agentrl, gymnasium; env = gymnasium.make('me/MyEnv-v0'); env.reset(seed=0); env.close()"
NEWCOMERS = f"""
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(3) as pool:
    others = [pool.submit(exec, {NEWCOMER!r}) for _ in range(3)]
    {NEWCOMER}
for other in others:
    other.result()
"""
"""Four of them at once, one in the main thread."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        NEWCOMER,
        "from gymnasium import make; import agentrl; make('me/MyEnv-v0')",
        "import gymnasium; gymnasium.make('agentrl:me/MyEnv-v0')",
        "import agentrl, gymnasium; gymnasium.make_vec('me/MyEnv-v0', num_envs=2, vectorization_mode='sync')",
        "import agentrl, gymnasium; gymnasium.spec('me/MyEnv-v0'); gymnasium.registry['me/MyEnv-v0']",
        "import agentrl; agentrl.make('me/MyEnv-v0')",
        "import my_env, agentrl, sys; assert 'my_env.env' not in sys.modules and 'me/MyEnv-v0' in agentrl.list_envs()",
    ],
)
def test_gymnasium_knows_what_is_installed(site: Path, tmp_path: Path, code: str) -> None:
    run(code, site, cwd=tmp_path)


def test_no_plugin_is_loaded_before_it_is_asked_for(site: Path, tmp_path: Path) -> None:
    offer(tmp_path, "heavy", "heavy", code="raise SystemExit('loaded')")
    code = """
import sys, agentrl, gymnasium
gymnasium.make('CartPole-v1'), gymnasium.make('agentrl/Arithmetic-v0')
gymnasium.register('mine/Own-v0', 'mine:Own')
assert not {'my_env', 'heavy', 'torch'} & set(sys.modules)
assert 'agentrl/Arithmetic-v0' in gymnasium.pprint_registry(disable_print=True)
gymnasium.pprint_registry(gymnasium.registry, disable_print=True)
"""
    run(code, site, tmp_path, cwd=tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        *("raise ValueError('bug')", "import sys; sys.exit(3)", "import gymnasium; gymnasium.make('me/No-v0')"),
        *("import agentrl; agentrl.make('me/MyEnv-v0')", "", "def broken(:", "import no_such_library"),
    ],
)
def test_a_broken_plugin_breaks_nobody(site: Path, tmp_path: Path, code: str) -> None:
    offer(tmp_path, "broken", "broken", code=code)
    assert run(NEWCOMERS, site, tmp_path, cwd=tmp_path, options=()).stderr.count("plugin 'broken'") == 1


@pytest.mark.slow
def test_plugins_are_listed_with_their_faults(tmp_path: Path) -> None:
    offer(tmp_path, "hollow", "hollow", code="")
    offer(tmp_path, "folder", "folder")
    (tmp_path / "folder").mkdir()
    offer(tmp_path, "raises", "raises", code="print('loud')\nraise RuntimeError('\\x1b[2Jno')")
    done = run("from agentrl.cli import main; main(['list'])", tmp_path, cwd=tmp_path)
    listed = done.stdout
    assert done.stderr == "loud\n" and r"'raises' can't be loaded: RuntimeError('\x1b[2Jno')" in listed
    problem = "registers no environment, as it was loaded from"
    assert f"'hollow' of hollow 1.0: 'hollow' {problem} '{tmp_path}/hollow.py'" in listed
    assert f"'folder' {problem} '{tmp_path}/folder'" in listed
    done = run("from agentrl.cli import main; main(['list', '--json'])", tmp_path, cwd=tmp_path)
    assert {plugin["name"] for plugin in json.loads(done.stdout)["broken_plugins"]} == {"hollow", "folder", "raises"}


@pytest.mark.slow
def test_who_imported_it_before_makes_no_difference(site: Path, tmp_path: Path) -> None:
    code = "import my_env; from agentrl.cli import main; main(['list', 'me/MyEnv-v0']); main(['list'])"
    listed = run(code, site, cwd=tmp_path).stdout
    assert "distribution  my-env 0.1.0" in listed and "broken plugins" not in listed
