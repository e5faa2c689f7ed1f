"""Continuous batching: requests join and leave between cycles, prompts run in pieces, one batched cycle serves all that decode.

One `step` is: drop who left or ran out of time, admit into free slots, run a piece of a prompt (or some short ones), run one cycle.
Synchronous, for one thread; `engine.py` runs it.  Every request gets the tokens that its single run would give it, whatever runs beside it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from domino_deploy.errors import RequestError
from domino_deploy.runtime.constraints import Matcher
from domino_deploy.runtime.controller import SpeculationController
from domino_deploy.runtime.prefix_cache import LEAST_REUSED_ROWS, PrefixCache
from domino_deploy.runtime.protocols import SlotPair
from domino_deploy.runtime.requests import ABORT, ERROR, CycleRecord, EngineSnapshot, Observer, Output, Request, RequestStatistics
from domino_deploy.runtime.scheduled_request import ScheduledRequest, SchedulerLimits
from domino_deploy.runtime.telling import Telling

logger = logging.getLogger(__name__)

# Weight of the latest request in the mean time that one is served.
_SERVICE_WEIGHT = 0.1
# Cycles that the reported acceptance length is the mean of: some seconds of a busy engine.
_RECENT_CYCLES = 100


class Scheduler:
    """Runs requests over the slots of a pair.

    Args:
        pair: its slots, all empty.
        decode: text of tokens.
        controller: chooses how many tokens a cycle drafts.
        limits: what a request may have.
        prefill_rows: rows of prompts that run between two cycles at most, where the pair can be given pieces.
        least_reused_rows: rows of a known beginning that are worth a copy.
        observer: told what happens.
        clock: seconds, rising.
    """

    def __init__(
        self,
        pair: SlotPair,
        decode: Callable[[Sequence[int]], str],
        controller: SpeculationController,
        limits: SchedulerLimits,
        *,
        prefill_rows: int,
        least_reused_rows: int = LEAST_REUSED_ROWS,
        observer: Observer | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._pair = pair
        self._decode = decode
        self._controller = controller
        self._limits = limits
        # A prompt that must come whole is never longer than the capacity.
        self._prefill_rows = pair.capacity if pair.max_prefill_rows is None else min(prefill_rows, pair.max_prefill_rows)
        self._cache = PrefixCache(pair, least_rows=least_reused_rows)
        self._tell = Telling(observer)
        self._clock = clock
        self._requests: dict[str, ScheduledRequest] = {}  # all of them, in order of arrival
        self._waiting: deque[ScheduledRequest] = deque()
        self._prefilling: deque[ScheduledRequest] = deque()
        self._decoding: list[ScheduledRequest] = []
        self._width: int | None = None
        self._told: tuple[int, str] | None = None  # the controller's last choice; cycles that were nobody's change nothing of it
        self._service_seconds: float | None = None
        self._recent: deque[CycleRecord] = deque(maxlen=_RECENT_CYCLES)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def snapshot(self) -> EngineSnapshot:
        """How it stands now."""
        running = [*self._prefilling, *self._decoding]
        drafts = sum(record.drafts for record in self._recent)
        return EngineSnapshot(
            running=len(running),
            waiting=len(self._waiting),
            used_rows=sum(self._pair.rows(request.slot).target for request in running if request.slot is not None),
            total_rows=self._pair.num_slots * self._pair.capacity,
            width=self._width,
            acceptance_length=1 + sum(record.accepted for record in self._recent) / drafts if drafts else None,
        )

    def seconds_between_ends(self) -> float | None:
        """How often a request ends while all slots are in use, by those that ended lately; None before any."""
        return None if self._service_seconds is None else self._service_seconds / self._pair.num_slots

    def prepared(self, request: Request, *, matcher: Matcher | None = None, arrived: float | None = None) -> ScheduledRequest:
        """A request, ready to be queued; any thread may call this.

        Args:
            matcher: of its constraint.
            arrived: when, in seconds on the scheduler's clock; None for now.
        """
        arrived = self._clock() if arrived is None else arrived
        return ScheduledRequest(request, arrived=arrived, limits=self._limits, decode=self._decode, matcher=matcher)

    def submit(self, scheduled: ScheduledRequest) -> None:
        """Queue a prepared request; no other with its id may be there."""
        assert scheduled.request.request_id not in self._requests, "who makes the ids keeps them apart"
        self._requests[scheduled.request.request_id] = scheduled
        self._waiting.append(scheduled)
        self._tell(lambda observer: observer.queued(scheduled.request))

    def cancel(self, request_id: str) -> None:
        """End a request in the next step; one that is finished already, or unknown, is none to end."""
        if request_id in self._requests:
            self._requests[request_id].is_cancelled = True

    def end_all(self, finish_reason: str, error: Exception | None = None) -> None:
        """End every request, without another pass."""
        for request in list(self._requests.values()):
            self._end(request, finish_reason, error)

    def step(self) -> None:
        """One iteration.  An error of one request ends that one; those of the pair pass through, and then nothing can go on."""
        self._drop()
        self._admit()
        self._run_prompts()
        if self._decoding:
            self._run_cycle()

    def _drop(self) -> None:
        """End the requests that were cancelled or whose time is over, wherever they are."""
        now = self._clock()
        for request in list(self._requests.values()):
            late = request.overdue(now)
            if request.is_cancelled or late is not None:
                self._end(request, ABORT, late)

    def _admit(self) -> None:
        """The oldest first; which slot serves one is decided when its prompt's turn comes, when more may be in the caches."""
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._pair.num_slots:
            request = self._waiting.popleft()
            request.admit(self._clock())
            self._prefilling.append(request)

    def _run_prompts(self) -> None:
        """Run a piece of the first prompt, and of the next ones those that fit as a whole into what is left of a piece.

        Prompts take turns, so that a short one need not wait for all of a long one; a pass for several at once would be no faster.
        """
        left = self._prefill_rows
        while self._prefilling and left:
            request = self._prefilling[0]
            slot = self._place(request)
            rows = len(request.tokens) - self._pair.rows(slot).target
            if rows > left and left < self._prefill_rows:
                return  # not as a whole: it begins the next step
            self._prefilling.popleft()
            self._run_piece(request, slot, min(rows, left))
            left -= min(rows, left)

    def _run_piece(self, request: ScheduledRequest, slot: int, rows: int) -> None:
        held = self._pair.rows(slot).target
        piece = request.tokens[held : held + rows]
        is_last = held + len(piece) == len(request.tokens)
        started = self._clock()
        logits = self._pair.prefill(slot, piece, num_logits=len(piece) if request.reads_prompt else 1, with_drafter=request.with_drafter)
        now = self._clock()
        self._tell(lambda observer: observer.prefilled(len(piece), now - started))
        try:
            output = request.take_piece(logits, milliseconds=(now - started) * 1e3, is_last=is_last, now=now)
        except Exception as error:
            self._fail(request, error)
            return
        if output is None:
            self._prefilling.append(request)
        else:
            self._decoding.append(request)
            self._deliver(request, output)

    def _place(self, request: ScheduledRequest) -> int:
        """The slot of a request, with as many rows of its prompt as are to be had without running them."""
        if request.slot is None:
            used = {other.slot for other in (*self._prefilling, *self._decoding)}
            free = [slot for slot in range(self._pair.num_slots) if slot not in used]
            request.slot, rows = self._cache.start(
                request.tokens, free, with_drafter=request.with_drafter, may_reuse=not request.reads_prompt
            )
        else:
            rows = 0 if request.reads_prompt else self._cache.catch_up(request.slot, with_drafter=request.with_drafter)
        request.cached_tokens += rows
        return request.slot

    def _run_cycle(self) -> None:
        """Draft, verify and accept for all that decode."""
        requests, started = self._decoding, self._clock()
        waiting_rows = self._waiting_rows(requests)
        width = self._choose_width(requests, waiting_rows)
        batch = self._pair.cycle([request.cycle(width) for request in requests])
        outputs: list[Output | Exception] = []
        for request, verified in zip(requests, batch.sequences, strict=True):
            try:
                outputs.append(request.take_cycle(verified))
            except Exception as error:  # of this request alone: its logits, its constraint
                outputs.append(error)
        # Rows in the caches are those of the anchor and of all kept tokens but the last, the next anchor.
        steps = [output.step if isinstance(output, Output) else None for output in outputs]
        self._pair.commit([0 if step is None else len(step.token_ids) for step in steps])
        terms = batch.terms_ms.within((self._clock() - started) * 1e3)
        taken = [step for step in steps if step is not None]
        taken_in = waiting_rows if width else 0
        self._record(CycleRecord.of(taken, batch=len(requests), width=width, waiting_rows=taken_in, terms_ms=terms))
        for request, output, step in zip(list(requests), outputs, steps, strict=True):
            if isinstance(output, Exception):
                self._fail(request, output)
            elif step is not None:
                self._deliver(request, replace(output, step=replace(step, terms_ms=terms), batch=len(outputs)))

    def _waiting_rows(self, requests: Sequence[ScheduledRequest]) -> int:
        """Rows that the drafter must take in first, if these requests draft."""
        drafting = (request.slot for request in requests if request.num_drafts(self._limits.max_drafts))
        return sum(self._pair.rows(slot).waiting_rows for slot in drafting if slot is not None)

    def _choose_width(self, requests: Sequence[ScheduledRequest], waiting_rows: int) -> int:
        """Ask the controller for the coming cycle's width; who cannot use a draft is as good as plain."""
        histories = []
        for request in requests:
            request.history.limit = request.num_drafts(self._limits.max_drafts)
            if request.history.limit > 0:
                histories.append(request.history)
        if not histories:  # nobody's choice, so the observer is not told
            self._width = 0
            return 0
        joining = min(len(self._prefilling) + len(self._waiting), self._pair.num_slots - len(requests))
        width = self._controller.width(
            histories, plain_sequences=len(requests) - len(histories), joining=joining, waiting_rows=waiting_rows
        )
        reason = self._controller.last_reason
        if (width, reason) != self._told:
            self._tell(lambda observer: observer.width_chosen(width, reason))
        self._width, self._told = width, (width, reason)
        return width

    def _record(self, record: CycleRecord) -> None:
        self._controller.observe(record)
        self._recent.append(record)
        self._tell(lambda observer: observer.cycled(record))

    def _deliver(self, request: ScheduledRequest, output: Output) -> None:
        """Hand an output out; with the last one, the request leaves and its slot is free."""
        now = self._clock()
        if output.finish_reason is not None:
            output = replace(output, statistics=request.statistics(now))
            self._remove(request)
        if output.tokens:
            interval = request.since_last_delivery(now)
            self._tell(lambda observer: observer.delivered(request.request, len(output.tokens), interval))
        # Counted before it is told: who has the whole answer finds it in the metrics.
        if output.finish_reason is not None and output.statistics is not None:
            self._note_end(request.request, output.finish_reason, output.statistics)
        try:
            request.request.deliver(output)
        except Exception:  # who asked is gone, and cannot be told
            logger.exception("request %s: its output could not be delivered; it is cancelled", request.request.request_id)
            request.is_cancelled = True

    def _end(self, request: ScheduledRequest, finish_reason: str, error: Exception | None) -> None:
        try:
            output = request.ended(finish_reason, error)
        except Exception as failure:  # of this request alone: its text
            logger.exception("request %s: its last output could not be made", request.request.request_id)
            output = Output(finish_reason=ERROR, error=failure)
        self._deliver(request, output)

    def _fail(self, request: ScheduledRequest, error: Exception) -> None:
        if isinstance(error, RequestError):  # a constraint that grew: the client's own doing, and the text may quote it
            logger.info("request %s is refused on its way", request.request.request_id)
        else:
            logger.error("request %s failed", request.request.request_id, exc_info=error)
        if request.slot is not None:
            self._pair.truncate(request.slot, 0)  # its rows may be what is wrong: nobody is to start from them
        self._end(request, ERROR, error)

    def _remove(self, request: ScheduledRequest) -> None:
        """Take a request out, wherever it is."""
        del self._requests[request.request.request_id]
        for place in (self._waiting, self._prefilling, self._decoding):
            if request in place:
                place.remove(request)
        if request.slot is not None:
            self._cache.touch(request.slot)

    def _note_end(self, request: Request, finish_reason: str, statistics: RequestStatistics) -> None:
        served = statistics.total_seconds - statistics.queue_seconds
        before = served if self._service_seconds is None else self._service_seconds
        self._service_seconds = before + _SERVICE_WEIGHT * (served - before)
        self._tell(lambda observer: observer.finished(request, finish_reason, statistics))
