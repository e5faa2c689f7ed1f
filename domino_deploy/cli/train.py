"""`domino-deploy train`: prompts -> responses of the target -> a drafter in the public layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from domino_deploy.cli.console import progress
from domino_deploy.cli.extras import needs
from domino_deploy.errors import RequestError, TrainingError
from domino_deploy.training.recipe import Recipe

# Recipe fields that users change; each default is the recipe's own.
_RECIPE_OPTIONS = {
    "num_layers": "Draft layers, copied from the target's last ones.",
    "block_size": "Positions of a block, the anchor's included.",
    "emb_dim": "Rank of the logit correction.",
    "gru_hidden_dim": "Width of the prefix GRU.",
    "mask_token_id": "Token id that stands for MASK; one the target's text never holds.",
    "steps": "Optimiser steps.",
    "sequences": "Samples a step.",
    "anchors": "Random blocks in each sample.",
    "learning_rate": "Peak learning rate.",
    "lambda_start": "Weight of the base logits' loss at the first step; it falls linearly to 0.",
    "gamma": "Position decay: proposal j weighs exp(-j / gamma).",
    "held_out": "Samples kept for measuring tau.",
    "evaluate_every": "Steps between measurements of the held-out tau.",
    "dtype": "float32, or bfloat16 matrix products with float32 masters.",
    "seed": "Seed of everything random.",
}


def _recipe_options(command: click.Command) -> click.Command:
    defaults = {field.name: field.default for field in dataclasses.fields(Recipe)}
    for name, text in reversed(_RECIPE_OPTIONS.items()):
        kind = click.Choice(["float32", "bfloat16"]) if name == "dtype" else type(defaults[name])
        command.params.append(click.Option([f"--{name.replace('_', '-')}"], type=kind, default=defaults[name], help=text))
    return command


@click.command()
@click.option("--target", required=True, metavar="TARGET", help="Target checkpoint: a folder or a hub id.")
@click.option("--target-revision", help="Hub revision of the target.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), required=True, metavar="FILE", help='JSONL with "prompt", "turns" or "messages".'
)
@click.option("--start", metavar="DRAFTER", help="Trained drafter to go on from.  [default: the target's last layers]")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Drafter folder to make.")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder for responses and features; an interrupted run resumes here.",
)
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), default=200, help="Longer prompts are left out.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=176, help="Longest response.")
@click.option("--batch-size", type=click.IntRange(min=1), default=128, help="Responses decoded together.")
@click.option("--force", is_flag=True, help="Replace DIR if it exists.")
@click.pass_context
def _train(
    ctx: click.Context,
    *,
    target: str,
    target_revision: str | None,
    start: str | None,
    prompts: Path,
    output: Path,
    work: Path,
    max_prompt_tokens: int,
    max_new_tokens: int,
    batch_size: int,
    force: bool,
    **recipe_values: Any,
) -> None:
    """Train a Domino drafter for a target.

    The target answers the prompts (greedily), its features are computed once, and a drafter is trained on them with a
    teacher-forced GRU and the base-anchored curriculum. DIR holds the drafter in the public checkpoint layout, its
    recipe and its metrics.
    """
    try:
        recipe = Recipe(**recipe_values)
    except TrainingError as error:  # here it is the flags that are wrong
        raise RequestError(str(error)) from error
    with needs("train"):
        from domino_deploy.training.pipeline import train_from_prompts

    with progress(ctx) as step:
        tau = train_from_prompts(
            target,
            prompts,
            output,
            work=work,
            recipe=recipe,
            target_revision=target_revision,
            start=start,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            overwrite=force,
            progress=step,
        )
    held_out = "" if tau is None else f", held-out tau {tau.final_tau:.2f} (base logits alone {tau.base_tau:.2f})"
    click.echo(f"{output}: drafter written{held_out}")


train = _recipe_options(_train)
train.name = "train"
