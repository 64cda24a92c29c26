"""A sub-agent as a tool: the same policy, with a history and tools of its own."""

from collections.abc import Mapping, Sequence

from agentrl.errors import ConfigError
from agentrl.toolenv.calls import answer
from agentrl.toolenv.dialects import get_dialect
from agentrl.toolenv.tools.function import Tool, ToolContext, ToolError
from agentrl.types import CutTurn, Message


class SubAgent:
    """Plays the policy on a task that the agent writes, and answers with its final text.

    The sub-agent begins with an empty history, and writes calls in the agent's dialect. Its turns are rows of the
    agent's episode, and are trained like the agent's.

    Args:
        name: the name that the agent calls.
        description: one or two sentences for the agent.
        instructions: beginning of the sub-agent's system message.
        tools: tools of the sub-agent, which the agent itself can't call.
        max_turns: how often the sub-agent may speak.

    Raises:
        ConfigError: ``max_turns`` is less than 1.
    """

    def __init__(
        self, name: str, description: str, *, instructions: str = "", tools: Sequence[Tool] = (), max_turns: int = 4
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"the sub-agent {name!r} has max_turns={max_turns}: it needs at least one turn")
        self.name, self.description = name, description
        self.instructions, self.tools, self.max_turns = instructions, tuple(tools), max_turns

    @property
    def parameters(self) -> Mapping[str, object]:
        """The JSON schema of the arguments."""
        task = {"type": "string", "description": "All that the sub-agent is to know."}
        return {"type": "object", "properties": {"task": task}, "required": ["task"], "additionalProperties": False}

    def call(self, arguments: Mapping[str, object], ctx: ToolContext) -> str:
        """Play ``arguments["task"]``.

        Raises:
            ToolError: the task is missing, or the sub-agent ended without an answer; the text says why.
            InfrastructureError: the engine, or a sandbox or server of its tools, failed.
        """
        task = arguments.get("task")
        if not isinstance(task, str) or set(arguments) != {"task"}:
            raise ToolError(f"{self.name} takes one argument, task, a string")
        dialect = get_dialect(ctx.dialect, self.tools)
        system = "\n".join(filter(None, (self.instructions, dialect.instructions())))
        messages = [Message(role="system", content=system)] if system else []
        messages.append(Message(role="user", content=task))
        for _ in range(self.max_turns):
            text = ctx.policy.turn(messages, dialect.template_tools)
            if isinstance(text, CutTurn) and text.then != "answer":
                raise ToolError("a turn of the sub-agent was cut off at its limit of tokens")
            calls = dialect.parse(text)
            if not calls:
                return text
            results = [answer(call, self.tools, ctx, f"the tools of {self.name}")[0] for call in calls]
            messages += [Message(role="assistant", content=str(text)), *results]
        raise ToolError(f"the sub-agent had no answer after {self.max_turns} turns")

    def open(self, seed: int) -> None:
        """Begin an episode of the sub-agent's tools."""
        for tool in self.tools:
            tool.open(seed)

    def close(self) -> None:
        """Close the sub-agent's tools."""
        for tool in self.tools:
            tool.close()
