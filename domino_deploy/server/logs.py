"""Logs: one line per request, readable or JSON, and uvicorn's own lines in the same form.  No prompt and no answer unless asked for."""

from __future__ import annotations

import json
import logging
import logging.config
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from domino_deploy.runtime.requests import RequestStatistics

_REQUESTS = logging.getLogger("domino_deploy.server.requests")
_FIELDS = "domino_fields"  # the attribute of a log record that holds what a line says beside its message
_QUIET_PATHS = {"/health", "/health/ready", "/metrics"}  # asked every few seconds by machines
_PLAIN = re.compile(r"[\w./:+-]+", re.ASCII)


class LogFormat(StrEnum):
    """Lines for people or for machines."""

    TEXT = "text"
    JSON = "json"


@dataclass(kw_only=True)
class RequestRecord:
    """What is known about one HTTP request by its end; middleware makes it and fills in the HTTP side, the routes the rest.

    arrived: in seconds of `time.monotonic`; status: None until the answer begins; seconds: from arrival to the last byte; model: the name
    the client used.
    answers: (finish reason, statistics) of each request to the engine that it became (a list of prompts becomes several).
    prompt, answer: texts, for --log-prompts only; is_disconnected: the client left before the end; error: what went wrong, names alone.
    template_differs: variables that the request has otherwise than the drafter was trained with, in words.
    """

    request_id: str
    method: str = "GET"
    path: str = "/"
    arrived: float = field(default_factory=time.monotonic)
    status: int | None = None
    seconds: float = 0.0
    model: str | None = None
    is_stream: bool = False
    answers: list[tuple[str, RequestStatistics]] = field(default_factory=list)
    prompt: str | None = None
    answer: str | None = None
    is_disconnected: bool = False
    error: str | None = None
    template_differs: list[str] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Whether the server did not do its part; 503 is what it says while it starts or ends."""
        if self.status is None:
            return not self.is_disconnected
        return self.status >= 500 and self.status != 503

    def to_fields(self, *, with_texts: bool) -> dict[str, Any]:
        """What its line says; what there is nothing to say about is left out."""
        found: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            "model": self.model,
        }
        if self.model is not None:
            found["stream"] = self.is_stream
        if self.answers:
            found |= _answer_fields(self.answers)
        if self.is_disconnected:
            found["client"] = "disconnected"
        if self.template_differs:
            found["template_differs"] = "; ".join(self.template_differs)
        found["error"] = self.error
        if with_texts:
            found |= {"prompt": self.prompt, "answer": self.answer}
        return {name: value for name, value in found.items() if value is not None}


def log_request(record: RequestRecord, *, with_texts: bool) -> None:
    """Write the line of one request: a failure is an error, poor drafts are a warning, what machines ask all the time is for debugging."""
    usual = logging.DEBUG if record.path in _QUIET_PATHS else logging.INFO
    warned = logging.WARNING if record.template_differs and record.status == 200 else usual
    level = logging.ERROR if record.has_failed else warned
    log_fields(_REQUESTS, level, "request", record.to_fields(with_texts=with_texts))


def log_fields(logger: logging.Logger, level: int, message: str, fields: Mapping[str, Any]) -> None:
    """Log a message with named values."""
    logger.log(level, message, extra={_FIELDS: fields})


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Write the log, warnings of Python's included, to stderr; arguments as below."""
    logging.config.dictConfig(logging_config(log_format, level))
    logging.captureWarnings(capture=True)


def logging_config(log_format: LogFormat, level: str) -> dict[str, Any]:
    """A configuration for `logging.config.dictConfig`: everything, uvicorn's lines included, to stderr in one form.

    Args:
        log_format: for people or for machines.
        level: the lowest that is written: "debug", "info", "warning" or "error".
    """
    formatter = JsonFormatter if log_format is LogFormat.JSON else TextFormatter
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines", "stream": "ext://sys.stderr"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        # At "info" uvicorn tells of its own start and end, which run.py does in words of ours.
        "loggers": {"domino_deploy": {"level": level.upper()}, "uvicorn": {"level": "DEBUG" if level == "debug" else "WARNING"}},
    }


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, then the named values."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time_of(record), "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # ASCII: readers of lines disagree on U+2028 and its like.
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message, then `name=value`; values that are no plain words are quoted, so that no client can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, _FIELDS, {})
        pairs = [f"{name}={_quoted(value)}" for name, value in fields.items()]
        line = " ".join([_time_of(record), f"{record.levelname:<7}", record.getMessage(), *pairs])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _answer_fields(answers: list[tuple[str, RequestStatistics]]) -> dict[str, Any]:
    """Counts are sums, times those of the slowest; tau as in vLLM: 1 + accepted / cycles that proposed anything."""
    statistics = [found for _, found in answers]
    steps = [step for found in statistics for step in found.steps]
    first = [found.first_token_seconds for found in statistics if found.first_token_seconds is not None]
    return {
        "finish_reason": ",".join(dict.fromkeys(reason for reason, _ in answers)),
        "prompt_tokens": sum(found.prompt_tokens for found in statistics),
        "cached_tokens": sum(found.cached_tokens for found in statistics),
        "generated_tokens": sum(found.generated_tokens for found in statistics),
        "tau": round(1 + sum(accepted for _, accepted in steps) / len(steps), 3) if steps else None,
        "queue_seconds": round(max(found.queue_seconds for found in statistics), 4),
        "first_token_seconds": round(max(first), 4) if first else None,
        "decode_seconds": round(max(found.decode_seconds for found in statistics), 4),
    }


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quoted(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
