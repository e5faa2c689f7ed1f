"""A run's figures as JSON, as tables, and as the markdown of a README."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from domino_deploy.bench.machine import Machine
from domino_deploy.bench.measure import Difference, Figures, Mode

Cells = tuple[str, ...]
_ALL = "all"
NOT_MEASURED = "-"
# As in the literature: tau and speed-up with two digits.
_SPEED_COLUMNS = ("prompts", "number", "tau", "accepted", "plain tok/s", "tok/s", "speed-up", "median speed-up", "identical", "looping")
_POOL_COLUMNS = ("uncertified",)
_LOOKUP_COLUMNS = ("lookup tau", "lookup tok/s", "lookup speed-up")
_TIME_COLUMNS = ("prompts", "draft ms", "head ms", "verify ms", "other ms", "other share", "plain step ms", "prefill ms")


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: Cells
    rows: tuple[Cells, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures and what they belong to: without machine, versions, settings and command a number says nothing."""

    overall: Figures
    kinds: Mapping[str, Figures]
    machine: Machine
    versions: Mapping[str, str]
    settings: Mapping[str, object]
    command: str

    def to_dict(self) -> dict[str, object]:
        """JSON values: the overall figures at top level, the same for each kind under `kinds`."""
        return {
            **_figures(self.overall),
            "kinds": {kind: _figures(figures) for kind, figures in self.kinds.items()},
            "machine": asdict(self.machine),
            "versions": dict(self.versions),
            "command": self.command,
            "settings": dict(self.settings),
        }


def tables(report: Report) -> tuple[Table, Table]:
    """Speed and time, a row per kind and one for all prompts together."""
    rows = [*report.kinds.items(), (_ALL, report.overall)] if len(report.kinds) > 1 else list(report.kinds.items())
    has_lookup = Mode.PROMPT_LOOKUP in report.overall.modes
    has_pool = report.overall.modes[Mode.SPECULATIVE].uncertified_share is not None
    speed = tuple(
        (*_speed(kind, figures), *(_pool(figures) if has_pool else ()), *(_lookup(figures) if has_lookup else ())) for kind, figures in rows
    )
    columns = (*_SPEED_COLUMNS, *(_POOL_COLUMNS if has_pool else ()), *(_LOOKUP_COLUMNS if has_lookup else ()))
    times = tuple(_times(kind, figures) for kind, figures in rows)
    return (
        Table(title="Speed", columns=columns, rows=speed),
        Table(title="Where the time of a cycle goes (medians)", columns=_TIME_COLUMNS, rows=times),
    )


def footnotes(report: Report) -> Iterator[str]:
    """What the tables belong to, a line each."""
    yield f"machine: {report.machine}"
    yield "versions: " + ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield settings_note(report.settings)
    yield f"command: {report.command}"


def settings_note(settings: Mapping[str, object]) -> str:
    """All settings in one line."""
    return "settings: " + ", ".join(f"{name} {_shown(value)}" for name, value in settings.items())


def differences(differences: Sequence[Difference]) -> list[str]:
    """A line for each response that is not plain decoding's."""
    return [f"{d.kind}, prompt {d.index}: {d.mode} differs from plain decoding from token {d.position} on" for d in differences]


def as_markdown(tables: Iterable[Table], notes: Iterable[str]) -> str:
    """Tables, and notes as a list below them."""
    return "\n\n".join([*map(_markdown_table, tables), "\n".join(f"- {_with_code(note)}" for note in notes)]) + "\n"


def _figures(figures: Figures) -> dict[str, object]:
    ours, plain = figures.modes[Mode.SPECULATIVE], figures.modes[Mode.PLAIN]
    lookup = figures.modes.get(Mode.PROMPT_LOOKUP)
    speed = ("tau", "acceptance_rate", "tokens_per_second", "speedup", "speedup_median")
    return {
        "tau": ours.tau,
        "speedup": ours.speedup,
        "identical": figures.is_identical,
        "terms_ms": asdict(ours.terms_ms),
        "other_share": ours.other_share,
        "speedup_median": ours.speedup_median,
        "acceptance_rate": ours.acceptance_rate,
        "uncertified_share": ours.uncertified_share,
        "tokens_per_second": ours.tokens_per_second,
        "prefill_ms": ours.prefill_ms,
        "plain": {"tokens_per_second": plain.tokens_per_second, "step_ms": figures.plain_step_ms, "prefill_ms": plain.prefill_ms},
        "prompt_lookup": None if lookup is None else {name: getattr(lookup, name) for name in speed},
        "prompts": figures.prompts,
        "tokens": figures.tokens,
        "looping_share": figures.looping_share,
        "differences": [asdict(difference) for difference in figures.differences],
    }


def _speed(kind: str, figures: Figures) -> Cells:
    ours, plain = figures.modes[Mode.SPECULATIVE], figures.modes[Mode.PLAIN]
    return (
        kind,
        str(figures.prompts),
        number(ours.tau),
        percent(ours.acceptance_rate),
        number(plain.tokens_per_second, 1),
        number(ours.tokens_per_second, 1),
        number(ours.speedup),
        number(ours.speedup_median),
        "yes" if figures.is_identical else f"NO ({len(figures.differences)})",
        percent(figures.looping_share),
    )


def _pool(figures: Figures) -> Cells:
    share = figures.modes[Mode.SPECULATIVE].uncertified_share
    return (NOT_MEASURED if share is None else f"{share:.1%}",)


def _lookup(figures: Figures) -> Cells:
    lookup = figures.modes[Mode.PROMPT_LOOKUP]
    return (number(lookup.tau), number(lookup.tokens_per_second, 1), number(lookup.speedup))


def _times(kind: str, figures: Figures) -> Cells:
    ours = figures.modes[Mode.SPECULATIVE]
    terms = ours.terms_ms
    milliseconds = (number(term) for term in (terms.draft, terms.head, terms.verify, terms.other))
    return (kind, *milliseconds, percent(ours.other_share), number(figures.plain_step_ms), number(ours.prefill_ms))


def number(value: float | None, digits: int = 2) -> str:
    """A table's cell."""
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as a table's cell."""
    return NOT_MEASURED if value is None else f"{value:.0%}"


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "+".join(map(str, value)) or "all"
    return "default" if value is None else str(value)


def _markdown_table(table: Table) -> str:
    lines = [table.columns, ("---", *("---:",) * (len(table.columns) - 1)), *table.rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _with_code(note: str) -> str:
    """`command: x` with x as code."""
    name, _, text = note.partition(": ")
    return f"{name}: `{text}`" if name == "command" else note
