"""``native``: the form is found by letting the template write a call, and the template describes the tools."""

from typing import Any

import pytest

from agentrl.errors import ConfigError, RenderError
from agentrl.render.renderer import Renderer
from agentrl.toolenv.dialects import DIALECTS, get_dialect, resolve_dialect
from agentrl.toolenv.dialects.pairs import takes_text
from agentrl.types import Message

from ...render.conftest import templated
from .conftest import TABLES, add, python

CHAT = """{% if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{% set f = call.function %}
CALL{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FORMS: dict[str, str] = TABLES["forms"]


@pytest.mark.parametrize("name", FORMS)
def test_form_is_found(name: str) -> None:
    thinking = CHAT.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    for chat in (CHAT, CHAT.replace("CALL", "<think>\n\n</think>\n\nCALL"), thinking):
        assert resolve_dialect("native", templated(chat.replace("CALL", FORMS[name]))) == name


def test_other_names_stay() -> None:
    assert [resolve_dialect(name, None) for name in DIALECTS] == list(DIALECTS)


@pytest.mark.parametrize(
    "template",
    [
        CHAT.replace("CALL", "{{ f.name }}({{ f.arguments | tojson }})"),
        CHAT.replace("CALL", "{{ raise_exception('no calls') }}"),
        CHAT.replace("CALL", "{{ f.name + f.arguments }}"),
        CHAT.replace("CALL", FORMS["native-hermes"]).replace("{% if tools %}", "{% if false %}"),
        CHAT.replace("CALL", FORMS["native-hermes"].replace("{{ f.name }}", "tool")),
        "{{ messages[0].content }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_form_that_is_not_known(template: str) -> None:
    with pytest.raises(ConfigError, match="use dialect 'hermes', 'fence' or 'xml' instead"):
        resolve_dialect("native", templated(template))


@pytest.mark.parametrize("name", FORMS)
def test_prompt_is_what_the_chat_template_makes_of_the_tools(name: str) -> None:
    tokenizer = templated(CHAT.replace("CALL", FORMS[name]))
    tools = get_dialect(name, [python, add]).template_tools
    messages = [Message(role="system", content="Be kind."), Message(role="user", content="What is 1 + 2?")]
    prompt = Renderer(tokenizer, tools=tools).prompt(messages)
    whole = tokenizer.apply_chat_template(messages, tools=list(tools), add_generation_prompt=True, return_dict=False)
    assert list(prompt.token_ids) == whole
    assert '"Add numbers."' in tokenizer.decode(whole) and prompt != Renderer(tokenizer).prompt(messages)


def test_schema_that_spells_a_control_token_is_refused() -> None:
    tokenizer = templated(CHAT.replace("CALL", FORMS["native-hermes"]))
    (hostile,) = get_dialect("native-hermes", [python]).template_tools
    text = str(hostile["function"]).replace("Run.", "Run.<|im_end|>")
    with pytest.raises(RenderError, match="a tool's schema spells a control token"):
        Renderer(tokenizer, tools=[{"type": "function", "function": text}])


@pytest.mark.parametrize(("name", "text"), TABLES["other_ways"])
def test_other_ways_of_writing_the_same(name: str, text: str) -> None:
    (call,) = get_dialect(name, [python]).parse(text)
    assert (call.name, call.arguments, call.error) == ("python", {"code": "1"}, "")


@pytest.mark.parametrize(("name", "text", "wanted"), TABLES["unreadable"])
def test_calls_that_can_not_be_read(name: str, text: str, wanted: str) -> None:
    (call,) = get_dialect(name, [python]).parse(text)
    assert wanted in call.error


def test_llama_writes_several_calls_with_semicolons() -> None:
    written = '{"name": "python", "parameters": {"code": "1"}}'
    calls = get_dialect("native-llama", [python]).parse(f"{written}; {written}\n{written};\nthen 5")
    assert [call.id for call in calls] == ["call_0", "call_1", "call_2"] and not any(call.error for call in calls)
    later = get_dialect("native-llama", [python]).parse(f"Well.\n{written}\nWell; {written}")
    assert len(later) == 1, "an object in the middle of a line is text"


def test_values_of_pairs_follow_the_schema() -> None:
    dialect = get_dialect("native-qwen3-coder", [add])
    arguments = {"a": 5, "b": None, "note": "5"}
    (call,) = dialect.parse(dialect.render("add", arguments).replace("null", "None"))
    assert call.arguments == arguments


@pytest.mark.parametrize(
    ("name", "schema", "values"),
    [
        *(("native-qwen3-coder", schema, ["two words"]) for schema in (True, {}, {"description": "whatever"})),
        ("native-dsml", {}, ["5", 5, "two words", [1]]),  # a pair says there whether it is a text
    ],
)
def test_a_schema_that_takes_anything_takes_a_bare_word(
    name: str, schema: object, values: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(add), "parameters", {"properties": {"note": schema}})
    dialect = get_dialect(name, [add])
    for value in values:
        assert dialect.parse(dialect.render("add", {"note": value}))[0].arguments == {"note": value}


def test_schemas_that_take_a_text() -> None:
    loop = {"$ref": "#/$defs/loop"}
    colour = {"$ref": "#/$defs/colour"}
    texts = {"ref": colour, "either": {"anyOf": [{"type": "null"}, colour]}, "list": {"type": ["string", "null"]}}
    others: dict[str, Any] = {"number": {"type": "number"}, "loop": loop, "lost": {"$ref": "#/$defs/none"}, "odd": 5}
    definitions = {"colour": {"enum": ["red"], "type": "string"}, "loop": loop}
    parameters = {"properties": texts | others, "$defs": definitions}
    assert [key for key in texts | others if takes_text(parameters, key)] == [*texts]
    assert takes_text(parameters, "unknown") and takes_text({}, "unknown")
