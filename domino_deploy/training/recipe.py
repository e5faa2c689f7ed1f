"""Every number of a training run, with the defaults of the demo drafter; frozen and validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from domino_deploy.errors import TrainingError, listed

_COUNTS = ("num_layers", "num_taps", "emb_dim", "gru_hidden_dim", "steps", "sequences", "anchors", "evaluate_every")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Shape of the drafter and course of the run (docs/architecture.md, "Training").

    Shape: num_layers draft layers copied from the target's last ones; emb_dim rank of the correction.
    Batch: `sequences` samples a step with `anchors` random blocks each.
    Loss: position weight exp(-j / gamma) for proposal j; lambda_start falls linearly to 0 over `lambda_decay_ratio` of the steps.
    """

    # What two CPU cores can train in a few hours for a 135M-parameter target; public drafters are larger (5 layers, blocks of 16).
    num_layers: int = 2
    block_size: int = 8
    num_taps: int = 5
    emb_dim: int = 48
    gru_hidden_dim: int = 256
    pure_draft_prefix_len: int = 1
    shift_label: bool = True
    mask_token_id: int = 16  # `<empty_output>` of the demo target; for another target name one that its text never holds

    steps: int = 4000
    sequences: int = 4
    anchors: int = 16
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_ratio: float = 0.04
    clip_norm: float = 1.0
    gamma: float = 4.0
    lambda_start: float = 1.0
    lambda_decay_ratio: float = 1.0
    # Softmax over the most frequent response tokens, the batch's own tokens and random others; 0 means the whole vocabulary.
    frequent_tokens: int = 6000
    random_tokens: int = 1500

    held_out: int = 48
    evaluate_every: int = 1000
    max_length: int = 512
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least {least}, found {getattr(self, name)}"
            for name, least in (
                *((name, 1) for name in _COUNTS),
                *((name, 0) for name in ("frequent_tokens", "random_tokens", "held_out")),
                ("block_size", 2),
                ("max_length", 8),
            )
            if getattr(self, name) < least
        ]
        for name in ("learning_rate", "gamma", "clip_norm"):
            if not getattr(self, name) > 0:
                problems.append(f"{name} must be positive, found {getattr(self, name)}")
        if not self.weight_decay >= 0:
            problems.append(f"weight_decay must be at least 0, found {self.weight_decay}")
        for name in ("warmup_ratio", "lambda_start", "lambda_decay_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"{name} must lie in [0, 1], found {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed must lie in [0, 2**63), found {self.seed}")
        proposals = self.block_size if self.shift_label else self.block_size - 1
        if not 0 <= self.pure_draft_prefix_len < proposals:
            problems.append(f"pure_draft_prefix_len must lie in [0, {proposals}), found {self.pure_draft_prefix_len}")
        if self.dtype not in ("float32", "bfloat16"):
            problems.append(f"dtype must be float32 or bfloat16, found {self.dtype}")
        if problems:
            raise TrainingError(listed(f"Training recipe: {len(problems)} value(s) out of range", problems, "Correct these values."))
