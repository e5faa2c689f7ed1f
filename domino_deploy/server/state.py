"""What the routes share: `request.app.state.server` is a `ServerState`, `request.state.record` the `RequestRecord` of a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from starlette.requests import Request

from domino_deploy.server.bridge import Generations
from domino_deploy.server.logs import RequestRecord
from domino_deploy.server.settings import ServerSettings
from domino_deploy.server.token_texts import TokenTexts
from domino_deploy.server.unknown_fields import UnknownFields

if TYPE_CHECKING:
    from domino_deploy.runtime.engine import Engine
    from domino_deploy.server.metrics import Metrics


@dataclass(kw_only=True)
class ServerState:
    """What the routes share.

    engine: what answers; metrics: what its observer counts into, None without one; created: Unix seconds of the start; generations: those
    under way; unknown_fields: of all bodies.
    """

    engine: Engine
    settings: ServerSettings
    metrics: Metrics | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    generations: Generations = field(default_factory=Generations)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)

    @property
    def is_draining(self) -> bool:
        """Whether no new requests are taken."""
        return self.generations.is_draining

    @property
    def has_metrics(self) -> bool:
        """Whether `/metrics` is there."""
        return self.metrics is not None and self.settings.has_metrics

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model, the first one in answers."""
        return self.settings.served_model_names or (self.engine.bundle.path.resolve().name,)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Of the engine's tokenizer."""
        return TokenTexts(self.engine.tokenizer)


def state_of(request: Request) -> ServerState:
    """What the application of this request shares."""
    found = request.app.state.server
    assert isinstance(found, ServerState)
    return found


def record_of(request: Request) -> RequestRecord:
    """What the log will say about this request; routes fill it in.  `request_id` is the one that is echoed as `x-request-id`."""
    found = request.state.record
    assert isinstance(found, RequestRecord)
    return found
