"""An engine that serves no request: for what of the server asks it no question but how it is."""

from __future__ import annotations

from pathlib import Path

from domino_deploy.bundle import open_bundle
from domino_deploy.runtime.requests import EngineSnapshot
from domino_deploy.runtime.text import bundle_tokenizer


class IdleEngine:
    """Ready, without a request; its attributes are there to be changed."""

    max_model_len = 96
    max_speculative_tokens = 6

    def __init__(self, bundle: Path) -> None:
        self.bundle = open_bundle(bundle)
        self.tokenizer = bundle_tokenizer(self.bundle)
        self.is_ready = True
        self.failure: Exception | None = None
        self.state = EngineSnapshot(running=0, waiting=0, used_rows=0, total_rows=1)

    def snapshot(self) -> EngineSnapshot:
        return self.state
