"""Made-up arguments that fit a JSON schema, for the examples that a model reads and the calls that a check makes."""

from collections.abc import Mapping
from typing import Any

_PLAIN: Mapping[str, object] = {"integer": 1, "number": 1.0, "boolean": True, "null": None}


def sample_arguments(parameters: Mapping[str, object], text: str = "", *, optional: bool = False) -> dict[str, object]:
    """Make arguments that fit, as far as the schema is simple.

    Args:
        parameters: the JSON schema of an object.
        text: the value of every text argument; empty uses the argument's own name.
        optional: also fill in optional arguments.
    """
    definitions = _mapping(parameters.get("$defs"))

    def fields(schema: Mapping[str, Any], depth: int) -> dict[str, object]:
        properties = _mapping(schema.get("properties"))
        wanted = [name for name in properties if optional or name in _list(schema.get("required"))]
        return {name: value(properties[name], text or name, depth) for name in wanted}

    def value(schema: object, filler: str, depth: int) -> object:
        if not isinstance(schema, Mapping) or depth == 0:
            return filler
        keys = _mapping(schema)
        for choices in (keys.get("anyOf"), keys.get("oneOf"), keys.get("allOf")):
            if _list(choices):
                # Deeper down the last choice, which is null for an optional field: the type may contain itself, as a
                # tree's nodes do.
                return value(_list(choices)[0 if depth > 6 else -1], filler, depth - 1)
        if "$ref" in keys:
            return value(definitions.get(str(keys["$ref"]).removeprefix("#/$defs/")), filler, depth - 1)
        if keys.get("type") == "object":
            return fields(keys, depth - 1)
        if keys.get("type") == "array":
            items = _list(keys.get("prefixItems")) or [keys.get("items")] * keys.get("minItems", 0)
            return [value(item, filler, depth - 1) for item in items]
        fitting = [*_list(keys.get("enum")), keys.get("const"), *_bounds(keys)]
        return next((fit for fit in fitting if fit is not None), _PLAIN.get(str(keys.get("type")), filler))

    return fields(parameters, 8)


def _bounds(schema: Mapping[str, Any]) -> list[object]:
    """Return numbers within a schema's bounds."""
    steps = {"minimum": 0, "maximum": 0, "exclusiveMinimum": 1, "exclusiveMaximum": -1}
    return [schema[key] + step for key, step in steps.items() if isinstance(schema.get(key), int | float)]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
