"""Every number of a training run, with the defaults of the demo drafter; frozen and validated."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from domino_deploy.config import DrafterKind
from domino_deploy.errors import CheckpointError, TrainingError, listed
from domino_deploy.strict_json import read_object

CausalEncoding = Literal["teacher-forced", "training-time-test"]
SHIPPED = Path(__file__).parent / "recipes"

# Smallest and largest value of each whole number but the seed. Values beyond any use are refused here: later they would end in an
# overflow, or in an allocation that takes minutes to fail.
_MANY = 2**31 - 1
_RANGES = {
    "num_layers": (1, 1024),
    "num_taps": (1, 1024),
    "block_size": (2, 1024),
    "emb_dim": (1, 2**16),
    "gru_hidden_dim": (1, 2**16),
    "mask_token_id": (0, _MANY),
    "steps": (1, _MANY),
    "epochs": (1, _MANY),
    "sequences": (1, 2**16),
    "micro_batch": (0, 2**16),
    "anchors": (1, 2**16),
    "frequent_tokens": (0, 2**24),
    "random_tokens": (0, 2**24),
    "held_out": (0, _MANY),
    "evaluate_every": (1, _MANY),
    "checkpoint_every": (1, _MANY),
    "max_length": (8, _MANY),
}
# Of the positive numbers; fp32 holds both ends.
_SMALLEST, _LARGEST = 1e-30, 1e30


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Shape of the drafter and course of the run (docs/training.md names the source of every part).

    Shape: num_layers draft layers copied from the target's last ones; num_taps target layers feed them; emb_dim is the rank of the
    correction. `kind` dflash has no head.
    Course: exactly one of steps and epochs. A step takes `sequences` samples, over all processes and passes together, with `anchors`
    random blocks each; `micro_batch` samples go through the model at once on each process (0: its whole share).
    Loss: docs of `objective.py`.
    """

    # What two CPU cores can train in a few hours for a 135M-parameter target; public drafters are larger (5 layers, blocks of 16).
    kind: Literal["domino", "dflash"] = "domino"
    num_layers: int = 2
    block_size: int = 8
    num_taps: int = 5
    emb_dim: int = 48
    gru_hidden_dim: int = 256
    pure_draft_prefix_len: int = 1
    shift_label: bool = True
    mask_token_id: int | None = None  # of the target; there is no usual one

    steps: int | None = 4000
    epochs: int | None = None
    sequences: int = 4
    micro_batch: int = 0
    anchors: int = 16
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    warmup_ratio: float = 0.04
    clip_norm: float = 1.0

    causal_encoding: CausalEncoding = "teacher-forced"
    gamma: float = 4.0
    lambda_start: float = 1.0
    lambda_decay_ratio: float = 1.0
    accept_until_fail: bool = False
    soft_labels: float = 0.0
    # Softmax over the most frequent response tokens, the batch's own tokens and random others; 0 means the whole vocabulary.
    frequent_tokens: int = 6000
    random_tokens: int = 1500

    features: Literal["cached", "live"] = "cached"
    held_out: int = 48
    evaluate_every: int = 1000
    checkpoint_every: int = 500
    max_length: int = 512
    dtype: Literal["float32", "bfloat16"] = "float32"
    save_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [*self._wrong_types()] or [*self._out_of_range()]
        if problems:
            raise TrainingError(listed(f"Training recipe: {len(problems)} value(s) cannot be used", problems, "Correct these values."))

    @property
    def drafter_kind(self) -> DrafterKind:
        return DrafterKind(self.kind)

    def total_steps(self, samples: int) -> int:
        """Optimiser steps of a run over `samples` training samples; the last step of an epoch runs on into the next."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, self.epochs * samples // self.sequences)

    def splits_evenly(self, processes: int) -> bool:
        """Whether every process gets the same number of samples of a step, and takes them in whole passes."""
        return self.sequences % (processes * max(1, self.micro_batch)) == 0

    def to_dict(self) -> dict[str, Any]:
        """As it stands in recipe.json."""
        return dataclasses.asdict(self)

    def _wrong_types(self) -> list[str]:
        problems = []
        for name, hint in get_type_hints(type(self)).items():
            value, kinds = getattr(self, name), get_args(hint) or (hint,)
            if type(None) not in kinds and not isinstance(kinds[0], type):  # a Literal: its values
                if value not in kinds:
                    problems.append(f"{name} must be one of {', '.join(map(str, kinds))}, found {value!r}")
            elif not (type(value) in kinds or (float in kinds and type(value) is int)):
                problems.append(f"{name} must be {' or '.join(_shown(kind) for kind in kinds)}, found {value!r}")
        return problems

    def _out_of_range(self) -> list[str]:
        problems = []
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                problems.append(f"{name} must be {f'at least {least}' if value < least else f'at most {most}'}, found {value}")
        if (self.steps is None) == (self.epochs is None):
            problems.append(f"exactly one of steps and epochs must be given, found steps {self.steps} and epochs {self.epochs}")
        for name in ("learning_rate", "gamma", "clip_norm"):
            if not _SMALLEST <= getattr(self, name) <= _LARGEST:
                problems.append(f"{name} must be positive, from {_SMALLEST} to {_LARGEST}, found {getattr(self, name)}")
        if not 0 <= self.weight_decay <= _LARGEST:
            problems.append(f"weight_decay must be at least 0 and at most {_LARGEST}, found {self.weight_decay}")
        for name in ("warmup_ratio", "lambda_start", "lambda_decay_ratio", "soft_labels"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"{name} must lie in [0, 1], found {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name} must lie in [0, 1), found {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed must lie in [0, 2**63), found {self.seed}")
        proposals = self.block_size if self.shift_label else self.block_size - 1
        if not 0 <= self.pure_draft_prefix_len < proposals:
            problems.append(f"pure_draft_prefix_len must lie in [0, {proposals}), found {self.pure_draft_prefix_len}")
        if self.micro_batch and self.sequences % self.micro_batch:
            problems.append(f"micro_batch must divide sequences ({self.sequences}), found {self.micro_batch}")
        return problems


def read_recipe(name: str | Path, **changes: Any) -> Recipe:
    """A recipe by the name of a shipped one (`qwen3-8b-domino-b16`), or from a recipe.json; `changes` replace its values.

    Fields that the file does not state have the defaults of `Recipe`.

    Raises:
        TrainingError: no such recipe, not JSON, unknown fields, or values that cannot be used.
    """
    path = SHIPPED / f"{name}.json" if str(name) in shipped_recipes() else Path(name)
    if not os.path.isfile(path):  # not Path.is_file: a name too long for a file is no error here
        raise TrainingError(f"{name}: expected a recipe.json or one of {', '.join(shipped_recipes())}, found neither. Check the name.")
    try:
        values = read_object(path)
    except CheckpointError as error:
        raise TrainingError(str(error)) from error
    return recipe_from(values | changes, str(name))


def recipe_from(values: Mapping[str, Any], source: str) -> Recipe:
    """The recipe that `values` state.

    Raises:
        TrainingError: unknown fields, or values that cannot be used.
    """
    known = {field.name for field in dataclasses.fields(Recipe)}
    unknown = sorted(set(values) - known)
    if unknown:
        advice = f"Fields are: {', '.join(sorted(known))}."
        raise TrainingError(listed(f"{source}: {len(unknown)} unknown recipe field(s)", unknown, advice))
    return Recipe(**values)


def _shown(kind: type) -> str:
    return "null" if kind is type(None) else kind.__name__


def shipped_recipes() -> list[str]:
    """Names that `read_recipe` knows."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))
