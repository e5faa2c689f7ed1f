"""scripts/bench_serving.py against a scripted server: both ways in turns, and figures that are what their names say."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from domino_deploy.bench.load import Speculation
from tests.support.scripted_server import ScriptedServer, answer, chunk
from tests.support.scripts import loaded_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded_script("bench_serving")


def measured(script: ModuleType, server: ScriptedServer, folder: Path) -> Result:
    files = ("--json", str(folder / "serving.json"), "--markdown", str(folder / "serving.md"))
    flags = ("--concurrency", "1,2", "--rounds", "2", "--seconds", "0.3", "--warm-up", "0.1", "--prompts", "6", "--max-new-tokens", "8")
    with server.url() as url:
        return CliRunner().invoke(script.main, ["--url", url, *flags, *files])


def test_every_round_takes_each_concurrency_both_ways_in_alternating_order(script: ModuleType, tmp_path: Path) -> None:
    server = ScriptedServer([0.01, *answer("same", " text")], api_key="")
    done = measured(script, server, tmp_path)
    assert done.exit_code == 0, done.output

    ways = [body["speculative"] for body in server.asked]
    first = [False, True] * 2  # those that count nowhere
    assert [way for way, _ in itertools.groupby(ways)] == first + [False, True] * 2 + [False, True, False]
    assert {body["max_tokens"] for body in server.asked} == {8, 2, 5, 4}
    lengths = [(body["messages"][0]["content"], body["max_tokens"]) for body in server.asked]
    assert len(set(lengths)) == 6, "a prompt's answer is as long every time"
    assert max(Counter(lengths).values()) - min(Counter(lengths).values()) <= 1, "every turn goes on where the last one ended"

    made = json.loads((tmp_path / "serving.json").read_text())
    assert [row["concurrency"] for row in made["rows"]] == [1, 2]
    for row in made["rows"]:
        assert row["same_texts"] == row["texts"] > 0
        assert row["acceptance_length"] == 3.0
        assert row["drafted_cycles"] == 1.0
        assert len(row["ratios"]) == 2
        assert min(row["ratios"]) <= row["ratio"] <= max(row["ratios"])
        assert min(row["ratios"]) <= row["interval"][0] <= row["ratio"] <= row["interval"][1] <= max(row["ratios"])
    page = (tmp_path / "serving.md").read_text()
    assert page == script.markdown(made)
    assert "| 100% |" in page


def test_a_turns_rate_is_what_the_counter_grew_by_over_its_seconds(script: ModuleType) -> None:
    nothing = Speculation(drafts=0, drafted=0, accepted=0)
    turn = script.Turn(concurrency=2, is_plain=True, seconds=4.0, tokens=120.0, speculation=nothing, answers=(), texts={})
    assert turn.tokens_per_second == 30.0


def test_the_interval_is_as_wide_as_the_rounds_differ(script: ModuleType) -> None:
    plain = np.linspace(80.0, 120.0, 40)
    assert script.interval(1.1 * plain, plain) == pytest.approx((1.1, 1.1)), "a machine's drift that both ways share is none of the ratio"
    noise = np.random.default_rng(0).normal(1.0, 0.05, size=40)
    low, high = script.interval(plain * noise, plain)
    assert low < 1.0 < high
    assert high - low == pytest.approx(2 * 1.96 * 0.05 / 40**0.5, rel=0.3)


def test_answers_that_a_turn_ends_in_are_left_and_not_compared(script: ModuleType, tmp_path: Path) -> None:
    pieces = itertools.count()

    def slow(body: dict[str, Any]) -> list[str | bytes | float]:
        return list(itertools.chain.from_iterable((piece, 0.03) for piece in answer(f"{next(pieces)}")))

    server = ScriptedServer(slow, api_key="")
    done = measured(script, server, tmp_path)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "serving.json").read_text())["rows"]
    assert sum(row["texts"] for row in rows) > 0
    assert all(row["same_texts"] == 0 for row in rows), "no two answers are the same"
    assert server.broken_off > 0


def test_a_turn_without_a_token_ends_the_measurement(script: ModuleType, tmp_path: Path) -> None:
    done = measured(script, ScriptedServer([chunk(""), *[0.05, ": comment\n\n"] * 400], api_key=""), tmp_path)
    assert done.exit_code == 1
    assert "found none in 0.3 seconds of concurrency 1. Give more --seconds." in done.output


def test_a_text_that_speculation_changed_is_counted(script: ModuleType, tmp_path: Path) -> None:
    def text_of(body: dict[str, Any]) -> str:
        return "b" if body["speculative"] and "?" in body["messages"][0]["content"] else "a"

    done = measured(script, ScriptedServer(lambda body: answer(text_of(body)), api_key=""), tmp_path)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "serving.json").read_text())["rows"]
    assert all(0 < row["same_texts"] < row["texts"] for row in rows)


def test_a_failed_request_ends_the_measurement(script: ModuleType, tmp_path: Path) -> None:
    done = measured(script, ScriptedServer(["data: half"], api_key=""), tmp_path)
    assert done.exit_code == 1
    assert "times a connection that ended before the answer did" in done.output
    assert not (tmp_path / "serving.json").exists()


def test_a_server_without_counters_is_refused(script: ModuleType, tmp_path: Path) -> None:
    done = measured(script, ScriptedServer(answer("a"), api_key="", has_metrics=False), tmp_path)
    assert done.exit_code == 1
    assert "vllm:generation_tokens_total" in done.output
