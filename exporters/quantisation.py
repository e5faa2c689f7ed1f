"""Weights as blocks of small integers: the layout of ONNX Runtime's MatMulNBits and GatherBlockQuantized, and back.

Round to nearest; a block of weights along the input axis shares one float32 scale.  A weight is `(q - zero_point) * scale`, where
symmetric blocks have the zero point 2^(bits-1).  Layout: com.microsoft.MatMulNBits in onnxruntime's ContribOperators.md.

Shape legend: N outputs, K inputs, L blocks per output (K / block size), P bytes of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Quantised(NamedTuple):
    """packed uint8 [N, L, P]; scales float32 [N, L]; zero_points uint8 [N, bytes of L values], None for symmetric blocks."""

    packed: Tensor
    scales: Tensor
    zero_points: Tensor | None


def quantise(weight_NK: Tensor, bits: int, block_size: int, *, symmetric: bool) -> Quantised:
    """Quantise a float32 matrix whose input axis is a whole number of blocks.

    Symmetric blocks are scaled so that the weight of the largest magnitude becomes -2^(bits-1): it is met exactly, and all
    2^bits integers are used.
    """
    blocks_NLk = weight_NK.unflatten(1, (-1, block_size))
    levels, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        low, high = blocks_NLk.amin(-1), blocks_NLk.amax(-1)
        scales_NL = torch.where(high > -low, high, low) / -middle
        zeros_NL = torch.full_like(scales_NL, middle)
    else:
        low, high = blocks_NLk.amin(-1).clamp_(max=0), blocks_NLk.amax(-1).clamp_(min=0)
        scales_NL = (high - low) / levels
        zeros_NL = (-low / _not_zero(scales_NL)).round_().clamp_(0, levels)
    integers = (blocks_NLk / _not_zero(scales_NL)[..., None]).round_().add_(zeros_NL[..., None]).clamp_(0, levels).to(torch.uint8)
    zero_points = None if symmetric else _packed(zeros_NL.to(torch.uint8), bits)
    return Quantised(_packed(integers, bits), scales_NL, zero_points)


def dequantise(quantised: Quantised, bits: int) -> Tensor:
    """The float32 matrix [N, K] that the integers stand for."""
    integers = _unpacked(quantised.packed, bits).float()
    scales_NL = quantised.scales
    if quantised.zero_points is None:
        integers -= 2 ** (bits - 1)
    else:
        integers -= _unpacked(quantised.zero_points, bits)[:, : scales_NL.shape[1], None].float()
    return (integers * scales_NL[..., None]).flatten(1)


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.ones_like(scales), scales)  # a block of zeros


def _packed(integers: Tensor, bits: int) -> Tensor:
    """Four-bit values in pairs, the even one in the low half of the byte; an odd one out has a zero beside it."""
    if bits == 8:
        return integers
    if integers.shape[-1] % 2:
        integers = torch.nn.functional.pad(integers, (0, 1))
    return integers[..., 0::2] | (integers[..., 1::2] << 4)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
