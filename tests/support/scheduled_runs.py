"""Requests run by a scheduler, and the same ones run alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from domino_deploy.runtime.choosing import Chooser
from domino_deploy.runtime.constraints import Matcher
from domino_deploy.runtime.controller import SpeculationController
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.output import OutputStream
from domino_deploy.runtime.protocols import FloatArray, SlotPair, Target
from domino_deploy.runtime.requests import CycleRecord, GenerationParams, Output, OutputToken, Request, RequestStatistics, TokenLogprobs
from domino_deploy.runtime.scheduled_request import SchedulerLimits
from domino_deploy.runtime.scheduler import Scheduler
from tests.support.doubles import ToyTarget

PATIENCE = 60.0  # seconds that a test waits for what takes milliseconds
LETTERS = "abcdefgh"  # of a toy vocabulary of 8 tokens
EOS = 7


def decode(token_ids: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in token_ids)


@dataclass
class Answer:
    """Everything that was delivered for one request."""

    outputs: list[Output] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[OutputToken, ...]:
        return tuple(token for output in self.outputs for token in output.tokens)

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def is_finished(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    @property
    def finish_reason(self) -> str | None:
        assert [output.finish_reason for output in self.outputs[:-1]] == [None] * (len(self.outputs) - 1)
        return self.outputs[-1].finish_reason

    @property
    def statistics(self) -> RequestStatistics:
        assert all(output.statistics is None for output in self.outputs[:-1])
        found = self.outputs[-1].statistics
        assert found is not None
        return found

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        assert all(output.prompt_logprobs is None for output in self.outputs[1:])
        return self.outputs[0].prompt_logprobs


@dataclass
class Client:
    """Takes its answer from another thread, and waits for it."""

    answer: Answer = field(default_factory=Answer)
    began: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def deliver(self, output: Output) -> None:
        self.answer.outputs.append(output)
        self.began.set()
        if output.finish_reason is not None:
            self.ended.set()

    def wait(self) -> Answer:
        assert self.ended.wait(PATIENCE)
        return self.answer


class Clock:
    """Stands still but for `advance`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Journal:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.records: list[CycleRecord] = []
        self.events: list[tuple[str, object]] = []

    def queued(self, request: Request) -> None:
        self.events.append(("queued", request.request_id))

    def prefilled(self, rows: int, seconds: float) -> None:
        self.events.append(("prefilled", rows))

    def cycled(self, record: CycleRecord) -> None:
        self.records.append(record)
        self.events.append(("cycled", record.batch))

    def delivered(self, request: Request, tokens: int, seconds_since_last: float | None) -> None:
        self.events.append(("delivered", (request.request_id, tokens, seconds_since_last)))

    def finished(self, request: Request, finish_reason: str, statistics: RequestStatistics) -> None:
        self.events.append(("finished", (request.request_id, finish_reason, statistics)))

    def width_chosen(self, width: int, reason: str) -> None:
        self.events.append(("width_chosen", (width, reason)))

    def of(self, kind: str) -> list[object]:
        return [what for event, what in self.events if event == kind]


@dataclass
class Bench:
    """A scheduler with everything around it at hand."""

    pair: SlotPair
    scheduler: Scheduler
    clock: Clock
    journal: Journal
    answers: dict[str, Answer] = field(default_factory=dict)

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        time_limit: float | None = None,
        deliver: Callable[[Output], None] | None = None,
        matcher: Matcher | None = None,
        **params: Any,
    ) -> Answer:
        return self.submit_params(
            request_id, prompt_ids, GenerationParams(**params), time_limit=time_limit, deliver=deliver, matcher=matcher
        )

    def submit_params(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: GenerationParams,
        *,
        time_limit: float | None = None,
        deliver: Callable[[Output], None] | None = None,
        matcher: Matcher | None = None,
    ) -> Answer:
        answer = self.answers[request_id] = Answer()
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            deliver=answer.outputs.append if deliver is None else deliver,
            time_limit=time_limit,
        )
        self.scheduler.submit(self.scheduler.prepared(request, matcher=matcher))
        return answer

    def run(self, most_steps: int = 10_000) -> int:
        """Step until nothing is left; how many steps it took."""
        for step in range(most_steps):
            if not self.scheduler.has_work:
                return step
            self.scheduler.step()
        raise AssertionError(f"not done after {most_steps} steps")


def bench(
    pair: SlotPair,
    *,
    prefill_rows: int = 4,
    max_drafts: int | None = None,
    adaptive: bool = False,
    least_reused_rows: int = 2,
    controller: SpeculationController | None = None,
    eos_token_ids: tuple[int, ...] = (EOS,),
    decode: Callable[[Sequence[int]], str] = decode,
    observer: Journal | None = None,
) -> Bench:
    """A scheduler over a pair; prompts come in so small pieces, and so few rows are worth a copy, that short ones have several."""
    most = pair.max_proposals if max_drafts is None else max_drafts
    clock, journal = Clock(), observer or Journal()
    scheduler = Scheduler(
        pair,
        decode,
        controller or SpeculationController(most, adaptive=adaptive),
        SchedulerLimits(max_sequence=pair.capacity, vocab_size=pair.vocab_size, max_drafts=most, eos_token_ids=eos_token_ids),
        prefill_rows=prefill_rows,
        least_reused_rows=least_reused_rows,
        observer=journal,
        clock=clock,
    )
    return Bench(pair, scheduler, clock, journal)


def alone(
    prompt_ids: Sequence[int],
    params: GenerationParams,
    target: Target | None = None,
    *,
    decode: Callable[[Sequence[int]], str] = decode,
    eos_token_ids: tuple[int, ...] = (EOS,),
    matcher: Matcher | None = None,
) -> Answer:
    """The request's single run, plain: what it must say in any company."""
    params = params.ended_by(eos_token_ids)
    chooser = Chooser(params, prompt_ids, matcher)
    stream = OutputStream(decode, params, () if params.ignore_eos else eos_token_ids)
    answer, count = Answer(), 0
    for step in generate(target or ToyTarget(8, 64), None, prompt_ids, params, num_speculative_tokens=0, chooser=chooser):
        released = stream.push(step, chooser.logprobs[count:])
        count += len(step.token_ids)
        prompt_logprobs = tuple(chooser.prompt_logprobs) if chooser.reads_prompt and not answer.outputs else None
        answer.outputs.append(
            Output(
                tokens=released.tokens,
                finish_reason=released.step.finish_reason,
                stop_reason=stream.stop_reason,
                prompt_logprobs=prompt_logprobs,
            )
        )
        if released.step.finish_reason is not None:
            break
    return answer


def logprob_values(logprobs: Iterable[TokenLogprobs | None], top: int) -> FloatArray:
    """[tokens, 1 + top], without the first token of a prompt, which has none: its own log-probability and the likeliest ones'."""
    rows = [[entry.logprob, *(value for _, value in entry.top)] for entry in logprobs if entry is not None]
    return np.array(rows, dtype=np.float32).reshape(-1, 1 + top)


def plain_view(answer: Answer) -> tuple[object, ...]:
    """What a client sees of an answer, but for which tokens were drafted."""
    tokens = [(token.token_id, token.text, token.logprobs) for token in answer.tokens]
    return tokens, answer.finish_reason, answer.outputs[-1].stop_reason, answer.prompt_logprobs
