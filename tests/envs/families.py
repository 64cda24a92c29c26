"""What is true of every family of generated problems, as functions that each family's tests call."""

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence

import agentrl
from agentrl.envs.generated import GeneratedEnv

ELSEWHERE = """
import json, agentrl
env = agentrl.make({name!r}, tool=False, split="test", level=list(agentrl.make({name!r}).levels))
print(json.dumps([[task.id, task.prompt, task.answer] for task in map(env.task_set.__getitem__, range({count}))]))
"""


def made(name: str, **options: object) -> GeneratedEnv:
    env = agentrl.make(name, **options)
    assert isinstance(env, GeneratedEnv)
    return env


def play(env: GeneratedEnv, task_id: str, actions: Sequence[str]) -> tuple[float, bool]:
    """The return of an episode, and whether it was terminated."""
    env.reset(seed=0, options={"task": task_id})
    total, terminated = 0.0, False
    for action in actions:
        _, reward, terminated, _, _ = env.step(action)
        total += reward
    return total, terminated


def box_scores(env: GeneratedEnv, task_id: str, box: str) -> bool:
    reward, terminated = play(env, task_id, [rf"So it is $\boxed{{{box}}}$."])
    assert terminated
    return reward == 1.0


def gold_is_perfect(name: str, level: int, tasks: int) -> None:
    for split in ("train", "test"):
        env = made(name, level=level, split=split, tool=False)
        for task in itertools.islice(env.task_set, tasks):
            assert play(env, task.id, env.gold(task)) == (1.0, True), task


def gold_is_perfect_with_the_tool(name: str) -> None:
    env = made(name, level=list(made(name).levels))
    for task in itertools.islice(env.task_set, len(env.levels) * 2):
        assert play(env, task.id, env.gold(task)) == (1.0, True), task
        assert all(run.ok for run in env.episode.tool_runs)
    env.close()


def problems_are_the_same_in_every_process(name: str, count: int) -> None:
    env = made(name, tool=False, split="test", level=list(made(name).levels))
    here = [[task.id, task.prompt, task.answer] for task in itertools.islice(env.task_set, count)]
    for seed in ("1", "2"):
        code, surroundings = ELSEWHERE.format(name=name, count=count), {"PYTHONHASHSEED": seed}
        surroundings["PYTHONPATH"] = ":".join(sys.path)
        run = subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, check=True)
        assert json.loads(run.stdout) == here


def splits_share_no_prompt(name: str, count: int) -> None:
    levels = list(made(name).levels)
    prompts = {
        split: {task.prompt for task in itertools.islice(made(name, split=split, level=levels).task_set, count)}
        for split in ("train", "test")
    }
    assert not prompts["train"] & prompts["test"]
    assert min(map(len, prompts.values())) > 0.75 * count


def nothing_hostile_scores(name: str, hostile: Sequence[str]) -> None:
    for level in made(name).levels:
        env = made(name, level=level, tool=False)
        task = env.task_set[0]
        for text in hostile:
            assert not env.is_right(task, text), text[:60]
            assert not box_scores(env, task.id, text), text[:60]


def a_box_beside_a_call_or_before_another_is_no_answer(name: str) -> None:
    env = made(name, max_turns=1)
    task = env.task_set[0]
    call, box = env.dialect.render("python", {"code": "1"}), rf"\boxed{{{task.answer}}}"
    assert play(env, task.id, [f"{call}\n{box}"]) == (0.0, False)
    assert play(env, task.id, [rf"{box} or \boxed{{17/1234567}}"]) == (0.0, True)
    assert play(env, task.id, [task.answer]) == (0.0, True)
    env.close()


def the_checker_is_content(name: str) -> None:
    for options in ({}, {"level": list(made(name).levels), "tool": False}):
        env = made(name, **options)
        report = agentrl.check_env(env)
        env.close()
        assert report.ok and not report.skipped, report


HOSTILE = (
    *("", " ", "nan", "inf", "True", "None", "x", "__import__('os').system('true')", "().__class__", "lambda: 0", "[]"),
    *("9^9^9^9", "9**9**9**9", "(" * 5000, "-" * 5000, r"\frac" * 2000, "{" * 3000 + "}" * 3000, "1," * 3000, "1/0"),
    *(
        "\x00",
        "\N{ARABIC-INDIC DIGIT ONE}",
        "=" * 2000,
        "1=1=1",
        "x=",
        "=1",
        "and and",
        r"\text{}",
        "exp(" * 99,
        "1e999",
    ),
)
"""Texts that answer no problem; none may raise, score or take time."""
