"""What an operator can choose about the server; the engine's own settings are in `runtime/engine_settings.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from domino_deploy.api_keys import KEY_CHARACTERS, is_key
from domino_deploy.errors import OutOfRangeError
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.server.sampling_defaults import OPENAI
from domino_deploy.template_variables import OWN_VARIABLES

MAX_PORT = 65535
LEAST_SIZE_BYTES = 1024  # the least that may be set as the limit of bodies or heads
LONGEST_DRAIN_SECONDS = 24 * 60 * 60  # a day: more is a slip of the unit
_ORIGIN = re.compile(r"https?://[^/\s?#]+|\*")
_HOST_NAME = re.compile(r"[\w.-]+|\[[0-9A-Fa-f:.]+\]|\*", re.ASCII)


class StatisticsLevel(StrEnum):
    """How much every answer says about its speculation, in vLLM's shape (`metrics.speculative_decoding`)."""

    NONE = "none"
    SUMMARY = "summary"
    DETAILED = "detailed"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Frozen and checked on construction.

    host, port: where to listen, port 0 for any free one; api_keys: each opens the API, none at all leaves it open;
    served_model_names: what clients may call the model, the first one in answers; () for the bundle folder's name.
    cors_origins: pages of these origins may call the API, "*" for all, () for none; allowed_hosts: further names that clients may call
    this server by where `known_hosts` counts, "*" for any.
    max_body_bytes, max_header_bytes: longest request body and head; head_seconds, body_seconds: how long a client may take to send
    either; send_seconds: how long one may read nothing of what waits for it; request_timeout_seconds: from arrival to the last token,
    None for no limit; keep_alive_seconds: silence in a stream after which a comment is sent; drain_seconds: how long running requests
    may go on once the server is told to end; statistics_level: as above.
    chat_template_kwargs: variables of the chat template where a request sets none of that name; sampling: how tokens are chosen where a
    request does not say, of which the seed, presence and frequency penalties and biases do not count.
    trained_with: the variables that the drafter in use was trained with, for requests that have others are told in the log.
    has_metrics, has_page: whether `/metrics` and the page at `/` are there; logs_prompts: whether prompts and answers go to the log.

    Raises:
        OutOfRangeError: values that cannot be used, all of them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 2**10
    head_seconds: float = 30.0
    body_seconds: float = 60.0
    send_seconds: float = 60.0
    request_timeout_seconds: float | None = 600.0  # the default limit of OpenAI's own clients
    keep_alive_seconds: float = 15.0
    drain_seconds: float = 30.0
    statistics_level: StatisticsLevel = StatisticsLevel.NONE
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = OPENAI
    trained_with: Mapping[str, Any] = field(default_factory=dict)
    has_metrics: bool = True
    has_page: bool = True
    logs_prompts: bool = False

    def __post_init__(self) -> None:
        problems = {}
        if not 0 <= self.port <= MAX_PORT:
            problems["port"] = f"must lie in [0, {MAX_PORT}], found {self.port}"
        for name in ("max_body_bytes", "max_header_bytes"):
            if getattr(self, name) < LEAST_SIZE_BYTES:
                problems[name] = f"must be at least {LEAST_SIZE_BYTES}, found {getattr(self, name)}"
        for name in ("request_timeout_seconds", "head_seconds", "body_seconds", "send_seconds", "keep_alive_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                problems[name] = f"must be above 0, found {value}"
        if not 0 <= self.drain_seconds <= LONGEST_DRAIN_SECONDS:
            problems["drain_seconds"] = f"must lie in [0, {LONGEST_DRAIN_SECONDS}], found {self.drain_seconds}"
        bad_keys = sum(not is_key(key) for key in self.api_keys)
        if bad_keys:
            problems["api_keys"] = f"must be {KEY_CHARACTERS}, found {bad_keys} of {len(self.api_keys)} that are not"
        nameless = [name for name in self.served_model_names if not name.strip()]
        if nameless:
            problems["served_model_names"] = f"must be more than white space, found {_quoted(nameless)}"
        origins = [origin for origin in self.cors_origins if not _ORIGIN.fullmatch(origin)]
        if origins:
            problems["cors_origins"] = f"must look like https://host[:port], or be *, found {_quoted(origins)}"
        hosts = [name for name in self.allowed_hosts if not _HOST_NAME.fullmatch(name)]
        if hosts:
            problems["allowed_hosts"] = f"must be names without scheme and port (IPv6 in brackets), or *, found {_quoted(hosts)}"
        own = [name for name in self.chat_template_kwargs if name in OWN_VARIABLES]
        if own:
            problems["chat_template_kwargs"] = (
                f"must be variables of the model's template, found {', '.join(own)}, which the server sets itself"
            )
        if problems:
            raise OutOfRangeError(problems, "Correct them and start the server again.")

    @property
    def is_open_to_the_network(self) -> bool:
        """Whether other machines can reach it."""
        return not (self._bare_host in ("localhost", "::1") or self._bare_host.startswith("127."))

    @property
    def known_hosts(self) -> tuple[str, ...] | None:
        """Names that a request must call the server by, in lower case, IPv6 in brackets; None for any.

        A page in a browser of this machine reaches a loopback address through a name of its own (DNS rebinding), and the browser takes
        both for one origin.  Only the name gives it away; a key would, too.
        """
        if self.is_open_to_the_network or self.api_keys or "*" in self.allowed_hosts:
            return None
        bound = f"[{self._bare_host}]" if ":" in self._bare_host else self._bare_host
        return tuple(
            dict.fromkeys(["localhost", "127.0.0.1", "[::1]", bound, *(name.lower().removesuffix(".") for name in self.allowed_hosts)])
        )

    @property
    def _bare_host(self) -> str:
        return self.host.strip("[]").lower()


def _quoted(values: Sequence[str]) -> str:
    return ", ".join(map(repr, values))
