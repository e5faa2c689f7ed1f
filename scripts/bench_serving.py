"""Throughput of a server with and without speculation: see scripts/bench_serving.

Prompts are the held-out ones of `domino-deploy bench`, which nothing was tuned on.  Requests without speculation go to the same server with
`speculative: false`, so that both ways share process, weights and threads.  A turn is one way at one concurrency: as many clients ask for
one answer after the other, of different lengths; what the server generates is counted over some seconds in which all of them are at work,
by its own counter of tokens.  Then they leave the answers that they are at.  A machine's speed drifts by more, within a minute, than two
ways may differ: turns are short and many, and a round takes every concurrency both ways, one right behind the other, in alternating order.
The ratio is that of the rates with speculation to those without, summed up; its interval is a bootstrap over rounds.  Answers are
compared: both ways must give the same texts.  Prompts are asked for in turns, so that none is found in the cache of a server with fewer
slots, beyond the chat template.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, stdev
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from serving_process import serving

from domino_deploy.bench import failures
from domino_deploy.bench.client import Answer, AnswerLeft, Client
from domino_deploy.bench.load import LoadSettings, Speculation, speculation_since
from domino_deploy.bench.machine import this_machine, versions
from domino_deploy.bench.report import Table, as_markdown, number
from domino_deploy.bench.tasks import OWN, select
from domino_deploy.cli.bench_url import whole_numbers

_COLUMNS = (
    "concurrency", "plain tok/s", "tok/s", "ratio", "95 % interval", "one round's spread", "acceptance length", "drafted cycles",
    "plain TPOT ms", "TPOT ms", "plain TTFT ms", "TTFT ms", "same texts",
)  # fmt: skip
_HEADING = """# Serving: throughput with and without speculation

Clients that ask one `domino-deploy serve` process for one answer after the other; "plain" are requests for the same prompts with
`"speculative": false`, in turns with the others: {rounds} rounds, in each of which every concurrency has {seconds:g} seconds each way.
Tokens per second are those that the server generated, medians over rounds. The ratio is that of the rates, summed over all rounds, with
the 95 % interval that a bootstrap over rounds gives; the spread is the standard deviation of one round's ratio. TPOT per token and TTFT
are medians of the answers that ended in these seconds; a turn begins with requests of all clients at once, which TTFT shows. The engine
chooses for every cycle how many tokens to draft, by measured costs and acceptance (`runtime/controller.py`). "Drafted cycles": of all
parts that a sequence had in a cycle, those with drafts.
"""
_RESAMPLES = 4000  # of the bootstrap
_TOKENS = "vllm:generation_tokens_total"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One concurrency, one way, one round.

    tokens, speculation: what the server's counters grew by in `seconds`; answers: those that ended in them; texts: of all answers, by
    the number of their prompt.
    """

    concurrency: int
    is_plain: bool
    seconds: float
    tokens: float
    speculation: Speculation
    answers: tuple[Answer, ...]
    texts: Mapping[int, str]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), default=Path("build/demo-bundle"))
@click.option("--url", help="Measure this server; by default one is started for the bundle.")
@click.option("--concurrency", callback=whole_numbers, default="1,2,4,8,16")
@click.option("--rounds", type=click.IntRange(min=1), default=40)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=5.0, help="Of every turn that count.")
@click.option("--warm-up", type=click.FloatRange(min=0), default=1.0, help="Seconds of every turn before those.")
@click.option("--prompts", type=click.IntRange(min=1), default=96, help="Different ones; they are asked for in turns.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, help="Of the longest answer; the shortest has a third of it.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=Path("demo/figures/serving.json"))
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path), default=Path("docs/serving_benchmark.md"))
def main(
    bundle: Path,
    *,
    url: str | None,
    concurrency: tuple[int, ...],
    rounds: int,
    seconds: float,
    warm_up: float,
    prompts: int,
    max_new_tokens: int,
    json_path: Path,
    markdown_path: Path,
) -> None:
    """Measure, and write the figures down."""
    settings = LoadSettings(concurrency=concurrency, max_new_tokens=max_new_tokens)
    sets = select(list(OWN), (), -(-prompts // len(OWN))).sets
    # Kinds in turns, so that every load is a mix of them.
    mixed = [prompt for same_place in zip(*(kind.prompts for kind in sets), strict=False) for prompt in same_place][:prompts]
    with _server(bundle, url, max(concurrency)) as address:
        measurement = _Measurement(Client(address), settings, mixed, seconds=seconds, warm_up=warm_up)
        turns = list(measurement.turns(rounds))
    facts = {
        "rows": [_row(turns, width) for width in concurrency],
        "rounds": rounds,
        "seconds": seconds,
        "prompts": len(mixed),
        "kinds": list(OWN),
        "max_new_tokens": max_new_tokens,
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


class _Measurement:
    """Turns against one server.

    Args:
        client: of the server.
        settings: of the requests, and the concurrencies.
        prompts: asked for in this order, over and over.
        seconds, warm_up: of a turn, those that count and those before.
    """

    def __init__(self, client: Client, settings: LoadSettings, prompts: Sequence[str], *, seconds: float, warm_up: float) -> None:
        self._client = client
        self._settings = settings
        self._prompts = prompts
        self._seconds = seconds
        self._warm_up = warm_up
        self._model = client.first_model()
        self._numbers = itertools.count()  # goes on from turn to turn

    def turns(self, rounds: int) -> Iterator[Turn]:
        """So many rounds, behind turns that count nowhere: the controller's estimates are those of a server that has been running."""
        for concurrency, is_plain in itertools.product(self._settings.concurrency, (True, False)):
            self._turn(concurrency, is_plain=is_plain)
        for taken in range(rounds):
            for concurrency in self._settings.concurrency:
                rates = {}
                for is_plain in (taken % 2 == 0, taken % 2 == 1):
                    turn = self._turn(concurrency, is_plain=is_plain)
                    rates[is_plain] = turn.tokens_per_second
                    yield turn
                both = f"{rates[True]:.1f} tok/s plain, {rates[False]:.1f} speculative"
                click.echo(f"round {taken + 1} of {rounds}, concurrency {concurrency}: {both}", err=True)

    def _turn(self, concurrency: int, *, is_plain: bool) -> Turn:
        leave, answers = threading.Event(), list[tuple[int, Answer]]()
        bodies = [self._body(prompt, is_plain, length) for prompt, length in zip(self._prompts, itertools.cycle(self._lengths()))]

        def ask_on() -> None:
            with suppress(AnswerLeft):
                while not leave.is_set():
                    number = next(self._numbers) % len(bodies)
                    answers.append((number, self._client.stream(self._settings.path, bodies[number], leave=leave)))

        with ThreadPoolExecutor(max_workers=concurrency) as clients:
            try:
                running = [clients.submit(ask_on) for _ in range(concurrency)]
                time.sleep(self._warm_up)
                before, started = self._counters()
                time.sleep(self._seconds)
                after, ended = self._counters()
            finally:
                leave.set()
        for client in running:
            client.result()
        _check(answers)
        if after[_TOKENS] <= before[_TOKENS]:
            raise click.ClickException(
                f"Expected tokens in every turn, found none in {self._seconds:g} seconds of concurrency {concurrency}. Give more --seconds."
            )
        speculation = speculation_since(before, after)
        assert speculation is not None, "a server with the one counter has the others"
        return Turn(
            concurrency=concurrency,
            is_plain=is_plain,
            seconds=ended - started,
            tokens=after[_TOKENS] - before[_TOKENS],
            speculation=speculation,
            answers=tuple(answer for _, answer in answers if started <= answer.ended <= ended),
            texts={number: answer.text for number, answer in answers},
        )

    def _lengths(self) -> list[int]:
        """Tokens of the answers, so that clients do not wait for each other's ends all at once; a prompt has the same every time."""
        most = self._settings.max_new_tokens
        return [most, max(1, most // 3), max(1, 2 * most // 3), max(1, most // 2)]

    def _body(self, prompt: str, is_plain: bool, length: int) -> dict[str, object]:
        return self._settings.body(self._model, prompt) | {"speculative": not is_plain, "max_tokens": length}

    def _counters(self) -> tuple[dict[str, float], float]:
        """The server's counters, and when it was asked for them."""
        counters = self._client.metrics()
        if counters is None or _TOKENS not in counters or speculation_since(counters, counters) is None:
            raise click.ClickException(
                f"Expected a server that counts {_TOKENS} and its drafts at /metrics, found none. Measure another one."
            )
        return counters, time.perf_counter()


def _check(answers: Sequence[tuple[int, Answer]]) -> None:
    """Every request must have succeeded."""
    errors = Counter(answer.error for _, answer in answers if answer.error is not None)
    if errors:
        found = ", ".join(f"{count} times {failures.words(kind)}" for kind, count in errors.items())
        raise click.ClickException(f"Expected every request to succeed, found {found}. See the server's log.")


def _row(turns: Sequence[Turn], concurrency: int) -> dict[str, Any]:
    """One concurrency's figures."""
    plain, ours = ([turn for turn in turns if (turn.concurrency, turn.is_plain) == (concurrency, is_plain)] for is_plain in (True, False))
    rates, plain_rates = (np.array([turn.tokens_per_second for turn in way]) for way in (ours, plain))
    grown = [turn.speculation for turn in ours]
    drafts, drafted, accepted = (
        sum(counts) for counts in zip(*((each.drafts, each.drafted, each.accepted) for each in grown), strict=True)
    )
    # A part in a cycle commits one token, and those accepted besides.
    parts = sum(turn.tokens for turn in ours) - accepted
    known = {number: text for turn in plain for number, text in turn.texts.items()}
    pairs = [(text, known[number]) for turn in ours for number, text in turn.texts.items() if number in known]
    return {
        "concurrency": concurrency,
        "plain_tokens_per_second": median(plain_rates.tolist()),
        "tokens_per_second": median(rates.tolist()),
        "ratio": float(rates.sum() / plain_rates.sum()),
        "interval": interval(rates, plain_rates),
        "ratios": (rates / plain_rates).tolist(),
        "acceptance_length": Speculation(drafts=drafts, drafted=drafted, accepted=accepted).acceptance_length,
        "drafted_cycles": drafts / parts if parts > 0 else None,
        "plain_tpot_ms": _median(answer.token_ms for turn in plain for answer in turn.answers),
        "tpot_ms": _median(answer.token_ms for turn in ours for answer in turn.answers),
        "plain_ttft_ms": _median(answer.first_text_ms for turn in plain for answer in turn.answers),
        "ttft_ms": _median(answer.first_text_ms for turn in ours for answer in turn.answers),
        "same_texts": sum(mine == theirs for mine, theirs in pairs),
        "texts": len(pairs),
    }


def interval(rates: np.ndarray, plain_rates: np.ndarray) -> tuple[float, float]:
    """95 % interval of sum(rates) / sum(plain_rates), [rounds] each: whole rounds drawn again with replacement."""
    rounds = len(rates)
    drawn = np.random.default_rng(0).integers(rounds, size=(_RESAMPLES, rounds))
    low, high = np.quantile(rates[drawn].sum(axis=1) / plain_rates[drawn].sum(axis=1), (0.025, 0.975))
    return float(low), float(high)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def markdown(facts: dict[str, Any]) -> str:
    """The page of these figures."""
    rows = tuple(
        (
            str(row["concurrency"]),
            *(number(row[name], 1) for name in ("plain_tokens_per_second", "tokens_per_second")),
            number(row["ratio"], 3),
            " to ".join(number(end, 3) for end in row["interval"]),
            number(stdev(row["ratios"]) if len(row["ratios"]) > 1 else None),
            number(row["acceptance_length"]),
            "-" if row["drafted_cycles"] is None else f"{row['drafted_cycles']:.0%}",
            *(number(row[name], 1) for name in ("plain_tpot_ms", "tpot_ms", "plain_ttft_ms", "ttft_ms")),
            f"{row['same_texts']} of {row['texts']}",
        )
        for row in facts["rows"]
    )
    machine = facts["machine"]
    notes = (
        f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['os']}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        f"prompts: the first {facts['prompts']} held-out ones of {', '.join(facts['kinds'])}; "
        f"{facts['max_new_tokens'] // 3} to {facts['max_new_tokens']} tokens each, greedy",
        f"command: {facts['command']}",
    )
    heading = _HEADING.format(rounds=facts["rounds"], seconds=facts["seconds"])
    return heading + "\n" + as_markdown([Table(title="", columns=_COLUMNS, rows=rows)], notes)


if __name__ == "__main__":
    main()
