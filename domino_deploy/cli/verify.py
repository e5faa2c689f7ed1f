"""`domino-deploy verify`: a bundle's graphs against PyTorch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from domino_deploy.cli.command import Command
from domino_deploy.cli.console import echo_json, echo_table, progress
from domino_deploy.cli.extras import needs
from domino_deploy.cli.ranges import AT_LEAST_1
from domino_deploy.errors import RequestError

if TYPE_CHECKING:
    from domino_deploy.exporters.verify_records import Generation, VerificationReport

_COLUMNS = ("graph", "output", "case", "largest error", "mean error", "of scale", "cosine", "tokens agree", "bound", "")


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--atol",
    multiple=True,
    metavar="[OUTPUT:]VALUE",
    help="Absolute error to allow: added to the bound. For all outputs or one; repeatable.",
)
@click.option(
    "--rtol",
    multiple=True,
    metavar="[OUTPUT:]VALUE",
    help="Error to allow as a part of the output's largest magnitude, in place of the precision's own. For all outputs or one; repeatable.",
)
@click.option(
    "--num-layers",
    type=AT_LEAST_1,
    help="Compare the target's first layers only, for targets that do not fit into memory twice.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File (.html) to write the report to, outside the bundle, whose own stays that of its export.",
)
@click.option("--json", is_flag=True, help="The report as one JSON object.")
@click.pass_context
def verify(
    ctx: click.Context,
    *,
    bundle: Path,
    atol: tuple[str, ...],
    rtol: tuple[str, ...],
    num_layers: int | None,
    report: Path | None,
    json: bool,
) -> None:
    """Compare a bundle's graphs with PyTorch.

    The same inputs go through the PyTorch model, in float32 on the weights that the bundle stores, and through ONNX Runtime; one line
    per output. Then both generate: in float32 every step must be the same, in narrower precisions a token may differ where the
    two candidates are a near tie. Exit code 1 when an output lies outside its bound.

    OUTPUT is one of logits, features, hidden, base_logits, updated_key_cache, updated_value_cache.
    """
    with needs("export"):
        from domino_deploy.exporters.verify import Tolerances, verify_bundle
        from domino_deploy.exporters.verify_report import write_report

    tolerances = Tolerances.parse(atol=atol, rtol=rtol)
    if report is not None:
        _check_place(report, bundle)
    with progress(ctx, also_piped=True) as step:
        found = verify_bundle(bundle, tolerances=tolerances, num_layers=num_layers, progress=step)
    if json:
        echo_json(found.to_dict())
    else:
        _show(found, title=f"{bundle}: PyTorch and ONNX Runtime, {found.precision}")
    if report is not None:  # last, so that the figures are there if it fails
        try:
            write_report(report, found, title=bundle.resolve().name)
        except OSError as error:
            raise RequestError(f"{report}: expected to write the report there, found: {error}. Choose another file.") from error
    ctx.exit(0 if found.passed else 1)


def _check_place(report: Path, bundle: Path) -> None:
    """Check, before minutes are spent, that a report can be at `report`, and that it takes the place of nothing else."""
    if report.suffix != ".html":
        raise RequestError(f"{report}: expected a file name that ends in .html, found another. Name the report so.")
    if report.resolve().is_relative_to(bundle.resolve()):
        raise RequestError(
            f"{report}: expected a file outside the bundle, whose files stay those of its export, found one in it. Name another."
        )
    if not os.path.isdir(report.parent):
        raise RequestError(f"{report}: expected a folder to write the report in, found no folder {report.parent}. Make it first.")


def _show(report: VerificationReport, *, title: str) -> None:
    rows = [
        (
            line.graph,
            line.name,
            line.case,
            f"{line.max_abs_error:.2e}",
            f"{line.mean_abs_error:.2e}",
            "" if line.max_rel_error is None else f"{line.max_rel_error:.1e}",
            "" if line.cosine is None else f"{line.cosine:.6f}",
            f"{line.compared - len(line.disagreements)} of {line.compared}" if line.compared else "",
            f"{line.bound:.2e}",
            "ok" if line.passed else "FAILED",
        )
        for line in report.lines
    ]
    echo_table(_COLUMNS, rows, title=title)
    for generation in report.generated:
        click.echo(_generation(generation))
    for note in report.notes:
        click.echo(f"note: {note}")
    for line in report.lines:
        if not line.passed:
            click.echo(line.problem())
    failed = sum(not line.passed for line in report.lines)
    click.echo(
        f"passed: {len(rows)} of {len(rows)} outputs within bounds"
        if report.passed
        else f"FAILED: {failed} of {len(rows)} outputs out of bounds"
    )


def _generation(generation: Generation) -> str:
    """One line: how many drafts each cycle accepted, on both sides, and the first token that differs."""
    found, expected = (" ".join(map(str, accepted)) for accepted in (generation.accepted, generation.expected_accepted))
    text = f"prompt {generation.prompt}: {generation.tokens} tokens, accepted per cycle {found}"
    if found != expected:
        text += f" (PyTorch: {expected})"
    if generation.difference is not None:
        one = generation.difference
        text += f"; token {one.found} for {one.expected} at {one.position}, logits {one.gap:.1e} apart, allowed {one.bound:.1e}"
    return text
