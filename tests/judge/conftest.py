"""A server that follows a script, and judges that ask it."""

from collections.abc import Callable
from typing import Any

import pytest

from agentrl.judge import Judge

from ..engines.conftest import fake
from ..engines.servers import Fake

__all__ = ["fake"]
Make = Callable[..., Judge]


@pytest.fixture
def judge(fake: Fake) -> Make:
    """Makes judges; each server has another port, so no test shares limits with another one."""

    def make(rubric: str = "Is it polite?", scale: tuple[int, int] = (1, 5), **options: Any) -> Judge:
        options = {"base_url": fake.url, **options}
        return Judge("m", rubric, scale, **options)

    return make
