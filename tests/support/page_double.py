"""The API that the page talks to, scripted: what it answers, when, and what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from domino_deploy.server import page
from domino_deploy.server.errors import ApiError, error_response
from domino_deploy.server.middleware import RequestContext, SecurityHeaders

TERMS_MS = {"draft": 4.0, "head": 1.0, "verify": 12.0, "other": 3.0}


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """A chunk: its texts, how many of them from the front were drafted, and how many were proposed."""

    texts: tuple[str, ...]
    accepted: int = 0
    proposed: int = 0

    def chunk(self, first_id: int) -> dict[str, Any]:
        tokens = [{"id": first_id + index, "text": text, "drafted": index < self.accepted} for index, text in enumerate(self.texts)]
        details = {
            "tokens": tokens,
            "cycles": 1,
            "batch": 1,
            "drafts": int(self.proposed > 0),
            "proposed": self.proposed,
            "accepted": self.accepted,
            "terms_ms": TERMS_MS,
        }
        choice = {"index": 0, "delta": {"content": "".join(self.texts)}, "finish_reason": None}
        return {"choices": [choice], "usage": None, "speculation": details}


@dataclass(kw_only=True)
class Script:
    """One answer: a refusal if `status` is not 200, else cycles, the rest of them once `gate` is set, and maybe an error at the end."""

    cycles: Sequence[Cycle] = ()
    gate: threading.Event | None = None
    status: int = 200
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    error_in_stream: str = ""
    finish_reason: str = "stop"


class PageDouble:
    """Answers with `scripts`, first to last; `asked` has the bodies, `keys` the Authorization headers, `left` who went away early."""

    def __init__(self, *scripts: Script, answer: Callable[[dict[str, Any]], Script] | None = None) -> None:
        self.scripts = list(scripts)
        self._answer = answer
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.left = 0
        self.app = Starlette(
            routes=[*page.routes, Route("/v1/models", self._models), Route("/v1/chat/completions", self._chat, methods=["POST"])],
            middleware=[Middleware(RequestContext), Middleware(SecurityHeaders)],
            exception_handlers={ApiError: _refused},
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "toy", "object": "model", "max_model_len": 128}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("authorization"))
        script = self._answer(body) if self._answer else self.scripts.pop(0)
        if script.status != 200:
            error = {"message": script.message, "type": "error", "param": None, "code": None}
            return JSONResponse({"error": error}, script.status, headers=script.headers)
        return StreamingResponse(self._stream(script), media_type="text/event-stream")

    async def _stream(self, script: Script) -> AsyncIterator[str]:
        try:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}], "usage": None})
            yield ": a comment, as keep-alives are\n\n"
            count = 0
            for index, cycle in enumerate(script.cycles):
                while index == 1 and script.gate is not None and not script.gate.is_set():
                    await asyncio.sleep(0.01)
                yield _event(cycle.chunk(first_id=100 + count))
                count += len(cycle.texts)
                await asyncio.sleep(0.02)  # two chunks of one instant have no speed
            if script.error_in_stream:
                yield _event({"error": {"message": script.error_in_stream, "type": "server_error", "param": None, "code": None}})
                return
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": script.finish_reason}], "usage": None})
            usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
            yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left += 1
            raise


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


def _event(body: dict[str, Any]) -> str:
    whole = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "toy", **body}
    return f"data: {json.dumps(whole)}\n\n"
