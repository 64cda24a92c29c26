"""Mathematical data sets in their published layouts, three rows of our own each, through the real environment."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from .published import LAYOUTS, Row, play, played, publish, write

pytestmark = pytest.mark.usefixtures("graders")


class Story(NamedTuple):
    passage: str
    question: str
    choices: tuple[str, str, str]
    """The second one is right."""
    unit: str

    @property
    def text(self) -> str:
        return f"{self.passage}\n{self.question}"

    @property
    def answer(self) -> str:
        return self.choices[1]

    @property
    def values(self) -> Row:
        choices = {"choices": [*self.choices], **dict(zip(("first", "second", "third"), self.choices, strict=True))}
        return {**self._asdict(), **choices, "text": self.text, "answer": self.answer, "float": float(self.answer)}


STORIES = (
    Story("Mia packs 3 boxes with 14 candles each", "How many does she pack?", ("17", "42", "45"), "candles"),
    Story("Ten of 17 swans on a lake fly off.", "How many swans stay?", ("10", "7", "27"), "swans"),
    Story("A crate weighs 12 kg. Ali lifts 12 crates.", "How many kilograms is that?", ("24", "144", "1"), "kg"),
)
FORMULAS: dict[str, str] = {
    r"What is $\frac{3}{4}-\frac{1}{4}$?": r"\frac{1}{2}",
    **{r"Which $x$ satisfy $x^2=9$?": "-3,3", r"Where does $y=2x$ meet $y=x+1$?": "(1, 2)"},
}
OF_FORMULAS = [{"text": text, "answer": answer, "several": "," in answer} for text, answer in FORMULAS.items()]
LISTED = {"MMLU": "(A) {}\n(B) {}\n(C) {}", "MMLU-STEM": "(A) {}\n(B) {}\n(C) {}", "SAT": "A) {} B) {} C) {}"}


def check_answers(data: str, answers: Mapping[str, str], wrong: Sequence[str]) -> None:
    """Whether the environment asks exactly these problems, and knows right from wrong."""
    asked: list[str] = []
    for env in played("agentrl/Math-v0", data=data):
        task = env.episode.task
        asked.append(task.prompt)
        for texts, reward in (
            ([answers[task.prompt]], 1.0),
            ({*answers.values(), *wrong} - {answers[task.prompt]}, 0.0),
        ):
            for text in texts:
                assert play(env, task.id, rf"\boxed{{{text}}}") == (reward, True), (task, text)
        assert play(env, task.id, *env.gold(task)) == (1.0, True)
    assert sorted(asked) == sorted(answers)


@pytest.mark.parametrize("layout", LAYOUTS["stories"])
def test_problems_in_words(tmp_path: Path, layout: str) -> None:
    path = publish(tmp_path, "stories", layout, [story.values for story in STORIES])
    if layout in LISTED:
        ask = "Answer with the letter of the right choice."
        texts = [f"{story.text}\n\n{LISTED[layout].format(*story.choices)}\n\n{ask}" for story in STORIES]
        check_answers(path, dict.fromkeys(texts, "B"), ["A", "C", "D", "42", "(A)"])
    else:
        wrong = ["43", "-7", "7 geese" if layout == "ASDiv" else "8"]
        check_answers(path, {story.text: story.answer for story in STORIES}, wrong)


@pytest.mark.parametrize("layout", LAYOUTS["formulas"])
def test_problems_in_formulas(tmp_path: Path, layout: str) -> None:
    path = publish(tmp_path, "formulas", layout, OF_FORMULAS)
    check_answers(path, FORMULAS, [r"\frac{1}{3}", "3", "(2, 1)", r"\{1, 2\}"])


def test_aime_as_dapo_evaluates_it(tmp_path: Path) -> None:
    path = publish(tmp_path, "formulas", "DAPO", 32 * OF_FORMULAS)
    with pytest.warns(UserWarning, match=r"dapo-math-17k\.parquet: 93 rows that repeat an earlier one are left out"):
        check_answers(path, FORMULAS, ["1"])


def test_a_letter_beside_the_answer(tmp_path: Path) -> None:
    texts = [f"{story.text}\nA. {story.choices[0]}  B. {story.choices[1]}  C. {story.choices[2]}" for story in STORIES]
    rows = [
        {"idx": i, "question": text, "answer": story.answer, "choice_answer": "B"}
        for i, (text, story) in enumerate(zip(texts, STORIES, strict=True))
    ]
    path = write(tmp_path / "cn_middle_school.jsonl", rows)
    check_answers(path, {text: story.answer for text, story in zip(texts, STORIES, strict=True)}, ["A", "C", "D", "43"])
    check_answers(path, dict.fromkeys(texts, "B"), ["A", "C", "43"])
