"""A person plays: turns from standard input, what is shown, and how one leaves."""

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar

import pytest

import agentrl
from agentrl.cli import main
from agentrl.toolenv.tools.function import tool
from agentrl.types import Task

Play = Callable[..., str]


@tool
def echo(text: str) -> str:
    """Repeat it."""
    return f"\x1b[31m{text}\x1b[0m\u202e"


class Parrot(agentrl.ToolEnv):
    """Say what the tool said."""

    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0, "short": 0.5}
    closed: ClassVar[list[bool]] = []

    def __init__(self, *, split: str = "train", dialect: str = "fence", max_turns: int = 3) -> None:
        super().__init__(split=split, dialect=dialect, max_turns=max_turns)
        self.tools = (echo,)

    def tasks(self, split: str) -> agentrl.TaskList:
        return agentrl.TaskList([Task(id=f"{split}-{n}", prompt=f"\x1b[2JSay {n}.", answer=str(n)) for n in range(50)])

    def reward(self, episode: agentrl.Episode) -> Mapping[str, float]:
        return {"correct": episode.final == episode.task.answer, "short": len(episode.final) < 3}

    def gold(self, task: Task) -> Sequence[str]:
        return [self.dialect.render("echo", {"text": task.answer}), task.answer]

    def close(self) -> None:
        self.closed.append(True)
        super().close()


class Plain(Parrot):
    """Without tools and without a perfect player."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = ()

    def gold(self, task: Task) -> Sequence[str]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def registered(clean_registry: None) -> None:
    agentrl.register("test/Parrot-v0", Parrot)
    agentrl.register("test/Plain-v0", Plain)
    Parrot.closed.clear()


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Play:
    """Plays with the given text on standard input; what was shown."""

    def run(typed: str, *options: str, env: str = "test/Parrot-v0", code: int = 0) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert main(["play", env, *options]) == code
        out, err = capsys.readouterr()
        assert not re.search("[^\n\t -~]", out)
        return out + err

    return run


def test_a_whole_episode(play: Play) -> None:
    shown = play("```echo\n7\n```\n.\n7\n.\n", "--task", "train-7")
    assert shown.splitlines() == [
        "task train-7, split train, at most 3 turns",
        "[system]",
        *("To use echo, write", "```echo", "text", "```", "Repeat it."),
        "[user]",
        r"\x1b[2JSay 7.",
        "(your turn ends with a line that holds only a dot; :help lists the commands)",
        "[tool echo]",
        r"\x1b[31m7\x1b[0m\u202e",
        "reward 0",
        "reward 1.5",
        "return 1.5: correct 1 (weight 1), short 1 (weight 0.5)",
    ]
    assert Parrot.closed


def test_gold_plays_turn_by_turn(play: Play) -> None:
    shown = play(":gold\n:gold\n", env="test/Parrot-v0?split=test&max_turns=2")
    assert shown.count("[assistant]") == 2 and "return 1.5" in shown
    assert "split test" in shown and "at most 2 turns" in shown
    assert "return 1.5" in play(":gold\n```echo\n1\n```\n.\n:gold\n", "--task", "train-3")
    shown = play(":gold\n", env="test/Plain-v0")
    assert "this environment has no perfect player" in shown and "left after 0 turns" in shown


def test_commands(play: Play) -> None:
    shown = play(":help\n:tools\n:dance\n:gold \n:quit\n2\n.\n")
    assert "Ctrl-D" in shown and "echo: Repeat it." in shown and "no command ':dance'" in shown
    assert shown.endswith("left after 1 turns: nothing was graded\n")
    assert "there are no tools" in play(":tools\n", env="test/Plain-v0")


@pytest.mark.parametrize(
    ("typed", "final"),
    [
        (".\n", ""),
        ("..\n.\n", "."),
        ("a\n:quit\n\n.\n", "a\n:quit\n"),
        ("no dot at the end", "no dot at the end"),
        (" :gold\n.\n", " :gold"),
    ],
)
def test_what_is_typed_is_what_is_played(play: Play, typed: str, final: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(Parrot, "reward", lambda _, episode: {"correct": heard.append(episode.final) or 0.0})
    play(typed)
    assert heard == [final]


def test_the_turns_are_used_up(play: Play) -> None:
    assert "the turns are used up" in play("```echo\n1\n```\n.\n" * 3)


def test_seeds_choose_the_task(play: Play) -> None:
    assert play("", "--seed", "5") == play("", "--seed", "5")
    assert len({play("", "--seed", str(seed)) for seed in range(8)}) > 4
    assert len({play("") for _ in range(8)}) > 1, "without a seed it is another task each time"


COMMAND = (sys.executable, "-m", "agentrl", "play", "agentrl/Arithmetic-v0", "--seed", "1")


@pytest.mark.usefixtures("needs_sandbox")
def test_bytes_that_are_no_text() -> None:
    done = subprocess.run(COMMAND, input=b"\xff\x00\xed\xa0\x80\n.\n", capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"return 0: correct 0" in done.stdout


def read_until(terminal: int, wanted: str, shown: str = "") -> str:
    while wanted not in shown:
        try:
            shown += os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # how Linux says that nobody is at the other end any more
            break
    assert wanted in shown, shown
    return shown


@contextmanager
def at_a_terminal(command: Sequence[str]) -> Generator[tuple[subprocess.Popen[bytes], int]]:
    """A program at a terminal of its own, and our end of that."""
    here, tty = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=tty, stdout=tty, stderr=tty, env=os.environ | {"TERM": "xterm"}
    )
    os.close(tty)
    try:
        yield process, here
    finally:
        process.kill()
        process.wait()
        os.close(here)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "code", "last"), [(b"\x03", 130, "interrupted"), (b"\x04", 0, "nothing was graded")])
def test_at_a_terminal(key: bytes, code: int, last: str) -> None:
    with at_a_terminal(COMMAND) as (process, here):
        shown = read_until(here, "> ")
        assert "\x1b[36m" in shown, "the user speaks in colour"
        os.write(here, b"```python\nprint(6 * 7)\n```\n.\n")
        shown = read_until(here, "reward 0")
        assert "42" in shown
        read_until(here, "> ", shown.rpartition("reward 0")[2])
        # A key that comes between the prompt and the wait for keys counts when the next one is pressed.
        while process.poll() is None:
            os.write(here, key)
            with suppress(subprocess.TimeoutExpired):
                process.wait(2)
        shown = read_until(here, last)
        assert process.wait() == code and "Traceback" not in shown
