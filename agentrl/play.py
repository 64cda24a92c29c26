"""``agentrl play``: a person takes the agent's place, at a terminal or through a pipe."""

import importlib
import importlib.util
import io
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, EnvContractError
from agentrl.registry import make
from agentrl.terminal import Terminal
from agentrl.types import Message

_HELP = """Write what the agent would write, on as many lines as it takes, and end it with a line that holds only a dot.
Ctrl-D ends it too; before the first line, it leaves. A line that is to hold only a dot is written with two.
What begins with one of these is a command where the agent's text would begin:
  :gold   let the perfect player take its next turn
  :tools  the tools, and how they are called
  :help   this page
  :quit   leave"""
_LISTEN_S = 0.2
_STYLES: Mapping[str, str] = {"system": "dim", "user": "cyan", "assistant": "yellow", "tool": "green"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to play."""

    env: str
    """The environment's id."""
    task: str | None = None
    """The task's id; one is drawn where there is none."""
    seed: int | None = None
    """Seeds the episode; none draws another task each time."""
    split: str | None = None
    """Which tasks; the environment's own default where there is none."""
    dialect: str | None = None
    """How tool calls are written; the environment's own default where there is none."""


def play(request: Request, terminal: Terminal) -> None:
    """Play one episode with turns from standard input, to its end or until the person leaves.

    Raises:
        UsageError: the environment, its split, task or dialect is not there, or the seed is negative.
        EnvContractError: the environment broke its contract.
        InfrastructureError: what a tool runs on failed.
    """
    if request.seed is not None and request.seed < 0:
        raise ConfigError(f"seed is {request.seed}: it must be at least 0")
    _prepare_input()
    chosen = {"split": request.split, "dialect": request.dialect}
    env = make(request.env, **{name: value for name, value in chosen.items() if value is not None})
    try:
        options: dict[str, Any] = {} if request.task is None else {"task": request.task}
        messages, _ = env.reset(seed=request.seed, options=options)
        game = _Game(env, terminal)
        game.begin(messages)
        while not game.over and (text := game.turn()) is not None:
            game.act(text)
        game.end()
    finally:
        env.close()


class _Game:
    """One episode and the person who plays it."""

    def __init__(self, env: ToolEnv, terminal: Terminal) -> None:
        self._env, self._terminal = env, terminal
        self._gold_turns = 0
        self._return = 0.0
        self.over = False

    def begin(self, messages: Iterable[Message]) -> None:
        """Show the first observation."""
        env = self._env
        self._terminal.write(f"task {env.episode.task.id}, split {env.split}, at most {env.max_turns} turns", "bold")
        self._show(messages)
        self._terminal.write("(your turn ends with a line that holds only a dot; :help lists the commands)", "dim")

    def turn(self) -> str | None:
        """The person's next turn; none where they leave."""
        lines: list[str] = []
        while True:
            try:
                line = _ask()
            except EOFError:
                return "\n".join(lines) if lines else None
            if line == ".":
                return "\n".join(lines)
            if lines or not line.startswith(":"):
                lines.append("." if line == ".." else line)
            elif line.strip() == ":quit":
                return None
            elif (text := self._command(line.strip())) is not None:
                return text

    def act(self, text: str) -> None:
        """Take a turn, and show what comes of it."""
        messages, reward, terminated, truncated, _ = self._env.step(text)
        self._return += reward
        self._show(messages)
        self._terminal.write(f"reward {reward:g}", "bold")
        self.over = terminated or truncated
        if truncated:
            self._terminal.write("the turns are used up", "red")

    def end(self) -> None:
        """Say how the episode ended, part by part."""
        episode, weights = self._env.episode, self._env.reward_weights
        if not self.over:
            self._terminal.write(f"left after {episode.turns} turns: nothing was graded")
            return
        parts = ", ".join(
            f"{name} {value:g} (weight {weights[name]:g})" for name, value in (episode.parts or {}).items()
        )
        self._terminal.write(f"return {self._return:g}: {parts}", "bold")

    def _command(self, line: str) -> str | None:
        """Obey a command; the text to play where it is ``:gold``."""
        if line == ":gold":
            return self._gold()
        if line == ":tools":
            self._tools()
        elif line == ":help":
            self._terminal.write(_HELP)
        else:
            self._terminal.write(f"there is no command {line!r}: :help lists them", "red")
        return None

    def _gold(self) -> str | None:
        try:
            turns = self._env.gold_turns(self._env.episode.task)
        except NotImplementedError:
            self._terminal.write("this environment has no perfect player", "red")
            return None
        if self._gold_turns >= len(turns):
            self._terminal.write("the perfect player has no turn left", "red")
            return None
        text = turns[self._gold_turns]
        self._gold_turns += 1
        self._show([Message(role="assistant", content=text)])
        return text

    def _tools(self) -> None:
        for tool in self._env.tools:
            self._terminal.write(f"{tool.name}: {tool.description}")
        self._terminal.write(self._env.dialect.instructions() or "there are no tools")

    def _show(self, messages: Iterable[Message]) -> None:
        for message in messages:
            role = message["role"]
            if role not in _STYLES:
                raise EnvContractError(f"an observation has the role {role!r}")
            name = f" {message['name']}" if "name" in message else ""
            self._terminal.write(f"[{role}{name}]", f"bold {_STYLES[role]}")
            self._terminal.write(message["content"], _STYLES[role])


def _prepare_input() -> None:
    """Take any bytes, as no more than text; at a terminal, let lines be edited where Python can do that."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty() and importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")


def _ask() -> str:
    """Read a line, and hear a Ctrl-C that comes after the prompt is shown but before the wait for keys has begun.

    Python attends to a signal only where it interrupts a wait, so the wait is interrupted now and then.

    Raises:
        EOFError: nothing more comes.
    """
    if not sys.stdin.isatty():
        return input()
    before = signal.signal(signal.SIGALRM, _go_on)
    signal.setitimer(signal.ITIMER_REAL, _LISTEN_S, _LISTEN_S)
    try:
        return input("> ")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _go_on(*_: object) -> None:
    """Handle a signal, so that it interrupts what waits."""
