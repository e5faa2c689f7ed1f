"""The target's choice of every token of one request: what changes its logits, the draw, and the log-probabilities to report.

In this order: repetition, frequency and presence penalty, logit bias, the constraint's mask and that of stop tokens until
`min_new_tokens`, then `sampling.py`.  All of it is a function of the tokens before, and is applied row by row as the target's choices are
made (`acceptance.accept`): a chosen token is committed, unless the request ended before it, so nothing is ever taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from domino_deploy.errors import RequestError
from domino_deploy.runtime.constraints import Matcher
from domino_deploy.runtime.logprobs import token_logprobs
from domino_deploy.runtime.protocols import FloatArray, Verified
from domino_deploy.runtime.requests import GenerationParams, TokenLogprobs
from domino_deploy.runtime.sampling import Sampler, SamplingParams, checked_best, checked_greedy_id


class Chooser:
    """Chooses the tokens of one request, in order.

    Args:
        params: the request; its `stop_token_ids` with the target's end-of-sequence tokens, where these end it.
        prompt_ids: the prompt.
        matcher: of `params.constraint`, at its start.

    Attributes:
        logprobs: of the chosen tokens, in order, if asked for; with those chosen behind the end of the request, which are dropped.
        prompt_logprobs: of the prompt's tokens read so far, None for the first; of all of them once the prompt is read.

    Raises:
        RequestError: a constraint without a matcher.
    """

    def __init__(self, params: GenerationParams, prompt_ids: Sequence[int], matcher: Matcher | None = None) -> None:
        if params.constraint is not None and matcher is None:
            raise RequestError("Expected a matcher for the request's constraint, found none. Make one with ConstraintCompiler.matcher.")
        self._sampler = Sampler(params.sampling)
        self._penalties = _Penalties(params.sampling, prompt_ids) if params.sampling.has_penalties else None
        bias = params.sampling.logit_bias
        self._bias_ids = np.fromiter(bias, dtype=np.int64, count=len(bias))
        self._bias = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self._stop_ids = np.array(sorted(set(params.stop_token_ids)), dtype=np.int64)
        self._early_tokens = params.min_new_tokens if params.stop_token_ids else 0  # before which no stop token may come
        self._matcher = matcher
        self._top = params.logprobs
        self._prompt_top = params.prompt_logprobs
        self._prompt_ids = prompt_ids
        self._count = 0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the highest logit decides, and nothing else is wanted of the logits."""
        sampling = self._sampler.params
        changes_logits = sampling.changes_logits or self._matcher is not None or self._early_tokens > 0
        return sampling.is_greedy and self._top is None and not changes_logits

    @property
    def reads_prompt(self) -> bool:
        """Whether it wants the logits of all rows of the prompt, in `read_prompt`."""
        return self._prompt_top is not None

    def choose(self, logits_V: FloatArray, position: int) -> int:
        """The token at `position` of the sequence, given the logits of the row before it, which are not written to.

        Raises:
            VerificationError: the logits are no basis for a choice (NaN, +inf, or all of them -inf).
            RequestError: the constraint grew beyond its bounds.
        """
        changed = self._changed(logits_V, position)
        token = self._sampler.choose(changed, position)
        if self._top is not None:
            self.logprobs.append(token_logprobs(logits_V, token, self._top))
        if self._penalties is not None:
            self._penalties.count(token)
        if self._matcher is not None:
            self._matcher.advance(token)
        self._count += 1
        return token

    def choices(self, verified: Verified, position: int, vocab_size: int) -> Callable[[int], int]:
        """The target's choice at each verified row, to be asked for in order; row 0 chooses the token at `position`."""
        if verified.logits is None:
            assert verified.greedy_ids is not None, "a pair gives one of the two"
            greedy_ids = verified.greedy_ids.tolist()
            return lambda row: checked_greedy_id(greedy_ids[row], position + row, vocab_size)
        logits_NV = verified.logits
        return lambda row: self.choose(logits_NV[row], position + row)

    def read_prompt(self, logits_NV: FloatArray) -> None:
        """Record the log-probabilities of the next prompt tokens, given the logits of the rows before them; the pieces in order."""
        assert self._prompt_top is not None, "only for a request that wants them"
        first = len(self.prompt_logprobs)
        # The row of the prompt's last token has no prompt token behind it.
        for logits_V, token in zip(logits_NV, self._prompt_ids[first : first + len(logits_NV)], strict=False):
            checked_best(logits_V, len(self.prompt_logprobs))
            self.prompt_logprobs.append(token_logprobs(logits_V, int(token), self._prompt_top))

    def _changed(self, logits_V: FloatArray, position: int) -> FloatArray:
        """The logits with everything applied: a copy, but for a row that nothing applies to."""
        is_early = self._count < self._early_tokens
        if not (self._sampler.params.changes_logits or self._matcher is not None or is_early):
            return logits_V
        checked_best(logits_V, position)  # a mask must not hide a damaged row
        row = logits_V.copy()
        if self._penalties is not None:
            self._penalties.apply(row)
        row[self._bias_ids] += self._bias
        if self._matcher is not None:
            self._matcher.mask(row)
        if is_early:
            with_end = row[self._stop_ids]
            row[self._stop_ids] = -np.inf
            if row.max() == -np.inf:
                row[self._stop_ids] = with_end  # a constraint, or stop tokens all over, leave nothing but the end
        return row


class _Penalties:
    """Tokens seen so far, and what they cost: written to a row as two sparse updates, however long the text and the vocabulary.

    Repetition as in arXiv 1909.05858 (CTRL), with transformers' rule for negative logits; frequency and presence as in OpenAI's API.
    """

    def __init__(self, sampling: SamplingParams, prompt_ids: Iterable[int]) -> None:
        self._repetition = np.float32(sampling.repetition_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._seen = _TokenCounts()
        self._generated = _TokenCounts()
        if self._repetition != 1:
            for token in set(prompt_ids):
                self._seen.add(int(token))

    def count(self, token_id: int) -> None:
        if self._repetition != 1:
            self._seen.add(token_id)
        if self._frequency or self._presence:
            self._generated.add(token_id)

    def apply(self, row_V: FloatArray) -> None:
        seen = self._seen.ids
        if seen.size:
            logits = row_V[seen]
            row_V[seen] = np.where(logits < 0, logits * self._repetition, logits / self._repetition)
        generated = self._generated.ids
        if generated.size:
            row_V[generated] -= self._frequency * self._generated.counts + self._presence


class _TokenCounts:
    """Distinct tokens and how often each came, in arrays that grow by doubling."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> FloatArray:
        return self._counts[: len(self._index)]

    def add(self, token_id: int) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == self._ids.size:
            self._ids, self._counts = (np.concatenate([array, np.zeros_like(array)]) for array in (self._ids, self._counts))
        self._ids[index] = token_id
        self._counts[index] += 1
