"""An ASGI application on a free port of this machine, served from a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


@contextmanager
def served(app: ASGIApp, *, config: uvicorn.Config | None = None, seconds: float = 60.0) -> Iterator[str]:
    """The address of `app`, which answers until the block is left; `seconds` is how long its start and end may take."""
    config = config or uvicorn.Config(app, log_level="error", lifespan="off", ws="none")
    config.host, config.port = "127.0.0.1", 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + seconds
        while not server.started:
            assert thread.is_alive(), "the server ended before it began"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(seconds)
        assert not thread.is_alive(), "the server does not end"
