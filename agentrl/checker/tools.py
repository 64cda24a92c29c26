"""The tools: names, descriptions, schemas, and answers that have a bound."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import cast

from agentrl.checker.play import LONG, Subject, call_text, play, short
from agentrl.checker.report import Finding
from agentrl.env import ToolEnv
from agentrl.tools import Tool

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
