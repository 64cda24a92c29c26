"""What verifiers want to download, as a folder that is mounted read-only: pytest, and stand-ins that fetch nothing.

Many published ``test.sh`` install ``uv`` by ``curl`` and run ``uvx … pytest … --ctrf FILE`` at grading time. A verdict
that depends on three servers is a source of false zeros, and most machines that train have no such network.
"""

import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError

MOUNT: Final = "/opt/agentrl-verifier"
"""Where the folder is mounted."""
DISTRIBUTIONS: Final = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
# What the container serves itself is asked by the image's own curl.
_CURL: Final = """#!/bin/sh
case "$*" in *localhost*|*127.0.0.1*|*0.0.0.0*|*'[::1]'*) PATH=${PATH#*:}; exec curl "$@" ;; esac
exit 0
"""
_APT: Final = """#!/bin/sh
exit 0
"""
# The options before the tool's name install packages; only those of pytest are here.
_UVX: Final = f"""#!/bin/sh
while [ $# -gt 0 ] && [ "$1" != pytest ]; do shift; done
[ $# -gt 0 ] || {{ echo "only pytest is here" >&2; exit 1; }}
shift
PYTHONPATH={MOUNT}/lib exec python3 -P -B -m pytest -p agentrl_ctrf -p no:cacheprovider "$@"
"""
_CTRF: Final = '''"""The option --ctrf FILE: a summary of the tests in the Common Test Report Format."""

import json

results = []


def pytest_addoption(parser):
    parser.addoption("--ctrf", default=None)


def pytest_runtest_logreport(report):
    if report.when == "call" or (report.when == "setup" and not report.passed):
        duration = round(report.duration * 1000)
        results.append({"name": report.nodeid, "status": report.outcome, "duration": duration})


def pytest_sessionfinish(session):
    path = session.config.getoption("--ctrf")
    if path:
        counts = {name: sum(r["status"] == name for r in results) for name in ("passed", "failed", "skipped")}
        summary = {"tests": len(results), "pending": 0, "other": 0, "start": 0, "stop": 0, **counts}
        report = {"results": {"tool": {"name": "pytest"}, "summary": summary, "tests": results}}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file)
'''
PROGRAMS: Final = {"curl": _CURL, "apt-get": _APT, "uvx": _UVX}
"""The stand-ins by name."""


def build_layer() -> Path:
    """Build the folder from the pytest that is installed here, and return it; its owner removes it.

    Raises:
        ConfigError: pytest is not installed.
    """
    folder = Path(tempfile.mkdtemp(prefix="agentrl-verifier-"))
    try:
        (folder / "bin").mkdir()
        (folder / "lib").mkdir()
        for name, text in PROGRAMS.items():
            (folder / "bin" / name).write_text(text, encoding="utf-8")
            (folder / "bin" / name).chmod(0o755)
        (folder / "lib" / "agentrl_ctrf.py").write_text(_CTRF, encoding="utf-8")
        for name in DISTRIBUTIONS:
            _copy(metadata.distribution(name), folder / "lib")
    except metadata.PackageNotFoundError as error:
        shutil.rmtree(folder)
        raise ConfigError(f"offline_verifier needs pytest on this machine: pip install pytest ({error})") from error
    folder.chmod(0o755)
    return folder


def _copy(distribution: metadata.Distribution, target: Path) -> None:
    for file in distribution.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target / file)
