"""Whoever watches the engine may fail; the engine goes on."""

from __future__ import annotations

import logging

import pytest

from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.telling import Telling
from tests.support.scheduled_runs import Journal, alone, bench, plain_view
from tests.support.toy_pair import ToyPair

PROMPT = [3, 1, 4]


class Broken(Journal):
    """Fails whatever it is told."""

    def __getattribute__(self, name: str) -> object:
        if name in {"queued", "prefilled", "cycled", "delivered", "finished", "width_chosen"}:
            raise OSError("no space left on the device")
        return super().__getattribute__(name)


def test_an_observer_that_always_fails_does_no_harm_and_is_logged_as_an_error_once(caplog: pytest.LogCaptureFixture):
    served = bench(ToyPair(2), observer=Broken())
    with caplog.at_level(logging.DEBUG):
        answer = served.submit("0", PROMPT, max_new_tokens=20)
        served.run()
    assert plain_view(answer) == plain_view(alone(PROMPT, GenerationParams(max_new_tokens=20)))
    told = [record for record in caplog.records if "observer failed" in record.message]
    assert [record.levelno for record in told] == [logging.ERROR] + [logging.DEBUG] * (len(told) - 1)
    assert "no space left" in caplog.text


def test_nobody_is_told_nothing():
    Telling(None)(lambda observer: observer.prefilled(1, 1.0))
