"""``agentrl config``: every setting with its meaning, as a valid TOML file."""

import json
import re
import textwrap
from collections.abc import Mapping

from pydantic import BaseModel

from agentrl.config import Config, load_config, presets
from agentrl.errors import UnknownNameError

_KINDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def explained(what: str | None = None) -> str:
    """Write the settings as TOML, each under comments with its meaning, type and default.

    Args:
        what: a section to write alone, or a preset to take the values from; by default all settings with their
            defaults.

    Raises:
        UnknownNameError: there is no such section or preset.
    """
    sections, names = list(Config.model_fields), presets()
    if what is not None and what not in [*sections, *names]:
        raise UnknownNameError("section or preset", what, [*sections, *names])
    chosen = load_config(preset=what if what in names else None)
    text = "# For agentrl train FILE.toml; --set section.key=value changes one of them.\n"
    for section in [what] if what in sections else sections:
        text += _section(section, getattr(chosen, section))
    return text


def _section(name: str, section: BaseModel) -> str:
    """Write the table ``name``, and below its settings the tables in it."""
    values, defaults, schema = section.model_dump(), type(section)().model_dump(), section.model_json_schema()
    text, tables = f"\n{_comment(schema['description'])}[{name}]\n", ""
    for key, setting in schema["properties"].items():
        if isinstance(table := getattr(section, key), BaseModel):
            tables += _section(f"{name}.{key}", table)
            continue
        # A description ends with the modules that read the setting, which users need not know.
        meaning = re.sub(r"\s\([\w, ]+\)\.$", ".", setting["description"])
        text += f"\n{_comment(meaning)}{_comment(f'{_kind(setting)}; default {_value(defaults[key])}')}"
        text += f"{key} = {_value(values[key])}\n"
    return text + tables


def _value(value: object) -> str:
    # Not by tomli-w, which spreads lists over lines and makes a table a section. Other values are the same as in JSON.
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_value(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def _comment(text: str) -> str:
    return textwrap.fill(text.replace("``", ""), 120, initial_indent="# ", subsequent_indent="# ") + "\n"


def _kind(setting: Mapping[str, object]) -> str:
    if isinstance(choices := setting.get("enum"), list):
        return " or ".join(map(json.dumps, choices))
    if isinstance(several := setting.get("anyOf"), list):
        return " or ".join(map(_kind, several))
    kind = _KINDS.get(str(setting["type"])) or ("a list" if setting["type"] == "array" else "a table")
    return ", ".join([kind, *(f"{words} {setting[name]}" for name, words in _BOUNDS.items() if name in setting)])
