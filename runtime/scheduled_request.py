"""One request on its way through the scheduler: its tokens, what chooses and releases them, its times and counters.

Knows nothing of the slots' memory and of other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from domino_deploy.runtime.acceptance import accept
from domino_deploy.runtime.choosing import Chooser
from domino_deploy.runtime.constraints import Matcher
from domino_deploy.runtime.controller import AcceptanceHistory
from domino_deploy.runtime.decode import cut, longest_sequence
from domino_deploy.runtime.output import OutputStream
from domino_deploy.runtime.protocols import FloatArray, SlotCycle, Step, TermsMs, Verified
from domino_deploy.runtime.requests import ERROR, Output, Request, RequestStatistics


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What the engine allows a request.

    max_sequence: tokens of the longest sequence, prompt and answer; the last token needs no row of its own, so one more may come out.
    vocab_size: of the target; max_drafts: per cycle at most; eos_token_ids: the target's end-of-sequence tokens.
    """

    max_sequence: int
    vocab_size: int
    max_drafts: int
    eos_token_ids: tuple[int, ...] = ()


class ScheduledRequest:
    """The state of one request.

    Args:
        request: what is asked.
        arrived: when, in seconds on the scheduler's clock.
        limits: the engine's.
        decode: text of tokens.
        matcher: of the request's constraint.

    Attributes:
        slot: where its rows are, None until the first piece of its prompt runs.
        tokens: prompt and answer; the last token of the answer has no row yet.
        max_drafts: per cycle, 0 for plain decoding.
        history: how its drafts fared.
        cached_tokens: of the prompt, found in a cache.
        is_cancelled: nobody waits for it any more.
    """

    def __init__(
        self,
        request: Request,
        *,
        arrived: float,
        limits: SchedulerLimits,
        decode: Callable[[Sequence[int]], str],
        matcher: Matcher | None = None,
    ) -> None:
        params = request.params.ended_by(limits.eos_token_ids)
        asked = params.num_speculative_tokens
        self.request = request
        self.slot: int | None = None
        self.tokens = list(request.prompt_ids)
        self.max_drafts = limits.max_drafts if asked is None else min(asked, limits.max_drafts)
        self.history = AcceptanceHistory()
        self.cached_tokens = 0
        self.is_cancelled = False
        self._vocab_size = limits.vocab_size
        self._prompt_length = len(self.tokens)
        self._final_length = longest_sequence(self._prompt_length, params, limits.max_sequence)
        self._stops = frozenset(params.stop_token_ids)
        self._chooser = Chooser(params, request.prompt_ids, matcher)
        self._stream = OutputStream(decode, params, () if params.ignore_eos else limits.eos_token_ids)
        self._steps: list[tuple[int, int]] = []
        self._arrived = arrived
        self._admitted: float | None = None
        self._prompt_end: float | None = None
        self._last_delivery: float | None = None
        self._prefill_ms = 0.0

    @property
    def with_drafter(self) -> bool:
        return self.max_drafts > 0

    @property
    def reads_prompt(self) -> bool:
        """Whether the logits of the prompt's own rows are wanted."""
        return self._chooser.reads_prompt

    def admit(self, now: float) -> None:
        self._admitted = now

    def overdue(self, now: float) -> TimeoutError | None:
        """What to say if its time is over."""
        limit = self.request.time_limit
        if limit is None or now - self._arrived < limit:
            return None
        return TimeoutError(
            f"Expected the answer within {limit:g} s, the time limit, found {self._num_generated} tokens of it after "
            f"{now - self._arrived:.1f} s. Ask for fewer tokens, or allow more time."
        )

    def take_piece(self, logits_NV: FloatArray, *, milliseconds: float, is_last: bool, now: float) -> Output | None:
        """Take in a piece of the prompt, run in so much time; the last piece gives the first token, if any is wanted.

        Args:
            logits_NV: of the piece's last row, or of all its rows where the prompt is read.
        """
        self._prefill_ms += milliseconds
        if is_last:  # it was run, whatever becomes of its logits
            self._prompt_end = now
        if self.reads_prompt:
            self._chooser.read_prompt(logits_NV)
        if not is_last:
            return None
        chosen = [self._chooser.choose(logits_NV[-1], len(self.tokens))] if len(self.tokens) < self._final_length else []
        prompt_logprobs = tuple(self._chooser.prompt_logprobs) if self.reads_prompt else None
        return replace(self._take(chosen, Step(token_ids=(), terms_ms=TermsMs(verify=self._prefill_ms))), prompt_logprobs=prompt_logprobs)

    def num_drafts(self, width: int) -> int:
        """Tokens to draft in a cycle of that width: a pass over c drafts can yield c + 1 tokens, and more than are wanted would be for
        nothing."""
        return min(width, self.max_drafts, self._final_length - len(self.tokens) - 1)

    def cycle(self, width: int) -> SlotCycle:
        """Its part in a cycle."""
        assert self.slot is not None, "only a request with a slot decodes"
        return SlotCycle(slot=self.slot, token_ids=tuple(self.tokens), count=self.num_drafts(width), with_drafter=self.with_drafter)

    def take_cycle(self, verified: Verified) -> Output:
        """Take in its part of a cycle; the step's times are left to who knows them."""
        drafts = verified.proposal.token_ids.tolist()
        chosen = accept(self._chooser.choices(verified, len(self.tokens), self._vocab_size), drafts)
        self.history.record(len(drafts), len(chosen) - 1)
        proposal = verified.proposal
        step = Step(
            token_ids=(),
            proposed=len(drafts),
            accepted=len(chosen) - 1,
            pooled=proposal.pooled,
            uncertified=proposal.uncertified,
        )
        output = self._take(chosen, step)
        if output.step is not None and drafts:
            self._steps.append((output.step.proposed, output.step.accepted))
        return output

    def ended(self, finish_reason: str, error: Exception | None = None) -> Output:
        """The last output of a request that did not come to an end of its own."""
        # Behind an error, what was held back is no one's text.
        tokens = () if finish_reason == ERROR else self._stream.finish()
        return Output(tokens=tokens, finish_reason=finish_reason, error=error)

    def since_last_delivery(self, now: float) -> float | None:
        """Seconds since this was asked last; None the first time."""
        last, self._last_delivery = self._last_delivery, now
        return None if last is None else now - last

    def statistics(self, now: float) -> RequestStatistics:
        """How it went, if it ended now."""
        admitted = now if self._admitted is None else self._admitted
        prompt_end = now if self._prompt_end is None else self._prompt_end
        return RequestStatistics(
            prompt_tokens=self._prompt_length,
            has_run_prompt=self._prompt_end is not None,
            cached_tokens=self.cached_tokens,
            generated_tokens=self._num_generated,
            queue_seconds=admitted - self._arrived,
            first_token_seconds=prompt_end - self._arrived if self._num_generated else None,
            prefill_seconds=prompt_end - admitted,
            decode_seconds=now - prompt_end,
            total_seconds=now - self._arrived,
            steps=tuple(self._steps),
        )

    @property
    def _num_generated(self) -> int:
        return len(self.tokens) - self._prompt_length

    def _take(self, chosen: list[int], step: Step) -> Output:
        """Keep the chosen tokens up to the request's end; `step` is what there is to say of them besides."""
        kept, finish_reason = cut(chosen, self._stops, self._final_length - len(self.tokens))
        step = replace(step, token_ids=tuple(kept), accepted=min(step.accepted, len(kept)), finish_reason=finish_reason)
        released = self._stream.push(step, self._chooser.logprobs[self._num_generated :])
        self.tokens += released.step.token_ids
        return Output(
            tokens=released.tokens,
            step=released.step,
            finish_reason=released.step.finish_reason,
            stop_reason=self._stream.stop_reason,
        )
