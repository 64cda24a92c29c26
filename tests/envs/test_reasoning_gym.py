"""reasoning-gym/<task>-v0: every task of the library by id, its scores, and answers that do no harm."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest

import agentrl
from agentrl.envs.reasoning_gym import library, worker
from agentrl.envs.reasoning_gym.env import ReasoningGym, widest_box
from agentrl.envs.reasoning_gym.library import MAX_CHARS, close_library
from agentrl.envs.reasoning_gym.names import TASKS
from agentrl.errors import ConfigError, InfrastructureError, UnknownNameError, UsageError
from agentrl.toolenv.checker import tasks as checker_tasks
from agentrl.toolenv.tasks import split_of

from ..conftest import python

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the library's, as it is imported
NO_GOLD = {"boxnet", "rush_hour"}
"""Tasks for which the library gives no answer that its own scorer takes for perfect."""


@pytest.fixture(autouse=True, scope="module")
def _library(require: Callable[[bool, str], None]) -> Iterator[None]:
    require(importlib.util.find_spec("reasoning_gym") is not None, "needs reasoning-gym")
    yield
    close_library()


def env(name: str, **options: Any) -> ReasoningGym:
    made = agentrl.make(f"reasoning-gym/{name}-v0", **options)
    assert isinstance(made, ReasoningGym)
    return made


def played(env: ReasoningGym, text: str, index: int = 0) -> float:
    env.reset(seed=0, options={"task": env.task_set[index].id})
    return env.step(text)[1]


def test_the_names_are_the_library_s() -> None:
    names = python(
        "-W", "ignore", "-c", "from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))"
    ).stdout.split()
    assert set(TASKS) == set(names) - {"composite"}
    assert len(TASKS) == len(set(TASKS)) == 105


def test_every_task_is_registered_without_the_library() -> None:
    assert {f"reasoning-gym/{name}-v0" for name in TASKS} <= set(gymnasium.registry)
    assert {f"reasoning-gym/{name}-v0" for name in TASKS} <= set(agentrl.list_envs())
    code = "import sys, gymnasium, agentrl; env = gymnasium.make('reasoning-gym/chain_sum-v0').unwrapped; env.reset()\n"
    code += "env.close(); print('reasoning_gym' in sys.modules)"
    assert python("-W", "ignore", "-c", code).stdout == "False\n"


def test_a_machine_without_the_library_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not [name for name in agentrl.list_envs() if name.startswith("reasoning-gym/")]
    with pytest.raises(UsageError, match=r"pip install 'agentrl\[reasoning-gym\]'"):
        agentrl.make("reasoning-gym/gcd-v0")


def test_wrong_names_and_settings() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'reasoning-gym/chain_sum-v0'"):
        agentrl.make("reasoning-gym/chain_sums-v0")
    with pytest.raises(UnknownNameError, match="did you mean 'gcd'"):
        ReasoningGym(name="gcdd")
    wrong = {"min_term": 3}, {"min_terms": -3}, {"min_terms": "a"}, {"min_terms": object()}
    for settings, problem in zip(wrong, ("min_term", "must be positive", "chain_sum", "must be a number"), strict=True):
        with pytest.raises(ConfigError, match=problem):
            env("chain_sum", **settings)


def test_settings_pass_through() -> None:
    made = env("chain_sum", min_terms=7, max_terms=7, split="test")
    for index in range(5):
        question = made.task_set[index].prompt
        assert question.count("+") + question.count(" - ") == 6


def test_a_question_is_a_function_of_split_and_index() -> None:
    for name in ("chain_sum", "list_functions", "zebra_puzzles", "pool_matrix"):
        before = [library.question(name, {}, split, index) for split in ("train", "test") for index in range(4)]
        close_library()
        after = [library.question(name, {}, split, index) for split in ("test", "train") for index in range(4)]
        assert before == after[4:] + after[:4]


def test_splits_share_no_question() -> None:
    for name in ("gcd", "letter_counting"):
        prompts = {split: {env(name, split=split).task_set[i].prompt for i in range(60)} for split in ("train", "test")}
        assert not prompts["train"] & prompts["test"]
        for split in prompts:
            assert {split_of(f"reasoning-gym {text}", worker.TEST_SHARE) for text in prompts[split]} == {split}


def test_too_few_questions_are_an_error_and_no_endless_search() -> None:
    with pytest.raises(ConfigError, match="has no question for split"):
        for split in ("train", "test"):
            library.question("count_bits", {"min_n": 5, "max_n": 5}, split, 0)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        *((r"\boxed{5}", "5"), (r"\boxed{4} no $\boxed{5}$.", "5"), (r"\boxed{}])}", "}])")),
        *(("\\boxed{ 1 2\n3 4 }", " 1 2\n3 4 "), (r'\boxed{{"a": {"b": 1}}}', '{"a": {"b": 1}}'), (r"\boxed{}", "")),
        *((r"} \boxed{5", None), ("5", None), ("", None)),
    ],
)
def test_the_widest_box_counts(text: str, box: str | None) -> None:
    assert widest_box(text) == box


def test_full_marks_alone_count_unless_asked_otherwise() -> None:
    exact, partial = env("chain_sum"), env("chain_sum", partial=True)
    answer = exact.task_set[0].answer
    scores = {rf"\boxed{{{answer}}}": 1.0, rf"\boxed{{ {answer} }}": 1.0, answer: 0.0, r"\boxed{}": 0.0}
    for text, score in scores.items():
        assert played(exact, text) == played(partial, text) == score
    near = rf"\boxed{{about {answer}}}"
    assert played(exact, near) == 0.0 < played(partial, near) < 1.0
    assert exact.best_return == partial.best_return == 1.0


def test_the_tool_is_optional() -> None:
    assert not env("gcd").tools
    made = env("gcd", tool=True, max_turns=1)
    call = made.dialect.render("python", {"code": "print(6 * 7)"})
    made.reset(seed=0)
    messages, reward, _, truncated, _ = made.step(f"{call}\n\\boxed{{{made.episode.task.answer}}}")
    assert (messages[0]["content"], reward, truncated) == ("42", 0.0, True)
    made.close()


HOSTILE = (
    "1" * (MAX_CHARS + 1),
    *("__import__('os')._exit(0)", "().__class__", "[exit() for _ in [0]]", "open('/etc/passwd').read()", "x" * 19_000),
    *("9**9**9**9", "9" * 19_000, "1e999999999", "1e99999999999999", "1/1e10", "[" * 9000, "[" * 9000 + "]" * 9000),
    *("{" * 9000, '{"a":' * 3000, "(" * 9000, "nan", "inf", "-inf", "\x00", "\ud800", "1" + "0" * 4400, "a," * 9000),
    *("factorial(10**9)", "x**10**10", "exp(" * 90 + "x" + ")" * 90, "0x" + "f" * 18_000, "\n" * 19_000, "None"),
    *("True", "nanj", "(n A n)", "1 + nani", "nan+nanj"),
)
EVALUATING = ("n_queens", "string_insertion", "spiral_matrix", "binary_matrix", "countdown", "puzzle24")
EVALUATING += ("simple_integration", "intermediate_integration", "polynomial_multiplication")
COMPUTING = ("power_function", "decimal_arithmetic", "bitwise_arithmetic", "complex_arithmetic")


@pytest.mark.parametrize("name", (*EVALUATING, *COMPUTING))
def test_hostile_answers_never_score(name: str) -> None:
    asked = library.question(name, {}, "train", 0)
    assert library.score(name, {}, asked, asked.answer) == 1.0
    for text in HOSTILE:
        assert library.score(name, {}, asked, text) < 0.1, text[:40]


@pytest.mark.parametrize("name", EVALUATING)
def test_no_scorer_evaluates_a_call(name: str) -> None:
    entry = worker._made(name, "{}", 5)[1]
    for text in (*HOSTILE, "print(1)", "[print(1)]", "().a", "'a'.join('b')", "f'{1}'", "x.y", "__debug__", "a[b](c)"):
        admitted = worker.admitted(name, entry, text)
        if admitted is not None:
            named = set("abcdefghijklmnopqrstuvwxyz(") & set(admitted)
            assert not named or name.endswith(("integration", "multiplication"))
            assert "__" not in admitted or not any(c.islower() for c in admitted)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        # The library takes other numbers, and 49/2 for 24.
        ("puzzle24", ["6*4*1*1", "9*5-7*3", "(9*8-9*2)/2.2"], "{} = 24"),
        ("coin_flip", ["0", "0.", "{:.4}", "-{}", "nan", ""], "{}"),
    ],
)
def test_the_library_is_too_kind(name: str, wrong: list[str], right: str) -> None:
    for index in range(3):
        asked = library.question(name, {}, "train", index)
        scores = [library.score(name, {}, asked, text.format(asked.answer)) for text in [*wrong, right]]
        assert scores == [*[0.0] * len(wrong), 1.0]


def test_halting_is_no_matter_of_saying_anything() -> None:
    answers: set[str] = set()
    name = "game_of_life_halting"
    for index in range(8):
        asked = library.question(name, {}, "train", index)
        answers.add(asked.answer)
        other = {"True": "False", "False": "True"}[asked.answer]
        scores = [library.score(name, {}, asked, text) for text in (asked.answer, other, "so", "")]
        assert scores == [1.0, 0.0, 0.0, 0.0]
    assert answers == {"True", "False"}


def test_an_answer_that_takes_too_long_is_wrong_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, entry = worker._made("chain_sum", "{}", 5)
    assert worker.score("chain_sum", "{}", 5, entry["answer"]) == {"score": 1.0}
    monkeypatch.setattr(worker, "CPU_SECONDS", 1)
    monkeypatch.setattr(dataset, "score_answer", lambda *_: sum(iter(int, 1)))
    assert worker.score("chain_sum", "{}", 5, "12") == {"score": 0.0}


def test_a_request_that_ends_the_process_is_an_error_and_the_next_is_answered() -> None:
    asked = library.question("gcd", {}, "train", 0)
    with pytest.raises(InfrastructureError, match="ended before it replied"):
        library._ask(do="nothing")
    assert library.question("gcd", {}, "train", 0) == asked


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", [*TASKS[::9], "chain_sum", "countdown", "n_queens"])
def test_our_checker_is_content(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_tasks, "SPLIT_SAMPLE", 3)
    report = agentrl.check_env(f"reasoning-gym/{name}-v0", tasks=1)
    assert report.ok, report
    assert bool(report.skipped) is (name in NO_GOLD), report
