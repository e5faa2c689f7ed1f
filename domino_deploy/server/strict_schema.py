"""OpenAI's `strict` for JSON schemas: an object has the properties that its schema lists, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_ONE = ("items", "additionalProperties")
_DEFINITIONS = ("$defs", "definitions")
# Beside what an object says of its own properties, or beside another of these, each says more of them: to close one part would forbid
# what the others ask for.
_JOINING = ("$ref", "allOf", "anyOf", "oneOf")
_OWN = ("properties", "patternProperties", "additionalProperties", "required")


def closed(schema: Any) -> Any:
    """A copy in which objects that list properties and say nothing of others have no others.

    Schemas that are joined of several (an `allOf` of more than one, or parts beside properties) stay as they are, and so do those that
    they refer to, wherever else these are used.
    """
    return _closed(schema, _opened(schema))


def _closed(schema: Any, opened: set[int]) -> Any:
    if not isinstance(schema, dict):
        return schema
    is_open = id(schema) in opened
    words = _DEFINITIONS if is_open else (*_SEVERAL, *_NAMED, *_ONE)
    found: dict[str, Any] = {"additionalProperties": False} if "properties" in schema and not is_open else {}
    for word, value in schema.items():
        if word not in words:
            found[word] = value
        elif word in _NAMED and isinstance(value, dict):
            found[word] = {name: _closed(one, opened) for name, one in value.items()}
        elif word in _SEVERAL and isinstance(value, list):
            found[word] = [_closed(one, opened) for one in value]
        else:
            found[word] = _closed(value, opened) if word in _ONE else value
    return found


def _opened(schema: Any) -> set[int]:
    """Identities of the objects that joined schemas are made of and refer to, and of what these refer to in turn."""
    objects = list(_objects(schema))
    anchors = {inner["$anchor"]: inner for inner in objects if isinstance(inner.get("$anchor"), str)}
    waiting: list[Any] = [inner for inner in objects if _is_joined(inner)]
    opened: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict) and id(value) not in opened:
            opened.add(id(value))
            waiting += [inner for word, inner in value.items() if word not in _DEFINITIONS]  # these count where they are used
            if isinstance(value.get("$ref"), str):
                waiting.append(_target(value["$ref"], schema, anchors))
    return opened


def _is_joined(schema: dict[str, Any]) -> bool:
    parts, several = [word for word in _JOINING if word in schema], schema.get("allOf")
    has_own = any(word in schema for word in _OWN)
    return len(parts) > 1 or (bool(parts) and has_own) or (isinstance(several, list) and len(several) > 1)


def _target(reference: str, root: Any, anchors: Mapping[str, Any]) -> Any:
    """What a reference inside `root` stands for; None if there is no such thing."""
    name, *steps = unquote(reference).removeprefix("#").split("/")
    found = anchors.get(name) if name else root
    for step in steps:
        if isinstance(found, dict):
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects inside of a schema, itself included."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
