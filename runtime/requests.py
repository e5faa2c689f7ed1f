"""What is asked of the engine, and what it answers: the records that scheduler, server and commands exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from domino_deploy.runtime.decode import GenerationParams
from domino_deploy.runtime.protocols import Step, TermsMs

ABORT = "abort"
ERROR = "error"


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

    prompt_tokens, cached_tokens (those of the prompt found in a cache), generated_tokens: as reported to the client; queue_seconds
    (arrival to slot), first_token_seconds (arrival to first token), prefill_seconds, decode_seconds, total_seconds;
    steps: (proposed, accepted) of each cycle that proposed at least one token, after truncation.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
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
    character.  step: the cycle as it was, released or not; None for an output that no cycle made.
    finish_reason: "stop", "length", "abort" (cancelled, or its time was over), "error", or None while it goes on; stop_reason: the
    stop string or stop token that ended it, None for the target's own end-of-sequence token and everything else.
    prompt_logprobs: of the whole prompt, None for its first token; on the first output, if asked for.
    statistics: on the last output.  error: what went wrong, for "error" and for "abort" by time.
    """

    tokens: tuple[OutputToken, ...] = ()
    step: Step | None = None
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
    proposed, accepted: tokens, after truncation; accepted_per_position: how many sequences accepted proposal 0, 1, ...;
    tokens: committed in all; terms_ms: where its time went.
    """

    batch: int
    width: int
    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    tokens: int = 0
    terms_ms: TermsMs = field(default_factory=TermsMs)


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
    """Who wants to know what the engine does; called in the engine's thread, must not block."""

    def queued(self, request: Request) -> None: ...

    def prefilled(self, rows: int, seconds: float) -> None: ...

    def cycled(self, record: CycleRecord) -> None: ...

    def delivered(self, request: Request, tokens: int, seconds_since_last: float | None) -> None:
        """Tokens went out; seconds since the ones before, None for the first."""

    def finished(self, request: Request, finish_reason: str, statistics: RequestStatistics) -> None: ...

    def width_chosen(self, width: int, reason: str) -> None:
        """The controller changed its mind; reasons are few words in snake case."""
