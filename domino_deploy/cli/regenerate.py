"""`domino-deploy regenerate`: prompts -> the target's own responses, with the features that training reads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from domino_deploy.cli.answer_flags import answer_flags
from domino_deploy.cli.command import Command
from domino_deploy.cli.console import Verbosity, as_bytes, echo_json, progress_bar, template_variables
from domino_deploy.cli.extras import needs
from domino_deploy.cli.ranges import AT_LEAST_0, AT_LEAST_1, MIN_P, SEED, TEMPERATURE, TOP_P
from domino_deploy.errors import RequestError
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.training.answer_options import Answering
from domino_deploy.training.prompt_file import PACKAGED, packaged, read_conversations

if TYPE_CHECKING:
    from domino_deploy.training.answering import Answers, Plan

_DEFAULT = Answering()
_SAMPLING = _DEFAULT.sampling
_PART = re.compile(r"(\d{1,6})/(\d{1,6})", re.ASCII)


@click.command(cls=Command)
@answer_flags
@click.option(
    "--prompts",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='JSONL with "prompt", "turns" or "messages", and "kind" if you like; may be given several times.',
)
@click.option(
    "--kind",
    multiple=True,
    metavar="NAME[:COUNT]",
    help=f"Prompts of our own: {', '.join(PACKAGED)}; may be given several times.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="WORK", help="Folder of the samples.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default=_DEFAULT.dtype, help="Of the target's weights and products.")
@click.option("--temperature", type=TEMPERATURE, default=_SAMPLING.temperature, help="0 is greedy.")
@click.option("--top-k", type=AT_LEAST_0, default=_SAMPLING.top_k, help="Keep this many of the likeliest tokens; 0 keeps all.")
@click.option("--top-p", type=TOP_P, default=_SAMPLING.top_p, help="Keep the likeliest tokens that together reach this probability.")
@click.option("--min-p", type=MIN_P, default=_SAMPLING.min_p, help="Keep tokens at least this fraction as likely as the likeliest.")
@click.option("--seed", type=SEED, default=_SAMPLING.seed, help="Of the sampling.")
@click.option("--part", metavar="I/N", help="Answer every N-th prompt, I from 0 to N-1.  [default: all; under torchrun the rank's share]")
@click.option("--features/--no-features", default=True, help="Keep the features that training reads; without, training computes them.")
@click.option("--num-taps", type=AT_LEAST_1, default=_DEFAULT.num_taps, help="Target layers whose features are kept.")
@click.option("--soft-labels", is_flag=True, help="Keep the last layer's normed output too, for training on the target's distribution.")
@click.option("--json", is_flag=True, help="The result as one JSON object.")
@click.pass_context
def regenerate(
    ctx: click.Context,
    *,
    target: str,
    target_revision: str | None,
    prompts: tuple[Path, ...],
    kind: tuple[str, ...],
    output: Path,
    device: str,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    chat_template_kwargs: str | None,
    part: str | None,
    features: bool,
    num_taps: int,
    soft_labels: bool,
    json: bool,
    **numbers: Any,
) -> None:
    """Let the target answer training prompts.

    WORK takes the responses and the target's features, batch by batch: the same command again goes on where an
    interrupted one stopped, and answers new prompts only. Under torchrun every process answers its share.
    """
    if not prompts and not kind:
        raise click.UsageError("Expected --prompts or --kind, found neither. Name what the target is to answer.")
    if soft_labels and not features:
        raise click.UsageError("Expected at most one of --soft-labels and --no-features, found both. Drop one.")
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    with needs("train"):
        from domino_deploy.checkpoint import open_target
        from domino_deploy.training.answering import answer_prompts
        from domino_deploy.training.distributed import device_of

    own, parts, parts_here = _share(part)
    options = Answering(
        sampling=sampling,
        template_variables=template_variables(chat_template_kwargs),
        num_taps=num_taps if features else 0,
        soft_labels=soft_labels,
        part=own,
        parts=parts,
        parts_here=parts_here,
        **numbers,
    )
    conversations = [one for name in kind for one in packaged(name)] + [one for path in prompts for one in read_conversations(path)]
    where = device_of(device)
    checkpoint = open_target(target, revision=target_revision)
    # Bars of several processes would write over each other.
    with progress_bar(ctx, is_shown=own == 0 or parts_here == 1) as on_progress:
        found = answer_prompts(
            checkpoint,
            conversations,
            output,
            options,
            device=where,
            on_plan=lambda plan: _echo_plan(ctx, plan, options.max_prompt_tokens),
            on_progress=on_progress,
        )
    result = _result(output, own, parts, found)
    if json:
        echo_json(result)
    else:
        click.echo(
            f"{output}: {result['samples']} samples, {result['response_tokens']} response tokens, {as_bytes(found.store.size_bytes())}; "
            f"this run added {found.added.samples} samples, {found.added.response_tokens} tokens, {found.added.tokens_per_second:.0f} tok/s"
            + (f", {found.added.empty} of them empty" if found.added.empty else "")
        )


def _echo_plan(ctx: click.Context, plan: Plan, longest: int) -> None:
    if ctx.obj is Verbosity.QUIET:
        return
    left_out = f"left out: {plan.too_long} longer than {longest} tokens or the target's room, {plan.duplicates} that were there twice"
    room = f"features take at most {plan.feature_bytes:,} bytes" if plan.feature_bytes else "no features to add"
    click.echo(
        f"{plan.prompts} prompts, {plan.answered} answered already; {left_out}\n{room}, {plan.free_bytes:,} bytes are free on the disk",
        err=True,
    )


def _result(work: Path, part: int, parts: int, found: Answers) -> dict[str, object]:
    stored, plan, added = found.read(), found.plan, found.added
    return {
        "work": str(work),
        "part": part,
        "parts": parts,
        "samples": len(stored.samples),
        "response_tokens": sum(len(sample.response_ids) for sample in stored.samples),
        "bytes": found.store.size_bytes(),
        "tapped_layers": list(stored.tapped_layers),
        "added_samples": added.samples,
        "added_response_tokens": added.response_tokens,
        "added_empty": added.empty,
        "tokens_per_second": round(added.tokens_per_second, 1),
        "answered_before": plan.answered,
        "left_out_too_long": plan.too_long,
        "duplicates": plan.duplicates,
    }


def _share(part: str | None) -> tuple[int, int, int]:
    """This process's part, the number of parts, and how many of them write to this machine's disk."""
    from domino_deploy.training.distributed import process_of_torchrun

    rank, size = process_of_torchrun()
    if part is None:
        here = os.environ.get("LOCAL_WORLD_SIZE", "")
        return rank, size, min(size, int(here)) if here.isdecimal() and int(here) else size
    if size > 1:
        raise RequestError(f"Expected no --part under torchrun, which shares the prompts out itself, found {part!r}. Drop it.")
    found = _PART.fullmatch(part)
    if found is None or not int(found[1]) < int(found[2]):
        raise RequestError(f"Expected --part I/N with I from 0 to N-1, such as 0/4, found {part!r}. Correct it.")
    return int(found[1]), int(found[2]), 1
