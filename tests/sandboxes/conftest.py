"""Sandboxes that the tests of this folder share: starting one costs half a second."""

from collections.abc import Iterator

import pytest

from agentrl.sandboxes import Sandbox, SandboxUnavailable, Session, open_sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    try:
        opened = open_sandbox("local")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with opened:
        yield opened


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    with sandbox.session() as opened:
        yield opened
