"""Make questions and score answers with the library reasoning-gym, in the process that it runs in.

``agentrl.processes.pool`` forks that process and limits its memory. An answer was written by the agent under training.
So it is scored in another fork, of which nothing remains; the kernel kills that fork when it takes too much time or
memory. A fork is no sandbox: only :func:`admitted` keeps scorers that evaluate the answer from doing harm.
"""

import functools
import json
import math
import os
import random
import re
import signal
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.envs.generated.countdown import solves
from agentrl.grading.formulas import FUNCTIONS, Unreadable, parse, write
from agentrl.grading.numbers import plain_number
from agentrl.toolenv.tasks import split_of, stable_hash

MAX_BYTES = 4 << 30
"""Address space of the process, and of a fork that scores."""
CONTROL = {"do": "question", "name": "chain_sum", "config": "{}", "split": "train", "index": 0}
"""A question that a working process makes in no time."""
CPU_SECONDS = 5
"""CPU time for scoring an answer."""
TRIES = 200
"""Most questions that are made to find one of the wanted split."""
TEST_SHARE = 2
"""One question in this many belongs to the test split."""
SIZE = 10
"""The nominal size of a data set; nearly all make an entry for any index on demand."""
_MADE_AT_ONCE = frozenset({"acre", "gsm_symbolic", "list_functions", "word_ladder"})
"""These make their entries, or draw their kinds, with the data set: each question gets a data set of its own."""
_LITERALS = re.compile(r"[\[\]\s,0-9'\"A-Z_.-]*")


def question(name: str, config: str, split: str, index: int) -> Mapping[str, object]:
    """Make question number ``index`` of a split: its position in the library, its text, and the library's answer.

    Args:
        name: the task.
        config: its settings as JSON.
        split: ``"train"`` or ``"test"``.
        index: from 0, without end.
    """
    _dataset(name, config, 0)  # settings that it does not take are an error at once
    problem = f"only questions of the other split in {TRIES} tries"
    for attempt in range(TRIES):
        position = stable_hash(f"{split} {index} {attempt}") % 2**31
        try:
            entry = _made(name, config, position)[1]
        except Exception as error:  # the library gives up on some positions, in various ways
            problem = repr(error)
            continue
        if split_of(f"reasoning-gym {entry['question']}", TEST_SHARE) == split:
            return {"position": position, "question": entry["question"], "answer": _answer(entry)}
    return {"config": f"{name} with {config} has no question for split {split!r}: {problem}"}


def _answer(entry: Mapping[str, Any]) -> str:
    """Return the library's answer, or else its example of an answer; empty where it has neither."""
    metadata: Mapping[str, Any] = entry["metadata"]
    examples = ("possible_answer", "example_answer", "example_correct_answer")
    answers = [entry["answer"], *(metadata[key] for key in examples if key in metadata)]
    answer = next((answer for answer in answers if answer is not None), "")
    return answer if isinstance(answer, str) else json.dumps(answer) if isinstance(answer, dict) else str(answer)


def score(name: str, config: str, position: int, answer: str) -> Mapping[str, object]:
    """Score ``answer`` by the library, from 0 to 1; 0 where the fork ends without a score."""
    dataset, entry = _made(name, config, position)
    read, write_ = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # A fork has no timer yet. No handler: the kernel ends the process, even inside a library's C code.
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            os.write(write_, repr(_scored(dataset, name, entry, answer)).encode())
        finally:
            os._exit(0)  # whatever was raised: a second process must not answer requests
    # Or the read below would never see the end of the pipe.
    os.close(write_)
    with open(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return {"score": float(text or 0)}


def admitted(name: str, entry: Mapping[str, Any], answer: str) -> str | None:
    """Return ``answer`` in a form that is safe for the scorer of task ``name``; None where it is wrong without scoring.

    Filtered are scorers that pass the text to Python's ``eval`` or to sympy, which uses it; and two that are too kind.
    """
    match name:
        case "coin_flip":  # the library's scorer accepts the beginning of the right digits, such as 0
            number, right = plain_number(answer), plain_number(entry["answer"])
            return answer if number is not None and right is not None and abs(number - right) <= 1e-4 else None
        case "complex_arithmetic":  # nan has full marks there: Python's min(1.0, nan) is 1.0
            return None if "n" in answer.lower() else answer
        case "n_queens" | "string_insertion" | "spiral_matrix" | "binary_matrix":
            return answer if _LITERALS.fullmatch(answer) else None
        case "countdown":
            return _solution(answer, entry["metadata"]["numbers"], entry["metadata"]["target"])
        case "puzzle24":
            return _solution(answer, entry["metadata"]["numbers"], 24)
        case "simple_integration" | "intermediate_integration":
            return _rewritten(answer, (entry["metadata"]["variable"], "C"))
        case "polynomial_multiplication":
            return _rewritten(answer, tuple("abcdefghijklmnopqrstuvwxyz"))
        case _:
            return answer


def _solution(answer: str, numbers: list[int], target: int) -> str | None:
    # The library's own scorers accept other numbers than the puzzle's, or a value that is right when rounded down.
    return write(parse(answer.partition("=")[0])) if solves(answer, numbers, target) else None


def _rewritten(answer: str, names: tuple[str, ...]) -> str | None:
    try:
        return write(parse(answer, names=names, functions=FUNCTIONS))
    except Unreadable:
        return None


def _scored(dataset: Any, name: str, entry: dict[str, Any], answer: str) -> float:
    # The text is compared as it is: white space around it is the agent's where the right answer has none.
    expected = str(entry["answer"])
    if expected.strip() == expected:
        answer = answer.strip()
    if name == "game_of_life_halting":  # the library's scorer takes any text for True
        return float(answer == expected)
    try:
        text = admitted(name, entry, answer)
        scored = 0.0 if text is None else float(dataset.score_answer(text, entry))
    except Exception:  # the library's scorers raise all sorts of things on a text that is no answer
        return 0.0
    return min(max(scored, 0.0), 1.0) if math.isfinite(scored) else 0.0


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str, seed: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=SIZE, **json.loads(config))


@functools.lru_cache(maxsize=64)
def _made(name: str, config: str, position: int) -> tuple[Any, dict[str, Any]]:
    """Make the data set and the entry at ``position``."""
    import numpy

    dataset = _dataset(name, config, position if name in _MADE_AT_ONCE else 0)
    # Some of the code that codeio runs draws from the generators that everybody shares.
    random.seed(position)
    numpy.random.seed(position)
    return dataset, dict(dataset[position % SIZE if name in _MADE_AT_ONCE else position])


def warm() -> None:
    """Import the library."""
    _dataset("chain_sum", "{}", 0)


_REQUESTS: Mapping[str, Callable[..., Mapping[str, object]]] = {"question": question, "score": score}


def reply(*, do: str, **request: Any) -> Mapping[str, object]:
    """Answer a request with the function's result, or with its error."""
    try:
        return _REQUESTS[do](**request)
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        return {"config": f"{request['name']} can't be made with {request['config']}: {error}"}
