"""What every test can rely on: no network for models, few hypothesis examples, and no silent skips where CI runs.

A tiny model and its tokenizer are shared; what needs torch is imported only when a test asks for them.
"""

import asyncio
import copy
import importlib
import inspect
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from .deadlines import (  # noqa: F401
    pytest_configure,
    pytest_enter_pdb,
    pytest_timeout_cancel_timer,
    pytest_timeout_set_timer,
)

# Set before any test imports transformers: both are read when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Processes that test side by side share the cores; PyTorch would take all of them for each.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts these tests in the background has SIGINT ignored, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

CI = os.environ.get("AGENTRL_CI") == "1"
ROOT = Path(__file__).resolve().parents[1]
SECONDS = Path(__file__).with_name("seconds.toml")
TAKEN = defaultdict[str, float](float)

# The examples of a property test are the same in every run, but in CI's second pass, which looks for new ones.
settings.register_profile(
    "same", max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "new", settings.get_profile("same"), max_examples=100, derandomize=False, database=None, print_blob=True
)
settings.load_profile(os.environ.get("AGENTRL_EXAMPLES", "same"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is for CI, and begin with the files that take longest.

    With ``AGENTRL_FEW=2`` each test runs with its first two sets of parameters.
    """
    if few := int(os.environ.get("AGENTRL_FEW", "0")):
        sets = defaultdict[str, list[pytest.Item]](list)
        for item in items:
            sets[item.nodeid.partition("[")[0]].append(item)
        items[:] = [item for of_one in sets.values() for item in of_one[:few]]
    if not CI and os.environ.get("AGENTRL_EVERYTHING") != "1":
        skip = pytest.mark.skip(reason="says nothing new about this machine: AGENTRL_EVERYTHING=1 runs it")
        for item in items:
            if item.get_closest_marker("ci"):
                item.add_marker(skip)
    order = {path: index for index, path in enumerate(dealt({item.path for item in items}))}
    items.sort(key=lambda item: order[item.path])


def dealt(files: Iterable[Path]) -> list[Path]:
    """Files in the order in which no worker waits for another at the end.

    pytest-xdist cuts the tests into a piece for each worker, and who has finished takes over from the end of another's.
    So each piece has equally much to do, and begins with the file that takes longest.
    """
    seconds = tomllib.loads(SECONDS.read_text(encoding="utf-8"))
    hands: list[list[Path]] = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]
    sums = [0.0] * len(hands)
    keys = {path: path.relative_to(ROOT).as_posix() for path in files}
    for path in sorted(files, key=lambda path: (-seconds.get(keys[path], 0.0), keys[path])):
        least = sums.index(min(sums))
        hands[least].append(path)
        sums[least] += seconds.get(keys[path], 0.0)
    return [path for hand in hands for path in hand]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the seconds of each file."""
    TAKEN[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish() -> None:
    """Keep the seconds of each file for the next runs' order, with ``AGENTRL_WRITE=1``."""
    if os.environ.get("AGENTRL_WRITE") == "1" and "PYTEST_XDIST_WORKER" not in os.environ and len(TAKEN) > 100:
        lines = (f'"{name}" = {seconds:.1f}\n' for name, seconds in sorted(TAKEN.items()) if seconds >= 0.5)
        SECONDS.write_text("# Seconds that each test file took: AGENTRL_WRITE=1 scripts/test.sh\n" + "".join(lines))


@pytest.fixture(scope="session")
def require() -> Callable[[bool, str], None]:
    """Skip a test when a piece of the machine is missing: ``require(which("chromium") is not None, "needs chromium")``.

    Where ``AGENTRL_CI=1`` is set the test fails instead.
    """

    def check(present: bool, reason: str) -> None:
        if not present:
            pytest.skip(reason)

    return check


@pytest.fixture(scope="session")
def needs_sandbox(require: Callable[[bool, str], None]) -> None:
    """Skip where no sandbox can be opened, and what says so is not seen: :func:`skip_without_sandbox` does the rest."""
    require(not missing_sandbox(), missing_sandbox())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def clean_registry() -> Iterator[None]:
    """Gymnasium's registry, which is as it was when the test ends."""
    import gymnasium

    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def fail_in_ci(report: Any) -> Any:
    """Turn a skip into a failure, so that CI can't pass by missing a piece."""
    # An expected failure is reported as skipped too; it ran, so it may stay.
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"AGENTRL_CI=1 allows no skips: {reason}. Install what is missing, or deselect by marker."
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(test := pyfuncitem.obj):
        return None
    options = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(test(**options))
    return True


NO_SANDBOX = ("SandboxUnavailable", "no sandbox can be opened here", "forbids namespaces by seccomp")
"""What the error, or the output, of a test says that needed a sandbox where there is none."""


@cache
def missing_sandbox() -> str:
    """Why this machine can't isolate programs; empty where it can."""
    from agentrl.sandboxes import SandboxUnavailable, open_sandbox

    try:
        open_sandbox("local", ready=1).close()
    except SandboxUnavailable as error:
        return str(error)
    return ""


def skip_without_sandbox(report: Any, item: pytest.Item) -> Any:
    """Turn a failure for want of a sandbox into a skip, so that no test must know which tools run programs."""
    if not report.failed:
        return report
    text = "\n".join([str(report.longrepr), *(content for _, content in report.sections)])
    if any(words in text for words in NO_SANDBOX) and (why := missing_sandbox()):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.reportinfo()[1], f"Skipped: {why}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Look at the outcome of every test."""
    return fail_in_ci(skip_without_sandbox((yield), item))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Look at the outcome of importing every test file."""
    return fail_in_ci((yield))


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """Forks processes of this Python that begin quickly: see ``forked.py``."""
    from .forked import Server

    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Any]:
    """The local sandbox, shared: starting one costs half a second. It is at rest, with all its ready sessions made."""
    from agentrl.sandboxes import SandboxUnavailable, open_sandbox

    try:
        opened = open_sandbox("local")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with opened:
        before: list[Any] = []
        while len(before) < opened.health().ready or before != psutil.Process().children(recursive=True):
            before = psutil.Process().children(recursive=True)
            time.sleep(0.2)
        yield opened


def python(*argv: str, folder: Path | None = None, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """What Python says where nobody installed this checkout, nothing is typed, and these variables are set."""
    paths = {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env=os.environ | paths,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def load_script(name: str, folder: str = "scripts") -> Any:
    """Import a module of a folder of scripts, which is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / folder)
        return importlib.import_module(name)


@cache
def tiny_tokenizer() -> Any:
    """The tiny tokenizer, trained on next to nothing: nearly every byte is a token."""
    from agentrl.models.tiny import make_tokenizer

    opening = "system\nuser\nassistant\ntool\nTo use python, write\n```python\ncode\n```"
    return make_tokenizer([opening, "What is 12 + 30?", "```python\nprint(12 + 30)\n```"] * 4, vocab_size=300)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tiny tokenizer."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def renderer(tokenizer: Any) -> Any:
    """What writes messages as tokens of it."""
    from agentrl.render.renderer import Renderer

    return Renderer(tokenizer)


@pytest.fixture(scope="module")
def graders(require: Callable[[bool, str], None]) -> Iterator[None]:
    """The processes that grade with math-verify, ended when the file's tests have run."""
    require(find_spec("math_verify") is not None, "needs math-verify")
    from agentrl.grading.latex import close_graders

    yield
    close_graders()


@pytest.fixture
def compiler(require: Callable[[bool, str], None]) -> None:
    """Skip where there is no C compiler: PyTorch computes there."""
    from agentrl.native import Unavailable, build

    try:
        build.find_compiler()
    except Unavailable as missing:
        require(False, str(missing))


@pytest.fixture(scope="module")
def one_thread() -> Generator[None]:
    """PyTorch on one thread: for a tiny model more of them cost more than they do."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model(tokenizer: Any) -> Any:
    """A tiny model whose next token depends on all that came before; tests that change it take a copy."""
    import torch

    from agentrl.models.tiny import make_model

    made = make_model(tokenizer, hidden=32, layers=2, heads=4, seed=0)
    with torch.no_grad():
        for name, weights in made.named_parameters():
            # As it is initialised every distribution is nearly uniform, and few bugs would show.
            if weights.ndim == 2:
                weights.mul_(16.0 if "embed" in name else 6.0)
    return made.eval()


@pytest.fixture(scope="session")
def reference(model: Any) -> Any:
    """The same model with the attention that transformers brings along, to compare with."""
    made = copy.deepcopy(model)
    made.set_attn_implementation("eager")
    return made


@pytest.fixture
def make_engine(model: Any) -> Callable[..., Any]:
    """Makes an engine that samples from a copy of the model."""
    from agentrl.engines.transformers import TransformersEngine

    return lambda **options: TransformersEngine(copy.deepcopy(model), **options)
