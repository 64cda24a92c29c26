"""``agentrl play``: a person takes the agent's place, at a terminal or through a pipe."""

import importlib
import importlib.util
import io
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

from agentrl.errors import ConfigError
from agentrl.runs.progress import Display
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.registry import make
from agentrl.toolenv.tools.context import SubTurn
from agentrl.toolenv.tools.python import open_sandboxes
from agentrl.types import Message

_HELP = """Write what the agent would write, on as many lines as it takes, and end it with a line that holds only a dot.
Ctrl-D ends it too; before the first line, it leaves. A line that is to hold only a dot is written with two.
What begins with one of these is a command where the agent's text would begin:
  :gold   let the perfect player take its next turn
  :tools  the tools, and how they are called
  :help   this page
  :quit   leave"""
_STYLES: Mapping[str, str] = {"system": "dim", "user": "cyan", "assistant": "yellow", "tool": "green"}


def play_by_hand(env_id: str, display: Display, *, task: str | None, seed: int | None, **options: Any) -> None:
    """Play one episode with turns from standard input, to its end or until the person leaves.

    Args:
        env_id: the environment's id.
        display: shows the episode.
        task: the task's id; one is drawn where there is none.
        seed: the episode's seed; without one, every episode draws anew.
        options: the environment's own arguments, ``split`` and ``dialect`` among them.

    Raises:
        UsageError: the environment, its split, task or dialect is not there, or the seed is negative.
        EnvContractError: the environment broke its contract.
        InfrastructureError: a tool's sandbox or server failed.
        SandboxUnavailable: a tool runs programs, and no sandbox can be opened here.
    """
    if seed is not None and seed < 0:
        raise ConfigError(f"seed is {seed}: it must be at least 0")
    _prepare_input()
    env = make(env_id, **options)
    with closing(env):
        open_sandboxes(env.tools)
        messages, _ = env.reset(seed=seed, options={} if task is None else {"task": task})
        game = _Game(env, display)
        display.say(f"task {env.episode.task.id}, split {env.split}, at most {env.max_turns} turns", "bold")
        game.show(messages)
        display.say("(your turn ends with a line that holds only a dot; :help lists the commands)", "dim")
        while not game.over and (text := game.turn()) is not None:
            game.act(text)
        game.end()


class _Game:
    """One episode and the person who plays it."""

    def __init__(self, env: ToolEnv, display: Display) -> None:
        self._env, self._display = env, display
        self._gold_turns = 0
        self._return = 0.0
        self.over = False

    def turn(self) -> str | None:
        """Read the person's next turn; None where they leave."""
        lines: list[str] = []
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return "\n".join(lines) if lines else None
            if line == ".":
                return "\n".join(lines)
            # Inside a turn a colon is text; only its first line can be a command.
            if lines or not line.startswith(":"):
                lines.append("." if line == ".." else line)
            elif line.strip() == ":quit":
                return None
            elif (text := self._command(line.strip())) is not None:
                return text

    def act(self, text: str) -> None:
        """Take a turn, and show its result."""
        messages, reward, terminated, truncated, _ = self._env.step(text)
        self._return += reward
        self.show(messages)
        self._display.say(f"reward {reward:g}", "bold")
        self.over = terminated or truncated
        # No token limit cuts a person's turn, so the turn limit is the only reason.
        if truncated:
            self._display.say("the turns are used up", "red")

    def end(self) -> None:
        """Print the return, part by part."""
        episode, weights = self._env.episode, self._env.reward_weights
        if not self.over:
            self._display.say(f"left after {episode.turns} turns: nothing was graded")
            return
        parts = ", ".join(
            f"{name} {value:g} (weight {weights[name]:g})" for name, value in (episode.parts or {}).items()
        )
        self._display.say(f"return {self._return:g}: {parts}", "bold")
        # What an environment has to say about its grading.
        if note := episode.state.get("note"):
            self._display.say(str(note))

    def _command(self, line: str) -> str | None:
        """Carry out a command; return the text to play where it is ``:gold``."""
        if line == ":gold":
            return self._gold()
        if line == ":tools":
            for tool in self._env.tools:
                self._display.say(f"{tool.name}: {tool.description}")
            self._display.say(self._env.dialect.instructions() or "there are no tools")
        elif line == ":help":
            self._display.say(_HELP)
        else:
            self._display.say(f"there is no command {line!r}: :help lists them", "red")
        return None

    def _gold(self) -> str | None:
        try:
            gold = self._env.gold_turns(self._env.episode.task)
            turns = [turn for turn in gold if not isinstance(turn, SubTurn)]
        except NotImplementedError:
            self._display.say("this environment has no perfect player", "red")
            return None
        if self._gold_turns >= len(turns):
            self._display.say("the perfect player has no turn left", "red")
            return None
        text = turns[self._gold_turns]
        self._gold_turns += 1
        self.show([Message(role="assistant", content=text)])
        return text

    def show(self, messages: Iterable[Message]) -> None:
        """Show messages, each in the colour of who speaks."""
        for message in messages:
            role, name = message["role"], f" {message['name']}" if "name" in message else ""
            style = _STYLES.get(role, "")
            self._display.say(f"[{role}{name}]", f"bold {style}")
            self._display.say(message["content"], style)


def _prepare_input() -> None:
    """Accept any bytes as text and, at a terminal, let lines be edited where Python has readline."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty() and importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")  # from then on input() uses it
