"""Bookkeeping of a KV cache for one sequence: how many slots are bound, which rows count, who sees what.

Pure numpy; the memory itself is the backend's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from domino_deploy.errors import CapacityError

BoolArray = NDArray[np.bool_]

# ONNX Runtime's attention reads every bound slot, used or not: bind few and grow by little.  64 slots of slack cost
# 1 % of a pass over 5 rows of a 135M-parameter target (0.7 of 67 ms), and growing costs one copy of the cache.
GROWTH_ROWS = 64


class CacheRows:
    """Which rows of a cache are committed.

    A pass `reserves` rows behind the committed ones; `commit` keeps the first of them, and the next pass writes over
    the rest.

    Args:
        limit: rows the cache may ever hold.
        growth: slots are bound in multiples of this.
    """

    def __init__(self, limit: int, growth: int = GROWTH_ROWS) -> None:
        self.limit = limit
        self.growth = growth
        self.length = 0
        self._pending = 0

    def reset(self) -> None:
        self.length = 0
        self._pending = 0

    def reserve(self, rows: int) -> None:
        """Note a pass over `rows` new rows.

        Raises:
            CapacityError: they do not fit.
        """
        check_room(self.length, rows, self.limit)
        self._pending = rows

    def commit(self, rows: int) -> None:
        if not 0 <= rows <= self._pending:
            raise ValueError(f"expected 0 to {self._pending} rows, those of the last pass, found {rows}: commit once per pass")
        self.length += rows
        self._pending = 0

    def expect_features(self, rows: int, sequence: int) -> None:
        """Check that `rows` feature rows, behind those committed, cover all of `sequence` tokens but the anchor."""
        if rows < 1 or self.length + rows != sequence - 1:
            raise ValueError(
                f"expected the features of tokens {self.length} to {sequence - 2}, at least one row, found {rows} rows: "
                "pass each token's row once, and reset the drafter for a new sequence"
            )

    def slots(self, rows: int) -> int:
        """Slots to bind for `rows` rows: the next multiple of `growth`, never above `limit`."""
        return min(next_multiple(rows, self.growth), self.limit)


def next_multiple(rows: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `rows`."""
    return -(-rows // step) * step


def check_room(length: int, rows: int, limit: int) -> None:
    """Check that `rows` new rows behind `length` fit.

    Raises:
        CapacityError: they do not.
    """
    if length + rows > limit:
        raise CapacityError(
            f"Expected at most {limit} rows, the capacity of the cache, found {length} + {rows}. "
            "Shorten the request, or open the session with a larger max_model_len."
        )


def causal_mask(start: int, out: BoolArray) -> BoolArray:
    """Fill a mask [S, C] for S rows at positions `start`...: each sees every slot up to its own."""
    rows, capacity = out.shape
    np.less_equal(np.arange(capacity), np.arange(start, start + rows)[:, None], out=out)
    return out


def block_mask(context: int, out: BoolArray) -> BoolArray:
    """Fill a mask [P, C] for a draft block behind `context` rows: each row sees the context and the whole block."""
    return placed_block_mask(context, context, None, out)


def sliding_block_mask(context: int, window: int, out: BoolArray) -> BoolArray:
    """As `block_mask`, but the row at position p sees of the context only the positions above p - window."""
    return placed_block_mask(context, context, window, out)


def placed_block_mask(context: int, block_slot: int, window: int | None, out: BoolArray) -> BoolArray:
    """As those two (with a window, the second), but the block lies in slots `block_slot`...: no row sees the slots before it and
    behind the context."""
    block, capacity = out.shape
    slots = np.arange(capacity)
    if window is None:
        np.less(slots, context, out=out)
    else:
        positions = np.arange(context, context + block)[:, None]
        np.greater(slots, positions - window, out=out)
        out[:, context:] = False
    out[:, block_slot : block_slot + block] = True
    return out
