"""A server of raw bytes that never ends its answer, for tests of what reads answers."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def endless(first: bytes, again: bytes, *, pause_seconds: float = 0.0) -> Iterator[str]:
    """Its address.  Every request is answered with `first`, then `again` after each pause until the client leaves; once if it is empty."""
    is_over = threading.Event()

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the client has left
                self.request.recv(1 << 16)
                self.request.sendall(first)
                while again and not is_over.wait(pause_seconds):
                    self.request.sendall(again)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            is_over.set()
            server.shutdown()
            thread.join()
