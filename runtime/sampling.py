"""From one row of logits to one token id: greedy choice, or temperature, top-k, top-p, min-p and a keyed uniform.

The randomness of a request is a function of its seed and of the position of the token in the sequence, nothing else;
that makes speculative and plain decoding with the same seed the same, token for token.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from domino_deploy.errors import OutOfRangeError, VerificationError
from domino_deploy.runtime.protocols import FloatArray

MAX_SEED = 2**64 - 1
MIN_TEMPERATURE = 0
MAX_TOP_K = 2**31 - 1  # JSON has no bound for integers, and no vocabulary is larger
_LARGEST = sys.float_info.max
TOP_P_RANGE = (0, 1)  # 0 itself keeps no token and is none
MIN_P_RANGE = (0, 1)
# These ranges are OpenAI's, but for the repetition penalty, which is transformers' and bounded here: beyond, logits overflow.
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
# Sorting all candidates among 152k logits takes 20 ms and more, telling these apart 1.6 ms; of most real rows they hold 0.9 of the mass.
_NUCLEUS_SIZE = 2048


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a token is chosen from the target's logits; the defaults are greedy decoding.

    Filters apply in transformers' order: temperature, top-k, top-p, min-p.

    Args:
        temperature: 0 for greedy decoding, otherwise logits are divided by it.
        top_k: keep the k most likely tokens, and those as likely as the last of them; 0 keeps all.
        top_p: keep the most likely tokens until their mass reaches top_p; 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
        seed: makes sampling repeatable; None draws a fresh one for every request.
        presence_penalty: taken off the logits of tokens that were generated before, from -2 to 2.
        frequency_penalty: taken off as often as they were generated before, from -2 to 2.
        repetition_penalty: logits of tokens in the prompt or generated before are divided by it if positive, and multiplied if not;
            1 changes nothing.
        logit_bias: added to the logits of these tokens, from -100 to 100.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # a dict has no hash; equality does compare it

    def __post_init__(self) -> None:
        problems = {}
        if not _is_number(self.temperature) or not MIN_TEMPERATURE <= self.temperature <= _LARGEST:
            problems["temperature"] = f"must be a finite number, {MIN_TEMPERATURE} or above, found {self.temperature!r:.80}"
        if not is_integer(self.top_k) or not 0 <= self.top_k <= MAX_TOP_K:
            problems["top_k"] = f"must be an integer from 0 (all tokens) to {MAX_TOP_K}, found {self.top_k!r:.80}"
        above, most = TOP_P_RANGE
        if not _is_number(self.top_p) or not above < self.top_p <= most:
            problems["top_p"] = f"must be a number above {above} and at most {most}, found {self.top_p!r:.80}"
        least, most = MIN_P_RANGE
        if not _is_number(self.min_p) or not least <= self.min_p <= most:
            problems["min_p"] = f"must be a number from {least} to {most}, found {self.min_p!r:.80}"
        if self.seed is not None and (not is_integer(self.seed) or not 0 <= self.seed <= MAX_SEED):
            problems["seed"] = f"must be an integer from 0 to {MAX_SEED}, found {self.seed!r}"
        for name, penalty in (("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)):
            if not _is_number(penalty) or not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                problems[name] = f"must be a number from {-MAX_PENALTY:g} to {MAX_PENALTY:g}, found {penalty!r}"
        if not _is_number(self.repetition_penalty) or not 1 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            problems["repetition_penalty"] = (
                f"must be a number from {1 / MAX_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}, found {self.repetition_penalty!r:.80}"
            )
        bias_problem = _bias_problem(self.logit_bias)
        if bias_problem is not None:
            problems["logit_bias"] = bias_problem
        if problems:
            raise OutOfRangeError(problems, "Correct them and send the request again.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """Whether there is a penalty or a bias; `distribution` and `Sampler` know none of them, `choosing.py` does."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


class Sampler:
    """Chooses the target's own tokens for one request."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed

    def choose(self, logits_V: FloatArray, position: int) -> int:
        """The token at `position` of the sequence, given the logits of the row before it.

        Raises:
            VerificationError: the logits are no basis for a choice (NaN, +inf, or all of them -inf).
        """
        best = checked_best(logits_V, position)
        if self.params.is_greedy:
            return best
        return inverse_cdf(distribution(logits_V, self.params), uniform(self.seed, position))


def checked_best(logits_V: FloatArray, position: int) -> int:
    """The token with the highest logit, the lowest id among equals.

    Raises:
        VerificationError: the logits are no basis for a choice (NaN, +inf, or all of them -inf).
    """
    best = int(np.argmax(logits_V))  # a NaN wins over every number
    if not np.isfinite(logits_V[best]):
        raise VerificationError(
            f"Expected finite logits for position {position}, found {_census(logits_V)}. "
            "The target's graph or weights are damaged; run: domino-deploy verify BUNDLE"
        )
    return best


def checked_greedy_id(token: int, position: int, vocab_size: int) -> int:
    """The token at `position`, as a backend chose it by the highest logit, which stayed on the device.

    Raises:
        VerificationError: no token; the logits were no basis for a choice.
    """
    if not 0 <= token < vocab_size:
        raise VerificationError(
            f"Expected finite logits for position {position}, found none to choose a token by ({token} is not in [0, {vocab_size})). "
            "The target's engine or weights are damaged; run: domino-deploy verify BUNDLE"
        )
    return token


def distribution(logits_V: FloatArray, params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities [V] that a token is drawn from, after all filters; `params.temperature` must be above 0."""
    scores = logits_V.astype(np.float64)
    scores -= scores.max()
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        scores /= params.temperature
    weights = np.exp(scores, out=scores)
    if 0 < params.top_k < weights.size:
        kth_logit = np.partition(logits_V, -params.top_k)[-params.top_k]
        weights[logits_V < kth_logit] = 0.0
    if params.top_p < 1:
        weights = _nucleus(weights, params.top_p)
    if params.min_p > 0:
        weights[weights < params.min_p * weights.max()] = 0.0
    weights /= weights.sum()
    return weights


def inverse_cdf(probabilities_V: NDArray[np.float64], uniform: float) -> int:
    """The token whose stretch of the cumulative distribution holds `uniform`, from [0, 1); ids in rising order."""
    cumulative = np.cumsum(probabilities_V)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # The product may round up to the total: then it is the last token that can be drawn at all.
    return token if token < probabilities_V.size else int(np.flatnonzero(probabilities_V)[-1])


def uniform(seed: int, position: int) -> float:
    """A uniform number from [0, 1) for one position of one request (Philox: a counter-based generator)."""
    bits = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """Zero all but the most likely tokens whose mass reaches `top_p` (arXiv 1904.09751); ties go to the lowest id."""
    total = weights.sum()
    # Tokens rarer than this weigh less than 1 - top_p together, so none of them is in: sort only the others.
    candidates = np.flatnonzero(weights >= (1 - top_p) * total / weights.size)
    few = candidates
    if candidates.size > _NUCLEUS_SIZE:
        # Mostly that many are enough, and the others need not be sorted.
        least = np.partition(weights[candidates], -_NUCLEUS_SIZE)[-_NUCLEUS_SIZE]
        few = candidates[weights[candidates] >= least]
    kept = _until(few, weights, top_p * total)
    if kept.size == few.size:
        kept = _until(candidates, weights, top_p * total)
    filtered = np.zeros_like(weights)
    filtered[kept] = weights[kept]
    return filtered


def _until(candidates: NDArray[np.int64], weights: NDArray[np.float64], mass: float) -> NDArray[np.int64]:
    """The most likely candidates until their mass reaches `mass`; the lowest id goes first among equals."""
    ranked = candidates[np.argsort(-weights[candidates], kind="stable")]
    mass_before = np.cumsum(weights[ranked]) - weights[ranked]
    return ranked[mass_before < mass]


def _census(logits_V: FloatArray) -> str:
    return (
        f"{np.isnan(logits_V).sum()} NaN, {np.isposinf(logits_V).sum()} +inf and {np.isneginf(logits_V).sum()} -inf among {logits_V.size}"
    )


def _bias_problem(logit_bias: object) -> str | None:
    if not isinstance(logit_bias, Mapping):
        return f"must be a mapping from token ids to numbers, found {logit_bias!r:.80}"
    ids = [token for token in logit_bias if not is_integer(token) or token < 0]
    values = {token: bias for token, bias in logit_bias.items() if not _is_number(bias) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS}
    problems = [f"must be of token ids, integers from 0, found {ids[0]!r:.40}"] if ids else []
    if values:
        token, bias = next(iter(values.items()))
        problems.append(
            f"must be numbers from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, found {len(values)} other(s): "
            f"{bias!r:.40} for token {token!r:.40}"
        )
    return "; ".join(problems) or None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
