"""`domino-deploy export`: checkpoints -> bundle."""

from __future__ import annotations

from pathlib import Path

import click

from domino_deploy.cli.console import as_bytes, progress
from domino_deploy.cli.extras import needs


@click.command()
@click.option("--ckpt", "--draft", required=True, metavar="DRAFTER", help="Drafter checkpoint: a folder or a hub id.")
@click.option("--target", required=True, metavar="TARGET", help="Target checkpoint: a folder or a hub id.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Bundle folder to make.")
@click.option("--revision", help="Hub revision of the drafter.")
@click.option("--target-revision", help="Hub revision of the target.")
@click.option(
    "--num-speculative-tokens",
    type=click.IntRange(min=1),
    help="Tokens to draft per cycle unless a request says otherwise.  [default: all that the drafter proposes]",
)
@click.option("--skip-verification", is_flag=True, help="Leave the graphs uncompared; the manifest records it.")
@click.option("--force", is_flag=True, help="Replace DIR if it exists.")
@click.pass_context
def export(
    ctx: click.Context,
    *,
    ckpt: str,
    target: str,
    output: Path,
    revision: str | None,
    target_revision: str | None,
    num_speculative_tokens: int | None,
    skip_verification: bool,
    force: bool,
) -> None:
    """Turn a drafter and its target into an ONNX bundle.

    The pair is checked first; the exported graphs are compared with PyTorch before the bundle appears under DIR, so a
    failure leaves nothing behind.
    """
    with needs("export"):
        from domino_deploy.exporters.export import export_bundle

    with progress(ctx) as step:
        bundle = export_bundle(
            ckpt,
            target,
            output,
            drafter_revision=revision,
            target_revision=target_revision,
            num_speculative_tokens=num_speculative_tokens,
            verify=not skip_verification,
            overwrite=force,
            progress=step,
        )
    size = sum(file.bytes for file in bundle.manifest.files.values())
    verdict = "not verified (--skip-verification)" if skip_verification else "verified against PyTorch"
    click.echo(f"{bundle.path}: {as_bytes(size)}, {verdict}")
