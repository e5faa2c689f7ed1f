"""When a response runs in circles: greedy decoding that has begun to repeat with a short period repeats for ever.

Imported by `bench` on machines without PyTorch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WINDOW, LONGEST_PERIOD = 32, 8


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether the last `WINDOW` tokens repeat with a period of at most `LONGEST_PERIOD`."""
    tail = list(token_ids[-WINDOW:])
    return len(tail) == WINDOW and any(tail[period:] == tail[:-period] for period in range(1, LONGEST_PERIOD + 1))


def looping_rows(window_BW: Tensor) -> Tensor:
    """`is_looping` of many responses at once: bool [B] for their last `WINDOW` tokens [B, WINDOW]."""
    periods = range(1, LONGEST_PERIOD + 1)
    return functools.reduce(operator.or_, [(window_BW[:, period:] == window_BW[:, :-period]).all(dim=1) for period in periods])
