"""`domino-deploy export`: checkpoints -> bundle."""

from __future__ import annotations

from pathlib import Path

import click

from domino_deploy.bundle import Bundle
from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.cli.command import Command
from domino_deploy.cli.console import as_bytes, json_flag, progress
from domino_deploy.cli.extras import needs
from domino_deploy.cli.ranges import AT_LEAST_0, AT_LEAST_1
from domino_deploy.precision import BLOCK_SIZES, Dtype, Precision

_DTYPES = [str(dtype) for dtype in Dtype]


@click.command(cls=Command, elsewhere={"--model": "Name the target by --target, and the drafter by --ckpt."})
@click.option("--ckpt", "--draft", required=True, metavar="DRAFTER", help="Drafter checkpoint: a folder or a hub id.")
@click.option("--target", required=True, metavar="TARGET", help="Target checkpoint: a folder or a hub id.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Bundle folder to make.")
@click.option("--revision", help="Hub revision of the drafter.")
@click.option("--target-revision", help="Hub revision of the target.")
@click.option(
    "--num-speculative-tokens",
    type=AT_LEAST_1,
    help="Tokens to draft per cycle unless a request says otherwise.  [default: all that the drafter proposes]",
)
@click.option(
    "--dtype", type=click.Choice(_DTYPES), default="float32", help="How weights are stored and graphs compute; int8 and int4: weights only."
)
@click.option("--drafter-dtype", type=click.Choice(_DTYPES), help="The drafter's, if it differs.")
@click.option("--lm-head-dtype", type=click.Choice(_DTYPES), help="The LM head's, if it differs.  [default: int8 for --dtype int4]")
@click.option("--block-size", type=click.Choice(BLOCK_SIZES), default=32, help="Weights that share a scale, for int8 and int4.")
@click.option("--asymmetric", is_flag=True, help="Zero points for int8 and int4: more exact, somewhat larger.")
@click.option(
    "--candidate-pool",
    type=AT_LEAST_0,
    default=0,
    help="Tokens per position that the correction looks at, those with the highest base logits; 0 for the whole vocabulary.",
)
@click.option("--certified-pool", is_flag=True, help="Look at the whole vocabulary wherever the pool's choice is not certain.")
@click.option(
    "--draft-vocab",
    type=AT_LEAST_1,
    metavar="SIZE",
    help="Tokens that the drafter may propose: the most frequent ones of --draft-vocab-from.",
)
@click.option(
    "--draft-vocab-from",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text, JSON lines or a work folder of regenerate whose tokens are counted; or, without SIZE, a JSON list of token ids.",
)
@click.option(
    "--drafter-chat-template-kwargs",
    metavar="JSON",
    help="Variables of the chat template that the drafter was trained with, which prompts get by default: "
    "'{\"enable_thinking\": false}'. [default: what its config.json says]",
)
@click.option(
    "--weights",
    type=click.Choice(["link", "copy"]),
    default="link",
    help="How weight files that stay as they are come into DIR: as hard links, which take no room, or copied.",
)
@click.option("--skip-verification", is_flag=True, help="Leave the graphs uncompared; the manifest records it.")
@click.option(
    "--num-layers",
    type=AT_LEAST_1,
    help="Compare the target's first layers only, for models that do not fit into memory twice.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be written and what it would cost; write nothing.")
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
    dtype: str,
    drafter_dtype: str | None,
    lm_head_dtype: str | None,
    block_size: int,
    asymmetric: bool,
    candidate_pool: int,
    certified_pool: bool,
    draft_vocab: int | None,
    draft_vocab_from: Path | None,
    drafter_chat_template_kwargs: str | None,
    weights: str,
    skip_verification: bool,
    num_layers: int | None,
    dry_run: bool,
    force: bool,
) -> None:
    """Turn a drafter and its target into an ONNX bundle.

    The pair is checked first; the exported graphs are compared with PyTorch before the bundle appears under DIR, so a
    failure leaves nothing behind.
    """
    with needs("export"):
        from domino_deploy.exporters.draft_vocab import draft_vocab_of
        from domino_deploy.exporters.export import export_bundle
        from domino_deploy.exporters.options import ExportOptions, check_request
        from domino_deploy.exporters.placement import Placement
        from domino_deploy.exporters.plan import plan_export

    precision = Precision.of(
        Dtype(dtype),
        drafter=None if drafter_dtype is None else Dtype(drafter_dtype),
        lm_head=None if lm_head_dtype is None else Dtype(lm_head_dtype),
        block_size=block_size,
        symmetric=not asymmetric,
    )
    options = ExportOptions(
        precision=precision,
        placement=Placement(weights),
        num_speculative_tokens=num_speculative_tokens,
        candidate_pool=candidate_pool,
        certified_pool=certified_pool,
        draft_vocab=draft_vocab_of(target, target_revision, draft_vocab, draft_vocab_from),
        trained_with=None
        if drafter_chat_template_kwargs is None
        else json_flag(drafter_chat_template_kwargs, "--drafter-chat-template-kwargs"),
    )
    if dry_run:
        drafter, whole = open_drafter(ckpt, revision=revision), open_target(target, revision=target_revision)
        check_request(options, whole.config, drafter.config, verify=not skip_verification, num_layers=num_layers)
        planned = plan_export(
            drafter,
            whole,
            output,
            options.precision,
            options.placement,
            draft_vocab_size=None if options.draft_vocab is None else len(options.draft_vocab),
            verify=not skip_verification,
            verified_layers=num_layers,
        )
        click.echo("\n".join(planned.lines()))
        ctx.exit(0 if planned.fits else 1)
    with progress(ctx, also_piped=True) as step:
        bundle = export_bundle(
            ckpt,
            target,
            output,
            options,
            drafter_revision=revision,
            target_revision=target_revision,
            verify=not skip_verification,
            num_layers=num_layers,
            overwrite=force,
            progress=step,
        )
    verdict = "not verified (--skip-verification)" if skip_verification else "verified against PyTorch"
    click.echo(f"{bundle.path}: {bundle.precision.name}, {_sizes(bundle)}, {verdict}")


def _sizes(bundle: Bundle) -> str:
    """Whole size, and how much of it is linked and took no room."""
    sizes = {name: entry.bytes for name, entry in bundle.manifest.files.items()}
    linked = sum(size for name, size in sizes.items() if (bundle.path / name).stat().st_nlink > 1)
    return as_bytes(sum(sizes.values())) + (f" ({as_bytes(linked)} of it linked to the checkpoints' files)" if linked else "")
