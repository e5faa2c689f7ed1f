"""Prompt lookup: draft by copying what followed the last n-gram when it occurred before (no model, any target).

The idea is Apoorv Saxena's "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from domino_deploy.runtime.protocols import FloatArray, IntArray, Proposal

# Longest first: a longer match is a better guess.
NGRAM_SIZES = (3, 2, 1)
# The number of copied tokens that the original proposes.
MAX_PROPOSALS = 10


class PromptLookupDrafter:
    """Proposes the continuation of an earlier occurrence of the last three, two or one tokens."""

    @property
    def max_proposals(self) -> int:
        return MAX_PROPOSALS

    def reset(self) -> None:
        """Nothing is remembered between calls."""

    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        """At most `count` copied tokens; none if the last token is new."""
        started = perf_counter()
        proposed = continuation(np.asarray(token_ids, dtype=np.int64), count)
        return Proposal(token_ids=proposed, draft_ms=(perf_counter() - started) * 1e3)


def continuation(context: IntArray, count: int) -> IntArray:
    """What followed the latest match that has `count` tokens behind it, else the earliest match, which has most."""
    for size in NGRAM_SIZES:
        if context.size <= size:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(context[:-1], size)
        ends = np.flatnonzero((windows == context[-size:]).all(axis=1)) + size
        if ends.size:
            complete = ends[ends + count <= context.size]
            start = complete[-1] if complete.size else ends[0]
            return context[start : start + count]
    return context[:0]
