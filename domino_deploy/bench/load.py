"""Load on a server: levels of concurrency, each so many requests, and the figures of each level.

Definitions.  TTFT: from sending a request to its first text.  TPOT, per token: from the first text to the last, divided by the
tokens behind the first.  ITL, per chunk: between two chunks with text; under speculation a chunk holds several tokens, so it is longer than
TPOT.  E2E: from sending to the end of the stream.  Acceptance length: 1 + accepted / drafts, acceptance rate: accepted / drafted tokens,
from what the server's counters grew by in the level.  Cached prompt: the part of the prompt tokens that the server had in its cache by its
own account; prompts repeat, in a level and from one to the next, so most of them are there unless the cache is off.  Baseline: a level's
requests once more without speculation; the way that comes first changes from level to level, as a machine's speed drifts.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np

from domino_deploy.bench.client import Answer, Client, Clock
from domino_deploy.errors import MeasurementError, OutOfRangeError
from domino_deploy.runtime.sampling import SamplingParams

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
PERCENTILES = (50, 90, 99)
LONGEST_TIMEOUT_SECONDS = 24 * 60 * 60  # sockets cannot wait for any number of seconds
PLAINLY = {"speculative": False}  # asks a domino-deploy server for decoding without speculation
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class Decoding(StrEnum):
    """What requests ask for; all but the first need a domino-deploy server."""

    SERVER = "server"  # what the server does by itself
    PLAIN = "plain"  # without speculation
    BOTH = "both"  # every level in both ways, the second as its baseline


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """Values of one run against a server.

    Args:
        concurrency: requests in flight, a level each.
        requests: of every level; prompts are taken in turns.
        warm_up_requests: sent first, counted nowhere.
        prompts_per_kind: the first so many of each kind.
        max_new_tokens: longest response.
        temperature: 0 is greedy.
        seed: of the sampling and of the order of prompts, the same in every level.
        is_raw: prompts as they are, to /v1/completions; else one user message each, to /v1/chat/completions.
        decoding: what requests ask for.
        timeout_seconds: for every wait for more of an answer.
    """

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    requests: int = 32
    warm_up_requests: int = 2
    prompts_per_kind: int = 5
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    is_raw: bool = False
    decoding: Decoding = Decoding.SERVER
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        problems = {}
        if not self.concurrency or min(self.concurrency) < 1:
            problems["concurrency"] = f"must be numbers of at least 1, found {', '.join(map(str, self.concurrency)) or 'none'}"
        for name in ("requests", "prompts_per_kind", "max_new_tokens"):
            if getattr(self, name) < 1:
                problems[name] = f"must be at least 1, found {getattr(self, name)}"
        if self.warm_up_requests < 0:
            problems["warm_up_requests"] = f"must be at least 0, found {self.warm_up_requests}"
        if not 0 < self.timeout_seconds <= LONGEST_TIMEOUT_SECONDS:
            problems["timeout_seconds"] = f"must lie in (0, {LONGEST_TIMEOUT_SECONDS}], found {self.timeout_seconds}"
        if problems:
            raise OutOfRangeError(problems, "Correct them and run again.")
        SamplingParams(temperature=self.temperature, seed=self.seed)

    @property
    def path(self) -> str:
        """Where requests go."""
        return COMPLETIONS_PATH if self.is_raw else CHAT_PATH

    def body(self, model: str, prompt: str) -> dict[str, object]:
        """The JSON of one request; a baseline's has PLAINLY besides."""
        asked: dict[str, object] = {"prompt": prompt} if self.is_raw else {"messages": [{"role": "user", "content": prompt}]}
        return {
            "model": model,
            **asked,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(PLAINLY if self.decoding is Decoding.PLAIN else {}),
        }

    def to_dict(self) -> dict[str, object]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """What the server's counters grew by: cycles that drafted, tokens drafted and accepted."""

    drafts: int
    drafted: int
    accepted: int

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per cycle that drafted, the target's own included."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Part of the drafted tokens that the target accepted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level's figures; percentiles by their number, None where nothing was measured.

    completion_tokens, prompt_tokens: of the requests that succeeded, None if one of them came without; cached_tokens: None if all did;
    errors: failed requests by what went wrong; messages: of each such kind the server's first words, if it had any;
    speculation: None for a server without these counters; is_baseline: without speculation, for the level of the same concurrency.
    """

    concurrency: int
    requests: int
    errors: Mapping[str, int]
    messages: Mapping[str, str]
    seconds: float
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    first_text_ms: Mapping[int, float] | None
    token_ms: Mapping[int, float] | None
    chunk_gap_ms: Mapping[int, float] | None
    total_ms: Mapping[int, float] | None
    speculation: Speculation | None
    is_baseline: bool = False

    @property
    def succeeded(self) -> int:
        """Requests answered in full."""
        return self.requests - sum(self.errors.values())

    @property
    def cached_share(self) -> float | None:
        """Part of the prompt tokens that the server found in its cache."""
        return self.cached_tokens / self.prompt_tokens if self.cached_tokens is not None and self.prompt_tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens of all successful requests per second of the level."""
        return self.completion_tokens / self.seconds if self.completion_tokens and self.seconds else None

    @property
    def requests_per_second(self) -> float | None:
        """Successful requests per second of the level."""
        return self.succeeded / self.seconds if self.succeeded and self.seconds else None


class Drafting(StrEnum):
    """What the server's counters say of a level and its baseline."""

    AS_ASKED = "as asked"
    NOT_CHECKED = "not checked"  # no counters: the server may have ignored what it was asked
    NOTHING_DRAFTED = "nothing drafted"  # in neither turn: both were plain decoding


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What was measured at one concurrency; baseline: None if it was not asked for."""

    level: Level
    baseline: Level | None = None

    @property
    def ratio(self) -> float | None:
        """Output tokens per second of the level to those of its baseline; None where one was not measured."""
        plain_rate = None if self.baseline is None else self.baseline.tokens_per_second
        rate = self.level.tokens_per_second
        return None if rate is None or plain_rate is None else rate / plain_rate

    @property
    def drafting(self) -> Drafting:
        """Whether the ratio is one of speculation to plain decoding."""
        if self.baseline is None or self.baseline.speculation is None or self.level.speculation is None:
            return Drafting.NOT_CHECKED
        return Drafting.AS_ASKED if self.level.speculation.drafts else Drafting.NOTHING_DRAFTED


def run(
    client: Client,
    model: str,
    prompts: Sequence[str],
    settings: LoadSettings,
    *,
    clock: Clock = time.perf_counter,
    on_level: Callable[[int], None] = lambda concurrency: None,
) -> list[Turns]:
    """Every level, in the order given, each with the same requests; `on_level` is told each before it begins.

    Raises:
        MeasurementError: the server drafted where a baseline asked it not to.
    """
    ordered = list(prompts)
    random.Random(settings.seed).shuffle(ordered)
    bodies = [settings.body(model, prompt) for prompt in itertools.islice(itertools.cycle(ordered), settings.requests)]
    warm_up = list(itertools.islice(itertools.cycle(bodies), settings.warm_up_requests))
    has_baseline = settings.decoding is Decoding.BOTH
    if has_baseline:
        # The way that comes first must not fill the cache of prompts for the other.
        warm_up += [{**body, "max_tokens": 1} for body in bodies[: len(ordered)]]
    if warm_up:
        send(client, settings.path, warm_up, concurrency=min(len(warm_up), max(settings.concurrency)))
    measured = []
    for index, concurrency in enumerate(settings.concurrency):
        levels = {}
        for is_baseline in (index % 2 == 0, index % 2 == 1) if has_baseline else (False,):
            on_level(concurrency)
            levels[is_baseline] = _turn(client, settings.path, bodies, concurrency, is_baseline=is_baseline, clock=clock)
        measured.append(Turns(level=levels[False], baseline=levels.get(True)))
    return measured


def _turn(client: Client, path: str, bodies: Sequence[Mapping[str, object]], concurrency: int, *, is_baseline: bool, clock: Clock) -> Level:
    """One level in one way."""
    before, started = client.metrics(), clock()
    asked = [{**body, **PLAINLY} for body in bodies] if is_baseline else bodies
    answers = send(client, path, asked, concurrency=concurrency)
    seconds = clock() - started
    after = None if before is None else client.metrics()
    speculation = speculation_since(before, after)
    if is_baseline and speculation is not None and speculation.drafts:
        raise MeasurementError(
            "Expected a server that decodes plainly where a request says speculative: false, found that it drafted "
            f"{speculation.drafted} tokens. Drop --baseline, and leave the server to this measurement alone."
        )
    return level(concurrency, answers, seconds, speculation=speculation, is_baseline=is_baseline)


def send(client: Client, path: str, bodies: Sequence[Mapping[str, object]], *, concurrency: int) -> list[Answer]:
    """All requests, so many at a time, in order; answers in the same order."""
    with ThreadPoolExecutor(max_workers=concurrency) as threads:
        return list(threads.map(lambda body: client.stream(path, body), bodies))


def level(
    concurrency: int, answers: Sequence[Answer], seconds: float, *, speculation: Speculation | None, is_baseline: bool = False
) -> Level:
    """The figures of one level's answers."""
    good = [answer for answer in answers if answer.error is None]
    said = [(answer.error, answer.message) for answer in reversed(answers)]  # the first of a kind is the last to be kept
    # vLLM states the cached tokens of a request only where there are some.
    cached = [answer.cached_tokens for answer in good if answer.cached_tokens is not None]
    return Level(
        concurrency=concurrency,
        requests=len(answers),
        errors=dict(sorted(Counter(answer.error for answer in answers if answer.error is not None).items())),
        messages={error: message for error, message in said if error is not None and message is not None},
        seconds=seconds,
        prompt_tokens=_sum([answer.prompt_tokens for answer in good]),
        cached_tokens=sum(cached) if cached else None,
        completion_tokens=_sum([answer.completion_tokens for answer in good]),
        first_text_ms=_percentiles([answer.first_text_ms for answer in good]),
        token_ms=_percentiles([answer.token_ms for answer in good]),
        chunk_gap_ms=_percentiles([gap for answer in good for gap in answer.chunk_gaps_ms]),
        total_ms=_percentiles([answer.total_ms for answer in good]),
        speculation=speculation,
        is_baseline=is_baseline,
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _percentiles(values: Sequence[float | None]) -> dict[int, float] | None:
    """Linear between samples; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return dict(zip(PERCENTILES, np.percentile(known, PERCENTILES).tolist(), strict=True))


def speculation_since(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> Speculation | None:
    """What `Client.metrics` grew by; None for a server without these counters, or whose counters are none."""
    names = (_DRAFTS, _DRAFTED, _ACCEPTED)
    if before is None or after is None or any(name not in after for name in names):
        return None
    grown = [after[name] - before.get(name, 0.0) for name in names]
    if not all(math.isfinite(growth) and growth >= 0 for growth in grown):
        return None
    drafts, drafted, accepted = map(round, grown)
    return Speculation(drafts=drafts, drafted=drafted, accepted=accepted)
