"""OpenAI's `strict` for JSON schemas: an object has the properties that its schema lists, and no others."""

from __future__ import annotations

from typing import Any

_SEVERAL = ("anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_ONE = ("items", "additionalProperties")
# Beside properties of its own, each of these lets an object have more of them: to close one part would forbid the others'.
_JOINING = ("$ref", "allOf", "anyOf", "oneOf")


def closed(schema: Any) -> Any:
    """A copy in which objects that list properties and say nothing of others have no others.

    Schemas that are joined of several (`allOf`, or one of the above beside properties) stay as they are.
    """
    if not isinstance(schema, dict):
        return schema
    is_object = "properties" in schema
    if "allOf" in schema or (is_object and any(word in schema for word in _JOINING)):
        return {**schema, **{word: _each(schema[word]) for word in ("$defs", "definitions") if word in schema}}
    found: dict[str, Any] = {"additionalProperties": False} if is_object else {}
    for word, value in schema.items():
        if word in _SEVERAL and isinstance(value, list):
            found[word] = [closed(one) for one in value]
        elif word in _NAMED:
            found[word] = _each(value)
        else:
            found[word] = closed(value) if word in _ONE else value
    return found


def _each(named: Any) -> Any:
    return {name: closed(schema) for name, schema in named.items()} if isinstance(named, dict) else named
