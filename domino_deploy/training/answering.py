"""From a target and conversations to a work folder of samples: what is left to do, whether it fits, and doing it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from domino_deploy.checkpoint import Checkpoint
from domino_deploy.checkpoint_drafter import default_target_layer_ids, has_room_for_taps
from domino_deploy.checkpoint_text import chat_template, special_tokens, tokenizer_file
from domino_deploy.config import TargetConfig
from domino_deploy.errors import TrainingError
from domino_deploy.model.loading import load_target
from domino_deploy.runtime.text import Tokenizer
from domino_deploy.template_variables import TRAINED_WITH
from domino_deploy.training.answer_options import Answering
from domino_deploy.training.features import layers_read
from domino_deploy.training.fingerprint import fingerprint
from domino_deploy.training.progress import Progress
from domino_deploy.training.prompt_file import Conversation, tokenise
from domino_deploy.training.regenerate import Regenerated, regenerate
from domino_deploy.training.samples import Prompt
from domino_deploy.training.store import SampleStore, StoredSamples
from domino_deploy.training.store_files import as_training_error


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done: prompts of this part, those answered already, those left out, and the room that features need."""

    prompts: int
    answered: int
    too_long: int
    duplicates: int
    feature_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What there was to do, what this run added, and the store it is in."""

    plan: Plan
    added: Regenerated
    store: SampleStore

    def read(self) -> StoredSamples:
        with as_training_error(self.store.folder):
            return self.store.read()


def answer_prompts(
    checkpoint: Checkpoint[TargetConfig],
    conversations: Sequence[Conversation],
    work: Path,
    options: Answering,
    *,
    device: torch.device,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Answers:
    """Answer what no run has answered yet; an interrupted run goes on where it stopped.

    Args:
        checkpoint: the target.
        conversations: what it is asked.
        work: folder of the samples (`store.py`).
        options: how.
        device: where the target runs.
        on_plan: told what is to be done before the weights are loaded.
        on_progress: told how far it is.

    Raises:
        TrainingError: prompts or a work folder that cannot be used, taps that the target has no room for, too little disk or memory.
    """
    prompts = tokenise(conversations, _tokenizer(checkpoint), _longest_prompt(checkpoint.config, options), options.template_variables)
    _refuse_foreign_tokens(prompts.prompts, checkpoint)
    own = prompts.prompts[options.part :: options.parts]
    layers = stored_layers(checkpoint.config, options.num_taps, soft_labels=options.soft_labels)
    width = len(layers) * checkpoint.config.hidden_size
    store = SampleStore.open(work, claim=claim_of(checkpoint, options), tapped_layers=layers, width=width, part=options.part)
    with as_training_error(work):
        answered = store.answered()
    most_rows = sum(len(prompt.ids) + options.max_new_tokens for prompt in own if prompt.ids not in answered)
    plan = Plan(
        prompts=len(own),
        answered=sum(prompt.ids in answered for prompt in own),
        too_long=prompts.too_long,
        duplicates=prompts.duplicates,
        feature_bytes=most_rows * width * 2 * options.parts_here,
        free_bytes=shutil.disk_usage(work).free,
    )
    on_plan(plan)
    if plan.feature_bytes > plan.free_bytes:
        raise TrainingError(
            f"{work}: expected room for up to {plan.feature_bytes:,} bytes of features, found {plan.free_bytes:,} free. Name a folder on "
            "another disk, keep fewer taps, or keep none (--no-features): they are then computed in training."
        )
    if plan.answered == plan.prompts:
        return Answers(plan=plan, added=Regenerated(), store=store)
    model = load_target(checkpoint, layers, dtype=getattr(torch, options.dtype)).to(device)
    added = regenerate(
        model,
        own,
        store,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        sampling=options.sampling,
        keep_features=bool(layers),
        on_progress=on_progress,
    )
    return Answers(plan=plan, added=added, store=store)


def claim_of(checkpoint: Checkpoint[TargetConfig], options: Answering) -> dict[str, object]:
    """What responses depend on beside their prompts' ids, as a work folder notes it."""
    # By name: penalties and biases, which are not applied here, would make other claims than work folders of earlier versions hold.
    drawn = {name: getattr(options.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    sampling = "greedy" if options.sampling.is_greedy else drawn
    return {
        "target": fingerprint(checkpoint),
        "max_new_tokens": options.max_new_tokens,
        "dtype": options.dtype,
        "sampling": sampling,
        TRAINED_WITH: dict(options.template_variables),
    }


def stored_layers(target: TargetConfig, num_taps: int, *, soft_labels: bool) -> tuple[int, ...]:
    """Layers whose features are kept for a drafter with `num_taps` taps, rising; () for none.

    Raises:
        TrainingError: the target has too few layers.
    """
    if num_taps == 0:
        return ()
    if not has_room_for_taps(num_taps, target.num_layers):
        raise TrainingError(f"Expected taps on distinct layers of a target of {target.num_layers}, found {num_taps}. Lower --num-taps.")
    return layers_read(default_target_layer_ids(num_taps, target.num_layers), target.num_layers, with_outputs=soft_labels)


def _refuse_foreign_tokens(prompts: Sequence[Prompt], checkpoint: Checkpoint[TargetConfig]) -> None:
    vocabulary = checkpoint.config.vocab_size
    most = max(max(prompt.ids) for prompt in prompts)
    if most >= vocabulary:
        raise TrainingError(
            f"{checkpoint.source}: expected prompts of token ids below {vocabulary}, the target's vocabulary, found {most}. Its tokenizer "
            "belongs to another model: put the target's own beside the weights."
        )


def _longest_prompt(target: TargetConfig, options: Answering) -> int:
    room = target.max_position_embeddings - options.max_new_tokens
    if room < 1:
        raise TrainingError(
            f"Expected responses within the target's {target.max_position_embeddings} positions, found up to {options.max_new_tokens} "
            "tokens. Lower --max-new-tokens."
        )
    return min(options.max_prompt_tokens, room)


def _tokenizer(checkpoint: Checkpoint[TargetConfig]) -> Tokenizer:
    folder = checkpoint.folder
    return Tokenizer(tokenizer_file(folder), chat_template=chat_template(folder), special_tokens=special_tokens(folder))
