"""A target whose logits are a function of the prefix alone, and drafters for it, good, bad and scripted.

They hold their caller to the protocols: a drafter must get every feature row once, and arrays of an earlier pass turn to
NaN, since backends reuse their memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from domino_deploy.runtime.kv_cache import CacheRows
from domino_deploy.runtime.protocols import FloatArray, IntArray, Proposal, TargetRows


@lru_cache(maxsize=200_000)
def toy_logits(prefix: tuple[int, ...], vocab_size: int) -> FloatArray:
    """Seeded by the whole prefix, so that one wrong token in a cache changes everything behind it."""
    return 1.5 * np.random.default_rng(zlib.crc32(repr(prefix).encode())).standard_normal(vocab_size).astype(np.float32)


class ToyTarget:
    """Row p's feature is (token, p)."""

    def __init__(self, vocab_size: int = 8, capacity: int = 64) -> None:
        self.vocab_size = vocab_size
        self.rows = CacheRows(capacity)
        self.tokens: list[int] = []
        self.passes: list[int] = []  # rows of each pass
        self._last: TargetRows | None = None

    @property
    def capacity(self) -> int:
        return self.rows.limit

    @property
    def length(self) -> int:
        return self.rows.length

    def logits(self, prefix: tuple[int, ...]) -> FloatArray:
        return toy_logits(prefix, self.vocab_size)

    def reset(self) -> None:
        self.rows.reset()
        self.tokens, self.passes = [], []

    def forward(self, token_ids: Sequence[int] | IntArray, num_logits: int) -> TargetRows:
        if self._last is not None:
            self._last.logits.fill(np.nan)
            self._last.features.fill(np.nan)
        self.rows.reserve(len(token_ids))
        self.passes.append(len(token_ids))
        self.tokens = [*self.tokens[: self.length], *map(int, token_ids)]
        ends = range(len(self.tokens) - num_logits + 1, len(self.tokens) + 1)
        features = np.array([(token, self.length + row) for row, token in enumerate(token_ids)], dtype=np.float32)
        self._last = TargetRows(logits=np.stack([self.logits(tuple(self.tokens[:end])) for end in ends]), features=features)
        return self._last

    def commit(self, rows: int) -> None:
        self.rows.commit(rows)


class ReplayTarget(ToyTarget):
    """Says what it was told to, from the first token of the prompt on."""

    def __init__(self, sequence: Sequence[int], vocab_size: int, capacity: int = 256) -> None:
        super().__init__(vocab_size, capacity)
        self.sequence = list(sequence)

    def logits(self, prefix: tuple[int, ...]) -> FloatArray:
        logits = np.zeros(self.vocab_size, dtype=np.float32)
        logits[self.sequence[len(prefix)]] = 9.0
        return logits


class ToyDrafter:
    """Proposes what `draft(prefix)` says, token by token; checks the features it gets."""

    max_proposals = 6

    def __init__(self, vocab_size: int = 8) -> None:
        self.vocab_size = vocab_size
        self.seen = 0

    def reset(self) -> None:
        self.seen = 0

    def draft(self, prefix: tuple[int, ...]) -> int | None:
        """The next token, or None to propose no more."""
        raise NotImplementedError

    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        assert 1 <= count <= self.max_proposals
        expected = [(token, position) for position, token in enumerate(token_ids[:-1])][self.seen :]
        np.testing.assert_array_equal(features, np.array(expected, dtype=np.float32).reshape(-1, 2))
        self.seen = len(token_ids) - 1
        drafts: list[int] = []
        while len(drafts) < count and (token := self.draft((*token_ids, *drafts))) is not None:
            drafts.append(token)
        return Proposal(token_ids=np.array(drafts, dtype=np.int64), draft_ms=0.5, head_ms=0.25)


class RandomDrafter(ToyDrafter):
    """Knows nothing: a token from a hash of the prefix."""

    def draft(self, prefix: tuple[int, ...]) -> int | None:
        return zlib.crc32(repr(("draft", prefix)).encode()) % self.vocab_size


class MatchedDrafter(ToyDrafter):
    """Always the target's most likely token."""

    def draft(self, prefix: tuple[int, ...]) -> int | None:
        return int(toy_logits(prefix, self.vocab_size).argmax())


class ScriptedDrafter(ToyDrafter):
    """Follows a script in a ring: -1 is the token that plain decoding gave there, -2 ends the proposal, others are tokens."""

    def __init__(self, script: Sequence[int], reference: Sequence[int], vocab_size: int = 8) -> None:
        super().__init__(vocab_size)
        self.script = list(script)
        self.reference = list(reference)
        self.calls = 0

    def draft(self, prefix: tuple[int, ...]) -> int | None:
        entry = self.script[self.calls % len(self.script)] if self.script else -2
        self.calls += 1
        if entry == -1:
            return self.reference[len(prefix)] if len(prefix) < len(self.reference) else 0
        return None if entry == -2 else entry % self.vocab_size
