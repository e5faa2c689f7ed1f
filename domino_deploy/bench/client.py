"""One streamed request to an OpenAI-compatible server, timed; and the few other things that a measurement asks a server.

The standard library alone: a request is a blocking call, and whoever wants several at once runs them in threads.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import SplitResult, urlsplit

from domino_deploy.api_keys import KEY_CHARACTERS, is_visible_ascii
from domino_deploy.bench import failures
from domino_deploy.bench.chunks import UNREADABLE, Chunks
from domino_deploy.errors import MeasurementError, RequestError

Clock = Callable[[], float]
_PIECE_BYTES = 1 << 16
_MOST_BYTES = 4 << 20  # of models and metrics: a server's are some tens of KiB
_METRICS_SECONDS = 10.0  # Prometheus' own limit for one reading
# What people copy from an example of a request, where the base URL is wanted.
_ENDPOINTS = ("/chat/completions", "/completions", "/models", "/responses")
# A line of Prometheus' text format: name, labels, value, and perhaps a time.
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})?\s+(?P<value>[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|NaN|Inf))(?:\s+-?\d+)?$")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one request came to; times are the clock's, seconds.

    text_times: when each chunk with text arrived; several tokens may share a chunk.
    prompt_tokens, cached_tokens, completion_tokens: the server's usage, None where it gives none.
    text: the answer, whole or as far as it came; error: why it failed, a kind of `failures.py`, None if it did not;
    message: the server's own words for it, None where it gave none.
    """

    started: float
    ended: float
    text_times: tuple[float, ...] = ()
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    message: str | None = None

    @property
    def first_text_ms(self) -> float | None:
        """TTFT: from sending to the first text."""
        return (self.text_times[0] - self.started) * 1e3 if self.text_times else None

    @property
    def token_ms(self) -> float | None:
        """TPOT: from the first text to the last, for each token behind the first."""
        if self.completion_tokens is None or self.completion_tokens < 2 or not self.text_times:
            return None
        return (self.text_times[-1] - self.text_times[0]) * 1e3 / (self.completion_tokens - 1)

    @property
    def chunk_gaps_ms(self) -> tuple[float, ...]:
        """ITL as streaming clients see it: between chunks, however many tokens each holds."""
        return tuple((after - before) * 1e3 for before, after in zip(self.text_times, self.text_times[1:], strict=False))

    @property
    def total_ms(self) -> float:
        """From sending to the end of the stream."""
        return (self.ended - self.started) * 1e3


class AnswerLeft(Exception):
    """The answer was not wanted any more."""


class Client:
    """A server by its address.

    Args:
        url: http or https, with or without /v1 at its end, without a name and a password.
        api_key: sent as a bearer token; "" for none.
        timeout_seconds: for a connection, for every wait for more of a streamed answer, and for other answers as a whole.
        clock: seconds.

    Raises:
        RequestError: the address is not one, or the key cannot be sent.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout_seconds: float = 600.0, clock: Clock = time.perf_counter) -> None:
        if "@" in url:  # nothing of it is shown: a part of the password may stand on either side
            raise RequestError(
                "Expected an address without a name and a password, found an @ in it. Drop them from --url; a key is --api-key."
            )
        parts = _address(url)
        if parts is None:
            raise RequestError(f"Expected the address of a server, such as http://127.0.0.1:8000, found {url!r}. Correct --url.")
        bad = sum(not is_visible_ascii(mark) for mark in api_key)
        if bad:  # the key itself is never shown
            raise RequestError(
                f"Expected an API key of {KEY_CHARACTERS}, found {bad} other(s) in it, such as a line end. Correct --api-key."
            )
        base = urlsplit(url.rstrip("/"))
        endpoint = next((name for name in _ENDPOINTS if base.path.endswith(name)), None)
        if endpoint is not None:
            base_url = base.geturl().removesuffix(endpoint)
            raise RequestError(f"Expected the base URL of a server, found the endpoint {endpoint} in {url!r}. Give --url {base_url}.")
        self._url = url
        self._is_secure, self._host = parts.scheme == "https", parts.hostname or ""
        self._port = parts.port or (443 if self._is_secure else 80)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_seconds = timeout_seconds
        self._clock = clock

    def first_model(self) -> str:
        """The first of the models that the server lists.

        Raises:
            MeasurementError: it cannot be asked, or lists none.
        """
        expected = f"Expected a server at {self._url} that lists its models"
        try:
            status, content = self._get("/v1/models", self._timeout_seconds)
        except (OSError, http.client.HTTPException) as error:
            kind = failures.kind_of(error)
            raise MeasurementError(f"{expected}, found {failures.words(kind)}. {failures.advice(kind)}") from error
        if status != HTTPStatus.OK:
            kind = failures.kind_of_status(status)
            message = failures.message_in(content)
            said = "" if message is None else f' ("{message}")'
            raise MeasurementError(f"{expected}, found {failures.words(kind)} at /v1/models{said}. {failures.advice(kind)}")
        try:
            model = json.loads(content)["data"][0]["id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            model = None
        if not isinstance(model, str):
            found = f"found no such list at /v1/models, but {content[:80].decode('utf-8', 'replace')!r}"
            raise MeasurementError(f"{expected}, {found}. Correct --url, or name the --model.")
        return model

    def metrics(self) -> dict[str, float] | None:
        """Prometheus samples by name, all labels summed up; None from a server that gives none at /metrics."""
        try:
            status, content = self._get("/metrics", min(_METRICS_SECONDS, self._timeout_seconds))
        except (OSError, http.client.HTTPException):
            return None
        if status != HTTPStatus.OK:
            return None
        samples: dict[str, float] = {}
        for found in filter(None, map(_SAMPLE.match, content.decode("utf-8", "replace").splitlines())):
            samples[found["name"]] = samples.get(found["name"], 0.0) + float(found["value"])
        return samples

    def stream(self, path: str, body: Mapping[str, object], *, leave: threading.Event | None = None) -> Answer:
        """Send one request and read its answer to the end; what goes wrong is the answer's `error`.

        Args:
            leave: once it is set, the connection is closed with the next piece of an answer that has not ended.

        Raises:
            AnswerLeft: it came to that.
        """
        started = self._clock()
        stream = Chunks(self._clock)
        error: str | None = None
        message: str | None = None
        connection = self._connection()
        try:
            content = json.dumps(body).encode()
            connection.connect()
            connected = connection.sock
            connection.request("POST", self._root + path, content, {"Content-Type": "application/json", **self._headers})
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                error = failures.kind_of_status(response.status)
                with suppress(OSError, http.client.HTTPException), _cut_off(connected, self._timeout_seconds):
                    message = failures.message_in(response.read(_PIECE_BYTES))
            elif response.headers.get_content_type() != "text/event-stream":
                error = "no_event_stream"
            else:
                while not stream.is_complete and (piece := response.read1(_PIECE_BYTES)):
                    stream.take(piece)
                    if leave is not None and leave.is_set() and not stream.is_complete:
                        raise AnswerLeft
                error, message = stream.error, stream.message
        except (OSError, http.client.HTTPException) as failure:
            error = failures.kind_of(failure)
        except UNREADABLE:
            error = "bad_chunk"
        finally:
            connection.close()
        return Answer(
            started=started,
            ended=self._clock(),
            text_times=tuple(stream.text_times),
            text="".join(stream.texts),
            error=error,
            message=message,
            **stream.usage,
        )

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_seconds)

    def _get(self, path: str, seconds: float) -> tuple[int, bytes]:
        """Status and body; an answer that is not there in full after so many seconds is a timeout."""
        connection = self._connection()
        try:
            connection.connect()
            with _cut_off(connection.sock, seconds):
                connection.request("GET", self._root + path, headers=self._headers)
                response = connection.getresponse()
                content = response.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise failures.LongAnswer
            if response.length:  # fewer bytes than the head promised
                raise http.client.IncompleteRead(content, response.length)
            return response.status, content
        finally:
            connection.close()


def _address(url: str) -> SplitResult | None:
    """Its parts; None for what is no address of a server, or one that cannot be looked up or sent."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        is_sound = parts.scheme in ("http", "https") and host and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:  # brackets, a port, or a label of the name
        return None
    return parts if is_sound and is_visible_ascii(host + parts.path) else None


@contextmanager
def _cut_off(connected: socket.socket, seconds: float) -> Iterator[None]:
    """End what is read of a socket after so many seconds: its own timeout is for each wait, and bytes one by one never end it.

    Raises:
        TimeoutError: it came to that.
    """
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        with suppress(OSError):  # closed meanwhile
            socket.socket.shutdown(connected, socket.SHUT_RDWR)  # of TCP: TLS would take part of its state from whoever reads

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if is_late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
    if is_late.is_set():
        raise TimeoutError
