"""The decode loop: prefill, then propose, verify, accept, commit, yield, until something ends it.

Plain decoding is the same loop without a drafter.  Knows tokens only; text and stop strings are `text.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from domino_deploy.errors import CapacityError, RequestError, listed
from domino_deploy.runtime.acceptance import accept
from domino_deploy.runtime.protocols import (
    NOTHING_PROPOSED,
    Drafter,
    FloatArray,
    PairingTarget,
    SpeculativePair,
    Step,
    Target,
    TermsMs,
    Verified,
)
from domino_deploy.runtime.sampling import Sampler, SamplingParams, checked_greedy_id, is_integer

# A prompt runs through the target in pieces of this many rows: enough for full matrix products, while attention scores
# (heads x rows x capacity x 4 bytes: 128 MiB for 32 heads and 4096 slots) stay bounded for prompts of any length.
PREFILL_ROWS = 256

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """One request.

    Args:
        sampling: how tokens are chosen.
        max_new_tokens: tokens to generate at most; the caches' capacity may end it earlier, also as "length".
        stop_strings: end as soon as the text holds one of them; it and what follows are not part of the text.
        stop_token_ids: end behind one of these tokens; it is the last of the tokens and not part of the text.
        ignore_eos: do not add the target's own end-of-sequence tokens to `stop_token_ids`.
        num_speculative_tokens: tokens to draft per cycle, 0 for plain decoding; None for the session's default.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.sampling, SamplingParams):
            problems.append(f"sampling must be SamplingParams, found {self.sampling!r}")
        if not is_integer(self.max_new_tokens) or self.max_new_tokens < 1:
            problems.append(f"max_new_tokens must be an integer, at least 1, found {self.max_new_tokens!r}")
        if not isinstance(self.stop_strings, tuple) or not all(isinstance(stop, str) and stop for stop in self.stop_strings):
            problems.append(f"stop_strings must be a tuple of strings that are not empty, found {self.stop_strings!r}")
        if not isinstance(self.stop_token_ids, tuple) or not all(is_integer(token) and token >= 0 for token in self.stop_token_ids):
            problems.append(f"stop_token_ids must be a tuple of token ids, found {self.stop_token_ids!r}")
        count = self.num_speculative_tokens
        if count is not None and (not is_integer(count) or count < 0):
            problems.append(f"num_speculative_tokens must be an integer, 0 (plain decoding) or above, found {count!r}")
        if problems:
            raise RequestError(
                listed(f"Request: {len(problems)} value(s) out of range", problems, "Correct them and send the request again.")
            )


def generate(
    target: Target, drafter: Drafter | None, prompt_ids: Sequence[int], params: GenerationParams, *, num_speculative_tokens: int
) -> Iterator[Step]:
    """Generate behind a prompt, one record per cycle; the first one is the prefill's token.

    Target and drafter are reset first, so a generation that was left half way does no harm to the next.

    Args:
        target: the target.
        drafter: a source of proposals, or None for plain decoding.
        prompt_ids: 1 up to `target.capacity` tokens.
        params: the request; of its stop conditions only `stop_token_ids` and `max_new_tokens` are looked at.
        num_speculative_tokens: tokens to draft per cycle, 0 up to `drafter.max_proposals`.

    Raises:
        RequestError: no prompt, a token outside the vocabulary, or more speculation than the drafter offers.
        CapacityError: the prompt does not fit.
    """
    _check(target, drafter, prompt_ids, params, num_speculative_tokens)
    return _cycles(target, drafter, list(prompt_ids), params, num_speculative_tokens)


def _cycles(
    target: Target, drafter: Drafter | None, tokens: list[int], params: GenerationParams, num_speculative_tokens: int
) -> Iterator[Step]:
    sampler = Sampler(params.sampling)
    stops = frozenset(params.stop_token_ids)
    # The last token needs no row of its own in the cache: hence the one more.
    final_length = len(tokens) + min(params.max_new_tokens, target.capacity - len(tokens) + 1)
    pair = _pair(target, drafter if num_speculative_tokens else None, needs_logits=not params.sampling.is_greedy)
    pair.reset()

    started = perf_counter()
    logits = pair.prefill(tokens)
    verify_ms = _since(started)
    kept, finish_reason = _cut([sampler.choose(logits, len(tokens))], stops, final_length - len(tokens))
    tokens += kept
    terms = TermsMs(verify=verify_ms, other=_since(started) - verify_ms)
    yield Step(token_ids=tuple(kept), terms_ms=terms, finish_reason=finish_reason)

    while finish_reason is None:
        started = perf_counter()
        # A pass over c drafts can yield c + 1 tokens, and more than are wanted would be work for nothing.
        verified = pair.cycle(tokens, min(num_speculative_tokens, final_length - len(tokens) - 1))
        proposal = verified.proposal
        drafts = proposal.token_ids.tolist()

        chosen = accept(_choices(sampler, verified, len(tokens), target.vocab_size), drafts)
        kept, finish_reason = _cut(chosen, stops, final_length - len(tokens))
        # Rows in the cache are those of the anchor and of all kept tokens but the last, the next anchor.
        pair.commit(len(kept))
        tokens += kept
        accepted = min(len(kept), len(chosen) - 1)
        graphs_ms = proposal.draft_ms + proposal.head_ms + verified.verify_ms
        terms = TermsMs(
            draft=proposal.draft_ms, head=proposal.head_ms, verify=verified.verify_ms, other=max(0.0, _since(started) - graphs_ms)
        )
        yield Step(
            token_ids=tuple(kept),
            proposed=len(drafts),
            accepted=accepted,
            terms_ms=terms,
            finish_reason=finish_reason,
            pooled=proposal.pooled,
            uncertified=proposal.uncertified,
        )


def _pair(target: Target, drafter: Drafter | None, *, needs_logits: bool) -> SpeculativePair:
    if isinstance(target, PairingTarget):
        return target.paired_with(drafter, needs_logits=needs_logits)
    return _HostPair(target, drafter)


class _HostPair:
    """Any target and any drafter: what passes between them passes through here."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self._target = target
        self._drafter = drafter
        self._features: FloatArray = np.zeros((0, 0), dtype=np.float32)

    def reset(self) -> None:
        self._target.reset()
        if self._drafter is not None:
            self._drafter.reset()

    def prefill(self, prompt_ids: Sequence[int]) -> FloatArray:
        features: list[FloatArray] = []
        for start in range(0, len(prompt_ids), PREFILL_ROWS):
            piece = prompt_ids[start : start + PREFILL_ROWS]
            rows = self._target.forward(piece, 1)
            self._target.commit(len(piece))
            features.append(rows.features.copy())  # a backend may reuse the memory in its next pass
        self._features = np.concatenate(features)
        logits: FloatArray = rows.logits[-1]
        return logits

    def cycle(self, token_ids: Sequence[int], count: int) -> Verified:
        drafter, proposal = self._drafter, NOTHING_PROPOSED
        if drafter is not None and count > 0:
            proposal = drafter.propose(token_ids, self._features, count)
        started = perf_counter()
        rows = self._target.forward([token_ids[-1], *proposal.token_ids.tolist()], len(proposal.token_ids) + 1)
        self._features = rows.features
        return Verified(proposal=proposal, logits=rows.logits, verify_ms=_since(started))

    def commit(self, rows: int) -> None:
        self._target.commit(rows)
        self._features = self._features[:rows]


def _choices(sampler: Sampler, verified: Verified, position: int, vocab_size: int) -> Callable[[int], int]:
    """The target's choice at each verified row; row 0 chooses the token at `position`."""
    if verified.logits is None:
        assert verified.greedy_ids is not None, "a pair gives one of the two"
        greedy_ids = verified.greedy_ids.tolist()
        return lambda row: checked_greedy_id(greedy_ids[row], position + row, vocab_size)
    logits_NV = verified.logits
    return lambda row: sampler.choose(logits_NV[row], position + row)


def _cut(tokens: list[int], stops: frozenset[int], wanted: int) -> tuple[list[int], str | None]:
    """The tokens up to and with the first that ends the request, and why it ends; a stop token goes before the length."""
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1], STOP
        if index + 1 == wanted:
            return tokens[: index + 1], LENGTH
    return tokens, None


def _check(
    target: Target, drafter: Drafter | None, prompt_ids: Sequence[int], params: GenerationParams, num_speculative_tokens: int
) -> None:
    offered = 0 if drafter is None else drafter.max_proposals
    problems = []
    if len(prompt_ids) == 0:
        problems.append("the prompt must have at least one token, found none")
    no_ids = [token for token in prompt_ids if not isinstance(token, int | np.integer)]
    foreign = [] if no_ids else sorted({int(token) for token in prompt_ids if not 0 <= token < target.vocab_size})
    if no_ids:
        problems.append(f"the prompt must be token ids, as Session.prompt_ids makes them, found {no_ids[0]!r:.40}")
    if foreign:
        problems.append(f"prompt tokens must lie in [0, {target.vocab_size}), found {_some(foreign)}")
    foreign = sorted({token for token in params.stop_token_ids if token >= target.vocab_size})
    if foreign:
        problems.append(f"stop token ids must lie in [0, {target.vocab_size}), found {_some(foreign)}")
    if not 0 <= num_speculative_tokens <= offered:
        problems.append(f"num_speculative_tokens must lie in [0, {offered}] for this drafter, found {num_speculative_tokens}")
    if problems:
        raise RequestError(listed(f"Request: {len(problems)} value(s) out of range", problems, "Correct them and send the request again."))
    if len(prompt_ids) > target.capacity:
        raise CapacityError(
            f"Expected a prompt of at most {target.capacity} tokens, the model length of this session, found {len(prompt_ids)}. "
            "Shorten the prompt, or open the session with a larger max_model_len."
        )


def _some(values: Sequence[int], most: int = 5) -> str:
    return ", ".join(map(str, values[:most])) + (f" and {len(values) - most} more" if len(values) > most else "")


def _since(started: float) -> float:
    return (perf_counter() - started) * 1e3
