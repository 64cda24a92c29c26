"""Each broken environment is found out, under its own code and no other."""

import re
from collections.abc import Generator

import pytest

from agentrl.toolenv.checker import CODES, check_env, leaks

from . import broken_contract, broken_leaks, broken_rewards, broken_tasks
from .conftest import Register
from .good import Good

BROKEN = [*broken_contract.BROKEN, *broken_tasks.BROKEN, *broken_rewards.BROKEN, *broken_leaks.BROKEN]


@pytest.fixture(autouse=True)
def _clear() -> Generator[None]:
    yield
    while broken_leaks.STARTED:
        broken_leaks.STARTED.pop()()


@pytest.mark.parametrize(("kind", "codes"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_environment_is_found_out(
    request: pytest.FixtureRequest, register: Register, kind: type[Good], codes: set[str]
) -> None:
    if codes != {"ARL-R004"}:
        request.getfixturevalue("short_texts")
    if any(code.startswith("ARL-P") for code in codes):  # what was left stays, however long one waits
        request.getfixturevalue("monkeypatch").setattr(leaks, "_PATIENCE_S", 0.1)
    report = check_env(register(kind, broken_tasks.ARGUMENTS.get(kind, {})))
    assert {finding.code for finding in report.findings} == codes, report
    assert not report.ok
    for finding in report.findings:
        for sentence in (finding.message, finding.advice or finding.message):
            assert re.fullmatch(r"[A-Z0-9].*\.\)?", sentence), sentence
        assert len(finding.message) < 400 and "\n" not in finding.message


def test_every_code_has_a_broken_environment_of_its_own() -> None:
    seen = {code for _, codes in BROKEN for code in codes if len(codes) == 1}
    assert seen == {code for code in CODES if not code.startswith("ARL-T")}  # test_tokens.py has those
