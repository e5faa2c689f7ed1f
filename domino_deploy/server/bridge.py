"""The asyncio side of requests to the engine: outputs as they come, and an end to them when the client goes away."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from domino_deploy.errors import DrainingError, QueueFullError
from domino_deploy.runtime.requests import ABORT, ERROR, GenerationParams, Output, Request

if TYPE_CHECKING:
    from domino_deploy.runtime.engine import Engine

Result = TypeVar("Result")
# Until the engine's queue is looked at again, for the later ones of several prompts.
_QUEUE_POLL_SECONDS = 0.1
# What the engine says of a cancelled request comes within one iteration; a client that went away is not worth a longer wait.
_LAST_OUTPUT_SECONDS = 2.0
# Two clients may choose one id for their requests; in the engine they must differ.
_SERIAL = itertools.count()


class Generation:
    """The prompts of one HTTP request, each a request to the engine; as many at a time as the engine has slots.

    Whoever starts it must close it, which cancels whatever still runs.

    Args:
        engine: what answers.
        prompts: token ids.
        params: of all prompts alike.
        name: of the HTTP request, for the engine's logs.
        time_limit: seconds per prompt, from its arrival in the engine.
        note_end: told the last output of each prompt, however it ended.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: GenerationParams,
        *,
        name: str,
        time_limit: float | None,
        note_end: Callable[[Output], None],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._name = f"{name}-{next(_SERIAL)}"
        self._time_limit = time_limit
        self._note_end = note_end
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self._waiting = deque(range(len(prompts)))
        self._running: set[int] = set()
        self._lock = threading.Lock()  # of the flag below, which the thread that submits looks at
        self._is_closed = False

    async def start(self) -> None:
        """Submit the first prompts; closed again if that fails.

        Raises:
            RequestError, CapacityError, QueueFullError, DrainingError: the engine refuses them.
        """
        try:
            await self._submit_waiting()
        except BaseException:
            await self.close()
            raise

    async def outputs(self, silence_seconds: float) -> AsyncIterator[tuple[int, Output] | None]:
        """The outputs of all prompts, each with its prompt's index, until all have ended; None after so long a silence.

        Raises:
            TimeoutError: the time limit of one is over; DrainingError: the engine ended it; others: the engine failed on it.
        """
        while self._running or self._waiting:
            try:
                # Not wait_for: that of Python 3.11 loses a cancellation that comes together with an output.
                async with asyncio.timeout(silence_seconds):
                    index, output = await self._outputs.get()
            except TimeoutError:
                yield None
                continue
            self._follow(index, output)
            if output.finish_reason in (ABORT, ERROR):
                raise output.error or DrainingError("Expected to answer in full, found the server shutting down. Send the request again.")
            yield index, output
            if output.finish_reason is not None:
                await self._submit_waiting()

    async def _submit_waiting(self) -> None:
        most = self._engine.settings.max_sequences
        while self._waiting and len(self._running) < most:
            index = self._waiting[0]
            try:
                # Grammars are compiled on the way, which may take long.
                await run_in_threadpool(self._submit, index)
            except QueueFullError:
                if self._running:  # the next one of ours to end is another chance
                    return
                if index == 0:
                    raise
                await asyncio.sleep(_QUEUE_POLL_SECONDS)
                continue
            self._waiting.popleft()
            self._running.add(index)

    def _submit(self, index: int) -> None:
        request_id = self._request_id(index)

        def deliver(output: Output) -> None:
            try:
                self._loop.call_soon_threadsafe(self._outputs.put_nowait, (index, output))
            except RuntimeError:  # the loop is closed, the server gone: nobody waits for it
                self._engine.cancel(request_id)

        request = Request(
            request_id=request_id,
            prompt_ids=self._prompts[index],
            params=self._params,
            deliver=deliver,
            time_limit=self._time_limit,
        )
        self._engine.submit(request)
        # The thread goes on when its task is cancelled, and may come too late for `close`.
        with self._lock:
            if self._is_closed:
                self._engine.cancel(request_id)

    async def close(self) -> None:
        """Cancel what still runs, and note how it ended."""
        with self._lock:
            self._is_closed = True
        self._waiting.clear()
        # One that a thread was about to submit is in none of the two; that thread sees to it.
        for index in self._running:
            self._engine.cancel(self._request_id(index))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_OUTPUT_SECONDS):
                while self._running:
                    self._follow(*await self._outputs.get())

    def _follow(self, index: int, output: Output) -> None:
        if output.finish_reason is not None:
            self._running.discard(index)
            self._note_end(output)

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
