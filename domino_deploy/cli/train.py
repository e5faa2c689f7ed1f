"""`domino-deploy train`: prompts -> responses of the target -> a drafter in the public layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from domino_deploy.cli.answer_flags import answer_flags
from domino_deploy.cli.command import Command
from domino_deploy.cli.console import echo_json, progress_bar, template_variables
from domino_deploy.cli.extras import needs
from domino_deploy.cli.ranges import AT_LEAST_1
from domino_deploy.errors import RequestError, TrainingError
from domino_deploy.training.answer_options import Answering
from domino_deploy.training.prompt_file import read_conversations
from domino_deploy.training.recipe import Recipe, read_recipe, recipe_from, shipped_recipes

# Every field of the recipe is an option; what it means is said once, here.
_RECIPE_OPTIONS = {
    "kind": "domino, or dflash for a backbone without a head.",
    "num_layers": "Draft layers, copied from the target's last ones.",
    "block_size": "Positions of a block, the anchor's included.",
    "num_taps": "Target layers whose outputs feed the drafter.",
    "emb_dim": "Rank of the logit correction.",
    "gru_hidden_dim": "Width of the prefix GRU.",
    "pure_draft_prefix_len": "Proposals at the start of a block that stay uncorrected.",
    "shift_label": "Row p of a block predicts offset p + 1 (else p).",
    "mask_token_id": "Token id that stands for MASK; one the target's text never holds.",
    "steps": "Optimiser steps; instead of --epochs.",
    "epochs": "Passes over the samples; instead of --steps.",
    "sequences": "Samples a step, over all processes.",
    "micro_batch": "Samples a process takes at once; gradients add up over the rest. 0: all of its share.",
    "anchors": "Random blocks in each sample.",
    "learning_rate": "Peak learning rate.",
    "weight_decay": "AdamW's.",
    "beta1": "AdamW's.",
    "beta2": "AdamW's.",
    "warmup_ratio": "Share of the steps over which the learning rate rises; then it falls as a cosine to 0.",
    "clip_norm": "Largest norm of the gradient.",
    "causal_encoding": "What the GRU reads in training: true tokens, or the drafter's own.",
    "gamma": "Position decay: proposal j weighs exp(-j / gamma).",
    "lambda_start": "Weight of the base logits' loss at the first step; it falls linearly to 0.",
    "lambda_decay_ratio": "Share of the steps over which it falls.",
    "accept_until_fail": "Give no weight to proposals behind the first wrong one.",
    "soft_labels": "Share of the target's own distribution in the labels.",
    "frequent_tokens": "Tokens that are always in the softmax; 0: the whole vocabulary.",
    "random_tokens": "Random tokens added to them each step.",
    "features": "Keep the target's features on disk, or compute them in every step.",
    "held_out": "Samples kept for measuring tau.",
    "evaluate_every": "Steps between measurements of the held-out tau.",
    "checkpoint_every": "Steps between states that an interrupted run goes on from.",
    "max_length": "Longer samples are left out.",
    "dtype": "float32, or bfloat16 matrix products with float32 masters.",
    "save_dtype": "Of the drafter's file.",
    "seed": "Seed of everything random.",
}
_ANSWERING = Answering()


def _recipe_options(command: click.Command) -> click.Command:
    """An option for each field of `Recipe`; without a value, the recipe's own holds."""
    hints = get_type_hints(Recipe)
    for field in dataclasses.fields(Recipe):
        kinds = [kind for kind in get_args(hints[field.name]) or (hints[field.name],) if kind is not type(None)]
        name = field.name.replace("_", "-")
        shown = "none" if field.default is None else str(field.default)
        text = f"{_RECIPE_OPTIONS[field.name]}  [default: the recipe's, else {shown}]"
        if kinds == [bool]:
            command.params.append(click.Option([f"--{name}/--no-{name}"], default=None, show_default=False, help=text))
        else:
            kind = kinds[0] if isinstance(kinds[0], type) else click.Choice(kinds)
            command.params.append(click.Option([f"--{name}"], type=kind, default=None, show_default=False, help=text))
    return command


@click.command(cls=Command)
@answer_flags
@click.option(
    "--prompts",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='JSONL with "prompt", "turns" or "messages"; may be given several times. Without any, WORK holds the responses already.',
)
@click.option("--recipe", metavar="NAME|FILE", help=f"A shipped recipe ({', '.join(shipped_recipes())}) or a recipe.json.")
@click.option("--start", metavar="DRAFTER", help="Trained drafter to go on from.  [default: the target's last layers]")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Drafter folder to make.")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    metavar="WORK",
    help="Folder for responses, features and the run's state; an interrupted run goes on from there.",
)
@click.option("--restart", is_flag=True, help="Forget the state of an interrupted run; responses and features are kept.")
@click.option("--force", is_flag=True, help="Replace DIR if it exists.")
@click.option("--dry-run", is_flag=True, help="Say what the run would take, and do nothing; only the target's config.json is read.")
@click.option("--samples", type=click.IntRange(min=1, max=10**12), metavar="N", help="For --dry-run: number of regenerated samples.")
@click.option(
    "--mean-tokens", type=click.IntRange(min=1, max=10**12), metavar="N", help="For --dry-run: their mean length, prompt included."
)
@click.option("--processes", type=AT_LEAST_1, metavar="N", help="For --dry-run: number of GPUs.  [default: 1]")
@click.option("--json", is_flag=True, help="The result as one JSON object.")
@click.pass_context
def _train(
    ctx: click.Context,
    *,
    target: str,
    target_revision: str | None,
    prompts: tuple[Path, ...],
    recipe: str | None,
    start: str | None,
    output: Path | None,
    work: Path | None,
    max_prompt_tokens: int,
    max_new_tokens: int,
    batch_size: int,
    chat_template_kwargs: str | None,
    device: str,
    restart: bool,
    force: bool,
    dry_run: bool,
    samples: int | None,
    mean_tokens: int | None,
    processes: int | None,
    json: bool,
    **recipe_values: Any,
) -> None:
    """Train a drafter for a target.

    The target answers the prompts (greedily; `regenerate` can do it otherwise, and beforehand), and a drafter is trained on
    what it said, with a teacher-forced GRU and the base-anchored curriculum. DIR holds the drafter in the public checkpoint
    layout, its recipe and its metrics. For several GPUs: torchrun --nproc-per-node 8 -m domino_deploy.cli train ...
    """
    plan_only = {"--samples": samples, "--mean-tokens": mean_tokens, "--processes": processes}
    if dry_run:
        missing = [name for name in ("--samples", "--mean-tokens") if plan_only[name] is None]
        if missing:
            raise click.UsageError(f"Expected {' and '.join(missing)} with --dry-run, found none. Say how much data there will be.")
    else:
        given = [name for name, value in plan_only.items() if value is not None]
        if given:
            raise click.UsageError(f"Expected {', '.join(given)} with --dry-run only, found it without. Drop it, or add --dry-run.")
        missing = [name for name, value in (("--output", output), ("--work", work)) if value is None]
        if missing:
            raise click.UsageError(f"Expected {' and '.join(missing)}, found none. Name the drafter's folder and the work folder.")
    chosen = _recipe(recipe, recipe_values)
    if dry_run:
        assert samples is not None
        assert mean_tokens is not None
        _plan(target, target_revision, chosen, samples, mean_tokens, processes or 1, as_json=json)
        return
    assert output is not None
    assert work is not None
    with needs("train"):
        import matplotlib.figure  # noqa: F401  # drawn at the very end: its absence must be told before the hours of training

        from domino_deploy.training.distributed import process_of_torchrun
        from domino_deploy.training.pipeline import train_from_prompts

    answering = dataclasses.replace(
        _ANSWERING,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        template_variables=template_variables(chat_template_kwargs),
    )
    with progress_bar(ctx) as on_progress:
        tau = train_from_prompts(
            target,
            [one for path in prompts for one in read_conversations(path)],
            output,
            work=work,
            recipe=chosen,
            answering=answering,
            device=device,
            target_revision=target_revision,
            start=start,
            overwrite=force,
            restart=restart,
            on_progress=on_progress,
        )
    if process_of_torchrun()[0] > 0:  # of several processes one speaks
        return
    if json:
        found: dict[str, object] = {"drafter": str(output)}
        echo_json(found if tau is None else found | {"held_out_tau": tau.final_tau, "held_out_base_tau": tau.base_tau})
        return
    held_out = "" if tau is None else f", held-out tau {tau.final_tau:.2f}"
    if tau is not None and chosen.kind == "domino":
        held_out += f" (base logits alone {tau.base_tau:.2f})"
    click.echo(f"{output}: drafter written{held_out}")


def _recipe(name: str | None, values: dict[str, Any]) -> Recipe:
    """The named recipe with the values of the command line put in; steps and epochs replace each other."""
    given = {field: value for field, value in values.items() if value is not None}
    if len({"steps", "epochs"} & set(given)) == 1:
        given |= {"epochs": None} if "steps" in given else {"steps": None}
    try:
        return recipe_from(given, "command line") if name is None else read_recipe(name, **given)
    except TrainingError as error:  # here it is the flags that are wrong
        raise RequestError(str(error)) from error


def _plan(target: str, revision: str | None, recipe: Recipe, samples: int, mean_tokens: int, processes: int, *, as_json: bool) -> None:
    with needs("train"):
        from domino_deploy.training.plan import plan, target_config_of

    try:
        found = plan(target_config_of(target, revision), recipe, samples=samples, processes=processes, mean_tokens=mean_tokens)
    except TrainingError as error:
        raise RequestError(str(error)) from error
    if as_json:
        echo_json(found.to_dict())
    else:
        click.echo("\n".join(found.lines()))


train = _recipe_options(_train)
train.name = "train"
