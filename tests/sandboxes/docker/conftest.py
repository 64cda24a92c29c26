"""A sandbox for each container runtime that the engine has, shared by the tests of this folder."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.sandboxes import Sandbox, SandboxUnavailable, open_sandbox
from agentrl.sandboxes.docker.engine import DockerEngine, connect
from agentrl.sandboxes.docker.image import IMAGE, build_image

RUNTIMES = ("runc", "runsc")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ask for an engine."""
    for item in items:
        ours = isinstance(item, pytest.Function) and Path(__file__).parent in item.path.parents
        if ours and "engine" in item.fixturenames:
            item.add_marker("docker")


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerEngine]:
    """The engine of this machine, with our image."""
    try:
        opened = connect()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with opened:
        try:
            opened.image(IMAGE)
        except SandboxUnavailable:
            build_image()
        yield opened


@pytest.fixture(scope="session", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest, engine: DockerEngine) -> str:
    """A runtime of the engine."""
    if request.param not in engine.info().runtimes:
        if shutil.which("runsc") is None:
            pytest.skip("runsc is not installed: apt-get install runsc")
        pytest.skip("the engine does not know runsc: start it with scripts/engine.sh")
    return request.param


@pytest.fixture(scope="session")
def sandbox(runtime: str) -> Iterator[Sandbox]:
    with open_sandbox("docker", runtime=runtime, ready=3) as opened:
        yield opened


@pytest.fixture
def own(engine: DockerEngine) -> Iterator[Callable[..., Sandbox]]:
    """Opens sandboxes that a test may break, of the engine's own runtime."""
    opened: list[Sandbox] = []

    def make(**options: int) -> Sandbox:
        opened.append(open_sandbox("docker", **{"ready": 1, **options}))  # pyright: ignore[reportArgumentType]
        return opened[-1]

    yield make
    for sandbox in opened:
        sandbox.close()
