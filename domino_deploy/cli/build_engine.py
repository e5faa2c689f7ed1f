"""`domino-deploy build-engine`: bundle -> TensorRT engines."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.cli.command import Command
from domino_deploy.cli.console import as_bytes, progress
from domino_deploy.cli.extras import needs
from domino_deploy.cli.ranges import AT_LEAST_1
from domino_deploy.engines import EngineSet, Flavour
from domino_deploy.precision import Dtype
from domino_deploy.training.prompt_file import read_conversations, tokenise

if TYPE_CHECKING:
    from domino_deploy.exporters.fp8 import CalibrationText

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class ByteSize(click.ParamType[int]):
    """A number of bytes, or of KiB, MiB or GiB."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+) ?(|KiB|MiB|GiB)", value)
        if found is None:
            self.fail(f"expected bytes such as 4GiB or 512MiB, found {value!r}.", param, ctx)
        return int(found[1]) * _UNITS[found[2]]


@click.command("build-engine", cls=Command)
@click.argument("path", metavar="BUNDLE", type=click.Path(path_type=Path))
@click.option("--fp16", is_flag=True, help="Compute in float16; a bundle of another type is converted.  [default: the bundle's own type]")
@click.option("--bf16", is_flag=True, help="Compute in bfloat16.")
@click.option("--fp32", is_flag=True, help="Compute in float32.")
@click.option("--fp8", is_flag=True, help="Multiply the layers' matrices in float8, calibrated on text of our own.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Conversations to calibrate --fp8 on, as regenerate reads them.  [default: text of our own]",
)
@click.option("--backend", type=click.Choice([str(flavour) for flavour in Flavour]), help="Product.  [default: the one installed]")
@click.option(
    "--compute-capability",
    multiple=True,
    metavar="X.Y",
    help="GPUs to build for, such as 8.9; repeatable.  [default: this GPU for tensorrt, all supported ones for tensorrt-rtx]",
)
@click.option("--max-batch-size", type=AT_LEAST_1, default=1, help="Sequences at once.")
@click.option("--max-model-len", type=click.IntRange(min=128), help="Tokens of the longest sequence.  [default: the models', at most 4096]")
@click.option("--num-speculative-tokens", type=AT_LEAST_1, help="Tokens drafted per cycle.  [default: the bundle's]")
@click.option("--prefill-rows", type=click.IntRange(min=128), default=256, help="Prompt tokens per pass.")
@click.option("--workspace", type=ByteSize(), default="4GiB", help="Memory that a layer may use.")
@click.option("--opt-level", type=click.IntRange(0, 5), default=3, help="0: quick to build; 5: quick to run.")
@click.option(
    "--plugin", default="auto", metavar="FORM", help="What computes the logit correction: auto, none, aot, v3, or a compiled library."
)
@click.option("--strip-weights", is_flag=True, help="Leave the weights out; engines take them from the bundle when they are opened.")
@click.option("--timing-cache", type=click.Path(path_type=Path), metavar="FILE", help="Of tensorrt.  [default: in the user's cache folder]")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Engine folder to make.  [default: below BUNDLE/engines]"
)
@click.option("--force", is_flag=True, help="Replace DIR if it exists.")
@click.option("--dry-run", is_flag=True, help="Say what would be built and what it would take; write nothing.")
@click.pass_context
def build_engine(
    ctx: click.Context,
    *,
    path: Path,
    fp16: bool,
    bf16: bool,
    fp32: bool,
    fp8: bool,
    calibration: Path | None,
    backend: str | None,
    compute_capability: tuple[str, ...],
    max_batch_size: int,
    max_model_len: int | None,
    num_speculative_tokens: int | None,
    prefill_rows: int,
    workspace: int,
    opt_level: int,
    plugin: str,
    strip_weights: bool,
    timing_cache: Path | None,
    output: Path | None,
    force: bool,
    dry_run: bool,
) -> None:
    """Build TensorRT engines from a bundle.

    Engines for target, backbone and head, for one product and one kind of GPU, appear below BUNDLE/engines once all of them are
    complete.  tensorrt-rtx builds them on any machine, tensorrt on one with the GPU that they are for.
    """
    with needs("tensorrt-rtx"):  # of the two, the one that builds without a GPU; both bring what exports need
        from domino_deploy.exporters.engine_from_onnx import build_engines
        from domino_deploy.exporters.engine_options import EngineOptions, engine_settings
        from domino_deploy.exporters.engine_plan import plan_engines

    chosen = [dtype for dtype, is_chosen in ((Dtype.FLOAT16, fp16), (Dtype.BFLOAT16, bf16), (Dtype.FLOAT32, fp32)) if is_chosen]
    if len(chosen) + fp8 > 1:
        raise click.UsageError("Expected at most one of --fp16, --bf16, --fp32 and --fp8, found several. Keep one.")
    # Engines are known by the hashes of what they were built from.
    bundle = open_bundle(path, check_hashes=not dry_run)
    options = EngineOptions(
        flavour=None if backend is None else Flavour(backend),
        dtype=chosen[0] if chosen else None,
        is_float8=fp8,
        calibration_text=None if calibration is None else _calibration_text(bundle, calibration),
        compute_capabilities=compute_capability,
        max_batch_size=max_batch_size,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        prefill_rows=prefill_rows,
        workspace=workspace,
        opt_level=opt_level,
        plugin=plugin,
        is_stripped=strip_weights,
        timing_cache=timing_cache,
    )
    plan = plan_engines(bundle, engine_settings(bundle, options, output))
    if dry_run:
        click.echo("\n".join(plan.lines()))
        ctx.exit(1 if any(plan.shortages()) else 0)
    for warning in plan.warnings():
        click.echo(f"warning: {warning}", err=True)
    with progress(ctx) as step:
        engines = build_engines(bundle, options, output, overwrite=force, progress=step)
    click.echo(_summary(engines))


def _calibration_text(bundle: Bundle, file: Path) -> CalibrationText:
    from domino_deploy.exporters.fp8 import CalibrationText
    from domino_deploy.exporters.fp8_calibration import MOST_TOKENS
    from domino_deploy.runtime.text import bundle_tokenizer

    # Of each prompt at least one token is used, of all of them MOST_TOKENS.
    found = tokenise(read_conversations(file)[:MOST_TOKENS], bundle_tokenizer(bundle), max_prompt_tokens=sys.maxsize)
    return CalibrationText(source=file.name, prompts=[prompt.ids for prompt in found.prompts])


def _summary(engines: EngineSet) -> str:
    manifest = engines.manifest
    size = sum(graph.bytes for graph in manifest.graphs.values())
    plugin = manifest.plugin.form if manifest.plugin.library is None else manifest.plugin.library
    capabilities = ", ".join(manifest.compute_capabilities) or "all supported"
    return (
        f"{engines.path}: {manifest.flavour} {manifest.flavour_version}, compute capability {capabilities}, {manifest.weights}, "
        f"plugin {plugin}, {as_bytes(size)}, built in {manifest.build_seconds:.0f} s"
    )
