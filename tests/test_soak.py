"""scripts/soak: a short one of the tiny pair passes, and its books and its memory trend find what they are for."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


@pytest.mark.parametrize("is_fixed_width", [False, True], ids=["adaptive", "fixed width"])
def test_a_short_soak_passes(tiny_bundle: Path, tmp_path: Path, is_fixed_width: bool) -> None:
    report = tmp_path / "soak.json"
    flags = ["--minutes", "0.1", "--clients", "12", "--bundle", tiny_bundle, "--cases", "16", "--slots", "3", "--queue", "6"]
    flags += ["--max-model-len", "400", "--threads", "1", "--output", report]
    flags += ["--fixed-width"] if is_fixed_width else []
    command = [sys.executable, ROOT / "scripts" / "soak.py", *flags]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + report.read_text(encoding="utf-8") if report.exists() else done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["greedy_answers_compared"] > 0
    assert all(found["actions"].values())
    assert ("--fixed-width" in found["command"]) is is_fixed_width
    if is_fixed_width:
        assert found["drafted_share"]["found"] >= found["drafted_share"]["least_at_fixed_width"] > 0.5
    calm = found["books"]["clients that do not"]
    assert all(line["least"] == line["most"] for line in calm.values()), "with nobody leaving, the books are exact"


def answer(soak_clients: ModuleType, **changes: Any) -> Any:
    """Five tokens, of which two cycles made the last four and accepted two of five drafts; 4 tokens of the prompt were cached."""
    usual = {"request_id": "1", "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 5, "finish_reason": "length"}
    drafted = {"is_plain": False, "drafts": 2, "drafted_tokens": 5, "accepted_tokens": 2, "max_drafts": 3}
    return soak_clients.Finished(**usual | drafted | changes)


def books(soak_clients: ModuleType) -> Any:
    """Two whole answers, one refusal, one client that left behind the first chunk."""
    ledger = soak_clients.Ledger()
    for reason in ("stop", "length"):
        ledger.finished.append(answer(soak_clients, finish_reason=reason))
    ledger.left.append(soak_clients.Left(prompt_tokens=7, max_tokens=20, has_started=True))
    ledger.statuses.update({200: 3, 400: 1})
    ledger.sent = 4
    return ledger


HISTOGRAMS = {
    "vllm:e2e_request_latency_seconds": 3,
    "vllm:request_queue_time_seconds": 3,
    "vllm:time_to_first_token_seconds": 3,
    "vllm:request_prefill_time_seconds": 3,
    "vllm:request_decode_time_seconds": 3,
    "vllm:request_inference_time_seconds": 3,
    "vllm:request_prompt_tokens": 3,
    "vllm:request_generation_tokens": 3,
    "vllm:request_max_num_generation_tokens": 3,
    "vllm:request_params_max_tokens": 3,
    "vllm:request_time_per_output_token_seconds": 2,
    "domino_draft_seconds": 4,
    "domino_head_seconds": 4,
    "domino_verify_seconds": 5,
    "domino_other_seconds": 5,
}
# The one that left had 3 tokens, 7 of its prompt run, and one cycle that drafted 3 and accepted 1.
GROWN = {
    "vllm:request_success_total{stop}": 1.0,
    "vllm:request_success_total{length}": 1.0,
    "vllm:request_success_total{abort}": 1.0,
    "vllm:request_success_total{error}": 0.0,
    "vllm:generation_tokens_total": 13.0,
    "vllm:prompt_tokens_total": 27.0,
    "domino_cached_prompt_tokens_total": 8.0,
    "vllm:prefix_cache_hits_total": 8.0,
    "vllm:prefix_cache_queries_total": 27.0,
    "vllm:spec_decode_num_drafts_total": 5.0,
    "vllm:spec_decode_num_draft_tokens_total": 13.0,
    "vllm:spec_decode_num_accepted_tokens_total": 5.0,
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": 5.0,
    "vllm:iteration_tokens_total_sum": 29.0,
    **{f"{name}_count": float(count) for name, count in HISTOGRAMS.items()},
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
        ("domino_cached_prompt_tokens_total", 7.0, "cached tokens"),
        ("domino_cached_prompt_tokens_total", 16.0, "cached tokens"),
        ("vllm:prefix_cache_hits_total", 9.0, "cached tokens, by vLLM's name"),
        ("vllm:prefix_cache_queries_total", 20.0, "tokens looked for in a cache"),
        ("vllm:spec_decode_num_drafts_total", 3.0, "drafts"),
        ("vllm:spec_decode_num_drafts_total", 25.0, "drafts"),
        ("vllm:spec_decode_num_draft_tokens_total", 9.0, "drafted tokens"),
        ("vllm:spec_decode_num_draft_tokens_total", 71.0, "drafted tokens"),
        ("vllm:spec_decode_num_accepted_tokens_total", 3.0, "accepted tokens"),
        ("vllm:iteration_tokens_total_sum", 19.0, "iteration_tokens, sum"),
        ("vllm:iteration_tokens_total_sum", 48.0, "iteration_tokens, sum"),
    ],
)
def test_a_counter_that_is_off_is_found(script: Any, counter: str, value: float, found: str) -> None:
    lines = script("soak_balance").balance(books(script("soak_clients")), {200: 3, 400: 1}, {**GROWN, counter: value})
    assert found in [name for name, line in lines.items() if not line.adds_up]


def test_without_a_whole_answer_nothing_bounds_the_drafted_tokens(script: Any) -> None:
    soak_clients = script("soak_clients")
    ledger = soak_clients.Ledger(left=[soak_clients.Left(prompt_tokens=7, max_tokens=20, has_started=True)], sent=1)
    grown = dict.fromkeys(GROWN, 0.0) | {
        "vllm:spec_decode_num_drafts_total": 1.0,
        "vllm:spec_decode_num_draft_tokens_total": 3.0,
    }
    lines = script("soak_balance")._speculation_lines(ledger, grown)
    assert [name for name, line in lines.items() if not line.adds_up] == []
    assert "drafts" in lines
    nobody = script("soak_balance")._speculation_lines(soak_clients.Ledger(), grown)
    assert not nobody["drafted tokens"].adds_up, "nobody was there to draft for"


@pytest.mark.parametrize("name", [name for name in HISTOGRAMS if name not in ("domino_draft_seconds", "domino_verify_seconds")])
@pytest.mark.parametrize("off", [-2, 2])
def test_so_is_a_histogram_that_was_told_of_too_few_or_too_many(script: Any, name: str, off: int) -> None:
    grown = {**GROWN, f"{name}_count": float(HISTOGRAMS[name] + off)}
    lines = script("soak_balance").balance(books(script("soak_clients")), {200: 3, 400: 1}, grown)
    assert [each for each, line in lines.items() if not line.adds_up] == [f"{name.removeprefix('vllm:')}, count"]


@pytest.mark.parametrize(
    ("tokens", "is_plain", "least"),
    [(1, False, 0), (2, False, 0), (3, False, 1), (5, False, 3), (6, False, 3), (7, False, 4), (9, False, 6), (9, True, 0)],
)
def test_the_least_that_a_fixed_width_drafts_is_that_of_cycles_that_accept_everything(
    script: Any, tokens: int, is_plain: bool, least: int
) -> None:
    """With 3 drafts a cycle: 9 tokens are the prompt's and two cycles of 4."""
    found = script("soak_balance").least_drafted_tokens(
        answer(script("soak_clients"), completion_tokens=tokens, is_plain=is_plain, max_drafts=3)
    )
    assert found == least


@pytest.mark.parametrize(
    ("drafted", "is_fixed_width", "passes"),
    [((5, 5), True, True), ((5, 2), True, False), ((0, 0), True, False), ((0, 0), False, True), ((), True, False)],
    ids=["all", "one too few", "none", "none, adaptive", "no answers"],
)
def test_a_server_that_stopped_drafting_fails_the_soak_at_a_fixed_width(
    script: Any, drafted: tuple[int, ...], is_fixed_width: bool, passes: bool
) -> None:
    soak_clients, soak_run = script("soak_clients"), script("soak_run")
    ledger = soak_clients.Ledger(
        finished=[answer(soak_clients, drafted_tokens=count) for count in drafted], actions=Counter(soak_clients.ACTIONS)
    )
    run = soak_run.Run(
        seconds=10.0,
        memory=[(0.0, 10**9), (5.0, 10**9), (10.0, 10**9)],
        idle=soak_run.Idle(running=0, waiting=0, seconds=0.0),
        full_batch=soak_run.FullBatch(slots=1, rounds=1, served=1, most_running_at_once=1),
        rough_growth=GROWN,
        calm_growth=GROWN,
        rough=ledger,
    )
    report, adaptive = (script("soak")._report(run, {}, is_fixed_width=fixed) for fixed in (is_fixed_width, False))
    assert all(check["passed"] for check in report["checks"].values()) is passes
    assert len(report["checks"]) - len(adaptive["checks"]) == is_fixed_width, "what was not checked is not said to have passed"
    assert report["drafted_share"]["found"] == round(sum(drafted) / (5 * len(drafted) or 1), 3)


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
