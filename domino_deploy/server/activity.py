"""A line every few seconds on what the engine does, while it does anything: throughput, requests, caches, speculation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from domino_deploy.runtime.requests import CycleRecord, EngineSnapshot
from domino_deploy.server.logs import log_fields

_LOG = logging.getLogger(__name__)

LINE_SECONDS = 10.0  # as vLLM's


@dataclass(kw_only=True)
class WorkDone:
    """Counted since the start, in the engine's thread: rows of prompts that were run, tokens given out, drafts and what was accepted."""

    prompt_rows: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    accepted: int = 0

    def count_cycle(self, record: CycleRecord) -> None:
        """Take in what one cycle drafted."""
        self.drafts += record.drafts
        self.accepted += record.accepted


class ActivityLog:
    """Writes the line.

    Args:
        work: what is counted.
        snapshot: how the engine stands.
        clock: seconds, rising.
    """

    def __init__(self, work: WorkDone, snapshot: Callable[[], EngineSnapshot], *, clock: Callable[[], float] = monotonic) -> None:
        self._work = work
        self._snapshot = snapshot
        self._clock = clock
        self._before = replace(work)
        self._looked_at = clock()

    async def keep_telling(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LINE_SECONDS)
            self.tell()

    def tell(self) -> None:
        """What came since the last call; nothing if nothing did, and nothing is under way."""
        now, work, found = self._clock(), replace(self._work), self._snapshot()
        before, seconds = self._before, now - self._looked_at
        self._before, self._looked_at = work, now
        if work == before and not found.running and not found.waiting:
            return
        drafts = work.drafts - before.drafts
        fields: dict[str, float] = {
            "prompt_tokens_per_second": round((work.prompt_rows - before.prompt_rows) / seconds, 1),
            "generation_tokens_per_second": round((work.generated_tokens - before.generated_tokens) / seconds, 1),
            "running": found.running,
            "waiting": found.waiting,
            "cache_used_percent": round(100 * found.used_rows / max(found.total_rows, 1), 1),
        }
        if drafts:
            fields["acceptance_length"] = round(1 + (work.accepted - before.accepted) / drafts, 2)
        if found.width is not None:
            fields["width"] = found.width
        log_fields(_LOG, logging.INFO, "activity", fields)
