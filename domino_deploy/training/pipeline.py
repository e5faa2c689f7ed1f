"""From prompts to a drafter: what `domino-deploy train` does, step by step, in one process or many."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from domino_deploy.checkpoint import Checkpoint, open_drafter, open_target
from domino_deploy.config import TargetConfig
from domino_deploy.errors import TrainingError, listed, shortened
from domino_deploy.model.loading import load_target
from domino_deploy.strict_json import read_object
from domino_deploy.template_variables import TRAINED_WITH, variable_problems
from domino_deploy.training.answer_options import Answering
from domino_deploy.training.answering import answer_prompts
from domino_deploy.training.distributed import World, joined
from domino_deploy.training.evaluate import Acceptance
from domino_deploy.training.features import corpus_of, layers_read
from domino_deploy.training.fingerprint import fingerprint
from domino_deploy.training.initialise import drafter_config, refuse_other_shape
from domino_deploy.training.memory import enough_memory
from domino_deploy.training.places import CHECKPOINT, METRICS, alone_in, refuse_output, try_output
from domino_deploy.training.progress import Progress
from domino_deploy.training.prompt_file import Conversation
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.samples import Sample
from domino_deploy.training.store import CLAIM, StoredSamples, read_stored
from domino_deploy.training.store_files import as_training_error
from domino_deploy.training.trainer import refuse_uneven, train

_LESS_MEMORY = "Lower --micro-batch, --anchors or the sizes of the drafter; --dry-run says what takes how much."


def train_from_prompts(
    target: str | Path,
    conversations: Sequence[Conversation],
    output: Path,
    *,
    work: Path,
    recipe: Recipe,
    answering: Answering,
    device: str = "auto",
    target_revision: str | None = None,
    start: str | Path | None = None,
    overwrite: bool = False,
    restart: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Acceptance | None:
    """Regenerate what is not answered yet, train on all samples of the work folder, save; the last held-out measurement.

    Args:
        target: folder or hub id.
        conversations: what the target is asked; none if `work` holds its responses already.
        output: folder of the drafter, made when training is done.
        work: responses, features and the state of the run; an interrupted run goes on from there.
        recipe: shape and course of the run.
        answering: how prompts are answered; its dtype, taps and share among processes are set here. The variables that prompts were
            rendered with, its own where the work folder does not note them, go into the drafter's config.json.
        device: auto, cpu or cuda.
        target_revision: of a hub target.
        start: a trained drafter to go on from (folder or hub id); None for the target's own last layers.
        overwrite: replace an existing drafter at `output`.
        restart: forget the state of an interrupted run; responses and features are kept.
        on_progress: told about every phase, by the first process.

    Raises:
        TrainingError: bad prompts, too few samples, an output that may not be replaced, a work folder of another target or another run,
            a full disk, a loss that is not finite.
        CheckpointError: a target, or a drafter to start from, that cannot be used.
    """
    refuse_output(output, work=work, overwrite=overwrite)
    trained_with = _variables(work, answering)
    checkpoint = open_target(target, revision=target_revision)
    config = drafter_config(checkpoint.config, recipe)
    started = None if start is None else open_drafter(start)
    if started is not None:
        refuse_other_shape(started, config)
    with joined(device) as world, _own_places(output, work, world, is_work_made=bool(conversations)):
        refuse_uneven(recipe, world)
        tell = on_progress if world.is_main else _silent
        if conversations:
            options = _answering(answering, recipe, world)
            answer_prompts(checkpoint, conversations, work, options, device=world.device, on_progress=tell)
            world.wait()
        stored = read_stored(work)
        _check_samples(work, stored, checkpoint, recipe)
        chosen = usable(stored.samples, recipe)
        if restart and world.is_main:
            _forget_state(work)
        world.wait()
        with_outputs = recipe.soft_labels > 0
        layers = layers_read(config.target_layer_ids, config.num_target_layers, with_outputs=with_outputs)
        with enough_memory("this run", _LESS_MEMORY):
            model = load_target(checkpoint, layers, dtype=getattr(torch, recipe.dtype)).to(world.device)
            corpus = corpus_of(
                model,
                stored,
                chosen,
                config.target_layer_ids,
                with_outputs=with_outputs,
                live=recipe.features == "live",
                dtype=getattr(torch, recipe.dtype),
                path=work / "features-of-training.f16",
                world=world,
                on_progress=tell,
            )
            made_for = {"target": fingerprint(checkpoint), "start": None if started is None else fingerprint(started)}
            return train(
                model,
                config,
                corpus,
                recipe,
                output,
                work=work,
                made_for=made_for,
                trained_with=trained_with,
                start=started,
                world=world,
                on_progress=tell,
            )


def usable(samples: Sequence[Sample], recipe: Recipe) -> list[int]:
    """Indices of the samples with an anchor and a label, and not too long, in an order that depends on them and the seed alone.

    Raises:
        TrainingError: no more than are held out.
    """
    kept = [index for index, sample in enumerate(samples) if len(sample.response_ids) >= 2 and len(sample.token_ids) <= recipe.max_length]
    if len(kept) <= recipe.held_out:
        raise TrainingError(
            f"Training needs more than {recipe.held_out} samples (the held-out ones) with at least two response tokens and at most "
            f"{recipe.max_length} tokens in all; found {len(kept)} of {len(samples)}. Regenerate more responses, hold out fewer, or "
            "raise --max-length."
        )
    kept.sort(key=lambda index: samples[index].prompt_ids)
    random.Random(recipe.seed).shuffle(kept)
    return kept


def _forget_state(work: Path) -> None:
    with as_training_error(work):  # a state that stays would be taken up
        if (work / CHECKPOINT).exists():
            shutil.rmtree(work / CHECKPOINT)
        (work / METRICS).unlink(missing_ok=True)


@contextmanager
def _own_places(output: Path, work: Path, world: World, *, is_work_made: bool) -> Iterator[None]:
    """Output and work folder are usable, and the first process keeps other runs out of the latter; a missing one is told later."""
    if not world.is_main:
        yield
        return
    try_output(output)
    with alone_in(work) if is_work_made or work.is_dir() else nullcontext():
        yield


def _silent(progress: Progress) -> None:
    """Of several processes one speaks."""


def _answering(options: Answering, recipe: Recipe, world: World) -> Answering:
    taps = recipe.num_taps if recipe.features == "cached" else 0
    return dataclasses.replace(
        options,
        dtype=recipe.dtype,
        num_taps=taps,
        soft_labels=taps > 0 and recipe.soft_labels > 0,
        part=world.rank,
        parts=world.size,
        parts_here=world.size,
    )


def _variables(work: Path, answering: Answering) -> Mapping[str, object]:
    """What the chat template got when the prompts were answered, or will get; notes of earlier versions do not say it."""
    given, note = answering.template_variables, work / CLAIM
    noted = read_object(note).get(TRAINED_WITH) if note.exists() else None
    if noted is None or noted == given:
        return given
    if given:
        raise TrainingError(
            f"{work}: expected template variables {json.dumps(noted)}, which its prompts were rendered with, "
            f"found {json.dumps(dict(given))}. Leave them out, or name another work folder."
        )
    problems = variable_problems(noted)
    if problems:
        raise TrainingError(listed(f"{note}: {TRAINED_WITH} cannot be used", problems, "Regenerate into another folder."))
    return dict(noted)


def _check_samples(work: Path, stored: StoredSamples, checkpoint: Checkpoint[TargetConfig], recipe: Recipe) -> None:
    """The samples are this target's, and none holds the token that is to stand for MASK."""
    if (work / CLAIM).exists():
        found = read_object(work / CLAIM).get("target")
        if found != fingerprint(checkpoint):
            raise TrainingError(
                f"{work}: expected responses of {checkpoint.source}, found those of a target with other weights ({CLAIM}). "
                "A drafter learns what its own target says: name another work folder."
            )
    problems, vocabulary = [], checkpoint.config.vocab_size
    for number, sample in enumerate(stored.samples):
        if max(sample.token_ids) >= vocabulary:
            problems.append(f"sample {number}: token {max(sample.token_ids)}, outside the target's vocabulary of {vocabulary}")
        elif recipe.mask_token_id in sample.token_ids:
            problems.append(f"sample {number}: token {recipe.mask_token_id}, which is to stand for MASK (mask_token_id)")
    if problems:
        advice = "Regenerate with this target, and choose a mask_token_id that its text never holds."
        raise TrainingError(listed(f"{work}: {len(problems)} sample(s) cannot be used", shortened(problems, most=20), advice))
