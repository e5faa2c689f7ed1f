"""One training run: a corpus in; a drafter in the public layout, its recipe and its metrics out.

The same function serves one process and many (`distributed.py`); what a step trains on depends on the seed and the step's
number alone, so runs that were interrupted, split into micro-batches or spread over processes compute the same sums.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_deploy.aside import written_aside
from domino_deploy.checkpoint import Checkpoint
from domino_deploy.config import DrafterConfig
from domino_deploy.errors import TrainingError
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel
from domino_deploy.training.batches import Drawer, assemble
from domino_deploy.training.distributed import ALONE, World, set_gradient_exchange, shard, whole
from domino_deploy.training.evaluate import Acceptance, Walk, acceptance
from domino_deploy.training.features import Corpus
from domino_deploy.training.initialise import new_drafter, started_drafter
from domino_deploy.training.metrics import MetricsLog, plot
from domino_deploy.training.objective import DraftLoss, SoftmaxVocabulary, curriculum, total_weight
from domino_deploy.training.places import CHECKPOINT, METRICS
from domino_deploy.training.progress import Progress
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.samples import Sample, digest
from domino_deploy.training.save import save_drafter
from domino_deploy.training.state import Standing, load_state, save_state

_LOG_EVERY = 20  # steps between lines of metrics.jsonl
# Fields that a resumed run may have otherwise: they change what is written and when, or how a step is cut up.
_MAY_CHANGE = ("micro_batch", "evaluate_every", "checkpoint_every", "save_dtype", "epochs")


def train(
    target: TargetModel,
    config: DrafterConfig,
    corpus: Corpus,
    recipe: Recipe,
    output: Path,
    *,
    work: Path,
    made_for: Mapping[str, Any] | None = None,
    trained_with: Mapping[str, object] | None = None,
    start: Checkpoint[DrafterConfig] | None = None,
    world: World = ALONE,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Acceptance | None:
    """Train a drafter and write it to `output` (config.json, model.safetensors, recipe.json, metrics.jsonl, metrics.png).

    Args:
        target: frozen, on the device of this process; its embedding and LM head are used, its layers as a start.
        config: the drafter's shape (`initialise.drafter_config`).
        corpus: samples and features; the last `recipe.held_out` samples are only evaluated on.
        recipe: everything else.
        output: folder of the drafter; what stands there is replaced at the end.
        work: folder for the state of the run; a state that is there is taken up.
        made_for: what tells this run from others, beside recipe and samples.
        trained_with: variables that the chat template got, for the drafter's config.json.
        start: a trained drafter to go on from; None for the target's own last layers.
        world: this process among others.
        on_progress: told about every phase.

    Returns:
        The held-out acceptance at the end; None if nothing was held out.

    Raises:
        TrainingError: no usable samples, a recipe that does not divide among the processes, a `start` of another shape, the state of
            another run in `work`, a loss that is not finite, or a drafter that its type cannot hold.
    """
    run = _Run(target, config, corpus, recipe, work, made_for or {}, start, world, on_progress)
    found = run.optimise()
    drafter = run.drafter_copy(torch.float32)
    if world.is_main:
        try:
            with written_aside(output.absolute()) as folder:
                save_drafter(
                    drafter,
                    corpus.scales,
                    folder,
                    target=target.config,
                    trained_with=trained_with,
                    dtype=getattr(torch, recipe.save_dtype),
                )
                shutil.copyfile(work / METRICS, folder / METRICS)
                (folder / "recipe.json").write_text(json.dumps(recipe.to_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise TrainingError(
                f"{output}: expected room for the drafter, found: {error}. Free some or mend it and run the same command: training is done "
                "and its state is kept."
            ) from error
        shutil.rmtree(work / CHECKPOINT, ignore_errors=True)  # the run is over
        (work / METRICS).unlink(missing_ok=True)
        plot(output / METRICS, output / "metrics.png")  # last: the drafter is safe whatever becomes of the picture
    world.wait()
    return found


def learning_rate(step: int, steps: int, recipe: Recipe) -> float:
    """Linear warm-up, then cosine to zero."""
    warmup = max(1, round(recipe.warmup_ratio * steps))
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def frequent_tokens(samples: Sequence[Sample], count: int) -> list[int]:
    """The `count` most frequent response tokens, the lower id first among equals."""
    counts = Counter(token for sample in samples for token in sample.response_ids)
    return [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:count]]


@dataclass
class _Since:
    """What throughput is counted over: from the last line of metrics or measurement on; tokens of the drawn samples."""

    started: float
    tokens: int = 0


class _Run:
    """Everything a run holds; built in the order in which it is used."""

    def __init__(
        self,
        target: TargetModel,
        config: DrafterConfig,
        corpus: Corpus,
        recipe: Recipe,
        work: Path,
        made_for: Mapping[str, Any],
        start: Checkpoint[DrafterConfig] | None,
        world: World,
        on_progress: Callable[[Progress], None],
    ) -> None:
        refuse_uneven(recipe, world)
        self.corpus, self.recipe, self.world, self.config = corpus, recipe, world, config
        self.work, self.on_progress = work, on_progress
        count = len(corpus.samples)
        if count <= recipe.held_out:
            raise TrainingError(
                f"Training needs more than {recipe.held_out} samples (the held-out ones), found {count}. Regenerate more, or hold out "
                "fewer."
            )
        training = range(count - recipe.held_out)
        self.held_out = range(count - recipe.held_out, count)
        self.drawer = Drawer(corpus.samples, training, sequences=recipe.sequences, anchors=recipe.anchors, seed=recipe.seed)
        self.steps = recipe.total_steps(len(training))
        self.embed, self.lm_head = target.model.embed_tokens, target.lm_head
        target.requires_grad_(False)
        frequent = (
            frequent_tokens([corpus.samples[index] for index in training], recipe.frequent_tokens) if recipe.frequent_tokens else None
        )
        self.vocabulary = SoftmaxVocabulary(frequent, recipe.random_tokens, config.vocab_size, recipe.seed)

        torch.manual_seed(recipe.seed)
        if start is None:
            drafter = new_drafter(target, config, torch.tensor([corpus.samples[0].token_ids], device=world.device))
        else:
            drafter = started_drafter(start, config, corpus.scales)
        self.loss = DraftLoss(drafter.to(world.device).train(), recipe)
        shard(self.loss, world)
        self.optimiser = torch.optim.AdamW(
            self.loss.parameters(),
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            weight_decay=recipe.weight_decay,
            fused=world.size == 1,  # one pass over memory; DTensors have the plain one
        )
        course = {name: value for name, value in recipe.to_dict().items() if name not in _MAY_CHANGE}
        self.made_for = course | {"samples": digest(corpus.samples), "steps": self.steps, **made_for}

    def optimise(self) -> Acceptance | None:
        """All steps that are left; the last held-out measurement."""
        recipe, world = self.recipe, self.world
        standing = load_state(self.work / CHECKPOINT, self.loss, self.optimiser, self.made_for) or Standing(steps=0, seconds=0.0)
        log = MetricsLog.resume(self.work / METRICS, standing.steps) if world.is_main else None
        if standing.steps:
            self.tell("training", standing.steps, self.steps, f"goes on behind step {standing.steps}, where an earlier run was interrupted")
        found, started, since = None, time.monotonic() - standing.seconds, _Since(time.monotonic())
        if standing.steps == self.steps:  # interrupted between the last state and the drafter
            found = self.measure() if recipe.held_out else None
        for step in range(standing.steps, self.steps):
            sums, gradient_norm, tokens = self.step(step)
            since.tokens += tokens
            done, is_last = step + 1, step == self.steps - 1
            if step % _LOG_EVERY == 0 or is_last:
                line = self.metrics_line(step, sums, gradient_norm, time.monotonic() - started, since)
                since = _Since(time.monotonic())
                if log:
                    log.append(line)
                self.tell("training", done, self.steps, _note(line))
            if recipe.held_out and (is_last or done % recipe.evaluate_every == 0):
                found = self.measure()
                if log:
                    log.append({"step": step, "held_out_tau": round(found.final_tau, 4), "held_out_base_tau": round(found.base_tau, 4)})
                since = _Since(time.monotonic())  # the measurement's seconds are not training's
                self.tell("held-out", done, self.steps, f"tau {found.final_tau:.3f} (base {found.base_tau:.3f})")
            if is_last or done % recipe.checkpoint_every == 0:
                standing = Standing(steps=done, seconds=time.monotonic() - started)
                save_state(self.work / CHECKPOINT, self.loss, self.optimiser, standing, self.made_for, world)
        return found

    def step(self, step: int) -> tuple[Tensor, Tensor, int]:
        """One update; the sums of `Losses` over the whole draw, the gradient's norm, and the tokens of the draw."""
        recipe, world, samples = self.recipe, self.world, self.corpus.samples
        draw = self.drawer.at(step)
        vocabulary = self.vocabulary.at(step, samples, draw, self.config.num_proposals).to(world.device)
        weight = total_weight(samples, draw, self.config.num_proposals, recipe.gamma)
        base_weight = curriculum(step, self.steps, recipe.lambda_start, recipe.lambda_decay_ratio)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(step, self.steps, recipe)
        self.optimiser.zero_grad(set_to_none=True)
        passes = list(draw.shares(world.rank, world.size, recipe.micro_batch))
        sums = torch.zeros(5, device=world.device)
        for number, share in enumerate(passes):
            batch = assemble(self.corpus, share, self.config, world.device, with_outputs=recipe.soft_labels > 0)
            set_gradient_exchange(self.loss, world, is_on=number == len(passes) - 1)
            with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=recipe.dtype == "bfloat16"):
                losses = self.loss(batch, vocabulary, self.embed, self.lm_head, base_weight, weight)
            (losses.total * world.size).backward()  # FSDP averages over processes, and the loss is a sum
            sums += losses.sums
        norm = torch.nn.utils.clip_grad_norm_(self.loss.parameters(), recipe.clip_norm)
        norm = whole(norm)
        if not torch.isfinite(norm):
            raise TrainingError(
                f"Expected finite gradients, found norm {norm.item()} at step {step}. Lower the learning rate, or train in float32; "
                f"the state of the last checkpoint is kept."
            )
        self.optimiser.step()
        return world.sum(sums), norm, sum(len(samples[index].token_ids) for index in draw.indices)

    def measure(self) -> Acceptance:
        """Held-out acceptance, every process its part of the samples."""
        drafter = self.drafter_copy(self.lm_head.weight.dtype).eval()
        own = self.held_out[self.world.rank :: self.world.size]
        counts = torch.zeros(len(self.held_out), 4, dtype=torch.int64, device=self.world.device)
        if own:
            part = acceptance(drafter, self.embed, self.lm_head, self.corpus, own)
            columns = (part.final.tokens, part.final.passes, part.base.tokens, part.base.passes)
            counts[self.world.rank :: self.world.size] = torch.tensor(columns, device=self.world.device).T
        tokens, passes, base_tokens, base_passes = (tuple(column) for column in self.world.sum(counts).T.tolist())
        return Acceptance(final=Walk(tokens=tokens, passes=passes), base=Walk(tokens=base_tokens, passes=base_passes))

    def drafter_copy(self, dtype: torch.dtype) -> DrafterModel:
        """The drafter of this moment, whole, in eval use; every process must ask for it."""
        with self.world.device:
            copy = DrafterModel(self.config)
        for name, parameter in self.loss.drafter.named_parameters():
            copy.get_parameter(name).data = whole(parameter).to(dtype, copy=True)
        return copy

    def metrics_line(self, step: int, sums: Tensor, norm: Tensor, seconds: float, since: _Since) -> dict[str, float]:
        base, final, base_hits, final_hits, blocks = sums.tolist()
        base_weight = curriculum(step, self.steps, self.recipe.lambda_start, self.recipe.lambda_decay_ratio)
        values = {"loss": base_weight * base + (1 - base_weight) * final, "base_loss": base, "base_tau": 1 + base_hits / blocks}
        if self.recipe.kind == "domino":
            values |= {"lambda": base_weight, "final_loss": final, "final_tau": 1 + final_hits / blocks}
        values["gradient_norm"] = norm.item()
        rate = since.tokens / max(time.monotonic() - since.started, 1e-9)
        head = {"step": step, "seconds": round(seconds, 1), "learning_rate": learning_rate(step, self.steps, self.recipe)}
        return head | {name: round(value, 4) for name, value in values.items()} | {"tokens_per_second": round(rate)}

    def tell(self, phase: str, done: int, total: int, note: str) -> None:
        if self.world.is_main:
            self.on_progress(Progress(phase=phase, done=done, total=total, note=note))


def _note(line: Mapping[str, float]) -> str:
    """A line of metrics in words."""
    tau = f"tau {line.get('final_tau', line['base_tau']):.2f}"
    if "final_tau" in line:
        tau += f" (base {line['base_tau']:.2f}) on training blocks"
    return f"loss {line['loss']:.3f}  {tau}  {line['tokens_per_second']:.0f} tok/s"


def refuse_uneven(recipe: Recipe, world: World) -> None:
    """Stop a run whose steps the processes cannot share.

    Raises:
        TrainingError: sequences are no multiple of processes times micro_batch.
    """
    if not recipe.splits_evenly(world.size):
        raise TrainingError(
            f"Expected sequences ({recipe.sequences}) to be a multiple of the processes ({world.size}) times micro_batch "
            f"({recipe.micro_batch or 'all at once'}), found a remainder. Change one of them."
        )
