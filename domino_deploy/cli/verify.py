"""`domino-deploy verify`: a bundle's graphs against PyTorch."""

from __future__ import annotations

from pathlib import Path

import click

from domino_deploy.cli.console import echo_json, echo_table, progress
from domino_deploy.cli.extras import needs


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", is_flag=True, help="The report as one JSON object.")
@click.pass_context
def verify(ctx: click.Context, *, bundle: Path, json: bool) -> None:
    """Compare a bundle's graphs with PyTorch.

    The same inputs go through the PyTorch model and through ONNX Runtime; one line per output. Exit code 1 when an
    output lies outside its bound.
    """
    with needs("export"):
        from domino_deploy.exporters.verify import verify_bundle

    with progress(ctx) as step:
        report = verify_bundle(bundle, progress=step)
    if json:
        echo_json(report.to_dict())
    else:
        columns = ("graph", "output", "case", "largest error", "mean error", "bound", "")
        rows = [
            (
                line.graph,
                line.name,
                line.case,
                f"{line.max_abs_error:.2e}",
                f"{line.mean_abs_error:.2e}",
                f"{line.bound:.2e}",
                "ok" if line.passed else "FAILED",
            )
            for line in report.lines
        ]
        echo_table(columns, rows, title=f"{bundle}: PyTorch and ONNX Runtime")
        failed = sum(not line.passed for line in report.lines)
        click.echo(
            f"passed: {len(rows)} of {len(rows)} outputs within bounds"
            if report.passed
            else f"FAILED: {failed} of {len(rows)} outputs out of bounds"
        )
    ctx.exit(0 if report.passed else 1)
