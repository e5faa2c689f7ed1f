"""Log-probabilities of tokens from one row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from domino_deploy.runtime.protocols import FloatArray
from domino_deploy.runtime.requests import TokenLogprobs

# Logits per block in the search for the highest: their maxima are found as fast as by one pass, and are few.
_BLOCK = 128


def token_logprobs(logits_V: FloatArray, token_id: int, top: int) -> TokenLogprobs:
    """The log-probability of a token, and the `top` likeliest ones with theirs; `logits_V` finite but for some -inf."""
    highest = logits_V.max()
    log_total = float(highest) + float(np.log(np.exp(logits_V - highest).sum(dtype=np.float64)))
    likeliest = tuple((int(token), float(logits_V[token]) - log_total) for token in top_ids(logits_V, top))
    return TokenLogprobs(token_id=token_id, logprob=float(logits_V[token_id]) - log_total, top=likeliest)


def top_ids(logits_V: FloatArray, number: int) -> NDArray[np.int64]:
    """The ids of the highest logits, falling; the lowest id goes first among equals, and is the one taken at the edge."""
    number = min(number, logits_V.size)
    if number == 0:
        return np.zeros(0, dtype=np.int64)
    candidates = np.flatnonzero(logits_V >= _lower_bound(logits_V, number))
    logits = logits_V[candidates]
    last = np.partition(logits, -number)[-number]
    above = np.flatnonzero(logits > last)
    places = np.concatenate([above, np.flatnonzero(logits == last)[: number - above.size]])
    ids = candidates[places]
    return ids[np.lexsort((ids, -logits_V[ids]))]


def _lower_bound(logits_V: FloatArray, number: int) -> np.float32:
    """A value that at least `number` logits reach, and in practice few more: so many blocks have one of at least that.

    Maxima are found much faster than an order statistic: with 49k logits, 0.03 ms against 0.25 ms.
    """
    num_blocks = logits_V.size // _BLOCK
    if num_blocks < number:
        return logits_V.min()
    maxima = logits_V[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(axis=1)
    return np.partition(maxima, -number)[-number]
