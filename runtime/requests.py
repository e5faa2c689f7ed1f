"""What is asked of the engine, and what it answers: the records that scheduler, server and commands exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from domino_deploy.errors import CapacityError, OutOfRangeError
from domino_deploy.runtime.constraints import Constraint
from domino_deploy.runtime.protocols import Step, TermsMs
from domino_deploy.runtime.sampling import SamplingParams, is_integer

STOP = "stop"
LENGTH = "length"
ABORT = "abort"
ERROR = "error"

# Likeliest tokens to report per position at most: OpenAI's own limit.
MAX_TOP_LOGPROBS = 20
_ADVICE = "Correct them and send the request again."


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """What is wanted of one request.

    Args:
        sampling: how tokens are chosen.
        max_new_tokens: tokens to generate at most; the caches' capacity may end it earlier, also as "length". 0 runs the prompt alone.
        min_new_tokens: tokens before which no stop token is chosen and no stop string is looked for; it gives way where a
            constraint, or the stop tokens themselves, leave nothing but the end.
        stop_strings: end as soon as the text holds one of them; it and what follows are not part of the text.
        stop_token_ids: end behind one of these tokens; it is the last of the tokens and not part of the text.
        ignore_eos: do not add the target's own end-of-sequence tokens to `stop_token_ids`.
        num_speculative_tokens: tokens to draft per cycle, 0 for plain decoding; None for the session's default.
        logprobs: log-probabilities of the generated tokens, and of that many likeliest ones at each position; None for none.
        prompt_logprobs: the same of the prompt's tokens.
        constraint: what the text must match.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        problems = {}
        if not isinstance(self.sampling, SamplingParams):
            problems["sampling"] = f"must be SamplingParams, found {self.sampling!r}"
        if not is_integer(self.max_new_tokens) or self.max_new_tokens < 0:
            problems["max_new_tokens"] = f"must be an integer, at least 0, found {self.max_new_tokens!r}"
        elif not is_integer(self.min_new_tokens) or not 0 <= self.min_new_tokens <= self.max_new_tokens:
            problems["min_new_tokens"] = (
                f"must be an integer from 0 to max_new_tokens ({self.max_new_tokens}), found {self.min_new_tokens!r}"
            )
        if not isinstance(self.stop_strings, tuple) or not all(isinstance(stop, str) and stop for stop in self.stop_strings):
            problems["stop_strings"] = f"must be a tuple of strings that are not empty, found {self.stop_strings!r}"
        if not isinstance(self.stop_token_ids, tuple) or not all(is_integer(token) and token >= 0 for token in self.stop_token_ids):
            problems["stop_token_ids"] = f"must be a tuple of token ids, found {self.stop_token_ids!r}"
        count = self.num_speculative_tokens
        if count is not None and (not is_integer(count) or count < 0):
            problems["num_speculative_tokens"] = f"must be an integer, 0 (plain decoding) or above, found {count!r}"
        for name, top in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if top is not None and (not is_integer(top) or not 0 <= top <= MAX_TOP_LOGPROBS):
                problems[name] = f"must be an integer from 0 to {MAX_TOP_LOGPROBS}, found {top!r}"
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            problems["constraint"] = f"must be a Constraint, found {self.constraint!r}"
        elif self.constraint is not None and self.ignore_eos:
            problems["ignore_eos"] = "must be False with a constraint, which ends with the target's end-of-sequence token, found True"
        if problems:
            raise OutOfRangeError(problems, _ADVICE)

    def ended_by(self, eos_token_ids: Iterable[int]) -> GenerationParams:
        """The same request, which the target's end-of-sequence tokens end as well, unless it ignores them."""
        return self if self.ignore_eos else replace(self, stop_token_ids=(*self.stop_token_ids, *eos_token_ids))


def check_request(
    prompt_ids: Sequence[int], params: GenerationParams, *, vocab_size: int, max_proposals: int, num_speculative_tokens: int
) -> None:
    """Hold a request against the models that are to serve it.

    Raises:
        OutOfRangeError: no prompt, a token that the target does not have, or more speculation than the drafter offers.
    """
    problems = {}
    if len(prompt_ids) == 0:
        problems["prompt_ids"] = "must have at least one token, found none"
    no_ids = [token for token in prompt_ids if not isinstance(token, int | np.integer)]
    if no_ids:
        problems["prompt_ids"] = f"must be token ids, as Session.prompt_ids makes them, found {no_ids[0]!r:.40}"
    named: dict[str, Iterable[int]] = {"stop_token_ids": params.stop_token_ids, "logit_bias": params.sampling.logit_bias}
    if not no_ids:
        named = {"prompt_ids": prompt_ids, **named}
    for name, token_ids in named.items():
        foreign = sorted({int(token) for token in token_ids if not 0 <= token < vocab_size})
        if foreign:
            problems[name] = f"must be token ids in [0, {vocab_size}), found {_some(foreign)}"
    problems |= speculation_problems(num_speculative_tokens, max_proposals=max_proposals)
    if problems:
        raise OutOfRangeError(problems, _ADVICE)


def speculation_problems(num_speculative_tokens: int, *, max_proposals: int) -> dict[str, str]:
    """For an `OutOfRangeError`: more tokens per cycle than the drafter offers, `max_proposals`, which is 0 without a drafter."""
    if 0 <= num_speculative_tokens <= max_proposals:
        return {}
    where = f"lie in [0, {max_proposals}] for this drafter" if max_proposals else "be 0, or left out, without a drafter"
    return {"num_speculative_tokens": f"must {where}, found {num_speculative_tokens}"}


def longest_prompt(max_model_len: int) -> int:
    """Tokens of a prompt at most: an answer has one at least."""
    return max_model_len - 1


def check_prompt(prompt_ids: Sequence[int], max_model_len: int, *, called: str = "max_model_len") -> None:
    """Hold a prompt's length against the model length, which the reader knows by the name `called`.

    Raises:
        CapacityError: it leaves no room for an answer.
    """
    most = longest_prompt(max_model_len)
    if len(prompt_ids) > most:
        raise CapacityError(
            f"Expected a prompt of at most {most} tokens, the model length {max_model_len} without one for the answer, "
            f"found {len(prompt_ids)}. Shorten it, or start with a larger {called}."
        )


def _some(values: Sequence[int], most: int = 5) -> str:
    return ", ".join(map(str, values[:most])) + (f" and {len(values) - most} more" if len(values) > most else "")


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """A token with its natural log-probability, and the likeliest tokens at its position with theirs, falling.

    All of them come from the target's logits as they are, before temperature, penalties, biases and masks.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class OutputToken:
    """A token whose text is certain: the texts of all tokens, joined, are the answer.

    text: the part of the answer that ends with this token ("" for one that only begins a character); drafted: it was proposed and
    accepted, not the target's own addition.
    """

    token_id: int
    text: str
    drafted: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, kw_only=True)
class RequestStatistics:
    """One finished request.

    prompt_tokens, cached_tokens (those of the prompt found in a cache), generated_tokens: as reported to the client;
    has_run_prompt: whether all of the prompt was run, though its first token may have failed;
    queue_seconds (arrival to slot), first_token_seconds (arrival to first token, None if none came), prefill_seconds (slot to the prompt's
    end), decode_seconds, total_seconds;
    steps: (proposed, accepted) of each cycle that proposed at least one token: drafts that the target verified, and those of them that
    are in the answer, which may have ended inside an accepted run.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    has_run_prompt: bool = False
    queue_seconds: float = 0.0
    first_token_seconds: float | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    total_seconds: float = 0.0
    steps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one pass of the engine made certain for one request.

    tokens: those released now; a token is held back while its text may change, be cut off by a stop string, or ends inside a
    character.  step: its part of the cycle, released or not, with the times of the whole cycle; the first one is the prefill's token;
    None for an output that no pass made.  batch: sequences that shared its cycle, and these times.
    finish_reason: "stop", "length", "abort" (cancelled, or its time was over), "error", or None while it goes on; stop_reason: the
    stop string or stop token that ended it, None for the target's own end-of-sequence token and everything else.
    prompt_logprobs: of the whole prompt, None for its first token; on the first output, if asked for.
    statistics: on the last output.  error: what went wrong, for "error" and for "abort" by time.
    """

    tokens: tuple[OutputToken, ...] = ()
    step: Step | None = None
    batch: int = 1
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    statistics: RequestStatistics | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request on its way into the engine.

    request_id: unique among those running; prompt_ids: at least one; params: what is wanted; its `num_speculative_tokens` is 0 for
    plain decoding, another number for at most that many, None for the engine's own.
    deliver: told every output, the last one with a finish reason; called in the engine's thread, must not block.
    time_limit: seconds from arrival to the last token, None for no limit.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: GenerationParams
    deliver: Callable[[Output], None]
    time_limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class CycleRecord:
    """One batched cycle.

    batch: sequences in it; width: drafts asked for per sequence, 0 for plain; drafts: sequences with at least one proposal;
    proposed, accepted: tokens, counted as in `RequestStatistics.steps`; reached_per_position, accepted_per_position: of how many
    sequences proposal 0, 1, ... (up to the last of any) was decided on, all before it accepted, and how many accepted it; tokens:
    committed in all; waiting_rows: those that the drafter had to take in beside drafting; terms_ms: where its time went.  A sequence that
    failed in it counts in `batch` alone.
    """

    batch: int
    width: int
    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    reached_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    tokens: int = 0
    waiting_rows: int = 0
    terms_ms: TermsMs = field(default_factory=TermsMs)

    @classmethod
    def of(cls, steps: Sequence[Step], *, batch: int, width: int, waiting_rows: int, terms_ms: TermsMs) -> CycleRecord:
        """The sum of what the sequences of a cycle made of it; those that failed have no step."""
        drafted = [step for step in steps if step.proposed]
        positions = range(max((step.proposed for step in drafted), default=0))
        return cls(
            batch=batch,
            width=width,
            drafts=len(drafted),
            proposed=sum(step.proposed for step in drafted),
            accepted=sum(step.accepted for step in drafted),
            reached_per_position=tuple(sum(_decided(step) > position for step in drafted) for position in positions),
            accepted_per_position=tuple(sum(step.accepted > position for step in drafted) for position in positions),
            tokens=sum(len(step.token_ids) for step in steps),
            waiting_rows=waiting_rows,
            terms_ms=terms_ms,
        )


def _decided(step: Step) -> int:
    """Proposals that were accepted or refused: those behind a refusal, or behind a request's end, were neither."""
    return min(step.proposed, step.accepted + 1) if len(step.token_ids) > step.accepted else step.accepted


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """How the engine stands: requests, cache rows in use and to be had, the controller's width (None before its first choice), and
    the mean acceptance length of recent cycles (None before any)."""

    running: int
    waiting: int
    used_rows: int
    total_rows: int
    width: int | None = None
    acceptance_length: float | None = None


class Observer(Protocol):
    """Who wants to know what the engine does; called in the engine's thread, must not block; its errors are logged and end nothing."""

    def queued(self, request: Request) -> None: ...

    def prefilled(self, rows: int, seconds: float) -> None: ...

    def cycled(self, record: CycleRecord) -> None: ...

    def delivered(self, request: Request, tokens: int, seconds_since_last: float | None) -> None:
        """Tokens went out; seconds since the ones before, None for the first."""

    def finished(self, request: Request, finish_reason: str, statistics: RequestStatistics) -> None: ...

    def width_chosen(self, width: int, reason: str) -> None:
        """The controller changed its mind; reasons are few words in snake case."""
