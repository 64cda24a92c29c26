"""What may be asked of an engine."""

import math
import sys
from typing import Any

import pytest

from agentrl.engines import make_engine
from agentrl.engines.base import Sampling
from agentrl.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", -math.inf), ("temperature", math.nan), ("max_tokens", 0)],
)
def test_a_temperature_below_0_and_no_token_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is"):
        Sampling(**{name: value})


def test_an_engine_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "agentrl.engines.vllm", raising=False)
    with pytest.raises(ConfigError, match=r"engine 'vllm' needs vllm: pip install 'agentrl\[vllm\]'"):
        make_engine("vllm", model, {})
