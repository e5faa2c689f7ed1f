"""What a training run will take, from the target's config.json and the recipe alone: no weights, no data, no GPU.

Counts (steps, blocks, parameters, stored bytes) are exact.  Memory and floating-point operations are estimates; every formula
stands in the docstring of the function that computes it.

Letters of the formulas: P parameters of the drafter, n processes, b bytes of a number in `recipe.dtype`, S samples in one pass of
one process, L rows of a sample, A blocks (anchors) in a sample, R = A x block size, N proposals of a block, T taps, M model width,
I width of the MLP, Q and K widths of all query and of all key heads, G width of the GRU, E rank of the correction, V vocabulary, U
tokens in the softmax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_deploy.checkpoint import CONFIG
from domino_deploy.checkpoint_config import target_config
from domino_deploy.checkpoint_source import file_in, resolve
from domino_deploy.checkpoint_tensors import expected_drafter_tensors, expected_target_tensors
from domino_deploy.config import DrafterConfig, DrafterKind, TargetConfig
from domino_deploy.errors import TrainingError, listed
from domino_deploy.strict_json import read_object
from domino_deploy.training.features import layers_read
from domino_deploy.training.initialise import drafter_config
from domino_deploy.training.objective import CHUNK_ROWS
from domino_deploy.training.recipe import Recipe

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MASTER = 4  # fp32: master weights, gradients, each of Adam's two moments


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one process at the peak of a step: an estimate, the allocator's own needs left out.

    `unfused_attention` is not part of `total`: attention scores, which only a kernel that is not fused keeps.
    """

    target: int
    masters: int
    moments: int
    gradients: int
    working_weights: int
    activations: int
    logits: int
    unfused_attention: int

    @property
    def total(self) -> int:
        return sum(dataclasses.asdict(self).values()) - self.unfused_attention


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Size of a run.

    training_samples: all but the held-out ones; steps: optimiser steps; passes: forward and backward passes of each process in a step,
    of `samples_per_pass` samples; blocks, positions: of a step, over all processes; target_parameters: of the whole target;
    feature_bytes: tapped features of all samples in fp16, kept on disk only if `features` is cached; operations: floating-point
    operations of a step, over all processes, a multiply-add counted as two.
    """

    processes: int
    training_samples: int
    steps: int
    steps_per_epoch: float
    sequences: int
    passes: int
    samples_per_pass: int
    blocks: int
    positions: int
    backbone_parameters: int
    head_parameters: int
    target_parameters: int
    features: str
    feature_bytes: int
    operations: float
    memory: Memory

    def to_dict(self) -> dict[str, Any]:
        """For JSON, totals included."""
        values = dataclasses.asdict(self)
        values["memory"]["total"] = self.memory.total
        return values | {"drafter_parameters": self.backbone_parameters + self.head_parameters}

    def lines(self) -> list[str]:
        """For a reader."""
        memory, parameters = self.memory, self.backbone_parameters + self.head_parameters
        kept = "kept on disk:" if self.features == "cached" else "live; kept on disk they would take"
        parts = [
            ("frozen target", memory.target),
            ("fp32 master weights", memory.masters),
            ("Adam's moments", memory.moments),
            ("gradients", memory.gradients),
            ("weights as a step uses them", memory.working_weights),
            (f"activations of {_count(self.samples_per_pass, 'sample')}", memory.activations),
            ("logits of one chunk", memory.logits),
        ]
        return [
            f"drafter   {_millions(parameters)} parameters: backbone {_millions(self.backbone_parameters)}, "
            f"head {_millions(self.head_parameters)} (target {_millions(self.target_parameters)})",
            f"run       {self.steps:,} steps of {_count(self.sequences, 'sample')}, {self.steps_per_epoch:,.1f} to an epoch of "
            f"{self.training_samples:,}; a step is {_count(self.passes, 'pass', 'passes')} of {_count(self.samples_per_pass, 'sample')}"
            + (f" on each of {self.processes} processes" if self.processes > 1 else ""),
            f"step      {self.blocks:,} blocks, {self.positions:,} positions, {self.operations:.1e} floating-point operations (estimate)",
            f"features  {kept} {self.feature_bytes / 1e9:,.1f} GB",
            f"memory    {_gib(memory.total)} on each process (estimate):",
            *(f"          {_gib(size):>10}  {name}" for name, size in parts),
            f"          and {_gib(memory.unfused_attention)} more if no fused attention kernel takes the mask",
        ]


def plan(target: TargetConfig, recipe: Recipe, *, samples: int, processes: int = 1, mean_tokens: int) -> Plan:
    """Size up a run; `mean_tokens` is cut at the recipe's `max_length`.

    Args:
        target: shape of the target (`target_config_of`).
        recipe: shape and course of the run.
        samples: regenerated samples, the held-out ones included.
        processes: one for each GPU.
        mean_tokens: mean length of a sample, prompt and response.

    Raises:
        TrainingError: a recipe that does not fit the target, fewer samples than are held out, or processes that cannot share a step.
    """
    problems = [
        f"{name} must be at least 1, found {value}" for name, value in (("processes", processes), ("mean_tokens", mean_tokens)) if value < 1
    ]
    if samples <= recipe.held_out:
        problems.append(f"samples must be more than the {recipe.held_out} held out, found {samples}")
    if processes > 0 and not recipe.splits_evenly(processes):
        problems.append(
            f"sequences must be a multiple of processes times micro_batch, found {recipe.sequences}, {processes} and {recipe.micro_batch}"
        )
    if problems:
        raise TrainingError(listed("The run cannot be planned", problems, "Correct these values, or the recipe's."))
    config = drafter_config(target, recipe)
    training, share = samples - recipe.held_out, recipe.sequences // processes
    per_pass = recipe.micro_batch or share
    length = min(mean_tokens, recipe.max_length)
    tensors, blocks = _sizes(expected_drafter_tensors(config)), recipe.sequences * recipe.anchors
    stored = len(layers_read(config.target_layer_ids, target.num_layers, with_outputs=recipe.soft_labels > 0))
    backbone = sum(_sizes(expected_drafter_tensors(dataclasses.replace(config, kind=DrafterKind.DFLASH))).values())
    return Plan(
        processes=processes,
        training_samples=training,
        steps=recipe.total_steps(training),
        steps_per_epoch=training / recipe.sequences,
        sequences=recipe.sequences,
        passes=share // per_pass,
        samples_per_pass=per_pass,
        blocks=blocks,
        positions=blocks * recipe.block_size,
        backbone_parameters=backbone,
        head_parameters=sum(tensors.values()) - backbone,
        target_parameters=sum(_sizes(expected_target_tensors(target)).values()),
        features=recipe.features,
        feature_bytes=samples * length * stored * config.hidden_size * _BYTES["float16"],
        operations=_operations(target, config, recipe, length, per_pass),
        memory=_memory(target, config, recipe, processes, share // per_pass, per_pass),
    )


def target_config_of(source: str | Path, revision: str | None = None) -> TargetConfig:
    """Shape of a target from its config.json, the only file that is read, or fetched from the hub.

    Raises:
        CheckpointError: no such folder or repository, no config.json in it, or one that is not a supported target's.
        MissingDependencyError: a hub id without huggingface_hub.
    """
    folder, _ = resolve(source, revision, only=(CONFIG,))
    path = file_in(folder, CONFIG)
    return target_config(read_object(path), str(path))


def _memory(target: TargetConfig, config: DrafterConfig, recipe: Recipe, processes: int, passes: int, samples: int) -> Memory:
    """Formulas, in bytes:

        target           b x all parameters
        masters          4 P / n
        moments          8 P / n
        gradients        4 P / n; 4 P more if n > 1 and a step has several passes (whole until the last one exchanges them)
        working_weights  4 P if n > 1 (FSDP2 gathers the weights whole and keeps them for the step)
                         + 2 P under bfloat16 (autocast keeps a cast copy)
        activations      S x `_activation_bytes`
        logits           4 U x rows of a chunk x (logits and their gradient, base and corrected; one more with soft labels)
                         + 8 U E: the correction's rows that the softmax needs, and their gradient
        unfused          4 x layers x S x query heads x R x (L + R)

    L is the recipe's `max_length`, the longest sample there can be.
    """
    width, drafter = _BYTES[recipe.dtype], sum(_sizes(expected_drafter_tensors(config)).values())
    frozen = _sizes(expected_target_tensors(target))
    rows, softmax = recipe.anchors * config.block_size, _softmax_tokens(config, recipe)
    logits = 2 * (1 if config.kind is DrafterKind.DFLASH else 2) + (1 if recipe.soft_labels else 0)
    chunk = min(CHUNK_ROWS, samples * recipe.anchors * config.num_proposals)
    return Memory(
        target=width * sum(frozen.values()),
        masters=_MASTER * drafter // processes,
        moments=2 * _MASTER * drafter // processes,
        gradients=_MASTER * drafter // processes + (_MASTER * drafter if processes > 1 and passes > 1 else 0),
        working_weights=(_MASTER * drafter if processes > 1 else 0) + (width * drafter if width < _MASTER else 0),
        activations=samples * _activation_bytes(config, recipe, width),
        logits=_MASTER * softmax * chunk * logits + 2 * _MASTER * softmax * config.emb_dim,
        unfused_attention=_MASTER * config.num_layers * samples * config.num_heads * rows * (recipe.max_length + rows),
    )


def _activation_bytes(config: DrafterConfig, recipe: Recipe, width: int) -> int:
    """What the way back through the backbone and the GRU needs of one sample, in bytes; attention by a fused kernel.

        norms      8 x layers x (R (2 M + Q) + (L + R) K) + 8 L M + 4 R M: their input and the normalised rows, in fp32
        block      b x layers x R (2 M + 3 Q + 4 I) + b R M: inputs of the matrix products, queries, attention, MLP; the result
        keys       b x layers x (L + R) (M + 2 K + R): input, keys, values, and the mask as numbers
        features   L x (4 + b) T M: as they come, and their cast
        GRU        b x A N (M + 10 G): embeddings and gates; Domino only
        outputs    4 A N M: of the target, with soft labels only

    PyTorch's CPU keeps just this (tests/test_training_plan.py counts it); a GPU's fused norms keep less.
    """
    model, queries, keys = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    length, rows, proposals = recipe.max_length, recipe.anchors * config.block_size, recipe.anchors * config.num_proposals
    norms = config.num_layers * (rows * (2 * model + queries) + (length + rows) * keys) + length * model
    block = config.num_layers * rows * (2 * model + 3 * queries + 4 * config.intermediate_size) + rows * model
    key = config.num_layers * (length + rows) * (model + 2 * keys + rows)
    gru = proposals * (model + 10 * config.gru_hidden_dim) if config.kind is DrafterKind.DOMINO else 0
    features = length * config.feature_size * (_MASTER + width)
    outputs = _MASTER * proposals * model if recipe.soft_labels else 0
    return _MASTER * (2 * norms + rows * model) + width * (block + key + gru) + features + outputs


def _softmax_tokens(config: DrafterConfig, recipe: Recipe) -> int:
    """U: the vocabulary, or at most the frequent ones, the random ones and all tokens of a step's blocks."""
    if not recipe.frequent_tokens:
        return config.vocab_size
    own = recipe.sequences * recipe.anchors * (config.num_proposals + 1)
    return min(config.vocab_size, recipe.frequent_tokens + recipe.random_tokens + own)


def _operations(target: TargetConfig, config: DrafterConfig, recipe: Recipe, length: int, samples: int) -> float:
    """Floating-point operations of one step: samples of the step x the sum of

        target      2 L x layers' weights + 4 L^2 Q a layer; with live features only
        context     4 L T M^2: `fc`, whose input needs no gradient
        blocks      6 R x (2 M Q + 3 M I) a layer
        keys        12 (L + R) M K a layer
        attention   12 R (L + R) Q a layer, masked pairs included
        LM head     4 A N M U: frozen, so no gradient of its weights; 6 A N M U if logits are computed again on the way back
        correction  6 A N E U, likewise 8; A N (12 M G + 18 G^2 + 6 E (M + G)) for GRU and bottleneck; Domino only

    A multiply-add counts two, a way back twice its way forth; L is the mean length.  Norms, soft labels and held-out measurements are
    left out.
    """
    model, queries, keys = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows, proposals = recipe.anchors * config.block_size, recipe.anchors * config.num_proposals
    softmax, again = _softmax_tokens(config, recipe), 2 if samples * proposals > CHUNK_ROWS else 0
    layer = 6 * rows * (2 * model * queries + 3 * model * config.intermediate_size) + 12 * (length + rows) * model * keys
    layer += 12 * rows * (length + rows) * queries
    sample = config.num_layers * layer + 4 * length * config.feature_size * model + (4 + again) * proposals * model * softmax
    if config.kind is DrafterKind.DOMINO:
        state, rank = config.gru_hidden_dim, config.emb_dim
        sample += proposals * ((6 + again) * rank * softmax + 6 * rank * (model + state) + 12 * model * state + 18 * state**2)
    if recipe.features == "live":
        layers = sum(size for name, size in _sizes(expected_target_tensors(target)).items() if name.startswith("model.layers."))
        sample += 2 * length * layers + 4 * length**2 * target.num_heads * target.head_dim * target.num_layers
    return float(recipe.sequences * sample)


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in shapes.items()}


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
