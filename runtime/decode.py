"""The decode loop: prefill, then propose, verify, accept, commit, yield, until something ends it.

Plain decoding is the same loop without a drafter.  Knows tokens only; text and stop strings are `text.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from time import perf_counter

import numpy as np

from domino_deploy.errors import RequestError
from domino_deploy.runtime.acceptance import accept
from domino_deploy.runtime.choosing import Chooser
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
from domino_deploy.runtime.requests import LENGTH, STOP, GenerationParams, check_prompt, check_request

# A prompt runs through the target in pieces of this many rows: enough for full matrix products, while attention scores
# (heads x rows x capacity x 4 bytes: 128 MiB for 32 heads and 4096 slots) stay bounded for prompts of any length.
PREFILL_ROWS = 256


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    params: GenerationParams,
    *,
    num_speculative_tokens: int,
    chooser: Chooser | None = None,
) -> Iterator[Step]:
    """Generate behind a prompt, one record per cycle; the first one is the prefill's token, or empty where no token is wanted.

    Target and drafter are reset first, so a generation that was left half way does no harm to the next.

    Args:
        target: the target.
        drafter: a source of proposals, or None for plain decoding.
        prompt_ids: 1 token up to `longest_prompt(target.capacity)`.
        params: the request; of its stop conditions only `stop_token_ids` and `max_new_tokens` are looked at.
        num_speculative_tokens: tokens to draft per cycle, 0 up to `drafter.max_proposals`.
        chooser: of this request and no other, with the matcher of its constraint; None makes one, where there is no constraint.  It
            keeps the log-probabilities.

    Raises:
        RequestError: no prompt, a token outside the vocabulary, more speculation than the drafter offers, or log-probabilities of a
            prompt from a backend that has none.
        CapacityError: the prompt leaves no room for an answer.
    """
    offered = 0 if drafter is None else drafter.max_proposals
    check_request(prompt_ids, params, vocab_size=target.vocab_size, max_proposals=offered, num_speculative_tokens=num_speculative_tokens)
    if params.prompt_logprobs is not None and isinstance(target, PairingTarget):
        raise RequestError(
            "Expected a backend that gives the logits of whole prompts for prompt_logprobs, found one that gives the last row alone. "
            "Leave prompt_logprobs out, or use the backend ort."
        )
    check_prompt(prompt_ids, target.capacity)
    return _cycles(target, drafter, list(prompt_ids), params, num_speculative_tokens, chooser or Chooser(params, prompt_ids))


def _cycles(
    target: Target,
    drafter: Drafter | None,
    tokens: list[int],
    params: GenerationParams,
    num_speculative_tokens: int,
    chooser: Chooser,
) -> Iterator[Step]:
    stops = frozenset(params.stop_token_ids)
    final_length = longest_sequence(len(tokens), params, target.capacity)
    pair = _pair(target, drafter if num_speculative_tokens else None, chooser)
    pair.reset()

    started = perf_counter()
    logits = pair.prefill(tokens)
    terms = TermsMs(verify=_since(started))
    chosen = [chooser.choose(logits, len(tokens))] if len(tokens) < final_length else []
    kept, finish_reason = cut(chosen, stops, final_length - len(tokens))
    tokens += kept
    yield Step(token_ids=tuple(kept), terms_ms=terms.within(_since(started)), finish_reason=finish_reason)

    while finish_reason is None:
        started = perf_counter()
        # A pass over c drafts can yield c + 1 tokens, and more than are wanted would be work for nothing.
        verified = pair.cycle(tokens, min(num_speculative_tokens, final_length - len(tokens) - 1))
        proposal = verified.proposal
        drafts = proposal.token_ids.tolist()

        chosen = accept(chooser.choices(verified, len(tokens), target.vocab_size), drafts)
        kept, finish_reason = cut(chosen, stops, final_length - len(tokens))
        # Rows in the cache are those of the anchor and of all kept tokens but the last, the next anchor.
        pair.commit(len(kept))
        tokens += kept
        accepted = min(len(kept), len(chosen) - 1)
        terms = TermsMs(draft=proposal.draft_ms, head=proposal.head_ms, verify=verified.verify_ms)
        yield Step(
            token_ids=tuple(kept),
            proposed=len(drafts),
            accepted=accepted,
            terms_ms=terms.within(_since(started)),
            finish_reason=finish_reason,
            pooled=proposal.pooled,
            uncertified=proposal.uncertified,
        )


def longest_sequence(prompt_length: int, params: GenerationParams, capacity: int) -> int:
    """Tokens of a request's prompt and answer at most, in a cache of `capacity` rows."""
    # The last token needs no row of its own: hence the one more.
    return min(prompt_length + params.max_new_tokens, capacity + 1)


def cut(tokens: list[int], stops: Collection[int], wanted: int) -> tuple[list[int], str | None]:
    """The tokens up to and with the first that ends the request, and why it ends; a stop token goes before the length."""
    if wanted == 0:
        return [], LENGTH
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1], STOP
        if index + 1 == wanted:
            return tokens[: index + 1], LENGTH
    return tokens, None


def _pair(target: Target, drafter: Drafter | None, chooser: Chooser) -> SpeculativePair:
    if isinstance(target, PairingTarget):
        return target.paired_with(drafter, needs_logits=not chooser.is_plain_greedy)
    return HostPair(target, drafter, chooser.read_prompt if chooser.reads_prompt else None)


class HostPair:
    """Any target and any drafter: what passes between them passes through here (`protocols.SpeculativePair`).

    Args:
        target: the target.
        drafter: a source of proposals, or None.
        read_prompt: told the logits of all of a prompt's rows, piece by piece; None leaves them uncomputed.
    """

    def __init__(self, target: Target, drafter: Drafter | None, read_prompt: Callable[[FloatArray], None] | None = None) -> None:
        self._target = target
        self._drafter = drafter
        self._read_prompt = read_prompt
        self._features: FloatArray = np.zeros((0, 0), dtype=np.float32)

    def reset(self) -> None:
        self._target.reset()
        if self._drafter is not None:
            self._drafter.reset()

    def prefill(self, prompt_ids: Sequence[int]) -> FloatArray:
        features: list[FloatArray] = []
        for start in range(0, len(prompt_ids), PREFILL_ROWS):
            piece = prompt_ids[start : start + PREFILL_ROWS]
            rows = self._target.forward(piece, 1 if self._read_prompt is None else len(piece))
            if self._read_prompt is not None:
                self._read_prompt(rows.logits)
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


def _since(started: float) -> float:
    return (perf_counter() - started) * 1e3
