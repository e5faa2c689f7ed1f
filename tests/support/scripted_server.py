"""An OpenAI-compatible server that gives the streams it is told, for tests of what measures servers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.loopback import served

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
KEY = "sk-bench"
Script = list[str | bytes | float] | Response


def chunk(text: str | None, **more: Any) -> str:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return f"data: {json.dumps({'choices': choices, **more})}\n\n"


def answer(*texts: str) -> list[str | bytes | float]:
    """A good stream; numbers are seconds of silence."""
    return [chunk(""), *(chunk(text) for text in texts), chunk(None, usage=USAGE), "data: [DONE]\n\n"]


class ScriptedServer:
    """Gives the streams it is told, one after another and then the last one always; keeps what it was asked.

    stream: pieces of the body, strings or bytes, and seconds to wait; or a whole response; or what makes one of the request's JSON.
    ignores_wishes: `speculative: false` changes nothing; never_drafts: by its counters, whatever it is asked.
    """

    def __init__(
        self,
        *streams: Script | Callable[[dict[str, Any]], Script],
        has_metrics: bool = True,
        api_key: str = KEY,
        ignores_wishes: bool = False,
        never_drafts: bool = False,
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.broken_off = 0  # streams that their clients did not read to the end
        self._streams = list(streams)
        self._has_metrics = has_metrics
        self._api_key = api_key
        self._ignores_wishes = ignores_wishes
        self._never_drafts = never_drafts
        self._lock = threading.Lock()

    @contextmanager
    def url(self) -> Iterator[str]:
        routes = [
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        with served(Starlette(routes=routes)) as url:
            yield url

    async def _models(self, request: Request) -> Response:
        if self._api_key and request.headers.get("authorization") != f"Bearer {self._api_key}":
            return JSONResponse({"error": {"message": "no"}}, status_code=401)
        return JSONResponse({"data": [{"id": "tiny"}, {"id": "other"}]})

    async def _metrics(self, request: Request) -> Response:
        """Each answer is 12 tokens, over two engines' labels: four cycles that drafted three and had two accepted, if not asked not to."""
        if not self._has_metrics:
            return PlainTextResponse("none", status_code=404)
        lines = ["# TYPE vllm:spec_decode_num_drafts counter", "some words"]
        counters = {"spec_decode_num_drafts": 4, "spec_decode_num_draft_tokens": 12, "spec_decode_num_accepted_tokens": 8}
        drafted_answers = sum(body.get("speculative") is not False or self._ignores_wishes for body in self.asked)
        drafted_answers = 0 if self._never_drafts else drafted_answers
        counted = {name: each * drafted_answers for name, each in counters.items()} | {"generation_tokens": 12 * len(self.asked)}
        for name, total in counted.items():
            for engine in (0, 1):
                lines.append(f'vllm:{name}_total{{engine="{engine}"}} {100.0 + total / 2}')
        return PlainTextResponse("\n".join(lines))

    async def _complete(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.paths.append(request.url.path)
        stream = self._streams.pop(0) if len(self._streams) > 1 else self._streams[0]
        if callable(stream) and not isinstance(stream, Response):
            stream = stream(self.asked[-1])
        return stream if isinstance(stream, Response) else StreamingResponse(self._sent(stream), media_type="text/event-stream")

    async def _sent(self, pieces: list[str | bytes | float]) -> AsyncIterator[bytes]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        is_whole = False
        try:
            for piece in pieces:
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                else:
                    yield piece if isinstance(piece, bytes) else piece.encode()
            is_whole = True
        finally:
            self.in_flight -= 1
            self.broken_off += not is_whole
