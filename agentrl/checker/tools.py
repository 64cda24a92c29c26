"""The tools: names, descriptions, schemas, and answers, which there are and which have a bound."""

import json
import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from agentrl.background import Overrun
from agentrl.checker.play import LONG, Subject, call_text, calls_of, gold_of, play, short
from agentrl.checker.report import Finding
from agentrl.env import ToolEnv
from agentrl.tools import BadArgumentsError, FunctionTool, Tool, ToolContext, ToolError

MAX_RESULT = 50_000
"""Characters that an answer may have beyond twice its call: an echo is bounded by what the agent writes itself."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}
_PROMPTS_FOR_MUCH = ("#" * LONG, f"print('x' * {10 * LONG})")
"""What makes a tool without a bound answer at length: its own argument, or a program's output."""


def unplayable(env: ToolEnv) -> list[Finding]:
    """ARL-E018 and E020 where they keep the dialect from being made: then there is nothing else to be seen."""
    counts = Counter(tool.name for tool in env.tools)
    if twins := [name for name, count in counts.items() if count > 1]:
        return [Finding(code="ARL-E018", message=f"{counts[name]} tools are called {name!r}.") for name in twins]
    try:
        env.dialect.instructions()
    except Exception:  # a dialect may raise anything on a schema that is none
        return [finding for tool in env.tools for finding in _schema_findings(tool)]
    return []


def _schema_findings(tool: Tool) -> list[Finding]:
    fault = schema_fault(tool.parameters)
    return [Finding(code="ARL-E020", message=f"The parameters of {tool.name!r} {fault}.")] if fault else []


def check_tools(subject: Subject) -> Iterator[Finding]:
    """ARL-E013, E018 to E021: every tool can be named, described, called and read."""
    env = subject.env
    for tool in env.tools:
        if not _NAME.fullmatch(tool.name):
            yield Finding(code="ARL-E018", message=f"A tool is called {short(tool.name)}.")
        if not tool.description.strip():
            yield Finding(code="ARL-E019", message=f"The tool {tool.name!r} has no description.")
        if faults := _schema_findings(tool):
            yield from faults
        elif _NAME.fullmatch(tool.name) and not call_text(env, tool, "x"):
            yield Finding(code="ARL-E013", message=f"The dialect {env.dialect.name} can't call {tool.name!r}.")
        yield from _bound(subject, env, tool)


class _Listener:
    """A tool that notes how each call of it ended."""

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


@contextmanager
def _listening(env: ToolEnv) -> Generator[list[_Listener]]:
    tools = env.tools
    listeners = [_Listener(tool) for tool in tools]
    env.tools = cast("list[Tool]", listeners)
    try:
        yield listeners
    finally:
        env.tools = tools


def check_tools_work(subject: Subject) -> Iterator[Finding]:
    """ARL-E023, E024: no tool raises on every call, or runs out of time on every call."""
    env = subject.env
    with _listening(env) as listeners:
        for call in calls_of(env):
            list(play(env, subject.tasks[0], [call]))
        if all(None in one.ended for one in listeners):
            return
        for task in subject.tasks:
            list(play(env, task, gold_of(env, task) or []))
    for one in listeners:
        faults = [error for error in one.ended if error is not None]
        if len(faults) < len(one.ended) or not faults or schema_fault(one.parameters):
            continue
        calls, kinds = f"{len(faults)} calls of {one.name!r}", {_kind(one.tool, error) for error in faults}
        last = faults[-1]
        said = short(str(last) if isinstance(last, ToolError) else f"{type(last).__name__}: {last}", 100)
        if kinds == {"overran"}:
            yield Finding(code="ARL-E024", message=f"All {calls} ran out of time.")
        elif kinds <= {"overran", "raised"}:
            yield Finding(code="ARL-E023", message=f"All {calls} raised, such as with {said}.")
        else:  # perhaps rightly: nobody knows the arguments that it takes
            subject.skipped.append(f"whether {one.name!r} works: all {calls} were refused, such as with {said}.")


def _kind(tool: Tool, error: Exception) -> str:
    """Whether a call ``overran``, ``raised`` what is no word to the model, or was ``refused``."""
    if isinstance(error.__cause__, Overrun):
        return "overran"
    if not isinstance(error, ToolError):
        return "raised"
    if not isinstance(tool, FunctionTool) or isinstance(error, BadArgumentsError):
        return "refused"
    # What a function raised is the cause: a ToolError where it meant to answer so.
    return "refused" if isinstance(error.__cause__, ToolError) else "raised"


def schema_fault(schema: object) -> str:
    """What keeps ``schema`` from being the JSON schema of an object, to follow "the parameters"; else empty."""
    try:
        json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        return f"can't be written as JSON ({error})"
    if not isinstance(schema, Mapping):
        return f"are {short(str(schema))}, no mapping"
    known = cast(Mapping[str, object], schema)
    if known.get("type") != "object":
        return f"have the type {known.get('type')!r}, not 'object'"
    properties = known.get("properties")
    if not isinstance(properties, Mapping):
        return "have no properties"
    named = cast(Mapping[str, object], properties)
    required = known.get("required", [])
    if not isinstance(required, list) or not set(cast(list[str], required)) <= set(named):
        return f"require {required!r}, which are not all properties"
    for name, property_ in named.items():
        if fault := _property_fault(property_):
            return f"give {name!r} {fault}"
    return ""


def _property_fault(schema: object) -> str:
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, Mapping):
        return f"the schema {short(str(schema))}"
    kind = cast(Mapping[str, object], schema).get("type", "string")
    kinds = cast(list[object], kind) if isinstance(kind, list) else [kind]
    return "" if set(map(str, kinds)) <= _TYPES else f"the unknown type {kind!r}"


def _bound(subject: Subject, env: ToolEnv, tool: Tool) -> Iterator[Finding]:
    for text in _PROMPTS_FOR_MUCH:
        call = call_text(env, tool, text)
        for turn in play(env, subject.tasks[0], [call] if call else []):
            longest = max((len(str(message["content"])) for message in turn.messages), default=0)
            if longest > MAX_RESULT + 2 * len(call):
                yield Finding(
                    code="ARL-E021",
                    message=f"The tool {tool.name!r} answered a call of {len(call)} characters with {longest}.",
                )
                return
