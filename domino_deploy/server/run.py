"""The life of a server process: bind, listen, warm up, serve, drain, end.

It listens while the engine still warms up, so that `/health/ready` can say so; requests that come meanwhile wait in the queue.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from domino_deploy.errors import RequestError
from domino_deploy.server.activity import ActivityLog
from domino_deploy.server.bridge import Generation
from domino_deploy.server.connections import ServerConfig
from domino_deploy.server.state import ServerState

if TYPE_CHECKING:
    from domino_deploy.runtime.engine import Engine

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.1  # how late a start or a failure of the engine is seen, and the end of a drain
# After the engine's end: for its last words to reach the clients, and for 503 to reach whoever asks in that moment.
_LAST_ANSWERS_SECONDS = 1.0


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address, not yet listening; to be had before anything slow is loaded.

    Raises:
        RequestError: the address is not ours, taken, or not allowed.
    """
    name = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: a label longer than names may be
        raise RequestError(f"Expected a host to listen on, found {host!r}, which has no address: {error}. Correct --host.") from error
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a restart would wait for the last one's connections
        found.bind(address)
    except OSError as error:
        found.close()
        raise RequestError(_refusal(error, host, port)) from error
    return found


def base_url(listening: socket.socket, host: str) -> str:
    """What clients take as their base URL; an address that stands for all of the machine's is given as the local one."""
    port = listening.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host.strip("[]"), host)
    return f"http://{f'[{shown}]' if ':' in shown and not shown.startswith('[') else shown}:{port}/v1"


def run(app: Starlette, listening: socket.socket, *, announce: Callable[[], None]) -> int:
    """Serve until a signal, or the engine's failure; starts the engine, and closes it.

    The first SIGTERM or SIGINT lets running requests finish, for as long as the settings say, and aborts the rest; a second one ends
    the process at once.  The main thread only.

    Args:
        app: made by `create_app`.
        listening: made by `bound_socket`; closed in the end.
        announce: called once requests are taken.

    Returns:
        The process's exit code: 0 after a signal, 1 after a failure.
    """
    return asyncio.run(_run(app, listening, announce))


async def _run(app: Starlette, listening: socket.socket, announce: Callable[[], None]) -> int:
    state: ServerState = app.state.server
    server = _Server(ServerConfig(app, state.settings))
    ending = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, number, ending)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    state.engine.start()
    telling = None if state.metrics is None else asyncio.create_task(ActivityLog(state.metrics.work, state.engine.snapshot).keep_telling())
    try:
        await _until_the_end(state.engine, ending, serving, announce)
        last_words = await _finish_requests(state)
    finally:
        if telling is not None:
            telling.cancel()
        await asyncio.to_thread(state.engine.close)
        server.should_exit = True
        await serving
    _LOG.info(last_words)
    return 0 if state.engine.failure is None else 1


async def _until_the_end(engine: Engine, ending: asyncio.Event, serving: asyncio.Task[None], announce: Callable[[], None]) -> None:
    is_announced = False
    while not ending.is_set() and engine.failure is None and not serving.done():
        if engine.is_ready and not is_announced:
            is_announced = True
            announce()
        await asyncio.sleep(_POLL_SECONDS)


async def _finish_requests(state: ServerState) -> str:
    """Let those that run finish; requests that come meanwhile are answered with 503.  What there is to say in the end."""
    engine = state.engine
    going = state.generations.drain()
    if engine.failure is None:
        last_words = await _drain(engine, going, state.settings.drain_seconds)
        if engine.failure is None:
            return last_words
    _LOG.error("The engine failed, the server ends", exc_info=engine.failure)
    await asyncio.sleep(_LAST_ANSWERS_SECONDS)
    return "Ended: the engine failed"


async def _drain(engine: Engine, going: Sequence[Generation], seconds: float) -> str:
    """Wait for these, whose later prompts the engine still takes; the counts are of HTTP requests, as the log's lines are."""
    _LOG.info("Ending: %d requests may finish", len(going))
    left, deadline = list(going), monotonic() + seconds
    while (left := [one for one in left if not one.has_ended]) and engine.failure is None and monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    if left and engine.failure is None:
        _LOG.warning("Ending: requests did not finish within %g seconds and are aborted", seconds)
    # However they ended: some of them may have failed, run out of time or lost their client.
    return f"Ended: {len(going) - len(left)} requests ended, {len(left)} aborted"


def _on_signal(number: int, ending: asyncio.Event) -> None:
    if ending.is_set():
        _LOG.warning("A second signal: ending at once")
        os._exit(128 + number)  # the engine's thread may be inside a graph, which nothing else interrupts
    ending.set()


class _Server(uvicorn.Server):
    """Leaves signals alone: `run` acts on them, and uvicorn would end streams that may still finish."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _refusal(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Expected a free port to listen on, found {port} of {host} in use. Stop what uses it, or choose another --port (0: any)."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Expected a port that this user may listen on, found {port}, which takes more rights. Choose a --port above 1023."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"Expected an address of this machine, found {host}, which is none. Choose another --host: 127.0.0.1, or 0.0.0.0 for all."
    return f"Expected an address to listen on, found {host}:{port}, which cannot be bound: {error.strerror}. Choose another."
