"""Installed distributions that offer environments: Gymnasium knows them, and none is loaded before it is asked for."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.cli.scaffold import create

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages: what ``agentrl new`` writes, as pip installs it."""
    folder = tmp_path_factory.mktemp("installed")
    made = create("my_env", folder=folder / "source")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(made.folder)], check=True)
    return folder / "site"


@pytest.fixture
def offer(tmp_path: Path) -> Callable[[str, str], Path]:
    """Installs one more distribution: a module, and an entry point that names it."""

    def install(name: str, code: str) -> Path:
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[agentrl.envs]\n{name} = {name}\n")
        return tmp_path

    return install


def run(code: str, *folders: Path, cwd: Path, options: tuple[str, ...] = ("-W", "error")) -> str:
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


NEWCOMER = "import agentrl, gymnasium; env = gymnasium.make('me/MyEnv-v0'); env.reset(seed=0); env.close()"


@pytest.mark.parametrize(
    "code",
    [
        NEWCOMER,
        "from gymnasium import make; import agentrl; make('me/MyEnv-v0')",
        "import gymnasium; gymnasium.make('agentrl:me/MyEnv-v0')",
        "import agentrl, gymnasium; gymnasium.make_vec('me/MyEnv-v0', num_envs=2, vectorization_mode='sync')",
        "import agentrl, gymnasium; gymnasium.spec('me/MyEnv-v0'); gymnasium.registry['me/MyEnv-v0']",
        "import agentrl; agentrl.make('me/MyEnv-v0')",
        "import my_env, agentrl; assert 'me/MyEnv-v0' in agentrl.list_envs()",
    ],
)
def test_gymnasium_knows_what_is_installed(site: Path, tmp_path: Path, code: str) -> None:
    run(code, site, cwd=tmp_path)


def test_no_plugin_is_loaded_before_it_is_asked_for(site: Path, offer: Callable[..., Path], tmp_path: Path) -> None:
    heavy = offer("heavy", "raise SystemExit('loaded')")
    code = """
import sys, agentrl, gymnasium
gymnasium.make('CartPole-v1'), gymnasium.make('agentrl/Arithmetic-v0')
gymnasium.register('mine/Own-v0', 'mine:Own')
assert not {'my_env', 'heavy', 'torch'} & set(sys.modules)
assert 'agentrl/Arithmetic-v0' in gymnasium.pprint_registry(disable_print=True)
gymnasium.pprint_registry(gymnasium.registry, disable_print=True)
"""
    run(code, site, heavy, cwd=tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        *("raise ValueError('bug')", "import sys; sys.exit(3)", "import gymnasium; gymnasium.make('me/No-v0')"),
        *("import agentrl; agentrl.make('me/MyEnv-v0')", ""),
    ],
)
def test_a_broken_plugin_breaks_nobody(site: Path, offer: Callable[..., Path], tmp_path: Path, code: str) -> None:
    broken = offer("broken", code)
    told = run(NEWCOMER, site, broken, cwd=tmp_path, options=())
    assert told.count("plugin 'broken'") == 1
    run(f"import threading\nfor _ in range(4): threading.Thread(target=lambda: exec({NEWCOMER!r})).start()",
        site, broken, cwd=tmp_path, options=())  # fmt: skip


def test_a_plugin_that_registers_nothing_is_named(offer: Callable[..., Path], tmp_path: Path) -> None:
    folder = offer("hollow", "")
    namespace = offer("folder", "")
    (namespace / "folder.py").unlink()
    (namespace / "folder").mkdir()
    listed = run("from agentrl.cli import main; main(['list'])", folder, cwd=tmp_path)
    assert (
        f"'hollow' of hollow 1.0: 'hollow' registers no environment, as it was loaded from '{folder}/hollow.py'"
        in listed
    )
    assert f"'folder' registers no environment, as it was loaded from '{folder}/folder'" in listed
    code = "from agentrl.cli import doctor; print(doctor.offers())"
    assert "'hollow of hollow 1.0': \"registers no environment" in run(code, folder, cwd=tmp_path)


def test_who_imported_it_before_makes_no_difference(site: Path, tmp_path: Path) -> None:
    code = "import my_env; from agentrl.cli import main; main(['list', 'me/MyEnv-v0']); main(['list'])"
    listed = run(code, site, cwd=tmp_path)
    assert "distribution  my-env 0.1.0" in listed and "broken plugins" not in listed
