"""When a response runs in circles: greedy decoding that has begun to repeat with a short period repeats for ever."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW, LONGEST_PERIOD = 32, 8


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether the last `WINDOW` tokens repeat with a period of at most `LONGEST_PERIOD`."""
    tail = list(token_ids[-WINDOW:])
    return len(tail) == WINDOW and any(tail[period:] == tail[:-period] for period in range(1, LONGEST_PERIOD + 1))
