"""The run on the lent machine: the target answers the prompts, a drafter is trained on that, both within a number of minutes.

What is done stays done: responses and drafters are written out as soon as they exist, and a phase that fails or runs late
leaves what was there.  Imported once `domino_deploy` can be (`gpu_train_demo.py`).
"""

from __future__ import annotations

import dataclasses
import platform
import random
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from gpu_train_demo_budget import REGENERATE_SHARE, Budget, Report, recipe_that_fits
from gpu_train_demo_pieces import Texts, cut, pack_texts
from gpu_train_demo_trainer import OUT_PIECE_BYTES, TIMING_STEPS, Trainer

from domino_deploy.checkpoint import open_target
from domino_deploy.model.loading import load_target
from domino_deploy.model.target import TargetModel
from domino_deploy.training.features import Corpus, corpus_of
from domino_deploy.training.initialise import drafter_config
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.regenerate import decode_batch
from domino_deploy.training.samples import Sample
from domino_deploy.training.store import StoredSamples

CHUNK_BATCHES = 4  # are sorted by length together: little padding, and an early stop still leaves the whole mixture


def run(
    target: Path,
    prompts: Texts,
    recipe: Recipe,
    *,
    out: Path,
    work: Path,
    budget: Budget,
    device: torch.device,
    batch_size: int,
    max_new_tokens: int,
    timing_steps: int = TIMING_STEPS,
) -> bool:
    """Regenerate, train, write to `out`; whether all of it was done.

    Args:
        target: its checkpoint.
        prompts: in the order in which they are answered; the last responses are held out.
        recipe: its number of steps is replaced by what fits.
        out: report.json, responses.* and drafter.* (pieces, `gpu_train_demo_pieces.cut`).
        work: for everything that need not come back.
        budget: counted from its making.
        device: of all models.
        batch_size: responses decoded together; halved when memory ends.
        max_new_tokens: longest response.
        timing_steps: steps of the run that measures.
    """
    report = Report(out, budget)
    try:
        report.note(machine=machine(device), minutes=round(budget.seconds / 60, 2))
        with report.phase("load"):
            checkpoint = open_target(target)
            config = drafter_config(checkpoint.config, recipe)
            narrow = load_target(checkpoint, dtype=getattr(torch, recipe.dtype)).to(device)
        with report.phase("regenerate"):
            texts = regenerate(narrow, prompts, batch_size, max_new_tokens, budget, report)
        del narrow
        with report.phase("write responses"):
            write_responses(texts, out, work, report)
        with report.phase("corpus"):
            taps = config.target_layer_ids
            wanted = tuple(dict.fromkeys((*taps, *((checkpoint.config.num_layers - 1,) if recipe.soft_labels else ()))))
            model = load_target(checkpoint, wanted).to(device)
            recipe = dataclasses.replace(recipe, features="live", held_out=min(recipe.held_out, len(texts.prompts) // 10))
            corpus = corpus_from(model, texts, taps, recipe, work)
        trainer = Trainer(model, config, corpus, recipe, out, work, budget, report)
        with report.phase("timing"):
            timing = trainer.timed(timing_steps)
        with report.phase("train"):
            trainer.run(recipe_that_fits(trainer.recipe, timing, budget))
    except Exception:  # the reason goes with what was done: nobody can look at the machine afterwards
        report.note(error=traceback.format_exc())
        return False
    report.say("done")
    return True


def machine(device: torch.device) -> dict[str, str]:
    """What a figure of this run must name."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_gib": f"{properties.total_memory / 2**30:.0f}"}
    return found


def regenerate(model: TargetModel, prompts: Texts, batch_size: int, max_new_tokens: int, budget: Budget, report: Report) -> Texts:
    """Greedy responses to as many prompts as the time allows; those of fewer than two tokens are left out."""
    rows: list[tuple[Sequence[int], Sequence[int], str]] = []
    waiting = list(zip(prompts.prompts, prompts.kinds, strict=True))
    started, tokens = budget.spent, 0
    while waiting and (not rows or budget.spent < budget.seconds * REGENERATE_SHARE):
        chunk, waiting = waiting[: batch_size * CHUNK_BATCHES], waiting[batch_size * CHUNK_BATCHES :]
        chunk.sort(key=lambda prompt: len(prompt[0]))
        while chunk and (not rows or budget.spent < budget.seconds * REGENERATE_SHARE):
            batch = chunk[:batch_size]
            try:
                responses = decode_batch(model, [ids for ids, _ in batch], max_new_tokens).responses
            except torch.OutOfMemoryError:
                if batch_size == 1:
                    raise
                batch_size //= 2
                report.say(f"out of memory: batches of {batch_size} from here on")
                torch.cuda.empty_cache()
                continue
            chunk = chunk[batch_size:]
            rows += [(ids, response, kind) for (ids, kind), response in zip(batch, responses, strict=True) if len(response) >= 2]
            tokens += sum(map(len, responses))
            report.say(f"{len(rows)} responses, {tokens} tokens, {tokens / max(budget.spent - started, 1e-9):.0f} tokens/s")
    seconds = budget.spent - started
    report.note(
        responses=len(rows),
        tokens=tokens,
        tokens_per_second=round(tokens / max(seconds, 1e-9)),
        unanswered=len(prompts.prompts) - len(rows),
    )
    random.Random(0).shuffle(rows)  # the last ones, which are held out, must not be the longest prompts of their chunk
    found = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    return Texts(prompts=found[0], responses=found[1], kinds=found[2])


def write_responses(texts: Texts, out: Path, work: Path, report: Report) -> None:
    """responses.* in `out`: as many as fit into two files."""
    work.mkdir(parents=True, exist_ok=True)
    path, count = work / "responses.npz", len(texts.prompts)
    while True:
        pack_texts(Texts(prompts=texts.prompts[:count], responses=texts.responses[:count], kinds=texts.kinds[:count]), path)
        if path.stat().st_size < 2 * OUT_PIECE_BYTES - 2**16:  # room for the archive's own blocks
            break
        count = count * 9 // 10
    cut({path.name: path}, out, "responses", OUT_PIECE_BYTES)
    report.note(responses_written=count)


def corpus_from(model: TargetModel, texts: Texts, taps: Sequence[int], recipe: Recipe, work: Path) -> Corpus:
    """Samples short enough for the recipe, with live features."""
    rows = zip(texts.prompts, texts.responses, texts.kinds, strict=True)
    samples = [Sample(prompt_ids=tuple(ids), response_ids=tuple(response), kind=kind) for ids, response, kind in rows]
    samples = [sample for sample in samples if len(sample.token_ids) <= recipe.max_length]
    stored = StoredSamples(samples=samples, tapped_layers=(), features=(), places=())
    return corpus_of(
        model,
        stored,
        range(len(samples)),
        taps,
        with_outputs=recipe.soft_labels > 0,
        live=True,
        dtype=getattr(torch, recipe.dtype),
        path=work / "features.f16",
    )
