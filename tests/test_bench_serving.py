"""scripts/bench_serving.py against a scripted server: both ways in turns, and figures that are what their names say."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from tests.support.scripted_server import ScriptedServer, answer
from tests.support.scripts import loaded_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded_script("bench_serving")


def measured(script: ModuleType, server: ScriptedServer, folder: Path) -> Result:
    files = ("--json", str(folder / "serving.json"), "--markdown", str(folder / "serving.md"))
    flags = ("--concurrency", "1,2", "--rounds", "2", "--requests", "4", "--max-new-tokens", "8")
    with server.url() as url:
        return CliRunner().invoke(script.main, ["--url", url, *flags, *files])


def test_every_round_asks_for_the_same_both_ways_in_alternating_order(script: ModuleType, tmp_path: Path) -> None:
    server = ScriptedServer(answer("same", " text"), api_key="")
    done = measured(script, server, tmp_path)
    assert done.exit_code == 0, done.output

    behind_warm_up = server.asked[8:]
    turns = [behind_warm_up[start + 2 : start + 6] for start in range(0, len(behind_warm_up), 6)]
    displacing = [behind_warm_up[start : start + 2] for start in range(0, len(behind_warm_up), 6)]
    assert [{body["speculative"] for body in turn} for turn in turns] == [{False}, {True}, {False}, {True}] + [{True}, {False}] * 2
    prompts = [sorted(body["messages"][0]["content"] for body in turn) for turn in turns]
    assert all(asked == prompts[0] for asked in prompts)
    for displaced, turn in zip(displacing, turns, strict=True):  # as many others as there are slots, asked for in the same way
        assert [(body["max_tokens"], body["speculative"]) for body in displaced] == [(1, turn[0]["speculative"])] * 2
        assert not {body["messages"][0]["content"] for body in displaced} & set(prompts[0])

    made = json.loads((tmp_path / "serving.json").read_text())
    assert [row["concurrency"] for row in made["rows"]] == [1, 2]
    for row in made["rows"]:
        assert (row["same_texts"], row["texts"]) == (8, 8)
        assert row["acceptance_length"] == 3.0
        assert row["drafted_cycles_per_request"] == 4.0
        assert len(row["ratios"]) == 2
        assert min(row["ratios"]) <= row["ratio"] <= max(row["ratios"])
    page = (tmp_path / "serving.md").read_text()
    assert page == script.markdown(made)
    assert "8 of 8" in page


def test_a_text_that_speculation_changed_is_counted(script: ModuleType, tmp_path: Path) -> None:
    same = [answer("a", "b")] * 8
    first_round = [answer("a", "b")] * (2 + 4 + 2) + [answer("a", "c"), *[answer("a", "b")] * 3]
    done = measured(script, ScriptedServer(*same, *first_round, answer("a", "b"), api_key=""), tmp_path)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "serving.json").read_text())["rows"]
    assert [row["same_texts"] for row in rows] == [7, 8]


def test_a_failed_request_ends_the_measurement(script: ModuleType, tmp_path: Path) -> None:
    done = measured(script, ScriptedServer(["data: half"], api_key=""), tmp_path)
    assert done.exit_code == 1
    assert "broken_stream" in done.output
    assert not (tmp_path / "serving.json").exists()
