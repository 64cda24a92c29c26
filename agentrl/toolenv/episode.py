"""The episode as an environment's own methods read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.toolenv.tools.context import Exchanges
from agentrl.types import CutTurns, Message, Stop, Task, ToolRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The episode so far, as ``reward`` and ``respond`` read it."""

    task: Task
    """The task being played."""
    messages: tuple[Message, ...]
    """The complete conversation, the assistant's turns included."""
    tool_runs: tuple[ToolRun, ...] = ()
    """One entry per tool call, in order."""
    turns: int = 0
    """How often the assistant has spoken."""
    cut: Literal["", CutTurns] = ""
    """How a token limit's cut of the assistant's last turn is treated; empty where that turn was complete."""
    # Any: whoever puts a value in knows its type, and would have to narrow an object at every use.
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The tools' ``ToolContext.state``."""
    exchanges: Exchanges = field(default_factory=Exchanges)
    """What judges and simulated users were asked and answered."""
    stop: Stop | None = None
    """Why the episode ended; None before it has."""
    ended: bool = False
    """True after a tool or a hook has called ``ToolContext.end``."""
    parts: Mapping[str, float] | None = None
    """The parts of the final reward, once the episode is graded."""
    answer: str | None = None
    """The final answer, once the episode is over, where the environment defines ``answer_of``."""

    @property
    def final(self) -> str:
        """The assistant's last text; empty before its first turn, and where a token limit's cut made it no answer."""
        if self.cut in ("end", "continue"):
            return ""
        return next((message["content"] for message in reversed(self.messages) if message["role"] == "assistant"), "")
