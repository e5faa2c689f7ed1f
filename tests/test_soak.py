"""scripts/soak: a short one of the tiny pair passes, and its books and its memory trend find what they are for."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


def test_a_short_soak_passes(tiny_bundle: Path, tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    flags = ["--minutes", "0.1", "--clients", "12", "--bundle", tiny_bundle, "--cases", "16", "--slots", "3", "--queue", "6"]
    flags += ["--max-model-len", "400", "--threads", "1", "--output", report]
    command = [sys.executable, ROOT / "scripts" / "soak.py", *flags]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + report.read_text(encoding="utf-8") if report.exists() else done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["greedy_answers_compared"] > 0
    assert all(found["actions"].values())
    calm = found["books"]["clients that do not"]
    assert all(line["least"] == line["most"] for line in calm.values()), "with nobody leaving, the books are exact"


def books(soak_clients: ModuleType) -> Any:
    """Two whole answers, one refusal, one client that left behind the first chunk."""
    ledger = soak_clients.Ledger()
    for number, reason in enumerate(("stop", "length")):
        ledger.finished.append(soak_clients.Finished(request_id=str(number), prompt_tokens=10, completion_tokens=5, finish_reason=reason))
    ledger.left.append(soak_clients.Left(prompt_tokens=7, max_tokens=20, has_started=True))
    ledger.statuses.update({200: 3, 400: 1})
    ledger.sent = 4
    return ledger


GROWN = {
    "vllm:request_success_total{stop}": 1.0,
    "vllm:request_success_total{length}": 1.0,
    "vllm:request_success_total{abort}": 1.0,
    "vllm:request_success_total{error}": 0.0,
    "vllm:generation_tokens_total": 13.0,
    "vllm:prompt_tokens_total": 27.0,
    "vllm:spec_decode_num_accepted_tokens_total": 4.0,
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": 4.0,
}


def test_books_that_agree_add_up(script: Any) -> None:
    lines = script("soak_balance").balance(books(script("soak_clients")), {200: 2, 400: 1, 499: 1}, GROWN)
    assert [name for name, line in lines.items() if not line.adds_up] == []


@pytest.mark.parametrize(
    ("counter", "value", "found"),
    [
        ("vllm:request_success_total{abort}", 0.0, "requests that ended"),
        ("vllm:request_success_total{error}", 1.0, "requests that ended with error"),
        ("vllm:generation_tokens_total", 9.0, "generated tokens"),
        ("vllm:generation_tokens_total", 31.0, "generated tokens"),
        ("vllm:prompt_tokens_total", 20.0, "prompt tokens"),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", 3.0, "accepted tokens by position"),
    ],
)
def test_a_counter_that_is_off_is_found(script: Any, counter: str, value: float, found: str) -> None:
    lines = script("soak_balance").balance(books(script("soak_clients")), {200: 3, 400: 1}, {**GROWN, counter: value})
    assert found in [name for name, line in lines.items() if not line.adds_up]


def test_growing_memory_has_its_slope(script: Any) -> None:
    samples = [(float(second), 10**9 + (0 if second < 20 else 10**6 * (second - 20))) for second in range(100)]
    trend = script("soak_balance").memory_trend(samples, warm_up_seconds=20)
    assert trend["slope_mb_per_minute"] == pytest.approx(60)
    assert trend["growth_mb"] == pytest.approx(79)
    assert trend["max_mb"] == pytest.approx(1079)


def test_the_pages_tables_hold_what_was_recorded(script: Any) -> None:
    checks = [
        {"done": "asks", "passed": True, "found": "a | b", "seconds": 1},
        {
            "done": "compares",
            "passed": False,
            "found": {"server": {"task": {"acc,none": 0.5}}, "hf": {"task": {"acc,none": 0.25}}},
            "seconds": 1,
        },
    ]
    record = {"command": "domino-deploy serve x", "packages": {"lm-eval": "1"}, "checks": checks}
    page = script("clients_render").page({"machine": "m", "versions": {"python": "3"}, "clients": {"lm_eval": record}})
    assert "| asks | passed | a \\| b |" in page
    assert "| compares | **failed** | below |" in page
    assert "| task | acc | 0.5 | 0.25 |" in page


def test_statuses_are_those_of_the_lines_that_end_a_request(script: Any, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    lines = [
        {"request_id": "soak-1", "message": "Ignored the field"},
        {"request_id": "soak-1", "status": 200},
        {"request_id": "b", "status": 408},
    ]
    log.write_text("\n".join(["Opening a bundle", *map(json.dumps, lines)]), encoding="utf-8")
    assert script("soak_balance").logged_statuses(log, "soak-") == {200: 1}
