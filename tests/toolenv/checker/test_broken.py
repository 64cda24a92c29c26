"""Each broken environment is found out, under its own code and no other."""

import re
from collections.abc import Generator

import pytest

from agentrl.toolenv.checker import CODES, check_env, leaks

from . import broken_contract, broken_leaks, broken_rewards, broken_tasks
from .conftest import Register
from .good import Good

MODULES = (broken_contract, broken_tasks, broken_rewards, broken_leaks)
BROKEN: list[type[Good]] = [kind for module in MODULES for kind in vars(module).values() if getattr(kind, "codes", ())]


@pytest.fixture(autouse=True)
def _clear() -> Generator[None]:
    yield
    while broken_leaks.STARTED:
        broken_leaks.STARTED.pop()()


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_environment_is_found_out(
    request: pytest.FixtureRequest, register: Register, kind: type[Good]
) -> None:
    if kind.codes != {"ARL-R004"}:
        request.getfixturevalue("short_texts")
    if any(code.startswith("ARL-P") for code in kind.codes):  # what was left stays, however long one waits
        request.getfixturevalue("monkeypatch").setattr(leaks, "_PATIENCE_S", 0.1)
    report = check_env(register(kind))
    assert {finding.code for finding in report.findings} == kind.codes, report
    assert not report.ok
    for finding in report.findings:
        for sentence in (finding.message, finding.advice or finding.message):
            assert re.fullmatch(r"[A-Z0-9].*\.\)?", sentence), sentence
        assert len(finding.message) < 300 and "\n" not in finding.message
    assert any(re.search(kind.shows, finding.message) for finding in report.findings), report


def test_every_code_has_a_broken_environment_of_its_own() -> None:
    seen = {code for kind in BROKEN for code in kind.codes if len(kind.codes) == 1}
    assert seen == {code for code in CODES if not code.startswith("ARL-T")}  # test_tokens.py has those
