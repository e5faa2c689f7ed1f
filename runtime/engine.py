"""The engine: a bundle opened for many requests at a time, and the one thread that runs its scheduler.

with Engine.open("bundle") as engine:
    engine.submit(Request(request_id="1", prompt_ids=[...], params=GenerationParams(), deliver=print))
    engine.drain(timeout_seconds=60)

Everything else may call from any thread; outputs are delivered in the engine's.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from domino_deploy.backends import Backend
from domino_deploy.bundle import Bundle
from domino_deploy.errors import DrainingError, QueueFullError, RequestError
from domino_deploy.runtime.backends.ort_provider import Provider
from domino_deploy.runtime.constraints import ConstraintCompiler
from domino_deploy.runtime.controller import SpeculationController
from domino_deploy.runtime.engine_settings import EngineSettings
from domino_deploy.runtime.opening import DrafterChoice, open_slots
from domino_deploy.runtime.protocols import SlotPair
from domino_deploy.runtime.requests import ABORT, ERROR, EngineSnapshot, Observer, Output, Request, check_prompt, check_request
from domino_deploy.runtime.scheduled_request import ScheduledRequest, SchedulerLimits
from domino_deploy.runtime.scheduler import Scheduler
from domino_deploy.runtime.text import Tokenizer
from domino_deploy.runtime.warm_up import Interrupted, warm_up

__all__ = ["Engine", "EngineSettings"]

logger = logging.getLogger(__name__)

# Seconds that a refused client is asked to wait: not so few that it asks all the time, and what OpenAI's clients obey at most.
_LEAST_RETRY_SECONDS = 1.0
_MOST_RETRY_SECONDS = 120.0


class Engine:
    """Serves many requests at a time.

    Made by `open`; the constructor takes the parts as they are.

    Args:
        bundle: an opened bundle.
        tokenizer: its tokenizer.
        pair: its target and drafter; all slots empty.
        settings: its `max_sequences` gives way to the pair's number of slots.
        observer: told what happens.
        clock: seconds, rising.

    Attributes:
        max_model_len: tokens of the longest sequence, prompt and answer.
        max_speculative_tokens: drafts per cycle at most; 0 without a drafter.
    """

    def __init__(
        self,
        bundle: Bundle,
        tokenizer: Tokenizer,
        pair: SlotPair,
        settings: EngineSettings,
        *,
        observer: Observer | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.bundle = bundle
        self.tokenizer = tokenizer
        self.settings = replace(settings, max_sequences=pair.num_slots)
        self.max_model_len = pair.capacity
        wanted = bundle.manifest.num_speculative_tokens if settings.num_speculative_tokens is None else settings.num_speculative_tokens
        self.max_speculative_tokens = min(wanted, pair.max_proposals)
        self._pair = pair
        self._clock = clock
        self._controller = SpeculationController(self.max_speculative_tokens, adaptive=settings.adaptive)
        limits = SchedulerLimits(
            max_sequence=pair.capacity,
            vocab_size=pair.vocab_size,
            max_drafts=self.max_speculative_tokens,
            eos_token_ids=tuple(bundle.target.eos_token_ids),
        )
        self._scheduler = Scheduler(
            pair, tokenizer.decode, self._controller, limits, prefill_rows=settings.prefill_rows, observer=observer, clock=clock
        )
        self._thread = threading.Thread(target=self._run, name="domino-deploy-engine", daemon=True)
        # Guards everything below; told when something is to be done, and when a request has ended.
        self._changed = threading.Condition()
        self._inbox: deque[ScheduledRequest] = deque()
        self._cancelled: set[str] = set()
        self._unfinished: set[str] = set()
        self._snapshot = self._scheduler.snapshot()
        self._is_ready = False
        self._is_draining = False
        self._is_closing = False
        self._failure: Exception | None = None

    @classmethod
    def open(
        cls,
        bundle: str | Path,
        *,
        backend: Backend = Backend.ORT,
        provider: Provider = Provider.CPU,
        drafter: DrafterChoice = DrafterChoice.BUNDLE,
        max_model_len: int | None = None,
        threads: int | None = None,
        settings: EngineSettings | None = None,
        observer: Observer | None = None,
    ) -> Self:
        """Open a bundle for serving; other arguments, and errors, are those of `Session.open`.

        Args:
            settings: None for the defaults; a backend that runs one sequence at a time makes others wait for it.
            observer: told what the engine does.
        """
        settings = EngineSettings() if settings is None else settings
        opened, tokenizer, pair = open_slots(
            bundle,
            num_slots=settings.max_sequences,
            backend=backend,
            provider=provider,
            drafter=drafter,
            max_model_len=max_model_len,
            threads=threads,
        )
        return cls(opened, tokenizer, pair, settings, observer=observer)

    @property
    def is_ready(self) -> bool:
        """Whether requests are served now."""
        return self._is_ready and self._failure is None and not self._is_closing

    @property
    def gives_prompt_logprobs(self) -> bool:
        """Whether requests may ask for `prompt_logprobs`."""
        return self._pair.gives_prompt_logits

    @property
    def failure(self) -> Exception | None:
        """What ended the engine, if anything did; no request is taken any more."""
        return self._failure

    def start(self) -> None:
        """Start the engine's thread, which warms up first; requests may come at once, and wait for it."""
        if self._thread.ident is None:
            self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request; its time runs from here on.

        Raises:
            RequestError: one that cannot be served, or with the id of another that is not finished yet.
            CapacityError: a prompt that leaves no room for an answer.
            QueueFullError: as many wait as may.
            DrainingError: not started, draining, closed or failed.
        """
        arrived = self._clock()
        with self._changed:
            self._check_open(request)
        self._check(request)
        constraint = request.params.constraint
        matcher = None if constraint is None else self._compiler.matcher(constraint)
        delivering = replace(request, deliver=lambda output: self._deliver(request, output))
        scheduled = self._scheduler.prepared(delivering, matcher=matcher, arrived=arrived)
        with self._changed:
            self._check_open(request)
            self._unfinished.add(request.request_id)
            self._inbox.append(scheduled)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request within one iteration; its last output says so.  One that is not there has ended already."""
        with self._changed:
            if request_id in self._unfinished:
                self._cancelled.add(request_id)
                self._changed.notify_all()

    def snapshot(self) -> EngineSnapshot:
        """How the engine stood after its last iteration, and who has come to wait since."""
        with self._changed:
            return replace(self._snapshot, waiting=self._snapshot.waiting + len(self._inbox))

    def drain(self, timeout_seconds: float) -> bool:
        """Take no more requests and wait for those there are; whether all ended in time."""
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(lambda: not self._unfinished, timeout_seconds)

    def close(self) -> None:
        """End what is left and the thread with it; the engine cannot be used any more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @cached_property
    def _compiler(self) -> ConstraintCompiler:
        return ConstraintCompiler(self.tokenizer.source, self._pair.vocab_size, tuple(self.bundle.target.eos_token_ids))

    def _check_open(self, request: Request) -> None:
        if self._failure is not None:
            raise DrainingError("Expected an engine that runs, found one that failed. Its log says why; start the server again.")
        if self._thread.ident is None or self._is_draining or self._is_closing:
            found = "one that is not started" if self._thread.ident is None else "one that is shutting down"
            raise DrainingError(f"Expected an engine that takes requests, found {found}. Try again later.")
        if request.request_id in self._unfinished:
            raise RequestError(
                f"Expected a request id that no unfinished request has, found {request.request_id!r} once more. Give each its own."
            )
        most = self.settings.max_sequences + self.settings.max_queued
        if len(self._unfinished) >= most:
            between = self._scheduler.seconds_between_ends() or _LEAST_RETRY_SECONDS
            seconds = min(max(between, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
            raise QueueFullError(
                f"Expected at most {most} requests at a time, {self.settings.max_sequences} running and {self.settings.max_queued} "
                f"waiting, found one more. Try again in {seconds:.0f} s.",
                retry_after_seconds=seconds,
            )

    def _check(self, request: Request) -> None:
        # Its number of speculative tokens is an upper limit, and any will do.
        check_request(request.prompt_ids, request.params, vocab_size=self._pair.vocab_size, max_proposals=0, num_speculative_tokens=0)
        if request.params.prompt_logprobs is not None and not self.gives_prompt_logprobs:
            raise RequestError(
                "Expected no prompt_logprobs with a backend that gives the logits of a prompt's last token alone, found "
                f"{request.params.prompt_logprobs}. Leave them out, or serve with the backend ort."
            )
        check_prompt(request.prompt_ids, self.max_model_len)

    def _deliver(self, request: Request, output: Output) -> None:
        if output.finish_reason is not None:
            with self._changed:
                self._unfinished.discard(request.request_id)
                self._cancelled.discard(request.request_id)
                self._snapshot = self._scheduler.snapshot()  # who has its last output is not found running any more
                self._changed.notify_all()
        request.deliver(output)

    def _run(self) -> None:
        """The thread: warm up, then iterate while there is something to do, and sleep while there is not."""
        finish_reason = ABORT
        try:
            self._warm_up()
            self._is_ready = True
            while self._take_in():
                self._scheduler.step()
                self._snapshot = self._scheduler.snapshot()
        except Interrupted:
            logger.info("the engine is closed before it was warm")
        except BaseException as error:  # a panic of a library written in Rust is no Exception
            logger.exception("the engine failed")
            finish_reason = ERROR
            with self._changed:
                self._failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        self._end_all(finish_reason)

    def _take_in(self) -> bool:
        """Wait for something to do and hand it to the scheduler; False when the engine is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._inbox or self._cancelled or self._scheduler.has_work)
            if self._is_closing:
                return False
            self._empty_inbox()
            for request_id in self._cancelled:
                self._scheduler.cancel(request_id)
            self._cancelled.clear()
            return True

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._scheduler.submit(self._inbox.popleft())
        self._snapshot = self._scheduler.snapshot()

    def _end_all(self, finish_reason: str) -> None:
        with self._changed:
            self._is_closing = True
            self._empty_inbox()
        self._scheduler.end_all(finish_reason, self._failure)
        self._snapshot = self._scheduler.snapshot()

    def _warm_up(self) -> None:
        warm_up(self._pair, self._controller, self.max_speculative_tokens, is_wanted=lambda: not self._is_closing)
