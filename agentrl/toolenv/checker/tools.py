"""Checks of the tools: names, descriptions, schemas, and answers, which must come and must be bounded."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from agentrl.toolenv.author import is_tool
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.checker.report import Finding
from agentrl.toolenv.checker.subject import LONG, Subject, short
from agentrl.toolenv.tools.function import NAME, BadArgumentsError, FunctionTool, Tool, ToolContext, ToolError
from agentrl.toolenv.tools.timed import Overrun

MAX_RESULT = 50_000
"""Characters that an answer may have beyond twice its call: a mere echo is bounded by the agent's own text."""
_PROMPTS_FOR_MUCH = ("#" * LONG, f"print('x' * {10 * LONG})")
"""Arguments that make an unbounded tool answer at length: by echoing them, or by running them as a program."""


def unplayable(env: ToolEnv) -> list[Finding]:
    """ARL-E018 and E020 where they keep the dialect from being made: then nothing else can be checked."""
    if strange := [tool for tool in env.tools if not is_tool(tool)]:
        message = f"Its tools hold {short(repr(strange[0]))}, which is none: a function becomes one by @tool above it."
        return [Finding("ARL-E000", message)]
    counts = Counter(tool.name for tool in env.tools)
    if twins := [name for name, count in counts.items() if count > 1]:
        return [Finding("ARL-E018", f"{counts[name]} tools are called {name!r}.") for name in twins]
    try:
        env.dialect.instructions()
    except Exception:  # a dialect may raise anything on a malformed schema
        return [finding for tool in env.tools for finding in _schema_findings(tool)]
    return []


def _schema_findings(tool: Tool) -> list[Finding]:
    fault = schema_fault(tool.parameters)
    return [Finding("ARL-E020", f"The parameters of {tool.name!r} {fault}.")] if fault else []


def check_tools(subject: Subject) -> Iterator[Finding]:
    """ARL-E013, E018 to E021: every tool can be named, described, called and read."""
    env = subject.env
    for tool in env.tools:
        if not NAME.fullmatch(tool.name):
            yield Finding("ARL-E018", f"A tool is called {short(tool.name)}.")
        if not tool.description.strip():
            yield Finding("ARL-E019", f"The tool {tool.name!r} has no description.")
        if faults := _schema_findings(tool):
            yield from faults
        # A name that no dialect can write is ARL-E018 already.
        elif NAME.fullmatch(tool.name) and not subject.call(tool, "x"):
            yield Finding("ARL-E013", f"The dialect {env.dialect.name} can't call {tool.name!r}.")
        yield from _bound(subject, tool)


class _Listener:
    """Wraps a tool and records how each call ended."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.ended: list[Exception | None] = []

    def call(self, arguments: Mapping[str, object], ctx: ToolContext) -> str:
        """Call the tool."""
        try:
            answer = self.tool.call(arguments, ctx)
        except Exception as error:
            self.ended.append(error)
            raise
        self.ended.append(None)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tool, name)


def check_tools_work(subject: Subject) -> Iterator[Finding]:
    """ARL-E023, E024: no tool raises on every call, or runs out of time on every call."""
    env, tools = subject.env, subject.env.tools
    listeners = [_Listener(tool) for tool in tools]
    # The environment turns a tool's exception into an observation, so it has to be caught at the tool.
    env.tools = cast("list[Tool]", listeners)
    try:
        _try_tools(subject, listeners)
    finally:
        env.tools = tools
    for listener in listeners:
        faults = [error for error in listener.ended if error is not None]
        if len(faults) < len(listener.ended) or not faults or schema_fault(listener.parameters):
            continue
        calls, kinds = f"{len(faults)} calls of {listener.name!r}", {_kind(listener.tool, error) for error in faults}
        last = faults[-1]
        reason = short(str(last) if isinstance(last, ToolError) else f"{type(last).__name__}: {last}", 100)
        if kinds == {"overran"}:
            yield Finding("ARL-E024", f"All {calls} ran out of time.")
        elif kinds <= {"overran", "raised"}:
            yield Finding("ARL-E023", f"All {calls} raised, such as with {reason}.")
        else:  # perhaps rightly: the made-up arguments may all be wrong
            made_up = f"all {calls}, made up for this check, were refused"
            subject.skipped.append(f"whether {listener.name!r} works: {made_up}, such as with {reason}.")


def _try_tools(subject: Subject, listeners: Sequence[_Listener]) -> None:
    """Call the tools, with arguments that cost more only where simpler ones never worked."""
    task = subject.tasks[0]
    for call in subject.calls():
        list(subject.turns(task, [call]))
    if all(None in listener.ended for listener in listeners):
        return
    for gold_task in subject.tasks:
        list(subject.turns(gold_task, subject.gold(gold_task) or []))
    for listener in listeners:
        for text in ("2", "1 + 1", task.answer, task.prompt):
            if None not in listener.ended and (call := subject.call(cast(Tool, listener), text)):
                list(subject.turns(task, [call]))


def _kind(tool: Tool, error: Exception) -> str:
    """Classify a failed call: ``overran``, ``raised`` (no word meant for the model) or ``refused``."""
    if isinstance(error.__cause__, Overrun):
        return "overran"
    if not isinstance(error, ToolError):
        return "raised"
    if not isinstance(tool, FunctionTool) or isinstance(error, BadArgumentsError):
        return "refused"
    # FunctionTool wraps every exception; the cause is a ToolError where the function raised one on purpose.
    return "refused" if isinstance(error.__cause__, ToolError) else "raised"


def schema_fault(schema: object) -> str:
    """Return why ``schema`` is no JSON schema of an object, in words after "the parameters"; empty where it is one."""
    try:
        # Through JSON, as a model reads it.
        plain: Any = json.loads(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        return f"can't be written as JSON ({error})"
    properties = plain.get("properties") if isinstance(plain, dict) and plain.get("type") == "object" else None
    if not isinstance(properties, dict):
        return "are no JSON schema of an object with properties"
    unknown = sorted(set(plain.get("required", ())) - set(properties))
    return f"require {unknown}, which are no properties" if unknown else ""


def _bound(subject: Subject, tool: Tool) -> Iterator[Finding]:
    for text in _PROMPTS_FOR_MUCH:
        call = subject.call(tool, text)
        for turn in subject.turns(subject.tasks[0], [call] if call else []):
            longest = max((len(str(message["content"])) for message in turn.messages), default=0)
            if longest > MAX_RESULT + 2 * len(call):
                message = f"The tool {tool.name!r} answered a call of {len(call)} characters with {longest}."
                yield Finding("ARL-E021", message)
                return
