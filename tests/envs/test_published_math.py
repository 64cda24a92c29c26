"""Mathematical data sets in their published layouts, three rows of our own each, through the real environment."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from .published import Row, played, write

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


class Formula(NamedTuple):
    text: str
    answer: str

    @property
    def solution(self) -> str:
        return rf"We work it out and find $\boxed{{{self.answer}}}$, as asked."


STORIES = (
    Story("Mia packs 3 boxes with 14 candles each", "How many does she pack?", ("17", "42", "45"), "candles"),
    Story("Ten of 17 swans on a lake fly off.", "How many swans stay?", ("10", "7", "27"), "swans"),
    Story("A crate weighs 12 kg. Ali lifts 12 crates.", "How many kilograms is that?", ("24", "144", "1"), "kg"),
)
FORMULAS = (
    Formula(r"What is $\frac{3}{4}-\frac{1}{4}$?", r"\frac{1}{2}"),
    Formula(r"Which $x$ satisfy $x^2=9$?", "-3,3"),
    Formula(r"Where does $y=2x$ meet $y=x+1$?", "(1, 2)"),
)


def aime_2024(i: int, one: Story) -> Row:
    row = {"id": 60 + i, "problem": one.text, "solution": f"So it is {one.answer}.", "answer": one.answer}
    return {**row, "url": "https://example.org/2024_AIME_I", "year": "2024"}


def aime(i: int, one: Story) -> Row:
    row = {"ID": f"1983-I-{i}", "Year": 1983, "Problem Number": i, "Question": one.text}
    return {**row, "Answer": one.answer.zfill(3), "Part": "I"}


def svamp(i: int, one: Story) -> Row:
    row = {"ID": f"chal-{i}", "Body": one.passage, "Question": one.question, "Equation": "( 3.0 * 14.0 )"}
    return {**row, "Answer": float(one.answer), "Type": "Multiplication"}


def asdiv(i: int, one: Story) -> Row:
    row = {"body": one.passage, "question": one.question, "solution_type": "Multiplication"}
    return {**row, "answer": f"{one.answer} ({one.unit})", "formula": "3*14=42", "idx": i}


def sat(i: int, one: Story) -> Row:
    options = "A) {} B) {} C) {}".format(*one.choices)
    return {"id": str(i), "question": one.text, "options": options, "Answer": "B"}


def math_500(i: int, one: Formula) -> Row:
    row = {"problem": one.text, "solution": one.solution, "answer": one.answer, "subject": "Algebra", "level": 2}
    return {**row, "unique_id": f"test/algebra/{i}.json"}


def dapo(i: int, one: Formula) -> Row:
    frame = "Solve the following math problem step by step. The last line should be of the form Answer: $Answer.\n\n"
    content = f'{frame}{one.text}\n\nRemember to put your answer on its own line after "Answer:".'
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": one.answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-{i}"},
    }


def olympiad(i: int, one: Formula) -> Row:
    return {
        **{"id": 1600 + i, "question": one.text, "solution": [one.solution], "final_answer": [f"${one.answer}$"]},
        **{"context": None, **{f"image_{number}": None for number in range(1, 10)}, "modality": "Text-only"},
        **{"difficulty": "Competition", "is_multiple_answer": "," in one.answer, "unit": None, "error": None},
        **{"answer_type": "Numerical", "question_type": "Open-ended", "subfield": "Algebra", "subject": "Math"},
        "language": "English",
    }


OF_STORIES: dict[str, tuple[str, Callable[[int, Story], Row]]] = {
    "GSM8K": ("train.jsonl", lambda i, s: {"question": s.text, "answer": f"It is <<6*7=42>>.\n#### {s.answer}"}),
    "AIME 2024": ("aime_2024.parquet", aime_2024),
    "AIME 1983 to 2024": ("aime.jsonl", aime),
    "AMC": ("amc.parquet", lambda i, s: {"id": i, "problem": s.text, "answer": float(s.answer), "url": "https://…"}),
    "SVAMP": ("SVAMP.json", svamp),
    "ASDiv": ("test.jsonl", asdiv),
    "MMLU": (
        "test.parquet",
        lambda i, s: {"question": s.text, "subject": "algebra", "choices": s.choices, "answer": 1},
    ),
    "MMLU-STEM": ("test.jsonl", lambda i, s: {"question": s.text, "type": "a", "choices": s.choices, "answer": 1}),
    "SAT": ("test.jsonl", sat),
}
OF_FORMULAS: dict[str, tuple[str, Callable[[int, Formula], Row]]] = {
    "MATH": (
        "train.parquet",
        lambda i, f: {"problem": f.text, "level": "Level 2", "type": "A", "solution": f.solution},
    ),
    "MATH-500": ("test.jsonl", math_500),
    "DeepScaleR": ("deepscaler.json", lambda i, f: {"problem": f.text, "answer": f.answer, "solution": f.solution}),
    "DAPO": ("dapo-math-17k.parquet", dapo),
    "OlympiadBench": ("OE_TO_maths_en_COMP.parquet", olympiad),
    "Minerva": ("test.jsonl", lambda i, f: {"problem": f.text, "solution": f.solution, "type": "Astronomy", "idx": i}),
    "Minerva with lists": ("minerva.json", lambda i, f: {"problem": f.text, "answer": [f.answer]}),
}
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
                env.reset(seed=0, options={"task": task.id})
                assert env.step(rf"\boxed{{{text}}}")[1:3] == (reward, True), (task, text)
        env.reset(seed=0, options={"task": task.id})
        assert [env.step(turn) for turn in env.gold(task)][-1][1] == 1.0
    assert sorted(asked) == sorted(answers)


@pytest.mark.parametrize("layout", OF_STORIES)
def test_problems_in_words(tmp_path: Path, layout: str) -> None:
    name, build = OF_STORIES[layout]
    path = write(tmp_path / name, [build(i, one) for i, one in enumerate(STORIES)])
    if layout in LISTED:
        ask = "Answer with the letter of the right choice."
        texts = [f"{one.text}\n\n{LISTED[layout].format(*one.choices)}\n\n{ask}" for one in STORIES]
        check_answers(path, dict.fromkeys(texts, "B"), ["A", "C", "D", "42", "(A)"])
    else:
        check_answers(
            path, {one.text: one.answer for one in STORIES}, ["43", "-7", "7 geese" if layout == "ASDiv" else "8"]
        )


@pytest.mark.parametrize("layout", OF_FORMULAS)
def test_problems_in_formulas(tmp_path: Path, layout: str) -> None:
    name, build = OF_FORMULAS[layout]
    path = write(tmp_path / name, [build(i, one) for i, one in enumerate(FORMULAS)])
    check_answers(path, {one.text: one.answer for one in FORMULAS}, [r"\frac{1}{3}", "3", "(2, 1)", r"\{1, 2\}"])


def test_aime_as_dapo_evaluates_it(tmp_path: Path) -> None:
    path = write(tmp_path / "aime-2024.parquet", [dapo(i, one) for i, one in enumerate(32 * FORMULAS)])
    with pytest.warns(UserWarning, match=r"aime-2024\.parquet: 93 rows that repeat an earlier one are left out"):
        check_answers(path, {one.text: one.answer for one in FORMULAS}, ["1"])


def test_a_letter_beside_the_answer(tmp_path: Path) -> None:
    texts = [f"{one.text}\nA. {one.choices[0]}  B. {one.choices[1]}  C. {one.choices[2]}" for one in STORIES]
    rows = [
        {"idx": i, "question": text, "answer": one.answer, "choice_answer": "B"}
        for i, (text, one) in enumerate(zip(texts, STORIES, strict=True))
    ]
    path = write(tmp_path / "cn_middle_school.jsonl", rows)
    check_answers(path, {text: one.answer for text, one in zip(texts, STORIES, strict=True)}, ["A", "C", "D", "43"])
    check_answers(path, dict.fromkeys(texts, "B"), ["A", "C", "43"])
