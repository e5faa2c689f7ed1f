"""Typed reads from a config.json whose fields may stand in several places; all problems go to one list.

After a problem a read returns its default or a stand-in, so that reading can go on: whoever reads must look at
`problems` before using any value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Guards against sizes that no model has and that would cost memory before anything else refused them.
_MAX_INTEGER = 2**31 - 1

REQUIRED: Any = object()


class Fields:
    """Reader over `places`: (label, JSON object) pairs, in which a field may stand once or more often with one value.

    A field that is null counts as absent, as it does in transformers.
    """

    def __init__(self, places: Sequence[tuple[str, Mapping[str, Any]]], problems: list[str]) -> None:
        self._places = places
        self.problems = problems

    def value(self, *names: str, default: Any = None) -> Any:
        """The field's value; `names` are spellings of the same field."""
        found = [
            (f"{label}.{name}" if label else name, place[name])
            for label, place in self._places
            for name in names
            if place.get(name) is not None
        ]
        if not found:
            if default is REQUIRED:
                self.problems.append(f"{' / '.join(names)} is missing ({self._where()})")
                return None
            return default
        if any(not _same(value, found[0][1]) for _, value in found[1:]):
            self.problems.append("contradiction: " + ", ".join(f"{where} is {shown(value)}" for where, value in found))
        return found[0][1]

    def integer(self, *names: str, default: Any = REQUIRED, minimum: int = 1, maximum: int = _MAX_INTEGER) -> Any:
        """An int in [minimum, maximum]; a bool or a float is none.  None only where that is the default."""
        value = self.value(*names, default=default)
        if value is None:
            return minimum if default is REQUIRED else None
        if type(value) is not int:
            return self._wrong(names, "an integer", value, minimum)
        if not minimum <= value <= maximum:
            return self._wrong(names, f"an integer from {minimum} to {maximum}", value, minimum)
        return value

    def number(self, *names: str, default: Any = REQUIRED, minimum: float = 0.0) -> Any:
        """A finite float above `minimum`."""
        value = self.value(*names, default=default)
        if value is None:
            return 1.0 if default is REQUIRED else None
        if type(value) not in (int, float) or not _is_finite(value) or not value > minimum:
            return self._wrong(names, f"a finite number above {minimum:g}", value, 1.0)
        return float(value)

    def boolean(self, *names: str, default: Any = REQUIRED) -> bool:
        value = self.value(*names, default=default)
        if value is None:
            return False
        return value if isinstance(value, bool) else self._wrong(names, "true or false", value, False)

    def text(self, *names: str, default: Any = REQUIRED) -> str:
        value = self.value(*names, default=default)
        if value is None:
            return ""
        return value if isinstance(value, str) else self._wrong(names, "a string", value, "")

    def integers(self, *names: str, default: Any = REQUIRED) -> tuple[int, ...]:
        """A list of non-negative ints; a single one counts as a list of one where a list may."""
        value = self.value(*names, default=default)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(type(item) is int and 0 <= item <= _MAX_INTEGER for item in value):
            return self._wrong(names, "a list of non-negative integers", value, ())
        return tuple(value)

    def neutral_only(self, settings: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse each of `settings` whose value is none of the listed, the ones that change nothing."""
        for name, neutral in settings.items():
            value = self.value(name)
            if value is not None and not any(_same(value, item) for item in neutral):
                accepted = " or ".join(["absent", *(shown(item) for item in neutral)])
                self.problems.append(f"{name} is {shown(value)}; only {accepted} is supported")

    def _wrong(self, names: Sequence[str], expected: str, value: Any, stand_in: Any) -> Any:
        self.problems.append(f"{names[0]} must be {expected}, found {shown(value)}")
        return stand_in

    def _where(self) -> str:
        return "looked " + " and ".join(f"under {label}" if label else "at top level" for label, _ in self._places)


def shown(value: Any) -> str:
    """A JSON value for an error message, cut short."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def shown_key(name: str) -> str:
    """A key for an error message: as it is, or escaped and cut short if it could garble the message."""
    return name if name.isprintable() and len(name) <= 80 else shown(name)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _same(one: Any, other: Any) -> bool:
    # In Python, True == 1; in a config they are a contradiction.
    return isinstance(one, bool) == isinstance(other, bool) and one == other
