"""The conformance suite on the local back end, and the suite itself on sandboxes that break their promises."""

import json
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl.sandboxes import Limits, Result, Sandbox, SandboxError, open_sandbox

from .conformance import Case, Outcome, cases, programs
from .conformance.expectations import CHECKS, broken

FOLDER = Path(programs.__file__).parent
LOCAL = [case for case in cases() if not case.backends or "local" in case.backends]


@pytest.fixture(scope="module")
def outcomes(sandbox: Sandbox) -> Iterator[dict[str, Future[Outcome]]]:
    """Start every case at once; a sandbox runs as many programs as there are cores."""
    # A sandbox of its own, which waits less for sleepers; the shared one is asked for only to be skipped with it.
    with open_sandbox("local", limits=Limits(wall_factor=2.0)) as brisk, ThreadPoolExecutor(4) as pool:
        yield {case.name: pool.submit(case.run, brisk) for case in LOCAL}
        # Another worker may have taken some of the tests.
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", LOCAL, ids=str)
def test_the_local_back_end_conforms(outcomes: dict[str, Future[Outcome]], case: Case) -> None:
    outcome = outcomes[case.name].result()
    assert outcome.passed, outcome


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

    def session(self, *_: Any, **__: Any) -> Any:
        raise SandboxError("it does one thing only")

    counters = health = session

    def close(self) -> None:
        return


def outcomes_of(sandbox: Sandbox, *only: str) -> list[Outcome]:
    return [case.run(sandbox) for case in cases(only)]


def test_a_sandbox_that_always_says_ok_fails_every_kind_of_promise() -> None:
    groups = ("time", "memory", "exit", "forge", "works", "transactions")
    outcomes = outcomes_of(Broken(Result(status="ok")), *groups)
    failed = [outcome.case.group for outcome in outcomes if not outcome.passed]
    assert set(failed) == set(groups) and len(failed) > len(outcomes) * 0.8


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (SandboxError("no such machine"), "must not make the infrastructure fail: SandboxError: no such machine"),
        (KeyError("half written"), "the back end raised KeyError"),
    ],
)
def test_an_error_is_a_failure_that_says_why(error: Exception, sentence: str) -> None:
    (outcome,) = outcomes_of(Broken(error), "infinite_loop")
    assert not outcome.passed and sentence in outcome.seen


def test_promises_of_other_back_ends_are_not_asked() -> None:
    broken = Broken(Result(status="killed"))
    (outcome,) = outcomes_of(broken, "proc_is_read_only")
    assert (outcome.asked, outcome.passed, broken.asked) == (False, True, 0)


def test_an_outcome_says_what_was_expected_what_was_seen_and_why_it_matters() -> None:
    bad, good = outcomes_of(Broken(Result(status="ok", stdout="hello\n")), "works_hello", "sleep_past_timeout")
    assert good.passed and not bad.passed
    expected = "verdict ['timeout'], stdout_has 'before'"
    for text in ("time/sleep_past_timeout", expected, "stdout 'hello", "hold up the others"):
        assert text in str(bad)


def test_cases_are_chosen_by_name_or_group_and_say_what_and_why() -> None:
    assert [case.name for case in cases(["works_hel*"])] == ["works_hello"]
    assert {case.group for case in cases(["fs"])} == {"fs"}
    assert len(cases()) > 290 and len({case.name for case in cases()}) == len(cases())
    with pytest.raises(ValueError, match=r"no case is called 'nonesuch'; the groups are concurrency, determinism"):
        cases(["works", "nonesuch"])
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


def test_what_runs_beside_a_program_counts() -> None:
    """The program is fine, the one beside it is not."""

    def answer(_: int) -> Result:
        beside = threading.current_thread() is not threading.main_thread()
        return Result(status="error" if beside else "ok", stdout="survived")

    (outcome,) = outcomes_of(Broken(answer), "kill_other_sessions")
    assert outcome.seen.startswith("beside it: status error")


def test_output_that_should_be_the_same_is_compared() -> None:
    counting = Broken(lambda asked: Result(status="ok", stdout=str(asked)))
    (outcome,) = outcomes_of(counting, "hashes_of_strings")
    assert outcome.seen == "differing output: ['1', '2', '3']"
