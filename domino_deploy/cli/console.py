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

import click

from domino_deploy.errors import RequestError

Progress = Callable[[str], None]


class Verbosity(Enum):
    """QUIET: no progress.  NORMAL: progress on a terminal.  VERBOSE: a line per step, wherever stderr goes."""

    QUIET = auto()
    NORMAL = auto()
    VERBOSE = auto()


@contextmanager
def progress(ctx: click.Context) -> Iterator[Progress]:
    """A function that is told each step as it begins; shows the running step and its seconds."""
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
    else:
        yield lambda step: None


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


def as_bytes(count: int) -> str:
    """1536 -> '1.5 KB' in steps of 1000."""
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
