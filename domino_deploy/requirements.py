"""Requirement lines of package metadata, as far as this project's and torch's need them; no package is imported for it.

`torch<3,>=2.10; extra == "export"` -> name, bounds, extra.  Releases are compared by their numbers: local parts (`+cpu`) and what
follows the numbers (`rc1`, `.dev3`) are left out.  Other markers than `extra` are not read.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_LINE = re.compile(r"([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>|~=)\s*([\w.+!*-]+)")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")

Release = tuple[int, ...]
_COMPARISONS: Mapping[str, Callable[[Release, Release], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One line: the package in its canonical spelling, its bounds as written, and the extra that asks for it ("" for none)."""

    name: str
    specifiers: str
    extra: str

    def allows(self, version: str) -> bool:
        """Whether a version lies within all bounds; one without numbers (a build of one's own) does."""
        found = release(version)
        return not found or all(_holds(sign, bound, found) for sign, bound in _BOUND.findall(self.specifiers))


def parse_requirement(line: str) -> Requirement | None:
    """The line's meaning; None if it has none that we know."""
    found = _LINE.fullmatch(line.strip())
    if found is None:
        return None
    extra = _EXTRA.search(found[3] or "")
    return Requirement(
        name=re.sub(r"[-_.]+", "-", found[1]).lower(), specifiers=found[2].strip().replace(" ", ""), extra=extra[1] if extra else ""
    )


def release(version: str) -> Release:
    """`2.13.0+cpu` -> (2, 13, 0); () if it begins with no number."""
    found = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version.strip())
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def below(version: str, bound: str) -> bool:
    """Whether a version comes before another; one without numbers does not."""
    found = release(version)
    return bool(found) and _holds("<", bound, found)


def _holds(sign: str, text: str, version: Release) -> bool:
    bound = release(text)
    if sign == "~=":  # ~=1.4.2 is >=1.4.2, ==1.4.*
        return _holds(">=", text, version) and version[: len(bound) - 1] == bound[:-1]
    if text.endswith(".*"):
        version = version[: len(bound)]
    length = max(len(bound), len(version))
    left, right = ((*numbers, *(0,) * (length - len(numbers))) for numbers in (version, bound))
    return _COMPARISONS[sign](left, right)
