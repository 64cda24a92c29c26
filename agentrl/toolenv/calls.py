"""Run an agent's tool calls: each fault of a call or a tool becomes an answer that the agent can learn from."""

import copy
import time
from collections.abc import Sequence
from typing import cast

from agentrl.errors import AgentRLError, InfrastructureError
from agentrl.sandboxes import SandboxError
from agentrl.toolenv import author
from agentrl.toolenv.tools.function import Tool, ToolContext, ToolError, cut_middle, shown
from agentrl.types import Message, ToolCall, ToolRun


def answer(call: ToolCall, tools: Sequence[Tool], context: ToolContext, source: str) -> tuple[Message, ToolRun]:
    """Run a call.

    Args:
        call: as the dialect read it.
        tools: those of the environment.
        context: the episode.
        source: the environment's class and attribute, for errors of the tools' author.

    Raises:
        InfrastructureError: a tool's sandbox or server failed.
        EnvContractError: a tool returned something else than a text.
    """
    # Copied before the call: a tool may change its arguments.
    arguments = copy.deepcopy(dict(call.arguments))
    began = time.perf_counter()
    try:
        with context.during_call() as own:
            content, ok = _run(call, tools, own, source), True
    except ToolError as error:
        content, ok = shown(error), False
    name = author.writable(call.name)
    message = Message(role="tool", content=author.writable(content), name=name, tool_call_id=call.id)
    return message, ToolRun(name=name, ok=ok, wall_s=time.perf_counter() - began, arguments=arguments)


def _run(call: ToolCall, tools: Sequence[Tool], context: ToolContext, source: str) -> str:
    if call.error:
        raise ToolError(call.error)
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        names = ", ".join(tool.name for tool in tools)
        raise ToolError(f"there is no tool {cut_middle(repr(call.name), 100)}; the tools are: {names}")
    try:
        content = cast(object, tool.call(call.arguments, context))
    except (AgentRLError, ToolError):
        raise
    except SandboxError as error:
        raise InfrastructureError(f"sandbox failed: {error}") from error
    except BaseException as error:  # a tool's fault becomes an observation, sys.exit() included
        if author.is_ctrl_c(error):
            raise
        raise ToolError(cut_middle(f"{type(error).__name__}: {shown(error)}", 2000)) from error
    if isinstance(content, str):
        return content
    raise author.gave(f"{source}: {tool.name}.call", content, "return text")
