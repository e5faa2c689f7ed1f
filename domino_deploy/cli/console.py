"""What commands share on the screen: progress on stderr, tables and JSON on stdout.

rich is imported when something is drawn: it costs a third of the time `--help` may take.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import click

from domino_deploy.errors import RequestError
from domino_deploy.strict_json import strict_value

if TYPE_CHECKING:
    from domino_deploy.training.progress import Progress as Stage

_LINE_SECONDS = 5.0  # between two lines of one phase with --verbose
_SPEED_SECONDS = 600.0  # over which the remaining time is estimated: a batch of responses may take minutes

Progress = Callable[[str], None]


class Verbosity(Enum):
    """QUIET: no progress.  NORMAL: progress on a terminal, elsewhere where `progress` is asked to.  VERBOSE: a line per step with its
    time, wherever stderr goes."""

    QUIET = auto()
    NORMAL = auto()
    VERBOSE = auto()


@contextmanager
def progress(ctx: click.Context, *, also_piped: bool = False) -> Iterator[Progress]:
    """A function that is told each step as it begins; shows the running step and its seconds.

    Args:
        ctx: the command's.
        also_piped: without a terminal, a line for each step: for runs of minutes with few steps, which would look hung.
    """
    verbosity: Verbosity = ctx.obj
    if verbosity is Verbosity.VERBOSE:
        started = time.perf_counter()
        yield lambda step: click.echo(f"[{time.perf_counter() - started:7.1f} s] {step}", err=True)
    elif verbosity is Verbosity.NORMAL and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress as Display
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Display(*columns, console=Console(stderr=True), transient=True) as display:
            task = display.add_task("Starting")
            yield lambda step: display.reset(task, description=step)
    elif verbosity is Verbosity.NORMAL and also_piped:
        yield lambda step: click.echo(f"{step} ...", err=True)
    else:
        yield lambda step: None


@contextmanager
def progress_bar(ctx: click.Context, *, is_shown: bool = True) -> Iterator[Callable[[Stage], None]]:
    """A function that is told how far a long run is; shows a bar, the run's own words, and the time gone and left."""
    verbosity: Verbosity = ctx.obj
    if is_shown and verbosity is Verbosity.VERBOSE:
        yield _lines()
    elif is_shown and verbosity is Verbosity.NORMAL and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Display

        words = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        note = TextColumn("{task.fields[note]}", markup=False)
        columns = (*words, note, TimeElapsedColumn(), TimeRemainingColumn())
        with Display(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=_SPEED_SECONDS) as display:
            task = display.add_task("Starting", total=None, note="")
            phase = ""

            def show(stage: Stage) -> None:
                nonlocal phase
                if stage.phase != phase:
                    phase = stage.phase
                    display.reset(task, description=phase, total=stage.total, completed=stage.done)
                display.update(task, completed=stage.done, total=stage.total, note=stage.note)

            yield show
    else:
        yield lambda stage: None


def _lines() -> Callable[[Stage], None]:
    """A line on stderr when the phase changes or ends, and every few seconds between."""
    started = time.perf_counter()
    phase, shown = "", 0.0

    def show(stage: Stage) -> None:
        nonlocal phase, shown
        now = time.perf_counter()
        if stage.phase == phase and stage.done < stage.total and now - shown < _LINE_SECONDS:
            return
        phase, shown = stage.phase, now
        click.echo(f"[{now - started:7.1f} s] {stage.phase} {stage.done}/{stage.total}  {stage.note}".rstrip(), err=True)

    return show


def echo_json(value: Mapping[str, object]) -> None:
    """One JSON object on stdout, and nothing else there."""
    click.echo(json.dumps(value, indent=2))


def echo_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """A drawn table on a terminal; tab-separated lines, header first, everywhere else."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            click.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)


def as_utf8(argument: str, name: str) -> str:
    """An argument of the command line; bytes that the locale could not decode are read as UTF-8.

    Raises:
        RequestError: they are not UTF-8 either.
    """
    has_undecoded = any("\udc80" <= character <= "\udcff" for character in argument)  # PEP 383
    return from_utf8(os.fsencode(argument), name) if has_undecoded else argument


def from_utf8(content: bytes, name: str) -> str:
    """Text from outside; `name` says where it came from.

    Raises:
        RequestError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"Expected text in UTF-8 from {name}, found {error.reason} at byte {error.start}. Convert the text.") from error


def template_variables(text: str | None) -> dict[str, Any]:
    """The object that --chat-template-kwargs states; {} without one; raises as `json_flag`."""
    return json_flag(text or "{}", "--chat-template-kwargs")


def json_flag(text: str, name: str) -> dict[str, Any]:
    """The object that a flag states as JSON.

    Raises:
        RequestError: it is no JSON object.
    """
    try:
        found = strict_value(text.encode())  # bytes that are no UTF-8 came as surrogates, and are an error here
    except (ValueError, RecursionError) as error:
        raise RequestError(f"Expected {name} as a JSON object, found {text[:80]!r}: {error}. Correct it.") from error
    if not isinstance(found, dict):
        raise RequestError(f"Expected {name} as a JSON object, found {text[:80]!r}. Correct it.")
    return found


def as_bytes(count: int) -> str:
    """1536 -> '1.5 KB' in steps of 1000."""
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
