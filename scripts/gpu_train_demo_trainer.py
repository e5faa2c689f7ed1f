"""Training within a budget: a few steps to measure, then as many as fit; drafters are written out on the way."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_train_demo_budget import Budget, Report, Timing, timing_of
from gpu_train_demo_pieces import cut
from safetensors import safe_open

from domino_deploy.config import DrafterConfig
from domino_deploy.errors import TrainingError
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel
from domino_deploy.training.distributed import World
from domino_deploy.training.evaluate import Acceptance
from domino_deploy.training.features import Corpus
from domino_deploy.training.places import CHECKPOINT, METRICS
from domino_deploy.training.progress import Progress
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.save import save_drafter
from domino_deploy.training.trainer import train

TIMING_STEPS = 41  # the trainer tells about steps 1, 21 and 41: the last twenty are timed
TIMING_HELD_OUT = 64
SAY_EVERY_S = 5  # between lines on the screen while training: 12,000 characters of it come back
OUT_PIECE_BYTES = 15 * 2**20  # a file that comes back may have 16 MiB


class OutOfTimeError(Exception):
    """Training came to the end of its time before its last step."""


class Trainer:
    """Calls `train` twice: a few steps to measure, then as many as fit; writes a drafter to `out` now and then."""

    def __init__(
        self,
        model: TargetModel,
        config: DrafterConfig,
        corpus: Corpus,
        recipe: Recipe,
        out: Path,
        work: Path,
        budget: Budget,
        report: Report,
    ) -> None:
        self.model, self.config, self.corpus, self.recipe = model, config, corpus, recipe
        self.out, self.work, self.budget, self.report = out, work, budget, report
        self._written = -1  # steps of the checkpoint that was written out last
        self._device = model.lm_head.weight.device

    def timed(self, steps: int) -> Timing:
        """Measure with a part of the samples; when memory ends, smaller passes are tried, and kept for the whole run."""
        held_out = min(TIMING_HELD_OUT, self.recipe.held_out)
        while (told := self._told_by(steps, held_out)) is None:
            passes, rest = divmod(self.recipe.micro_batch or self.recipe.sequences, 2)
            if rest:
                raise TrainingError(f"expected memory for passes of {2 * passes + rest} samples, found too little. Use fewer anchors.")
            self.recipe = dataclasses.replace(self.recipe, micro_batch=passes)
            self.report.say(f"out of memory: passes of {passes} samples from here on")
            torch.cuda.empty_cache()
        timing = timing_of(told, held_out, self.recipe.held_out)
        self.report.note(step_s=round(timing.step_s, 4), measure_s=round(timing.measure_s, 2), micro_batch=self.recipe.micro_batch)
        return timing

    def _told_by(self, steps: int, held_out: int) -> list[tuple[str, int, float]] | None:
        """What a run of `steps` tells (phase, steps done, seconds); None if memory ends."""
        count = min(len(self.corpus.samples), held_out + 8 * self.recipe.sequences)
        corpus = dataclasses.replace(self.corpus, samples=self.corpus.samples[:count])
        recipe = dataclasses.replace(self.recipe, steps=steps, epochs=None, held_out=held_out, evaluate_every=steps, checkpoint_every=steps)
        told: list[tuple[str, int, float]] = []

        def on_progress(progress: Progress) -> None:
            told.append((progress.phase, progress.done, self.budget.spent))

        work = self.work / "timing"
        shutil.rmtree(work, ignore_errors=True)
        try:
            self._train(corpus, recipe, work / "drafter", work, on_progress)
        except torch.OutOfMemoryError:
            return None
        shutil.rmtree(work)
        return told

    def run(self, recipe: Recipe) -> None:
        """The run itself; if it comes to the end of its time, the drafter of its last checkpoint is the result."""
        self.report.note(recipe=recipe.to_dict())
        work, drafter = self.work / "train", self.work / "drafter"
        shutil.rmtree(work, ignore_errors=True)

        said = -math.inf

        def on_progress(progress: Progress) -> None:
            nonlocal said
            if progress.phase != "training" or self.budget.spent > said + SAY_EVERY_S or progress.done == progress.total:
                self.report.say(f"{progress.phase} {progress.done}/{progress.total}  {progress.note}")
                said = self.budget.spent
            if progress.phase == "training":
                self._write_checkpoint(work)
                if self.budget.until_write < 0 and progress.done < progress.total:
                    raise OutOfTimeError(f"stopped after {progress.done} of {progress.total} steps")

        try:
            found = self._train(self.corpus, recipe, drafter, work, on_progress)
        except BaseException as error:
            self._write_checkpoint(work)
            if not isinstance(error, OutOfTimeError):
                raise
            self.report.note(stopped=str(error), drafter_steps=self._written)
            return
        cut({path.name: path for path in sorted(drafter.iterdir())}, self.out, "drafter", OUT_PIECE_BYTES)
        self.report.note(drafter_steps=recipe.steps)
        if found is not None:
            self.report.note(held_out_tau=round(found.final_tau, 4), held_out_base_tau=round(found.base_tau, 4))

    def _train(
        self, corpus: Corpus, recipe: Recipe, drafter: Path, work: Path, on_progress: Callable[[Progress], None]
    ) -> Acceptance | None:
        world = World(device=self._device)
        return train(self.model, self.config, corpus, recipe, drafter, work=work, world=world, on_progress=on_progress)

    def _write_checkpoint(self, work: Path) -> None:
        """The drafter of the last checkpoint, if it is a new one; the metrics so far with it."""
        state = work / CHECKPOINT
        if not state.is_dir():
            return
        steps = int(json.loads((state / "state.json").read_text(encoding="utf-8"))["steps"])
        if steps == self._written:
            return
        folder = self.work / "checkpoint-drafter"
        shutil.rmtree(folder, ignore_errors=True)
        dtype = getattr(torch, self.recipe.save_dtype)
        save_drafter(drafter_of_checkpoint(state, self.config), self.corpus.scales, folder, dtype=dtype, target=self.model.config)
        shutil.copyfile(work / METRICS, folder / METRICS)
        cut({path.name: path for path in sorted(folder.iterdir())}, self.out, "drafter", OUT_PIECE_BYTES)
        self._written = steps
        self.report.say(f"drafter of step {steps} written")


def drafter_of_checkpoint(state: Path, config: DrafterConfig) -> DrafterModel:
    """The drafter in a checkpoint of the trainer (`domino_deploy.training.state`)."""
    drafter = DrafterModel(config)
    with safe_open(state / "state.safetensors", framework="pt") as file:
        for name, parameter in drafter.named_parameters():
            parameter.data = file.get_tensor(f"drafter.{name}/parameter")
    return drafter
