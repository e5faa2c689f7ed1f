"""Operators that ONNX has and PyTorch lacks, as torch.library operators with plain PyTorch bodies.

`exporters/translations.py` turns each into its ONNX node.  RMS norm and attention need no operator of our own:
`F.rms_norm` and `F.scaled_dot_product_attention` are translated as they are.

Shape legend: B batch, S new rows, C cache capacity, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("domino::rotary_embedding", mutates_args=())
def rotary_embedding(x_BHSD: Tensor, cos_BSd: Tensor, sin_BSd: Tensor) -> Tensor:
    """Rotate the two halves of each head by the angles of its position (RoFormer, arXiv 2104.09864).

    Args:
        x_BHSD: queries or keys.
        cos_BSd: cosines, d = D / 2, one row per position.
        sin_BSd: sines, likewise.
    """
    first, second = x_BHSD.chunk(2, dim=-1)
    cos, sin = cos_BSd.unsqueeze(1), sin_BSd.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@rotary_embedding.register_fake
def _(x_BHSD: Tensor, cos_BSd: Tensor, sin_BSd: Tensor) -> Tensor:
    # Not empty_like: it would keep the strides of a transposed view, and `cat` does not.
    return x_BHSD.new_empty(x_BHSD.shape)


def _save_angles(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _rotate_back(ctx: Any, grad_BHSD: Tensor) -> tuple[Tensor, None, None]:
    # A rotation's transpose is the rotation by the opposite angle; angles get no gradient.
    cos, sin = ctx.saved_tensors
    return rotary_embedding(grad_BHSD.contiguous(), cos, -sin), None, None


rotary_embedding.register_autograd(_rotate_back, setup_context=_save_angles)


@torch.library.custom_op("domino::cache_update", mutates_args=())
def cache_update(cache_BHCD: Tensor, rows_BHSD: Tensor, write_index_B: Tensor) -> Tensor:
    """Return the cache with `rows` written from row `write_index[b]` on: ONNX TensorScatter, mode linear.

    Args:
        cache_BHCD: keys or values.
        rows_BHSD: new rows; `write_index[b] + S <= C` must hold.
        write_index_B: int64.
    """
    updated = cache_BHCD.clone(memory_format=torch.contiguous_format)
    slots_BS = write_index_B[:, None] + torch.arange(rows_BHSD.shape[2], device=rows_BHSD.device)
    index = slots_BS[:, None, :, None].expand_as(rows_BHSD)
    return updated.scatter_(2, index, rows_BHSD)


@cache_update.register_fake
def _(cache_BHCD: Tensor, rows_BHSD: Tensor, write_index_B: Tensor) -> Tensor:
    return cache_BHCD.new_empty(cache_BHCD.shape)
