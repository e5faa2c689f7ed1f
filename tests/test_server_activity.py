"""The log's line on what the engine does: due while there is work, silent while there is none, counted since the line before."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from domino_deploy.runtime.requests import CycleRecord, EngineSnapshot
from domino_deploy.server import activity
from domino_deploy.server.activity import ActivityLog, WorkDone
from domino_deploy.server.logs import TextFormatter
from domino_deploy.server.metrics import Metrics

IDLE = EngineSnapshot(running=0, waiting=0, used_rows=24, total_rows=96, width=5)


class Watched:
    """A log over a clock and an engine that a test sets."""

    def __init__(self, work: WorkDone, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog
        self.now = 100.0
        self.state = IDLE
        self.log = ActivityLog(work, lambda: self.state, clock=lambda: self.now)

    def tell(self, seconds: float = 10.0) -> list[str]:
        """The values of the lines that it then writes."""
        self.now += seconds
        self.caplog.clear()
        with self.caplog.at_level(logging.INFO, "domino_deploy.server.activity"):
            self.log.tell()
        return [TextFormatter().format(record).partition(" activity ")[2] for record in self.caplog.records]


def test_what_metrics_are_told_is_in_the_line(caplog: pytest.LogCaptureFixture) -> None:
    metrics: Any = Metrics("m")
    watched = Watched(metrics.work, caplog)
    metrics.prefilled(300, 0.5)
    metrics.delivered(None, 40, None)
    metrics.cycled(CycleRecord(batch=2, width=5, drafts=2, proposed=10, accepted=3, tokens=5))
    watched.state = EngineSnapshot(running=2, waiting=1, used_rows=24, total_rows=96, width=5)
    assert watched.tell(20.0) == [
        "prompt_tokens_per_second=15.0 generation_tokens_per_second=2.0 running=2 waiting=1 cache_used_percent=25.0 "
        "acceptance_length=2.5 width=5"
    ]


def test_each_line_counts_from_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    work = WorkDone(generated_tokens=1000)
    watched = Watched(work, caplog)
    for tokens, rate in ((50, 5.0), (20, 2.0)):
        work.generated_tokens += tokens
        (line,) = watched.tell()
        assert f"generation_tokens_per_second={rate} " in line


def test_an_idle_engine_has_no_line_and_one_that_is_held_up_has(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(WorkDone(generated_tokens=1000), caplog)
    assert watched.tell() == []
    watched.state = EngineSnapshot(running=0, waiting=3, used_rows=0, total_rows=96)
    assert watched.tell() == ["prompt_tokens_per_second=0.0 generation_tokens_per_second=0.0 running=0 waiting=3 cache_used_percent=0.0"]


def test_it_is_told_again_and_again_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "LINE_SECONDS", 0.001)
    told = asyncio.Event()
    log = ActivityLog(WorkDone(), lambda: IDLE)
    calls: list[int] = []

    def tell() -> None:
        calls.append(1)
        if len(calls) == 3:
            told.set()

    monkeypatch.setattr(log, "tell", tell)

    async def run() -> None:
        task = asyncio.create_task(log.keep_telling())
        await asyncio.wait_for(told.wait(), 10)
        task.cancel()

    asyncio.run(run())
