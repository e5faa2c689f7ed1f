"""Log-probabilities of tokens from one row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from domino_deploy.runtime.protocols import FloatArray
from domino_deploy.runtime.requests import TokenLogprobs


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
    last = np.partition(logits_V, -number)[-number]
    above = np.flatnonzero(logits_V > last)
    ids = np.concatenate([above, np.flatnonzero(logits_V == last)[: number - above.size]])
    return ids[np.lexsort((ids, -logits_V[ids]))]
