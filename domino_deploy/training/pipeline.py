"""From prompts to a drafter: what `domino-deploy train` does, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch

from domino_deploy.checkpoint import open_target
from domino_deploy.checkpoint_text import chat_template, special_tokens, tokenizer_file
from domino_deploy.errors import TrainingError
from domino_deploy.model.loading import load_target
from domino_deploy.runtime.text import Tokenizer
from domino_deploy.training.evaluate import Acceptance
from domino_deploy.training.initialise import drafter_config
from domino_deploy.training.prompt_file import read_messages, tokenise
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.regenerate import read_samples, regenerate
from domino_deploy.training.trainer import Progress, train


def train_from_prompts(
    target: str | Path,
    prompts: Path,
    output: Path,
    *,
    work: Path,
    recipe: Recipe,
    target_revision: str | None = None,
    max_prompt_tokens: int = 200,
    max_new_tokens: int = 176,
    batch_size: int = 128,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Acceptance | None:
    """Regenerate, compute features, train, save; returns the last held-out measurement.

    Args:
        target: folder or hub id.
        prompts: JSONL, see `prompt_file.read_messages`.
        output: folder of the drafter, made when training is done.
        work: holds responses.jsonl and features.f16; what is there already is not computed again.
        recipe: shape and course of the run.
        target_revision: of a hub target.
        max_prompt_tokens: longer prompts are left out.
        max_new_tokens: longest response, tokens.
        batch_size: responses decoded together.
        overwrite: replace an existing output folder.
        progress: told each step as it goes.

    Raises:
        TrainingError: bad prompts, too few samples, an output that exists, a loss that is not finite.
        CheckpointError: a target that cannot be used.
    """
    if output.exists() and not overwrite:
        raise TrainingError(f"Expected a new folder for the drafter, found {output}. Name another one, or pass --force.")
    conversations = read_messages(prompts)
    checkpoint = open_target(target, revision=target_revision)
    config = drafter_config(checkpoint.config, recipe)
    tokenizer = Tokenizer(
        tokenizer_file(checkpoint.folder),
        chat_template=chat_template(checkpoint.folder),
        special_tokens=special_tokens(checkpoint.folder),
    )
    tokenised = tokenise(conversations, tokenizer, max_prompt_tokens)
    work.mkdir(parents=True, exist_ok=True)
    responses, done = work / "responses.jsonl", 0

    def on_tokens(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(f"Regenerating responses: {done} tokens")

    progress(f"Regenerating responses to {len(tokenised)} prompts")
    narrow = load_target(checkpoint, dtype=getattr(torch, recipe.dtype))
    regenerate(narrow, tokenised, responses, max_new_tokens=max_new_tokens, batch_size=batch_size, on_tokens=on_tokens)
    del narrow
    wanted = set(tokenised)
    samples = sorted((sample for sample in read_samples(responses) if sample.prompt_ids in wanted), key=lambda sample: sample.prompt_ids)
    random.Random(recipe.seed).shuffle(samples)

    model = load_target(checkpoint, config.target_layer_ids)

    def on_progress(state: Progress) -> None:
        progress(f"{state.phase} {state.done}/{state.total}  {state.note}")

    return train(model, config, samples, recipe, output, work=work, on_progress=on_progress)
