"""What holds in every dialect: what is no call, what a malformed one, time, and that reading undoes writing."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentrl
from agentrl.errors import ConfigError, DialectError, EnvContractError
from agentrl.toolenv.dialects import DIALECTS, Dialect, get_dialect
from agentrl.toolenv.tools.function import FunctionTool, tool
from agentrl.types import ToolCall

from .conftest import TABLES, Slash, add, python

TOOLS = [python, add]
NAMES = list(DIALECTS)
assert DIALECTS["slash"] is Slash, "somebody's own is checked as ours are"
JSON_BODY = ["fence", "xml", "slash", "hermes", "native-hermes", "native-mistral", "native-llama"]
"""Dialects that write all arguments as one JSON object."""
PAIRS = ["native-qwen3-coder", "native-glm", "native-hy", "native-minimax", "native-dsml"]
AROUND: dict[str, str] = TABLES["around"]
OPEN = ["fence", "xml"]
"""Dialects whose mark is anybody's: the name of a tool makes it a call."""
NAMED_IN_JSON = ["hermes", "native-hermes", "native-mistral", "native-llama"]
MADE = {name: get_dialect(name, TOOLS) for name in NAMES}
MARKS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "```", "\n```\n", "```python\n", "```add\n", "<python>"),
    *("</python>", "<add>", "</add>", "[TOOL_CALLS]", "<|python_tag|>", "<function=add>", "</function>", "<|im_end|>"),
    *("<parameter=b>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '{"name": ', '"add"'),
    *('"python"', '"arguments": ', '{"code": ', '{"a": 1', '"b": [1, 2]', "NaN", "1e999", "9" * 1100, "[" * 70, '"'),
    *("]" * 70, '{"":' * 70, "\\u003c", "\\ud800", "\\", "'", "\n", "}", "]", ", ", ";", "\u2028", "\x00"),
]
texts = st.text(max_size=12) | st.lists(st.sampled_from([*MARKS, "x", " ", "é🙂"]), max_size=6).map("".join)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


def call(name: str, tool_name: str, arguments: str) -> str:
    """A call whose arguments are written by hand."""
    return TABLES["by_hand"][name].replace("NAME", tool_name).replace("ARGUMENTS", arguments)


def cut(name: str, dialect: Dialect) -> Sequence[str]:
    """Calls of the text tool that were opened and never closed."""
    whole = dialect.render("python", {"code": "print(1)"}).removesuffix(AROUND.get(name, ""))
    return [whole[: len(whole) - missing] for missing in (1, 2)]


every = pytest.mark.parametrize("name", NAMES)


@every
def test_calls_are_run_in_order_and_numbered(name: str) -> None:
    dialect = MADE[name]
    wanted = [("python", {"code": "print(1)"}), ("add", {"a": 1, "b": [2, 3]}), ("python", {"code": ""})]
    text = "\n".join(dialect.render(tool_name, arguments) for tool_name, arguments in wanted)
    for whole in (text, f"Let me see.\n{text}", f"Let me see.\n{text}\nDone."):
        calls = dialect.parse(whole)
        assert [(parsed.name, dict(parsed.arguments)) for parsed in calls] == wanted
        assert [parsed.id for parsed in calls] == ["call_0", "call_1", "call_2"]
        assert not any(parsed.error for parsed in calls)


@every
@pytest.mark.parametrize(
    "text", ["", "The answer is \\boxed{5}.", "{}", '{"answer": 5}', "[1, 2]", "<b>5</b>", "a < b"]
)
def test_texts_without_a_call(name: str, text: str) -> None:
    assert MADE[name].parse(text) == ()


@every
def test_thinking_is_no_call(name: str) -> None:
    dialect = MADE[name]
    hidden = dialect.render("python", {"code": "print(1)"})
    shown = dialect.render("python", {"code": "print(2)"})
    (only,) = dialect.parse(shown)
    assert dialect.parse(f"<think>\n{hidden}\n</think>") == ()
    assert dialect.parse(f"<think>\n{hidden}\n") == (), "a block that stays open"
    assert dialect.parse(f"<think>\n{hidden}\n</think>\n{shown}") == (only,)
    assert dialect.parse(f"<think>\n{hidden}\n<think></think>\n{shown}") == (only,), "blocks do not nest"
    assert dialect.parse(f"Hm.\n{hidden}\n</think>\n{shown}") == (only,), "a block that the chat template opened"
    assert dialect.parse(f"{cut(name, dialect)[0]}\n</think>\n{shown}") == (only,)
    assert len(dialect.parse(f"{hidden}\n<think>\n{shown}")) == 1
    assert len(dialect.parse(f"<think></think>\n{hidden}\n</think>\n{shown}")) == 2, "only one is the template's"


@every
def test_a_call_that_is_cut_off_is_malformed(name: str) -> None:
    for text in cut(name, MADE[name]):
        calls = MADE[name].parse(f"Let me see.\n{text}")
        assert len(calls) == 1 and calls[0].error, text


@every
def test_think_tags_inside_a_call_belong_to_it(name: str) -> None:
    arguments = {"code": "print('<think>', '</think>')"}
    assert MADE[name].parse(MADE[name].render("python", arguments))[0].arguments == arguments


@pytest.mark.parametrize("name", [*NAMED_IN_JSON, *PAIRS, *OPEN])
def test_unknown_tools_are_calls_where_the_mark_is_a_calls_own(name: str) -> None:
    written, read = ("x", {"b": "x"}) if name in PAIRS else ('{"url": "x"}', {"url": "x"})
    calls = MADE[name].parse(call(name, "browser", written))
    assert calls == (() if name in OPEN else (ToolCall(name="browser", arguments=read, id="call_0"),))


BROKEN = {
    **dict(TABLES["unreadable_arguments"]),
    '{"a": ' + "9" * 2000 + "}": "at most 1000 digits",
    '{"a": ' + "[" * 100 + "]" * 100 + "}": "nested",
    '{"a": ' + "[" * 100_000: "",
}


@pytest.mark.parametrize("name", JSON_BODY)
@pytest.mark.parametrize("arguments", BROKEN, ids=lambda arguments: arguments[:24])
def test_arguments_that_can_not_be_read(name: str, arguments: str) -> None:
    (read,) = MADE[name].parse(call(name, "add", arguments))
    assert read.error and BROKEN[arguments] in read.error
    assert read.arguments == {} and len(read.error) < 300


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("value", ["[1, 2", "NaN", "1e999", '{"a": 1, "a": 2}', "[" * 100_000, ""])
def test_values_that_can_not_be_read(name: str, value: str) -> None:
    (read,) = MADE[name].parse(call(name, "add", value))
    assert read.name == "add" and read.error.startswith("argument 'b': ")


@pytest.mark.parametrize("name", NAMED_IN_JSON)
@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ('{"ARGS": {}}', 'lacks "name"'),
        ('{"name": 5, "ARGS": {}}', '"name" must be a text'),
        ('{"name": "", "ARGS": {}}', '"name" must be a text'),
        ('{"name": "' + "x" * 200 + '"}', "at most 128 characters"),
        ('{"name": "add", "code": 5}', "'code' belongs elsewhere"),
        ('{"name": "add", "": 5}', "'' belongs elsewhere"),
    ],
)
def test_calls_that_are_not_whole(name: str, body: str, wanted: str) -> None:
    keyed = body.replace("ARGS", "parameters" if name == "native-llama" else "arguments")
    (read,) = MADE[name].parse(re.sub('{"name".*}', lambda _: keyed, call(name, "NAME", "0"), flags=re.DOTALL))
    assert wanted in read.error and len(read.name) <= 128


@pytest.mark.parametrize("name", [*NAMED_IN_JSON, *OPEN])
def test_a_call_without_arguments_has_none(name: str) -> None:
    written = re.sub(', "(arguments|parameters)": 0', "", call(name, "add", " " if name in OPEN else "0"))
    assert MADE[name].parse(written) == (ToolCall(name="add", arguments={}, id="call_0"),)


@every
@given(text=texts | st.lists(st.sampled_from([*MARKS, "\ud800"]), max_size=12).map("".join))
def test_parsing_never_raises(name: str, text: str) -> None:
    for number, read in enumerate(MADE[name].parse(text)):
        assert read.id == f"call_{number}" and len(read.name) <= 128 and len(read.error) <= 400
        json.dumps(dict(read.arguments), allow_nan=False)


@every
@given(code=texts, any_json=st.dictionaries(st.sampled_from(["a", "b", "note", "<x>", ""]), values, max_size=3))
def test_reading_undoes_writing(name: str, code: str, any_json: dict[str, Any]) -> None:
    for tool_name, arguments in [("python", {"code": code}), ("add", any_json)]:
        try:
            text = MADE[name].render(tool_name, arguments)
        except DialectError as error:
            assert str(error).startswith(f"dialect {name} can't write this call of {tool_name!r}")
            assert name not in NAMED_IN_JSON, "whatever is JSON can be written there"
            continue
        for whole in (text, f"Some words.\n{text}\nMore.", f"<think>Hm.</think>\n{text}"):
            assert MADE[name].parse(whole) == (ToolCall(name=tool_name, arguments=arguments, id="call_0"),)


DEEP: list[object] = []
for _ in range(5000):
    DEEP = [DEEP]
NO_JSON = [float("nan"), float("inf"), {1, 2}, (1, 2), b"x", "\ud800", {1: 2}, 10**1001, 10**5000, DEEP, object()]


@every
@pytest.mark.parametrize("value", NO_JSON, ids=range(len(NO_JSON)))
def test_what_is_no_json_can_not_be_written(name: str, value: object) -> None:
    with pytest.raises(DialectError, match=f"dialect {name} can't write this call of 'add'"):
        MADE[name].render("add", {"a": 1, "b": value})


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *(("fence", "a\n```\nb"), ("xml", "print('</python>')"), ("native-qwen3-coder", "'</parameter>'")),
        *(("native-qwen3-coder", "'</tool_call>'"), ("native-glm", "'</arg_value>'")),
    ],
)
def test_a_text_that_holds_the_closing_mark_can_not_be_written(name: str, code: str) -> None:
    with pytest.raises(DialectError, match="it would be read as another one"):
        MADE[name].render("python", {"code": code})


@pytest.mark.parametrize("name", OPEN)
def test_calls_that_fit_no_tool_can_not_be_written(name: str) -> None:
    for tool_name, arguments in [("sql", {"code": "x"}), ("python", {"code": 5}), ("python", {"cod": "x"})]:
        with pytest.raises(DialectError):
            MADE[name].render(tool_name, arguments)


HOSTILE = [
    *("<tool_call>", "<tool_call>{", "<tool_call></tool_call>", '<tool_call>{"":"', "</think>", "<think>"),
    *("[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS] [{", '\n{"name":', '\n{"name": "', "<|python_tag|>", "\n", " "),
    *("```python\n", "```add\n```\n", "```", "\n```python", "<python>", "</python>", "<add>{</add>", "{", "[", '"'),
    *("\\", "<tool_call>\n<function=add>\n<parameter=b>", "<tool_call>add<arg_key>", "<parameter=b>1</parameter>"),
    *('<invoke name="', '<invoke name="add"><parameter name="b">', "<tool_call:opensource>add<tool_sep:opensource>"),
    '<\uff5cDSML\uff5cinvoke name="add"><\uff5cDSML\uff5cparameter name="b" string="true">',
    *('{"name": "add"};', '\n{"name": "add"} ', "<tool_call>x</think>", "1", "```python\n</think>", "\n;", "< "),
]


@pytest.mark.slow
@every
@pytest.mark.parametrize(("size", "limit"), [(200_000, 2.0), pytest.param(500_000, 3.0, marks=pytest.mark.ci)])
def test_hostile_texts_take_linear_time(name: str, size: int, limit: float) -> None:
    """What is quadratic takes minutes."""
    for unit in HOSTILE:
        for text in (unit * (size // len(unit)), cut(name, MADE[name])[0] + unit * (size // 5 // len(unit))):
            began = time.process_time()
            MADE[name].parse(text)
            assert time.process_time() - began < limit, unit


@every
def test_hash_changes_with_whatever_changes_the_game(name: str) -> None:
    @tool
    def other(code: str) -> str:
        """Run something else."""
        return code

    other.name = "python"
    others = {dialect.hash for dialect in MADE.values() if dialect is not MADE[name]}
    hashes = {get_dialect(name, tools).hash for tools in ([], [python], TOOLS, [other])}
    assert len(others | hashes) == len(MADE) + 3 and all(len(hash_) == 16 and int(hash_, 16) >= 0 for hash_ in hashes)
    assert get_dialect(name, TOOLS).hash == MADE[name].hash
    assert MADE[name].label == f"{name} {MADE[name].hash}"


def test_schema_that_is_no_json() -> None:
    class Odd(FunctionTool):
        @property
        def parameters(self) -> Mapping[str, object]:
            return {"properties": {"a": {1, 2}}}

    with pytest.raises(EnvContractError, match="the parameters of tool 'python' are not a JSON schema"):
        get_dialect("hermes", [Odd(python._function)])


@every
def test_instructions_are_ours_or_the_templates(name: str) -> None:
    dialect = MADE[name]
    assert bool(dialect.instructions()) != bool(dialect.template_tools) == dialect.native == name.startswith("native-")
    if not dialect.native:
        assert all(word in dialect.instructions() for word in ("python", "add", "Add numbers.", '"integer"'))
    assert get_dialect(name).instructions() == ""


def test_native_is_no_dialect_of_its_own() -> None:
    with pytest.raises(ConfigError, match="'native' means another form for every chat template: name the form"):
        agentrl.make("agentrl/Arithmetic-v0", dialect="native")
