"""From prompts to a drafter: what `domino-deploy train` does, step by step."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from domino_deploy.checkpoint import CONFIG, WEIGHTS, Checkpoint, open_drafter, open_target
from domino_deploy.checkpoint_text import chat_template, special_tokens, tokenizer_file
from domino_deploy.config import TargetConfig
from domino_deploy.errors import TrainingError
from domino_deploy.model.loading import load_target
from domino_deploy.runtime.text import Tokenizer
from domino_deploy.strict_json import read_object
from domino_deploy.training.evaluate import Acceptance
from domino_deploy.training.initialise import drafter_config
from domino_deploy.training.prompt_file import read_messages, tokenise
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.regenerate import Sample, read_samples, regenerate
from domino_deploy.training.trainer import Progress, train


def train_from_prompts(
    target: str | Path,
    prompts: Path,
    output: Path,
    *,
    work: Path,
    recipe: Recipe,
    max_prompt_tokens: int,
    max_new_tokens: int,
    batch_size: int,
    target_revision: str | None = None,
    start: str | Path | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Acceptance | None:
    """Regenerate, compute features, train, save; returns the last held-out measurement.

    Args:
        target: folder or hub id.
        prompts: JSONL, see `prompt_file.read_messages`.
        output: folder of the drafter, made when training is done.
        work: holds responses and features of this target; what is there already is not computed again.
        recipe: shape and course of the run.
        max_prompt_tokens: longer prompts are left out.
        max_new_tokens: longest response, tokens.
        batch_size: responses decoded together.
        target_revision: of a hub target.
        start: a trained drafter to go on from (folder or hub id); None for the target's own last layers.
        overwrite: replace an existing drafter at `output`.
        progress: told each step as it goes.

    Raises:
        TrainingError: bad prompts, too few samples, an output that may not be replaced, a work folder of another target, a loss
            that is not finite.
        CheckpointError: a target, or a drafter to start from, that cannot be used.
    """
    _refuse_existing(output, overwrite)
    conversations = read_messages(prompts)
    checkpoint = open_target(target, revision=target_revision)
    config = drafter_config(checkpoint.config, recipe)
    started = None if start is None else open_drafter(start)
    tokenised = tokenise(conversations, _tokenizer(checkpoint), max_prompt_tokens)
    _claim(work, {"target": str(checkpoint.folder.resolve()), "dtype": recipe.dtype, "max_new_tokens": max_new_tokens})
    responses, done = work / "responses.jsonl", 0

    def on_tokens(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(f"Regenerating responses: {done} tokens")

    progress(f"Regenerating responses to {len(tokenised)} prompts")
    narrow = load_target(checkpoint, dtype=getattr(torch, recipe.dtype))
    regenerate(narrow, tokenised, responses, max_new_tokens=max_new_tokens, batch_size=batch_size, on_tokens=on_tokens)
    del narrow  # before the wide one is loaded
    samples = _shuffled(read_samples(responses), tokenised, recipe.seed)

    def on_progress(state: Progress) -> None:
        progress(f"{state.phase} {state.done}/{state.total}  {state.note}")

    model = load_target(checkpoint, config.target_layer_ids)
    return train(model, config, samples, recipe, output, work=work, start=started, on_progress=on_progress)


def _refuse_existing(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise TrainingError(f"Expected a new folder for the drafter, found {output}. Name another one, or pass --force.")
    if output.is_symlink() or not ((output / CONFIG).is_file() and (output / WEIGHTS).is_file()):
        raise TrainingError(f"{output}: expected a drafter to replace, found something else. Remove it, or name another folder.")


def _tokenizer(checkpoint: Checkpoint[TargetConfig]) -> Tokenizer:
    folder = checkpoint.folder
    return Tokenizer(tokenizer_file(folder), chat_template=chat_template(folder), special_tokens=special_tokens(folder))


def _claim(work: Path, made_for: dict[str, object]) -> None:
    """Keep a work folder to one target: responses and features do not say whose they are."""
    note = work / "made-for.json"
    if note.exists():
        found = read_object(note)
        if found != made_for:
            raise TrainingError(f"{work}: expected a work folder made for {made_for}, found one for {found}. Name another one.")
        return
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{work}: expected a work folder that can be written to, found: {error}. Name another one.") from error
    note.write_text(json.dumps(made_for) + "\n", encoding="utf-8")


def _shuffled(samples: Sequence[Sample], prompts: Sequence[tuple[int, ...]], seed: int) -> list[Sample]:
    """The samples that answer `prompts`, in an order that depends on them and the seed alone, not on who was answered first."""
    wanted = set(prompts)
    kept = sorted((sample for sample in samples if sample.prompt_ids in wanted), key=lambda sample: sample.prompt_ids)
    random.Random(seed).shuffle(kept)
    return kept
