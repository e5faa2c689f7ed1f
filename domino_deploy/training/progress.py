"""What a long run tells about itself; how it is shown is the caller's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The phase, how far it is, and a few numbers in words."""

    phase: str
    done: int
    total: int
    note: str = ""
