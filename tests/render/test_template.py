"""What a template does to contents, told from two renderings; and what is shown to a template that refuses messages."""

import json
from dataclasses import replace
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, RenderError
from agentrl.render.template import ChatTemplate, Shape, Slot, shapes_of
from agentrl.types import Message

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ content }}{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"


class Templated:
    """A template without a tokenizer."""

    def __init__(self, source: str) -> None:
        self.chat_template = source
        self.rendered = 0

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        self.rendered += 1
        environment = jinja2.Environment(autoescape=False)
        environment.filters["tojson"] = lambda text: json.dumps(text, ensure_ascii=False)

        def raise_exception(reason: str) -> None:
            raise jinja2.TemplateError(reason)

        template = environment.from_string(self.chat_template)
        return template.render(messages=conversation, raise_exception=raise_exception, **options)


def template_of(content: str, **args: object) -> ChatTemplate:
    return ChatTemplate(Templated(PLAIN.replace("content", content)), args)


USER, TOOL = Shape(role="user"), Shape(role="tool")


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("'  ' + m.content", Slot(number=0)),
        ("m.content | trim", Slot(number=0, trim_left=True, trim_right=True)),
        ("m.content.lstrip()", Slot(number=0, trim_left=True)),
        ("m.content.rstrip()", Slot(number=0, trim_right=True)),
        ("m.content | tojson", Slot(number=0, quoted=True)),
        ("m.content | trim | tojson", Slot(number=0, trim_left=True, trim_right=True, quoted=True)),
    ],
)
def test_what_is_done_to_contents_is_learned(content: str, wanted: Slot) -> None:
    template = template_of(content)
    pieces = template.write((USER,))
    assert [piece for piece in pieces if isinstance(piece, Slot)] == [wanted]
    for text in (" a\t", "\n", '"\\é\n', "plain"):
        shown = "".join(piece if isinstance(piece, str) else piece.fill(text) for piece in pieces)
        alone = Templated(PLAIN.replace("content", content))
        assert shown == alone.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)


CHANGES = [" | upper", "[:5]", "[5:]", " * 2", " and ''", ".strip('\\n')", " | tojson | tojson", " | replace('\"', '')"]


@pytest.mark.parametrize("change", [*CHANGES, " | length", " | urlencode"])
def test_what_else_is_done_to_contents_is_refused(change: str) -> None:
    with pytest.raises(RenderError, match="once, in order, as it is"):
        template_of(f"m.content{change}").write((USER,))


def test_the_template_is_asked_once() -> None:
    source = Templated(PLAIN.replace("content", "m.content"))
    template = ChatTemplate(source, {})
    messages = [Message(role="user", content="a"), Message(role="tool", content="b", name="python")]
    pieces = template.write(shapes_of(messages))
    asked = source.rendered
    assert template.write(shapes_of([{**message, "content": "other"} for message in messages])) == pieces  # type: ignore
    assert source.rendered == asked
    assert template.write(shapes_of([messages[0], {**messages[1], "content": ""}])) != pieces


@given(st.text(max_size=12), st.text(max_size=12))
def test_names_and_ids_bring_nothing_along(name: str, call_id: str) -> None:
    (shape,) = shapes_of([Message(role="tool", content="x", name=f"<{name}>", tool_call_id=f"<{call_id}>")])
    assert shape.name == "unknown" and shape.call_id == "call00000"


STRICT = """{% for m in messages -%}
{% if (m.role == 'user') != (loop.index0 is even) or m.role in ('system', 'tool') -%}
{{ raise_exception('take turns') }}
{%- endif %}[{{ m.role }}]{{ m.content | trim }}
{%- endfor %}"""


def test_a_template_that_counts() -> None:
    counting = ChatTemplate(Templated("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"), {})
    with pytest.raises(RenderError, match=r"counts: .*; set tokenizer.chat_template to one that writes every turn"):
        counting.check_turns((TOOL,))
    template_of("m.content").check_turns((TOOL, USER))


def test_variables() -> None:
    assert template_of("m.content ~ mood", mood="!").write((USER,)) == ("[user]", Slot(number=0), "![go]")
    with pytest.raises(ConfigError, match="no variable 'moods' to set; did you mean 'mood'"):
        template_of("m.content ~ mood", moods="!")
    with pytest.raises(ConfigError, match="no variable 'messages' to set"):
        template_of("m.content", messages="!")


def test_what_opens_a_turn() -> None:
    assert template_of("m.content").opening == "[go]"
    assert ChatTemplate(Templated(STRICT), {}).opening == ""
    spaced = "{% for m in messages %}{{ '[u]' if m.role == 'user' else ' ' }}{{ m.content }}{% endfor %}"
    assert ChatTemplate(Templated(spaced), {}).lead == " " and template_of("m.content").lead == ""


CALLS_ONLY = """{% for m in messages %}{% if m.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}
{{- raise_exception('no call') }}{% endif %}<r>{{ m.content }}</r>
{%- else %}[{{ m.role }}]{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}[end]
{%- endif %}{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"""


def test_results_that_only_calls_may_have_follow_calls() -> None:
    """Where the template describes tools, so that the model's calls are its own; else they are the user's words."""
    native = ChatTemplate(Templated(CALLS_ONLY), {}, [{"function": {"name": "search"}}])
    left, right = Slot(number=0), Slot(number=1)
    assert native.after_turn((TOOL,)) == ("[end]<r>", left, "</r>[go]")
    assert native.after_turn((TOOL, TOOL)) == ("[end]<r>", left, "</r><r>", right, "</r>[go]")
    assert native.after_turn((TOOL, USER)) == ("[end]<r>", left, "</r>[user]", right, "[end][go]")
    assert native.after_turn((replace(TOOL, content=""), USER)) == ("[end]<r></r>[user]", right, "[end][go]")
    assert native.after_turn((USER,)) == ("[end][user]", left, "[end][go]")
    assert template_of("m.content").after_turn((TOOL,)) == ("[tool]", left, "[go]")
    bare = ChatTemplate(Templated(CALLS_ONLY), {})
    assert bare.after_turn((TOOL,)) == ("[end][user]", left, "[end][go]")
    # A turn that calls and ends otherwise than a turn that does not: its end is not known.
    other = CALLS_ONLY.replace("[end]\n", "{{ '[end]' if not m.tool_calls }}\n")
    unknown = ChatTemplate(Templated(other), {}, [{"function": {"name": "search"}}])
    assert unknown.after_turn((TOOL,)) == ("[end][user]", left, "[end][go]")
