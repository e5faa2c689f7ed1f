"""The two operators of `model/ops.py`: values, gradients and registration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from domino_deploy.model import ops
from domino_deploy.model.layers import cached_mask, causal_mask


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoFormer's rotation in the usual full-width form: x * cos + rotate_half(x) * sin."""
    half = x.shape[-1] // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * torch.cat([cos, cos], -1)[:, None] + rotated * torch.cat([sin, sin], -1)[:, None]


def rotary_inputs(
    batch: int = 2, heads: int = 3, rows: int = 5, width: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, heads, rows, width, generator=generator, dtype=dtype)
    angle = 6.3 * torch.rand(batch, rows, width // 2, generator=generator, dtype=dtype)
    return x, angle.cos(), angle.sin()


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 3, 5, 8), (1, 9, 17, 64), (3, 2, 0, 4)], ids=str)
def test_rotation_equals_the_plain_formula(shape: tuple[int, int, int, int]) -> None:
    x, cos, sin = rotary_inputs(*shape)
    torch.testing.assert_close(ops.rotary_embedding(x, cos, sin), plain_rotation(x, cos, sin), atol=1e-12, rtol=0)


def test_rotation_of_a_transposed_view_equals_that_of_its_copy() -> None:
    x, cos, sin = rotary_inputs()
    view = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.is_contiguous()
    assert torch.equal(ops.rotary_embedding(view, cos, sin), ops.rotary_embedding(x, cos, sin))


def test_rotation_is_isometric_and_sees_position_differences_only() -> None:
    x, _, _ = rotary_inputs(rows=2)
    first, second = x[:, :, :1], x[:, :, 1:]

    def at(vectors: Tensor, position: float) -> Tensor:
        angle = position * torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64).expand(2, 1, 4)
        return ops.rotary_embedding(vectors, angle.cos(), angle.sin())

    torch.testing.assert_close(at(first, 7).norm(dim=-1), first.norm(dim=-1))
    torch.testing.assert_close((at(first, 7) * at(second, 3)).sum(-1), (at(first, 107) * at(second, 103)).sum(-1))
    assert not torch.allclose((at(first, 7) * at(second, 3)).sum(-1), (at(first, 3) * at(second, 7)).sum(-1))


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_rotation_gradient_equals_autograd_of_the_plain_formula(transposed: bool) -> None:
    x, cos, sin = rotary_inputs()
    if transposed:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (ops.rotary_embedding(ours, cos, sin) * weights).sum().backward()
    (plain_rotation(theirs, cos, sin) * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=0)


def test_rotation_gradient_passes_gradcheck() -> None:
    x, cos, sin = rotary_inputs(batch=1, heads=2, rows=3, width=4)
    assert torch.autograd.gradcheck(lambda x: ops.rotary_embedding(x, cos, sin), (x.requires_grad_(),))


CACHE_CASES = {
    "ragged": (3, 2, 9, 4, 3, [0, 6, 2]),
    "whole cache": (1, 2, 4, 4, 4, [0]),
    "last slot": (2, 1, 5, 2, 1, [4, 4]),
    "no rows": (2, 1, 5, 2, 0, [1, 5]),
}


def cache_inputs(name: str) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, capacity, width, rows, index = CACHE_CASES[name]
    generator = torch.Generator().manual_seed(2)
    cache = torch.randn(batch, heads, capacity, width, generator=generator)
    return cache, torch.randn(batch, heads, rows, width, generator=generator), torch.tensor(index)


@pytest.mark.parametrize("name", CACHE_CASES)
def test_cache_update_equals_a_loop(name: str) -> None:
    cache, rows, write_index = cache_inputs(name)
    expected = cache.clone()
    for b, start in enumerate(write_index.tolist()):
        for s in range(rows.shape[2]):
            expected[b, :, start + s] = rows[b, :, s]
    before = cache.clone()
    assert torch.equal(ops.cache_update(cache, rows, write_index), expected)
    assert torch.equal(cache, before), "the given cache must stay as it was"


def test_cache_update_takes_rows_that_are_views() -> None:
    cache, rows, write_index = cache_inputs("ragged")
    view = rows.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(ops.cache_update(cache, view, write_index), ops.cache_update(cache, rows, write_index))


def test_cache_update_beyond_the_capacity_raises() -> None:
    cache, rows, _ = cache_inputs("ragged")
    with pytest.raises(RuntimeError, match="out of bounds"):
        ops.cache_update(cache, rows, torch.tensor([0, 7, 0]))


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_operators_pass_opcheck(transposed: bool) -> None:
    """Schema, fake tensors (shapes *and* strides), autograd registration, AOT dispatch."""

    def laid_out(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x

    x, cos, sin = rotary_inputs(dtype=torch.float32)
    torch.library.opcheck(ops.rotary_embedding, (laid_out(x), cos, sin))
    torch.library.opcheck(ops.rotary_embedding, (laid_out(x).requires_grad_(), cos, sin))
    cache, rows, write_index = cache_inputs("ragged")
    torch.library.opcheck(ops.cache_update, (laid_out(cache), laid_out(rows), write_index))


def test_causal_mask_is_lower_triangular() -> None:
    expected = [[[[True, False, False], [True, True, False], [True, True, True]]]]
    assert causal_mask(3).tolist() == expected


def test_cached_mask_shows_each_row_the_slots_up_to_its_own() -> None:
    mask = cached_mask(torch.tensor([0, 3]), rows=2, capacity=6)
    for b, start in enumerate((0, 3)):
        for row in range(2):
            assert mask[b, 0, row].tolist() == [slot <= start + row for slot in range(6)]
