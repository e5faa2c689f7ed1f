"""The asyncio side of requests to the engine: outputs as they come, and an end to them when the client goes away."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from domino_deploy.errors import DrainingError, QueueFullError
from domino_deploy.runtime.requests import ABORT, ERROR, GenerationParams, Output, Request

if TYPE_CHECKING:
    from domino_deploy.runtime.engine import Engine

Result = TypeVar("Result")
# Until a full queue is looked at again, for the later ones of several prompts.
_QUEUE_POLL_SECONDS = 0.1
# What the engine says of a cancelled request comes within one iteration; a client that went away is not worth a longer wait.
_LAST_OUTPUT_SECONDS = 2.0
# Two clients may choose one id for their requests; in the engine they must differ.
_SERIAL = itertools.count()


class Generations:
    """The generations under way on a server.  The event loop's thread alone may call it."""

    def __init__(self) -> None:
        self._is_draining = False
        self._under_way: set[Generation] = set()

    @property
    def is_draining(self) -> bool:
        """Whether no more may begin."""
        return self._is_draining

    def begin(self, generation: Generation) -> None:
        """Take one in.

        Raises:
            DrainingError: no more may begin.
        """
        if self._is_draining:
            raise DrainingError("Expected a server that takes requests, found one that is shutting down. Try again later.")
        self._under_way.add(generation)

    def end(self, generation: Generation) -> None:
        """Let one go; one that is not there is gone already."""
        self._under_way.discard(generation)

    def drain(self) -> tuple[Generation, ...]:
        """Let no more begin; those that have, and have not ended yet."""
        self._is_draining = True
        return tuple(generation for generation in self._under_way if not generation.has_ended)


class Generation:
    """The prompts of one HTTP request, each a request to the engine; as many at a time as the engine has slots.

    Whoever starts it must close it, which cancels whatever still runs.

    Args:
        engine: what answers.
        under_way: where it is to be found from its start to its close.
        prompts: token ids.
        params: of all prompts alike.
        name: of the HTTP request, for the engine's logs.
        arrived: when the HTTP request did, in seconds of `time.monotonic`.
        time_limit: seconds from then to the last token of all prompts, None for no limit.
        note_end: told the last output of each prompt, however it ended.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: GenerationParams,
        *,
        under_way: Generations,
        name: str,
        arrived: float,
        time_limit: float | None,
        note_end: Callable[[Output], None],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._name = f"{name}-{next(_SERIAL)}"
        self._under_way = under_way
        self._arrived = arrived
        self._time_limit = time_limit
        self._note_end = note_end
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self._waiting = deque(range(len(prompts)))
        self._running: set[int] = set()  # what the engine took in; its last output is still to come
        self._num_ended = 0  # prompts, counted in the engine's thread
        self._num_tokens = 0
        self._lock = threading.Lock()  # of the flag below, and of what the thread that submits adds to those that run
        self._is_closed = False

    async def start(self) -> None:
        """Submit the first prompts; closed again if that fails.

        Raises:
            RequestError, CapacityError, QueueFullError, DrainingError: the engine, or a server that ends, refuses them.
            TimeoutError: the time limit is over.
        """
        try:
            self._under_way.begin(self)
            await self._submit_waiting()
        except BaseException:
            await self.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the engine has nothing more to do for it, told or not."""
        return self._is_closed or self._num_ended == len(self._prompts)

    async def outputs(self, silence_seconds: float) -> AsyncIterator[tuple[int, Output] | None]:
        """The outputs of all prompts, each with its prompt's index, until all have ended; None after so long a silence.

        Raises:
            TimeoutError: the time limit is over; DrainingError: the engine ended it; others: the engine failed on it.
        """
        heard, is_due = monotonic(), False
        while self._running or self._waiting:
            if is_due or not self._running:  # a slot became free, or the queue had no room
                await self._submit_waiting()
                is_due = False
            silence_left = heard + silence_seconds - monotonic()
            try:
                # Not wait_for: that of Python 3.11 loses a cancellation that comes together with an output.
                async with asyncio.timeout(silence_left if self._running else min(silence_left, _QUEUE_POLL_SECONDS)):
                    index, output = await self._outputs.get()
            except TimeoutError:
                if monotonic() - heard >= silence_seconds:
                    yield None
                    heard = monotonic()
                continue
            self._follow(index, output)
            if output.finish_reason == ABORT and isinstance(output.error, TimeoutError):
                raise self._late() from output.error
            if output.finish_reason in (ABORT, ERROR):
                raise output.error or DrainingError("Expected to answer in full, found the server shutting down. Send the request again.")
            yield index, output
            heard, is_due = monotonic(), output.finish_reason is not None

    async def _submit_waiting(self) -> None:
        """Submit prompts while there are slots for them; it returns early if the queue is full, for another try."""
        most = self._engine.settings.max_sequences
        while self._waiting and len(self._running) < most:
            index = self._waiting[0]
            seconds_left = self._seconds_left()
            if seconds_left is not None and seconds_left <= 0:
                raise self._late()
            try:
                # Grammars are compiled on the way, which may take long.
                await run_in_threadpool(self._submit, index)
            except QueueFullError:
                if index == 0:
                    raise
                return
            self._waiting.popleft()

    def _submit(self, index: int) -> None:
        request_id = self._request_id(index)

        def deliver(output: Output) -> None:
            self._num_ended += output.finish_reason is not None
            try:
                self._loop.call_soon_threadsafe(self._outputs.put_nowait, (index, output))
            except RuntimeError:  # the loop is closed, the server gone: nobody waits for it
                self._engine.cancel(request_id)

        request = Request(
            request_id=request_id,
            prompt_ids=self._prompts[index],
            params=self._params,
            deliver=deliver,
            time_limit=self._seconds_left(),
        )
        self._engine.submit(request)
        # Noted in this thread, which goes on when its task is cancelled: either `close` finds it, or it finds that it came too late.
        with self._lock:
            if self._is_closed:
                self._engine.cancel(request_id)
            else:
                self._running.add(index)

    async def close(self) -> None:
        """Cancel what still runs, and note how it ended."""
        with self._lock:
            self._is_closed = True
        self._under_way.end(self)
        self._waiting.clear()
        # One that a thread is still about to submit is not there; that thread sees to it.
        for index in self._running:
            self._engine.cancel(self._request_id(index))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_OUTPUT_SECONDS):
                while self._running:
                    self._follow(*await self._outputs.get())

    def _follow(self, index: int, output: Output) -> None:
        self._num_tokens += len(output.tokens)
        if output.finish_reason is not None:
            self._running.discard(index)
            self._note_end(output)

    def _seconds_left(self) -> float | None:
        return None if self._time_limit is None else self._arrived + self._time_limit - monotonic()

    def _late(self) -> TimeoutError:
        return TimeoutError(
            f"Expected the answer within {self._time_limit:g} s, the time limit, found {self._num_tokens} tokens of it after "
            f"{monotonic() - self._arrived:.1f} s. Ask for less at a time, or allow more time."
        )

    def _request_id(self, index: int) -> str:
        return f"{self._name}-{index}"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away (the body must have been read).

    Raises:
        ClientDisconnect: the client went away.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
