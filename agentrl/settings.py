"""``agentrl config``: every setting with its meaning, as a TOML file that can be used as it is."""

import json
import re
import textwrap
from collections.abc import Mapping

from agentrl.config import Config, load_config, presets, to_toml
from agentrl.errors import UnknownNameError

_KINDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def explained(what: str | None = None) -> str:
    """The settings as TOML, each under comments that say what it means, what it may be and its default.

    Args:
        what: a section, or a preset, whose values are then taken; all settings with their defaults without it.

    Raises:
        UnknownNameError: there is no such section or preset.
    """
    sections, known = list(Config.model_fields), presets()
    if what is not None and what not in [*sections, *known]:
        raise UnknownNameError("section or preset", what, [*sections, *known])
    values, defaults = load_config(preset=what if what in known else None), Config()
    about = Config.model_json_schema()["$defs"]
    text = "# For agentrl train FILE.toml; --set section.key=value changes one of them.\n"
    for section in [what] if what in sections else sections:
        schema = about[type(getattr(values, section)).__name__]
        text += f"\n{_comment(schema['description'])}[{section}]\n"
        for key, setting in schema["properties"].items():
            default = _line(key, getattr(getattr(defaults, section), key)).removeprefix(f"{key} = ")
            # The readers in parentheses are for those who change agentrl.
            meaning = re.sub(r" \([\w, ]+\)\.$", ".", setting["description"])
            text += f"\n{_comment(meaning)}{_comment(f'{_kind(setting)}; default {default}')}"
            text += _line(key, getattr(getattr(values, section), key)) + "\n"
    return text


def _line(key: str, value: object) -> str:
    return to_toml({"": {key: value}}).splitlines()[1]


def _comment(text: str) -> str:
    return textwrap.fill(text.replace("``", ""), 120, initial_indent="# ", subsequent_indent="# ") + "\n"


def _kind(setting: Mapping[str, object]) -> str:
    if isinstance(choices := setting.get("enum"), list):
        return " or ".join(map(json.dumps, choices))
    kind = _KINDS.get(str(setting["type"])) or ("a list" if setting["type"] == "array" else "a table")
    return ", ".join([kind, *(f"{words} {setting[name]}" for name, words in _BOUNDS.items() if name in setting)])
