"""`domino-deploy inspect`: what a bundle, a checkpoint or an ONNX file holds, and the memory that serving it takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from domino_deploy.cli.command import Command
from domino_deploy.cli.console import as_bytes, echo_json, echo_table
from domino_deploy.cli.inspect_facts import Facts, describe
from domino_deploy.cli.ranges import FiniteRange
from domino_deploy.precision import Dtype

_TABLES = ("graphs", "tensors", "files", "parts", "hard_links", "weights", "memory")


@click.command(cls=Command)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--target", metavar="TARGET", help="For a drafter checkpoint: its target; tells whether they belong together.")
@click.option("--draft", metavar="DRAFTER", help="For a target checkpoint: a drafter; likewise.")
@click.option("--batch", type=click.IntRange(1, 10**6), metavar="N", help="Memory plan: sequences at once.  [default: 1]")
@click.option(
    "--context",
    type=click.IntRange(1, 10**9),
    metavar="N",
    help="Memory plan: tokens of each, prompt and answer.  [default: what a session allows]",
)
@click.option(
    "--dtype",
    type=click.Choice([str(dtype) for dtype in Dtype]),
    help="Memory plan: what a checkpoint would be exported with.  [default: float32]",
)
@click.option(
    "--memory",
    type=FiniteRange(min=0, min_open=True, max=1e9),
    metavar="GB",
    help="Memory plan: also the largest batch and the longest context that fit.",
)
@click.option("--json", is_flag=True, help="Everything as one JSON object.")
def inspect(*, path: Path, json: bool, **plan: Any) -> None:
    """Show what a bundle, a checkpoint or an ONNX file holds.

    Graph inputs and outputs, operator counts, sizes, pairing facts and verification figures; with any of the other options, a
    memory plan too. Nothing is run, no weight is read.
    """
    facts = describe(path)
    if any(value is not None for value in plan.values()):
        if facts["kind"] == "onnx":
            raise click.UsageError("Expected a bundle or a checkpoint for a memory plan, found an ONNX file. Name the folder.")
        from domino_deploy.cli.inspect_memory import memory_facts

        facts |= memory_facts(path, **plan)
    if json:
        echo_json(facts)
    else:
        _show(facts)


def _show(facts: Facts) -> None:
    for name, value in facts.items():
        if name == "verification":
            click.echo(f"verification: {_verdict(value)}")
        elif name not in _TABLES:
            click.echo(f"{name}: {_line(value)}")
    for name, graph in facts.get("graphs", {}).items():
        counts = graph["operators"]
        operators = "operators not counted, the package onnx is not installed"
        if counts is not None:
            operators = f"{sum(counts.values())} nodes: {', '.join(f'{operator} {count}' for operator, count in counts.items())}"
        click.echo(f"\n{name}: {operators}")
        rows = [("input", *row) for row in _collapsed(graph["inputs"])] + [("output", *row) for row in _collapsed(graph["outputs"])]
        echo_table(("", "name", "dtype", "shape"), rows)
    if "files" in facts:
        click.echo()
        links = facts["hard_links"]
        files = [(name, as_bytes(file["bytes"]), "hard link" if name in links else "") for name, file in facts["files"].items()]
        echo_table(("file", "size", ""), files)
    if "parts" in facts:
        click.echo()
        echo_table(("part", "size"), [(part, as_bytes(size)) for part, size in facts["parts"].items()])
    if "memory" in facts:
        from domino_deploy.cli.inspect_memory import show_memory

        show_memory(facts)


def _verdict(report: Facts | None) -> str:
    if report is None:
        return "none (exported with --skip-verification)"
    lines = report.get("lines")
    if not isinstance(lines, list) or not all(isinstance(line, Mapping) and type(line.get("passed")) is bool for line in lines):
        return "recorded in another form than this version's"
    failed = sum(not line["passed"] for line in lines)
    return f"{len(lines)} outputs compared with PyTorch, {failed} out of bounds"


def _line(value: Any) -> str:
    """Nested values on one line; what is not set is left out."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} ({_line(item)})" if isinstance(item, Mapping) else f"{name} {_line(item)}"
            for name, item in value.items()
            if item not in (None, (), [])
        )
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _collapsed(tensors: Iterable[Facts]) -> list[tuple[str, str, str]]:
    """One row per tensor; the caches of all layers share one."""
    counts: Counter[tuple[str, str, str]] = Counter(
        (re.sub(r"\.\d+$", ".*", tensor["name"]), tensor["dtype"], " x ".join(map(str, tensor["shape"]))) for tensor in tensors
    )
    return [(f"{name} ({count} layers)" if count > 1 else name, dtype, shape) for (name, dtype, shape), count in counts.items()]
