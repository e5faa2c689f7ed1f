"""Frozen dataclasses of plain values to JSON objects and back, strictly: every key known, every value of its field's type."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from domino_deploy.errors import BundleError, CheckpointError, DominoDeployError, RequestError, listed

T = TypeVar("T")

_EXPORT_AGAIN = "Export the bundle again with this version of domino-deploy."


def to_json(value: Any) -> Any:
    """A dataclass, or anything in one, as JSON values; enums become their names, tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], value: Any, where: str, *, error: type[DominoDeployError] = BundleError, advice: str = _EXPORT_AGAIN) -> T:
    """The dataclass `kind` that `to_json` wrote.

    Args:
        kind: a dataclass whose fields are plain values, enums, tuples, mappings or dataclasses.
        value: the JSON value.
        where: names the file in errors.
        error: what to raise.
        advice: what to do then.

    Raises:
        BundleError, or `error`: every unknown or missing key and every value of another type, by its dotted name.
    """
    problems: list[str] = []
    try:
        result = _read(kind, value, "", problems)
    except (CheckpointError, RequestError) as refusal:  # a config or a precision that refuses its values
        raise error(f"{where}: {refusal} {advice}") from refusal
    if problems:
        raise error(listed(f"{where}: {len(problems)} problem(s)", problems, advice))
    return typing.cast(T, result)


def _read(kind: Any, value: Any, name: str, problems: list[str]) -> Any:
    """The value as a `kind`; None, and a line in `problems`, if it is none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return value
    if origin in (types.UnionType, typing.Union):
        return _read_union(arguments, value, name, problems)
    if dataclasses.is_dataclass(kind):
        return _read_object(kind, value, name, problems)
    if origin is tuple and isinstance(value, list):
        # tuple[Dim, ...] with Dim = int | str: the element type is the first argument.
        return tuple(_read(arguments[0], item, f"{name}[{index}]", problems) for index, item in enumerate(value))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _read(arguments[1], item, f"{name}.{key}", problems) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum) and value in [str(item) for item in kind]:
        return kind(value)
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    problems.append(f"{name}: expected {_described(kind)}, found {value!r:.80}")
    return None


def _read_union(kinds: tuple[Any, ...], value: Any, name: str, problems: list[str]) -> Any:
    if value is None and type(None) in kinds:
        return None
    found: list[str] = []
    for kind in kinds:
        found = []
        result = _read(kind, value, name, found)
        if not found:
            return result
    problems.append(f"{name}: expected {' or '.join(_described(kind) for kind in kinds)}, found {value!r:.80}")
    return None


def _read_object(kind: Any, value: Any, name: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"{name or 'the file'}: expected an object, found {value!r:.80}")
        return None
    hints, prefix, before = typing.get_type_hints(kind), f"{name}." if name else "", len(problems)
    problems += [f"{prefix}{key}: unknown key" for key in value if key not in hints]
    problems += [f"{prefix}{key}: missing" for key in hints if key not in value]
    fields = {key: _read(hint, value[key], f"{prefix}{key}", problems) for key, hint in hints.items() if key in value}
    return kind(**fields) if len(problems) == before else None


def _described(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "one of " + ", ".join(kind)
    return getattr(kind, "__name__", str(kind))
