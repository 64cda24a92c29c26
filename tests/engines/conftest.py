import threading
from collections.abc import Callable, Generator
from importlib.util import find_spec

import pytest

from .servers import KEY, Fake


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, require: Callable[[bool, str], None]) -> Generator[Fake]:
    require(find_spec("openai") is not None, "needs openai: pip install 'agentrl[openai]'")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with Fake() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
