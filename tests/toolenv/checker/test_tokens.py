"""Environment × tokenizer: what only tokens can show, each fault under its own code."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.errors import ConfigError, UsageError
from agentrl.render.loading import load_tokenizer
from agentrl.toolenv.checker import CODES, check_env
from agentrl.toolenv.dialects import DIALECTS

from ...render.conftest import Wrapped
from .conftest import Register
from .good import Good
from .test_fine import Answers, ManyTools, NoTools

pytestmark = pytest.mark.usefixtures("short_texts")


class Untemplated(Wrapped):
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        raise ValueError("chat_template is not set")


class Tickless(Wrapped):
    """Can't write a backtick."""

    def __call__(self, text: str, **options: Any) -> Any:
        return super().__call__(text.replace("`", "'"), **options)


class Slashless(Wrapped):
    """Can't write a backslash, so no box."""

    def __call__(self, text: str, **options: Any) -> Any:
        return super().__call__(text.replace("\\", "/"), **options)


class Obedient(Wrapped):
    """Takes a control token in a text for a control token, and does not list them."""

    added_tokens_decoder: ClassVar[dict[int, str]] = {}

    def __call__(self, text: str, **options: Any) -> Any:
        return super().__call__(text, **{**options, "split_special_tokens": False})


BROKEN: list[tuple[type[Wrapped], str]] = [
    (Untemplated, "ARL-T001"),
    (Tickless, "ARL-T004"),
    (Slashless, "ARL-T004"),
    (Obedient, "ARL-T005"),
]


@pytest.mark.parametrize(("broken", "code"), BROKEN)
def test_a_fault_in_tokens_is_found_out(register: Register, tokenizer: Any, broken: type[Wrapped], code: str) -> None:
    report = check_env(register(Good), tokenizer=broken(tokenizer))
    assert {finding.code for finding in report.findings} == {code}, report


def test_every_code_of_tokens_is_seen() -> None:
    assert {code for code in CODES if code.startswith("ARL-T")} == {code for _, code in BROKEN}


@pytest.mark.parametrize(
    ("kind", "dialect"), [(NoTools, None), (Answers, None), *((ManyTools, dialect) for dialect in DIALECTS)]
)
def test_good_environments_are_fine_in_tokens(
    register: Register, tokenizer: Any, kind: type[Good], dialect: str | None
) -> None:
    report = check_env(register(kind), tokenizer=tokenizer, dialect=dialect)
    assert report.ok, report


def test_the_native_dialect_is_the_templates(register: Register, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="native"):
        check_env(register(Good), dialect="native")
    with pytest.raises(ConfigError, match="dialect"):
        check_env(register(Good), dialect="native", tokenizer=tokenizer)  # its template writes no calls


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'agentrl\[train\]'"):
        load_tokenizer(tmp_path)
