"""Runs the soak: single runs, a server, clients for some minutes, then the books.  See scripts/soak."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from serving_process import flag_line, serving
from soak_balance import Line, balance, drafted_share, logged_statuses, memory_trend
from soak_cases import bad_requests, known_cases
from soak_clients import ACTIONS
from soak_run import Run, soak

from domino_deploy.bench.machine import this_machine, versions

MODEL = "soak"
WARM_UP = 0.2  # of the time: until every slot was used, every buffer has its size
MAX_GROWTH = 0.02  # of the server's own memory, over the whole time behind the warm-up
SHORTEST_TREND_SECONDS = 300.0  # a shorter run says nothing about memory: its warm-up is not over


@click.command(context_settings={"show_default": True})
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=30.0)
@click.option("--clients", type=click.IntRange(min=1), default=32)
@click.option("--bundle", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path("build/demo-bundle"))
@click.option("--cases", "count", type=click.IntRange(min=1), default=48, help="Requests whose answers are known.")
@click.option("--slots", type=click.IntRange(min=1), default=8)
@click.option("--queue", type=click.IntRange(min=1), default=22, help="Places in the queue: few, so that some requests are refused.")
@click.option("--max-model-len", type=click.IntRange(min=2), default=1024)
@click.option("--threads", type=click.IntRange(min=1), default=None, help="Per graph; by default one per physical core.")
@click.option("--fixed-width", "is_fixed_width", is_flag=True, help="Have the server always draft; and check that it does.")
@click.option("--seed", type=int, default=0)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, which also goes to stdout.")
def main(
    minutes: float,
    clients: int,
    bundle: Path,
    count: int,
    slots: int,
    queue: int,
    max_model_len: int,
    threads: int | None,
    is_fixed_width: bool,
    seed: int,
    output: Path | None,
) -> None:
    """Soak a server and report; exit code 1 if a check fails."""
    # Before the server starts: single runs have the machine for themselves.
    cases = known_cases(bundle, MODEL, count, seed=seed, max_model_len=max_model_len, threads=threads)
    click.echo(f"{len(cases)} requests run one by one", err=True)
    flags = ["--served-model-name", MODEL, "--max-num-seqs", str(slots), "--max-queue", str(queue)]
    flags += ["--max-model-len", str(max_model_len), "--log-format", "json", "--per-request-spec-decode-metrics", "summary"]
    flags += ["--fixed-width"] if is_fixed_width else []
    flags += [] if threads is None else ["--threads", str(threads)]
    with tempfile.TemporaryDirectory(prefix="soak-") as made:
        log = Path(made) / "server.log"
        with serving(bundle, log, *flags) as server:
            bad = bad_requests(MODEL, max_model_len)
            run = asyncio.run(soak(server, cases, bad, seconds=minutes * 60, clients=clients, slots=slots, seed=seed))
        books = {
            "clients that also misbehave": balance(run.rough, logged_statuses(log, run.rough.id_prefix), run.rough_growth),
            "clients that do not": balance(run.calm, logged_statuses(log, run.calm.id_prefix), run.calm_growth),
        }
    machine = {"command": flag_line(server.command, ""), "machine": str(this_machine()), "versions": versions()}
    report = {"minutes": minutes, "clients": clients, **machine, **_report(run, books, is_fixed_width=is_fixed_width)}
    text = json.dumps(report, indent=2)
    click.echo(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    failed = [name for name, check in report["checks"].items() if not check["passed"]]
    click.echo(f"failed: {', '.join(failed)}" if failed else "every check passed", err=True)
    sys.exit(1 if failed else 0)


def _report(run: Run, books: dict[str, dict[str, Line]], *, is_fixed_width: bool) -> dict[str, Any]:
    memory, batch, idle, rough = memory_trend(run.memory, WARM_UP * run.memory[-1][0]), run.full_batch, run.idle, run.rough
    wrong = [*rough.wrong, *run.calm.wrong]
    failures = {status: count for status, count in (rough.statuses + run.calm.statuses).items() if status >= 500}
    open_lines = {f"{part}: {name}": line for part, lines in books.items() for name, line in lines.items() if not line.adds_up}
    is_flat = run.seconds < SHORTEST_TREND_SECONDS or memory["growth_mb"] <= MAX_GROWTH * memory["start_mb"]
    is_full = batch.most_running_at_once == batch.slots and batch.served == batch.slots * batch.rounds
    share = drafted_share([*rough.finished, *run.calm.finished])
    drafts_enough = share["found"] > 0 and share["answers_below"] == 0
    everything = all(rough.actions[action] for action in ACTIONS)
    checks = {
        "every greedy answer equals its single run, every bad request has its status": (not wrong, wrong[:20]),
        "no 5xx": (not failures, failures),
        "nothing runs or waits once the clients have stopped": (idle.running == idle.waiting == 0, asdict(idle)),
        "a full batch is served at the end": (is_full, asdict(batch)),
        f"memory is flat after the warm-up (if {SHORTEST_TREND_SECONDS:.0f} s or more were measured)": (is_flat, memory),
        "every counter adds up": (not open_lines, open_lines),
        "something of every kind was done": (everything, dict(rough.actions)),
    }
    if is_fixed_width:
        checks["every answer drafted what it must"] = (drafts_enough, share)
    return {
        "seconds": run.seconds,
        "requests": rough.sent,
        "actions": dict(rough.actions),
        "statuses": {str(status): count for status, count in sorted(rough.statuses.items())},
        "whole_answers": len(rough.finished),
        "greedy_answers_compared": rough.checked,
        "clients_left": len(rough.left),
        "tokens_of_whole_answers": sum(answer.completion_tokens for answer in rough.finished),
        "drafted_tokens": run.rough_growth["vllm:spec_decode_num_draft_tokens_total"],
        "accepted_tokens": run.rough_growth["vllm:spec_decode_num_accepted_tokens_total"],
        "drafted_share": share,
        "memory": memory,
        "books": {part: {name: line._asdict() for name, line in lines.items()} for part, lines in books.items()},
        "checks": {name: {"passed": passed, "found": found} for name, (passed, found) in checks.items()},
    }


if __name__ == "__main__":
    main()
