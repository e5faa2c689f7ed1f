"""Rotary frequencies and angles: default, linear, llama3 and yarn scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from domino_deploy.config import RopeConfig, RopeType


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies [head_dim / 2] (fp32) and the factor on cosine and sine.

    Formulas: default RoFormer 3.2; linear arXiv 2306.15595; llama3 as in Llama 3.1's reference code;
    yarn arXiv 2309.00071, section 3.2 (ramp) and eq. 22 (temperature).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.type is RopeType.LINEAR:
        return frequencies / rope.factor, 1.0
    if rope.type is RopeType.LLAMA3:
        return _llama3(rope, frequencies), 1.0
    if rope.type is RopeType.YARN:
        temperature = 0.1 * math.log(rope.factor) + 1.0 if rope.attention_factor is None else rope.attention_factor
        return _yarn(rope, frequencies, head_dim), temperature
    return frequencies, 1.0


def angles(
    position_ids_BS: Tensor, inverse_frequencies_d: Tensor, factor: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, S, D / 2] for int64 positions [B, S], computed in fp32 and given in `dtype`."""
    phase = position_ids_BS[..., None].float() * inverse_frequencies_d.float()
    return (phase.cos() * factor).to(dtype), (phase.sin() * factor).to(dtype)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    old_length = rope.original_max_position_embeddings
    turns = old_length * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    # A ramp without width becomes a step.  One whose ends lie outside the head may have a negative width: transformers
    # divides by it as it is, and so models are trained.
    width = (high - low) or 1e-3
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return ramp * frequencies / rope.factor + (1 - ramp) * frequencies
