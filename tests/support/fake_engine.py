"""The real engine over a toy pair whose target says what a test wants: for tests of what stands in front of an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from domino_deploy.bundle import open_bundle
from domino_deploy.runtime.engine import Engine, EngineSettings
from domino_deploy.runtime.protocols import FloatArray
from domino_deploy.runtime.requests import CycleRecord, Request, RequestStatistics
from domino_deploy.runtime.text import bundle_tokenizer
from domino_deploy.server.app import create_app
from domino_deploy.server.settings import ServerSettings
from tests.support.doubles import toy_logits
from tests.support.toy_pair import ToyPair

# Of the scripted token, above the others' noise: far enough to be chosen at temperature 1 with any seed.
_CERTAIN = 40.0


def client_of(engine: Engine, **settings: Any) -> TestClient:
    """A client of a server over this engine, whose model is called tiny."""
    found = ServerSettings(served_model_names=("tiny",), allowed_hosts=("testserver",), **settings)
    return TestClient(create_app(engine, found), raise_server_exceptions=False)


class Witness:
    """Notes how requests end."""

    def __init__(self) -> None:
        self.ends: list[tuple[Request, str, RequestStatistics]] = []
        self.ended = threading.Event()

    def finished(self, request: Request, finish_reason: str, statistics: RequestStatistics) -> None:
        self.ends.append((request, finish_reason, statistics))
        self.ended.set()

    def queued(self, request: Request) -> None: ...

    def prefilled(self, rows: int, seconds: float) -> None: ...

    def cycled(self, record: CycleRecord) -> None: ...

    def delivered(self, request: Request, tokens: int, seconds_since_last: float | None) -> None: ...

    def width_chosen(self, width: int, reason: str) -> None: ...


class ScriptedEngine(Engine):
    """Answers every prompt with `answer` and the end-of-sequence token.

    Args:
        bundle: whose tokenizer and configuration are used.
        answer: a text, token ids, or what makes token ids of a prompt's.
        seconds_per_row: what a row of logits takes at least.

    Attributes:
        answer: may be changed between requests.
        requests, prompts: all so far, and their token ids.
        witness: of their ends.
    """

    def __init__(
        self,
        bundle: Path,
        answer: str | Sequence[int] | Callable[[Sequence[int]], Sequence[int]] = "",
        *,
        max_model_len: int = 512,
        max_sequences: int = 4,
        max_queued: int = 64,
        seconds_per_row: float = 0.0,
    ) -> None:
        opened = open_bundle(bundle)
        self.answer = answer
        self.prompts: list[tuple[int, ...]] = []
        self.requests: list[Request] = []
        self.seconds_per_row = seconds_per_row
        self.witness = Witness()
        self._eos = opened.target.eos_token_ids[0]
        self._toy = ToyPair(
            max_sequences,
            opened.target.vocab_size,
            max_model_len,
            opened.manifest.num_speculative_tokens,
            logits=self._logits,
        )
        settings = EngineSettings(max_sequences=max_sequences, max_queued=max_queued, adaptive=False)
        super().__init__(opened, bundle_tokenizer(opened), self._toy, settings, observer=self.witness)

    def start(self) -> None:
        """Return once it is warm: tests count and time what comes after."""
        super().start()
        while not self.is_ready:
            time.sleep(0.002)

    def fail_after(self, passes: int) -> None:
        """Die of a pass: so many more succeed first."""
        self._toy.fail_after(passes)

    def submit(self, request: Request) -> None:
        self.prompts.append(tuple(request.prompt_ids))
        self.requests.append(request)
        super().submit(request)

    def _logits(self, prefix: tuple[int, ...], vocab_size: int) -> FloatArray:
        logits = toy_logits(prefix, vocab_size).copy()
        prompts = [prompt for prompt in self.prompts if prefix[: len(prompt)] == prompt]
        if prompts:  # none in a warm-up
            time.sleep(self.seconds_per_row)
            prompt = max(prompts, key=len)
            script = self._script(prompt)
            generated = len(prefix) - len(prompt)
            logits[script[generated] if generated < len(script) else self._eos] += _CERTAIN
        return logits

    def _script(self, prompt: Sequence[int]) -> Sequence[int]:
        if isinstance(self.answer, str):
            return self.tokenizer.encode(self.answer, add_special_tokens=False)
        return self.answer(prompt) if callable(self.answer) else self.answer
