"""One streamed request to an OpenAI-compatible server, timed; and the few other things that a measurement asks a server.

The standard library alone: a request is a blocking call, and whoever wants several at once runs them in threads.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from domino_deploy.bench import failures
from domino_deploy.bench.event_stream import EventReader
from domino_deploy.errors import MeasurementError, RequestError

Clock = Callable[[], float]
_PIECE_BYTES = 1 << 16
# A line of Prometheus' text format: name, labels, value, and perhaps a time.
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})?\s+(?P<value>[-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|NaN|Inf))(?:\s+-?\d+)?$")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one request came to; times are the clock's, seconds.

    text_times: when each chunk with text arrived; several tokens may share a chunk.
    prompt_tokens, cached_tokens, completion_tokens: the server's usage, None where it gives none.
    text: the answer, whole or as far as it came; error: why it failed, a kind of `failures.py`, None if it did not.
    """

    started: float
    ended: float
    text_times: tuple[float, ...] = ()
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None

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


class Client:
    """A server by its address.

    Args:
        url: http or https, with or without /v1 at its end.
        api_key: sent as a bearer token; "" for none.
        timeout_seconds: for a connection, and for every wait for more of an answer.
        clock: seconds.

    Raises:
        RequestError: the address is not one.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout_seconds: float = 600.0, clock: Clock = time.perf_counter) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise RequestError(f"Expected the address of a server, such as http://127.0.0.1:8000, found {url!r}. Correct --url.")
        self._url = url
        self._is_secure, self._host = parts.scheme == "https", parts.hostname
        self._port = port or (443 if self._is_secure else 80)
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
            status, text = self._get("/v1/models")
        except (OSError, http.client.HTTPException) as error:
            kind = failures.kind_of(error)
            raise MeasurementError(f"{expected}, found {failures.words(kind)}. {failures.advice(kind)}") from error
        if status != HTTPStatus.OK:
            kind = failures.kind_of_status(status)
            raise MeasurementError(f"{expected}, found {failures.words(kind)} at /v1/models. {failures.advice(kind)}")
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            found = f"found no such list at /v1/models, but {text[:80]!r}"
            raise MeasurementError(f"{expected}, {found}. Correct --url, or name the --model.") from error

    def metrics(self) -> dict[str, float] | None:
        """Prometheus samples by name, all labels summed up; None from a server that gives none at /metrics."""
        try:
            status, text = self._get("/metrics")
        except (OSError, http.client.HTTPException):
            return None
        if status != HTTPStatus.OK:
            return None
        samples: dict[str, float] = {}
        for found in filter(None, map(_SAMPLE.match, text.splitlines())):
            samples[found["name"]] = samples.get(found["name"], 0.0) + float(found["value"])
        return samples

    def stream(self, path: str, body: Mapping[str, object]) -> Answer:
        """Send one request and read its answer to the end; what goes wrong is the answer's `error`."""
        started = self._clock()
        stream = _Stream(self._clock)
        error: str | None = None
        connection = self._connection()
        try:
            content = json.dumps(body).encode()
            connection.request("POST", self._root + path, content, {"Content-Type": "application/json", **self._headers})
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                response.read()
                error = failures.kind_of_status(response.status)
            elif response.headers.get_content_type() != "text/event-stream":
                error = "no_event_stream"
            else:
                while not stream.is_complete and (piece := response.read1(_PIECE_BYTES)):
                    stream.take(piece)
                error = stream.error
        except (OSError, http.client.HTTPException) as failure:
            error = failures.kind_of(failure)
        except (ValueError, TypeError, AttributeError):  # no JSON, or not the objects that OpenAI's clients read
            error = "bad_chunk"
        finally:
            connection.close()
        usage = stream.usage
        return Answer(
            started=started,
            ended=self._clock(),
            text_times=tuple(stream.text_times),
            text="".join(stream.texts),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            error=error,
        )

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_seconds)

    def _get(self, path: str) -> tuple[int, str]:
        """Status and text."""
        connection = self._connection()
        try:
            connection.request("GET", self._root + path, headers=self._headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        return response.status, content.decode("utf-8", "replace")


class _Stream:
    """The chunks of one answer, as far as they came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reader = EventReader()
        self._failure: str | None = None
        self.is_complete = False
        self.text_times: list[float] = []
        self.texts: list[str] = []
        self.usage: dict[str, Any] = {}

    @property
    def error(self) -> str | None:
        """As `Answer.error`, once no more bytes come."""
        return self._failure or (None if self.is_complete else "broken_stream")

    def take(self, piece: bytes) -> None:
        """Bytes that have just arrived."""
        now = self._clock()
        for data in self._reader.feed(piece):
            if data.startswith("[DONE]"):
                self.is_complete = True
                return
            chunk = json.loads(data)
            if chunk.get("error"):
                self._failure, self.is_complete = "error_in_stream", True
                return
            self.usage = chunk.get("usage") or self.usage
            text = "".join(_text(choice) for choice in chunk.get("choices") or ())
            if text:
                self.text_times.append(now)
                self.texts.append(text)


def _text(choice: Mapping[str, Any]) -> str:
    """What a chunk's choice adds to the answer, visible or not: text, thoughts, arguments of tool calls."""
    delta = choice.get("delta") or {}
    thoughts = delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls = [(call.get("function") or {}).get("arguments") or "" for call in delta.get("tool_calls") or ()]
    return "".join((choice.get("text") or "", delta.get("content") or "", thoughts, *calls))
