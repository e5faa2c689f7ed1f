"""Throughput of a server with and without speculation: see scripts/bench_serving.

Prompts are the held-out ones of `domino-deploy bench`, which nothing was tuned on.  Requests without speculation go to the same server with
`speculative: false`, so that both ways share process, weights and threads.  Every round measures every concurrency both ways, in
alternating order; figures are medians over rounds, ratios are medians of each round's ratio.  Answers are compared: both ways
must give the same texts.  Before every turn, other prompts take all slots: no prompt is found in a cache, beyond the chat template.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent))

from serving_process import serving

from domino_deploy.bench.client import Answer, Client
from domino_deploy.bench.load import Level, LoadSettings, level, send, speculation_since
from domino_deploy.bench.machine import this_machine, versions
from domino_deploy.bench.report import Table, as_markdown, number
from domino_deploy.bench.tasks import OWN, select
from domino_deploy.cli.bench_url import whole_numbers

_COLUMNS = (
    "concurrency", "plain tok/s", "tok/s", "ratio", "acceptance length", "drafted cycles", "plain TPOT ms", "TPOT ms", "plain TTFT ms",
    "TTFT ms", "same texts",
)  # fmt: skip
_HEADING = """# Serving: throughput with and without speculation

Requests in flight against one `domino-deploy serve` process; "plain" are the same requests with `"speculative": false`, in
turns with the others. Medians over {rounds} rounds of {requests} requests each; TPOT per token and TTFT are medians of requests.
The engine chooses for every cycle how many tokens to draft, by measured costs and acceptance (`runtime/controller.py`); a ratio
below 1 is where it did not pay all the same. "Drafted cycles": those of one request in which it drafted.
"""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One concurrency, one way, one round; `figures` of its answers, `texts` in the order of the prompts."""

    concurrency: int
    is_plain: bool
    figures: Level
    texts: tuple[str, ...]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), default=Path("build/demo-bundle"))
@click.option("--url", help="Measure this server; by default one is started for the bundle.")
@click.option("--concurrency", callback=whole_numbers, default="1,2,4,8,16")
@click.option("--rounds", type=click.IntRange(min=1), default=3)
@click.option("--requests", default=16, help="Of every turn.")
@click.option("--max-new-tokens", default=64)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=Path("demo/figures/serving.json"))
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path), default=Path("docs/serving_benchmark.md"))
def main(
    bundle: Path,
    *,
    url: str | None,
    concurrency: tuple[int, ...],
    rounds: int,
    requests: int,
    max_new_tokens: int,
    json_path: Path,
    markdown_path: Path,
) -> None:
    """Measure, and write the figures down."""
    settings = LoadSettings(concurrency=concurrency, requests=requests, max_new_tokens=max_new_tokens)
    sets = select(list(OWN), (), -(-requests // len(OWN))).sets
    # Kinds in turns, so that every load is a mix of them.
    prompts = [prompt for same_place in zip(*(kind.prompts for kind in sets), strict=False) for prompt in same_place][:requests]
    with _server(bundle, url, max(concurrency)) as address:
        client = Client(address)
        model = client.first_model()
        turns = list(_turns(client, model, prompts, settings, rounds))
    facts = {
        "rows": [_row(turns, width) for width in concurrency],
        "rounds": rounds,
        "settings": settings.to_dict() | {"prompts": len(prompts), "kinds": list(OWN)},
        "machine": asdict(this_machine()),
        "versions": versions(),
        "command": shlex.join(["scripts/bench_serving", *sys.argv[1:]]),
    }
    json_path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    markdown_path.write_text(markdown(facts), encoding="utf-8")
    click.echo(markdown(facts))


@contextmanager
def _server(bundle: Path, url: str | None, slots: int) -> Iterator[str]:
    """The server to measure: the one at `url`, or a new one with room for the highest concurrency."""
    if url is not None:
        yield url
        return
    log = Path("build/bench-serving.log")
    log.parent.mkdir(exist_ok=True)
    with serving(bundle, log, "--max-num-seqs", str(slots), ready_seconds=600.0) as server:
        yield server.url


def _turns(client: Client, model: str, prompts: Sequence[str], settings: LoadSettings, rounds: int) -> Iterator[Turn]:
    bodies = {is_plain: [_body(settings, model, prompt, is_plain) for prompt in prompts] for is_plain in (True, False)}
    others = OWN["word-problems"](len(prompts) + max(settings.concurrency))[len(prompts) :]
    for warm_up in bodies.values():  # the controller's estimates are those of a server that has been running
        send(client, settings.path, warm_up, concurrency=max(settings.concurrency))
    for turn in range(rounds):
        for concurrency in settings.concurrency:
            for is_plain in (turn % 2 == 0, turn % 2 == 1):
                click.echo(f"round {turn + 1}, concurrency {concurrency}, {'plain' if is_plain else 'speculative'}", err=True)
                displacing = [_body(settings, model, other, is_plain) | {"max_tokens": 1} for other in others]
                send(client, settings.path, displacing, concurrency=len(displacing))
                before, started = client.metrics(), time.perf_counter()
                answers = send(client, settings.path, bodies[is_plain], concurrency=concurrency)
                seconds = time.perf_counter() - started
                figures = level(concurrency, answers, seconds, speculation=speculation_since(before, client.metrics()))
                yield Turn(concurrency=concurrency, is_plain=is_plain, figures=_whole(figures), texts=_texts(answers))


def _body(settings: LoadSettings, model: str, prompt: str, is_plain: bool) -> dict[str, object]:
    return settings.body(model, prompt) | {"speculative": not is_plain}


def _whole(figures: Level) -> Level:
    if figures.errors:
        raise click.ClickException(f"Expected every request to succeed, found {dict(figures.errors)}. See the server's log.")
    return figures


def _texts(answers: Sequence[Answer]) -> tuple[str, ...]:
    return tuple(answer.text for answer in answers)


def _row(turns: Sequence[Turn], concurrency: int) -> dict[str, Any]:
    """One concurrency's figures."""
    plain, ours = ([turn for turn in turns if (turn.concurrency, turn.is_plain) == (concurrency, is_plain)] for is_plain in (True, False))
    ratios = [_rate(mine) / _rate(theirs) for mine, theirs in zip(ours, plain, strict=True)]
    grown = [turn.figures.speculation for turn in ours if turn.figures.speculation is not None]
    drafts, accepted = sum(each.drafts for each in grown), sum(each.accepted for each in grown)
    return {
        "concurrency": concurrency,
        "plain_tokens_per_second": median(map(_rate, plain)),
        "tokens_per_second": median(map(_rate, ours)),
        "ratio": median(ratios),
        "ratios": ratios,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "drafted_cycles_per_request": drafts / sum(turn.figures.requests for turn in ours),
        "plain_tpot_ms": _median_of([turn.figures.token_ms for turn in plain]),
        "tpot_ms": _median_of([turn.figures.token_ms for turn in ours]),
        "plain_ttft_ms": _median_of([turn.figures.first_text_ms for turn in plain]),
        "ttft_ms": _median_of([turn.figures.first_text_ms for turn in ours]),
        "same_texts": sum(_same_texts(mine, theirs) for mine, theirs in zip(ours, plain, strict=True)),
        "texts": sum(len(turn.texts) for turn in ours),
    }


def _same_texts(mine: Turn, theirs: Turn) -> int:
    return sum(text == other for text, other in zip(mine.texts, theirs.texts, strict=True))


def _rate(turn: Turn) -> float:
    rate = turn.figures.tokens_per_second
    if rate is None:
        raise click.ClickException("Expected a server that states completion tokens in its usage, found none. Measure another one.")
    return rate


def _median_of(percentiles: Sequence[Any]) -> float | None:
    """Over rounds, of each round's median."""
    known = [values[50] for values in percentiles if values is not None]
    return median(known) if known else None


def markdown(facts: dict[str, Any]) -> str:
    """The page of these figures."""
    rows = tuple(
        (
            str(row["concurrency"]),
            *(number(row[name], 1) for name in ("plain_tokens_per_second", "tokens_per_second")),
            *(number(row[name]) for name in ("ratio", "acceptance_length")),
            *(number(row[name], 1) for name in ("drafted_cycles_per_request", "plain_tpot_ms", "tpot_ms", "plain_ttft_ms", "ttft_ms")),
            f"{row['same_texts']} of {row['texts']}",
        )
        for row in facts["rows"]
    )
    machine = facts["machine"]
    notes = (
        f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['os']}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        f"prompts: the first {facts['settings']['prompts']} held-out ones of {', '.join(facts['settings']['kinds'])}; "
        f"{facts['settings']['max_new_tokens']} tokens each, greedy",
        f"command: {facts['command']}",
    )
    heading = _HEADING.format(rounds=facts["rounds"], requests=facts["settings"]["requests"])
    return heading + "\n" + as_markdown([Table(title="", columns=_COLUMNS, rows=rows)], notes)


if __name__ == "__main__":
    main()
