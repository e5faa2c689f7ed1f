"""A `domino-deploy serve` process on a free port: started, waited for, ended; for the scripts and tests that need a real server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ServerError(Exception):
    """The server did not come up, or ended by itself; the end of its log is in the message."""


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """A running server.

    url: without a path, no slash at the end; model: the name that requests give; api_key: "" if it asks for none; log: what it
    wrote to standard output and error.
    """

    url: str
    model: str
    api_key: str
    process: subprocess.Popen[bytes]
    command: tuple[str, ...]
    log: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def get(self, path: str) -> str:
        """Body of a GET; urllib's HTTPError for a status of 400 and above."""
        request = urllib.request.Request(self.url + path, headers=self.headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.read().decode("utf-8"))

    def own_bytes(self) -> int:
        """Resident memory of the process without mapped files (Linux: RssAnon): pages of the weights come in as texts first need them."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
        return int(kilobytes) * 1024


@contextmanager
def serving(bundle: Path, log: Path, *flags: str, api_key: str = "", ready_seconds: float = 600.0) -> Iterator[ServerProcess]:
    """Serve `bundle` on a free port of the loopback interface until the block ends; then it drains and goes.

    Args:
        bundle: the bundle's folder.
        log: a file for what the server writes.
        flags: more flags of `domino-deploy serve`.
        api_key: the key that the API asks for; "" for an open one.
        ready_seconds: how long to wait for /health/ready.

    Raises:
        ServerError: it is not ready by then, or has ended; or SIGTERM did not end it with exit code 0.
    """
    port = _free_port()
    keys = ("--api-key", api_key) if api_key else ()
    command = ("domino-deploy", "serve", str(bundle), "--host", "127.0.0.1", "--port", str(port), *keys, *flags)
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "domino_deploy.cli", *command[1:]], stdout=file, stderr=subprocess.STDOUT)
    try:
        server = ServerProcess(url=f"http://127.0.0.1:{port}", model="", api_key=api_key, process=process, command=command, log=log)
        _wait_until_ready(server, ready_seconds)
        listed: dict[str, Any] = json.loads(server.get("/v1/models"))
        yield ServerProcess(**{**vars(server), "model": listed["data"][0]["id"]})
    finally:
        ended_itself = process.poll() is not None
        process.terminate()
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    if ended_itself or code != 0:
        raise ServerError(f"Expected the server to end on SIGTERM with exit code 0, found {code}. Its log ends:\n{_end_of(log)}")


def _wait_until_ready(server: ServerProcess, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerError(f"Expected a server, found exit code {server.process.returncode}. Its log ends:\n{_end_of(server.log)}")
        try:
            server.get("/health/ready")
        except (urllib.error.URLError, ConnectionError):  # not listening yet, or 503: still warming up
            time.sleep(0.1)
        else:
            return
    raise ServerError(f"Expected /health/ready within {seconds:.0f} seconds, found none. The server's log ends:\n{_end_of(server.log)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_of(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def flag_line(command: Sequence[str], api_key: str) -> str:
    """The command for a report: without its key."""
    return " ".join("KEY" if word == api_key and api_key else word for word in command)
