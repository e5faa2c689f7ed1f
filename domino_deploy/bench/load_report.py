"""A load run's figures as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from domino_deploy.bench import failures
from domino_deploy.bench.load import PERCENTILES, Drafting, Level, Turns
from domino_deploy.bench.machine import Machine
from domino_deploy.bench.report import NOT_MEASURED, Cells, Table, number, percent, settings_note
from domino_deploy.errors import one_line

_SHOWN = "/".join(f"p{percentile}" for percentile in PERCENTILES)
_THROUGHPUT_COLUMNS = ("concurrency", "requests", "failed", "output tok/s", "requests/s", "acceptance length", "acceptance rate")
_FAILED_COLUMNS = ("concurrency", "requests", "kind", "found", "the server's words")
_RATIO_COLUMNS = ("concurrency", "plain output tok/s", "output tok/s", "ratio", "drafting")
_LATENCIES = ("TTFT ms", "TPOT ms per token", "ITL ms per chunk", "E2E ms")
_LATENCY_COLUMNS = ("concurrency", "cached prompt", *(f"{name}, {_SHOWN}" for name in _LATENCIES))


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was measured and what it belongs to; `machine` is the client's, which may not be the server's."""

    turns: tuple[Turns, ...]
    url: str
    model: str
    machine: Machine
    settings: Mapping[str, object]
    command: str

    def to_dict(self) -> dict[str, object]:
        """JSON values."""
        return {
            "levels": [_figures(level) for level in levels_of(self.turns)],
            "against_plain": [
                {"concurrency": turns.level.concurrency, "ratio": turns.ratio, "drafting": turns.drafting}
                for turns in self.turns
                if turns.baseline is not None
            ],
            "url": self.url,
            "model": self.model,
            "client_machine": asdict(self.machine),
            "settings": dict(self.settings),
            "command": self.command,
        }


def levels_of(measured: Sequence[Turns]) -> list[Level]:
    """A row each: baselines before the levels that they belong to."""
    return [level for turns in measured for level in (turns.baseline, turns.level) if level is not None]


def load_tables(measured: Sequence[Turns]) -> Iterator[Table]:
    """Throughput and latency, a row per level; ratios to baselines, and failed requests of each kind and level, where there are any."""
    levels = levels_of(measured)
    yield Table(title="Throughput", columns=_THROUGHPUT_COLUMNS, rows=tuple(map(_throughput, levels)))
    yield Table(title="Latency", columns=_LATENCY_COLUMNS, rows=tuple(map(_latency, levels)))
    compared = tuple(_compared(turns, turns.baseline) for turns in measured if turns.baseline is not None)
    if compared:
        yield Table(title="Against plain decoding", columns=_RATIO_COLUMNS, rows=compared)
    failed = tuple(_failed(levels))
    if failed:
        yield Table(title="Failed requests", columns=_FAILED_COLUMNS, rows=failed)


def load_footnotes(report: LoadReport) -> Iterator[str]:
    """What the tables belong to and what their columns are, a line each."""
    yield f"server: {report.url}, model {one_line(report.model)}"
    yield f"client: {report.machine}"
    yield settings_note(report.settings)
    yield (
        "cached prompt is the part of the prompt tokens that the server found in its cache, which makes TTFT shorter: "
        "prompts repeat, in a level and from one to the next"
    )
    found = {turns.drafting for turns in report.turns if turns.baseline is not None}
    if found:
        yield "plain: the same requests with speculative: false, right before or behind the others; the ratio has no interval"
    if Drafting.NOT_CHECKED in found:
        yield "not checked: without counts of drafts at /metrics the server may have ignored speculative: false, or drafted in neither turn"
    if Drafting.NOTHING_DRAFTED in found:
        yield "nothing drafted: the server decoded plainly without being asked to, so the ratio says nothing of speculation"
    yield "TPOT is per token, (last text - first text) / (tokens - 1); ITL is per chunk, and with speculation a chunk holds several tokens"
    yield f"command: {report.command}"


def error_lines(levels: Sequence[Level]) -> list[str]:
    """The rows of failed requests as lines, for a run without any figures; what the server said to them, once."""
    rows = list(_failed(levels))
    said = dict.fromkeys(f"{kind}, in the server's words: {words}" for _, _, kind, _, words in rows if words != NOT_MEASURED)
    return [*(f"concurrency {concurrency}: {count} x {kind}, {found}" for concurrency, count, kind, found, _ in rows), *said]


def error_advice(levels: Sequence[Level]) -> str:
    """What to do about them."""
    return " ".join(dict.fromkeys(failures.advice(kind) for level in levels for kind in level.errors))


def _failed(levels: Sequence[Level]) -> Iterator[Cells]:
    for level in levels:
        for kind, count in level.errors.items():
            yield _name(level), str(count), kind, failures.words(kind), level.messages.get(kind, NOT_MEASURED)


def _compared(turns: Turns, baseline: Level) -> Cells:
    rates = number(baseline.tokens_per_second, 1), number(turns.level.tokens_per_second, 1)
    return str(turns.level.concurrency), *rates, number(turns.ratio), turns.drafting


def _name(level: Level) -> str:
    return f"{level.concurrency} plain" if level.is_baseline else str(level.concurrency)


def _figures(level: Level) -> dict[str, object]:
    speculation = level.speculation
    return {
        "concurrency": level.concurrency,
        "is_baseline": level.is_baseline,
        "requests": level.requests,
        "succeeded": level.succeeded,
        "errors": dict(level.errors),
        "error_messages": dict(level.messages),
        "seconds": level.seconds,
        "output_tokens_per_second": level.tokens_per_second,
        "requests_per_second": level.requests_per_second,
        "prompt_tokens": level.prompt_tokens,
        "cached_prompt_tokens": level.cached_tokens,
        "completion_tokens": level.completion_tokens,
        "ttft_ms": _named(level.first_text_ms),
        "tpot_ms_per_token": _named(level.token_ms),
        "itl_ms_per_chunk": _named(level.chunk_gap_ms),
        "e2e_ms": _named(level.total_ms),
        "speculation": None
        if speculation is None
        else {**asdict(speculation), "acceptance_length": speculation.acceptance_length, "acceptance_rate": speculation.acceptance_rate},
    }


def _throughput(level: Level) -> Cells:
    speculation = level.speculation
    return (
        _name(level),
        str(level.requests),
        str(level.requests - level.succeeded),
        number(level.tokens_per_second, 1),
        number(level.requests_per_second),
        number(None if speculation is None else speculation.acceptance_length),
        percent(None if speculation is None else speculation.acceptance_rate),
    )


def _latency(level: Level) -> Cells:
    return (
        _name(level),
        percent(level.cached_share),
        *(_percentiles(values) for values in (level.first_text_ms, level.token_ms, level.chunk_gap_ms, level.total_ms)),
    )


def _percentiles(values: Mapping[int, float] | None) -> str:
    return NOT_MEASURED if values is None else " / ".join(number(values[percentile], 1) for percentile in PERCENTILES)


def _named(values: Mapping[int, float] | None) -> dict[str, float] | None:
    return None if values is None else {f"p{percentile}": value for percentile, value in values.items()}
