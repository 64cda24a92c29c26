"""The conformance suite on the local back end, and the suite itself on sandboxes that break their promises."""

import json
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl.sandboxes import Limits, Result, Sandbox, SandboxError, Session, open_sandbox
from agentrl.sandboxes.base import Counters, Health
from agentrl.sandboxes.conformance import Case, Outcome, cases, check, programs
from agentrl.sandboxes.conformance.expectations import CHECKS, broken, describe

FOLDER = Path(programs.__file__).parent


@pytest.fixture(scope="module")
def outcomes(sandbox: Sandbox) -> Iterator[dict[str, Future[Outcome]]]:
    """Start every case at once; a sandbox runs as many programs as there are cores."""
    # A sandbox of its own, which waits less for sleepers; the shared one is asked for only to be skipped with it.
    with open_sandbox("local", limits=Limits(wall_factor=2.0)) as brisk, ThreadPoolExecutor(4) as pool:
        yield {case.name: pool.submit(case.run, brisk) for case in cases()}


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_local_back_end_conforms(outcomes: dict[str, Future[Outcome]], case: Case) -> None:
    outcome = outcomes[case.name].result()
    assert outcome.passed, str(outcome)
    assert outcome.asked


class Broken(Sandbox):
    """A sandbox that does one thing only, or what follows from how often it was asked."""

    backend = "broken"

    def __init__(self, answer: Result | Exception | Callable[[int], Result]) -> None:
        self.limits = Limits()
        self._answer = answer
        self.asked = 0

    def run(self, code: str, **_: Any) -> Result:
        self.asked += 1
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer if isinstance(self._answer, Result) else self._answer(self.asked)

    def session(self, seed: int = 0) -> Session:
        raise SandboxError("it has no sessions")

    def counters(self) -> Counters:
        raise SandboxError("it does not count")

    def health(self) -> Health:
        raise SandboxError("it does not know")

    def close(self) -> None:
        return


def test_a_sandbox_that_always_says_ok_fails_every_kind_of_promise() -> None:
    report = check(Broken(Result(status="ok")), only=["time", "memory", "exit", "forge", "works", "transactions"])
    failed = {outcome.case.group for outcome in report.failures}
    assert failed == {"time", "memory", "exit", "forge", "works", "transactions"}
    assert not report.passed and len(report.failures) > len(report.outcomes) * 0.8


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SandboxError("no such machine"), "must not make the infrastructure fail: SandboxError: no such machine"),
        (KeyError("half written"), "the back end raised KeyError"),
    ],
)
def test_an_error_is_a_failure_that_says_why_and_does_not_end_the_suite(error: Exception, said: str) -> None:
    report = check(Broken(error), only=["infinite_loop", "sleep_past_timeout"])
    assert len(report.failures) == len(report.outcomes) == 2
    assert all(said in outcome.seen for outcome in report.failures)


def test_promises_of_other_back_ends_are_not_asked() -> None:
    broken = Broken(Result(status="killed"))
    (outcome,) = check(broken, only=["proc_is_read_only"]).outcomes
    assert (outcome.asked, outcome.passed, broken.asked) == (False, True, 0)
    assert "not a promise of this back end" in str(outcome)


def test_the_report_says_what_was_expected_what_was_seen_and_why_it_matters() -> None:
    report = check(Broken(Result(status="ok", stdout="hi", value="3")), only=["sleep_past_timeout", "works_hello"])
    text = str(report)
    assert "FAIL time/sleep_past_timeout" in text and "status timeout" in text and "value '3'" in text
    assert "hold up the others" in text and text.endswith("0 of 2 held, 0 not asked")


def test_a_good_report_is_short_and_progress_hears_of_each_outcome() -> None:
    heard: list[Outcome] = []
    report = check(Broken(Result(status="ok", stdout="hello\n")), only=["works_hello"], progress=heard.append)
    assert report.passed and str(report) == "1 of 1 held, 0 not asked" and tuple(heard) == report.outcomes
    assert str(report.outcomes[0]).startswith("ok   works/works_hello")


def test_cases_are_chosen_by_name_or_group() -> None:
    assert [case.name for case in cases(["works_hel*"])] == ["works_hello"]
    assert {case.group for case in cases(["fs"])} == {"fs"}
    assert len(cases()) > 290 and len({case.name for case in cases()}) == len(cases())
    with pytest.raises(ValueError, match=r"no case is called 'nonesuch'; the groups are concurrency, determinism"):
        cases(["works", "nonesuch"])


def test_every_case_says_what_and_why() -> None:
    for case in cases():
        assert case.expected and len(case.why) > 15, case.name
        assert case.name.isidentifier() and case.group.isidentifier(), case.name


def test_data_files_name_known_expectations_only() -> None:
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in programs.FILES]
    for entry in (entry for text in texts for entry in json.loads(text)):
        for step in (entry, *entry.get("cells", []), *entry.get("then", []), *entry.get("during", [])):
            if "cells" not in step:
                assert {"verdict"} <= set(step["expect"]) <= set(CHECKS), entry["name"]
                assert not isinstance(step["expect"].get("etype", []), str), entry["name"]


def test_limits_and_the_secret_stand_in_the_source() -> None:
    entry = {"code": ["a = {memory_bytes}", "b = '{CANARY}' + '{CANARY_DIR}'", "c = {'x': 1}"]}
    code = programs.source(entry, Limits(memory_bytes=7), Path("/secret/file"))
    assert code == "a = 7\nb = '/secret/file' + '/secret'\nc = {'x': 1}"


ROWS: list[Any] = tomllib.loads(Path(__file__).with_name("expectations.toml").read_text())["rows"]


@pytest.mark.parametrize(("expected", "result", "met"), ROWS)
def test_expectations(expected: dict[str, Any], result: dict[str, Any], met: bool) -> None:
    assert (list(broken(expected, Result(**result))) == []) == met


def test_every_expectation_is_tested_above() -> None:
    assert {key for expected, _, _ in ROWS for key in expected} == set(CHECKS)


def test_expectations_in_words() -> None:
    assert describe({"verdict": ["ok", "exit"], "stdout_has": "a"}) == "status ok or exit, stdout with 'a'"


def test_what_runs_beside_a_program_counts() -> None:
    """The program is fine, the one beside it is not."""

    def answer(_: int) -> Result:
        beside = threading.current_thread() is not threading.main_thread()
        return Result(status="error" if beside else "ok", stdout="survived")

    (outcome,) = check(Broken(answer), only=["kill_other_sessions"]).outcomes
    assert outcome.seen.startswith("beside it: status error")


def test_output_that_should_be_the_same_is_compared() -> None:
    counting = Broken(lambda asked: Result(status="ok", stdout=str(asked)))
    (outcome,) = check(counting, only=["hashes_of_strings"]).outcomes
    assert outcome.seen == "differing output: ['1', '2', '3']"
