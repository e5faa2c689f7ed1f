"""Certified corrections: the token of the whole vocabulary out of the rows that a bound does not rule out."""

import dataclasses

import pytest
import torch

from domino_deploy.plugins import reference, triton_bounds, triton_ops
from tests.triton_cases import DEVICE, TOLERANCES
from tests.triton_cases.corrections import SIZES, inputs

DTYPES = list(TOLERANCES)


def certified(base, z, s, codebook):
    return triton_ops.certified_logit_correction(base, z, s, codebook, triton_bounds.by_int8_rows(codebook))


def near_ties(batch):
    """Every token within the int8 rows' error of the best one: only exact correction tells them apart."""
    generator = torch.Generator().manual_seed(1)
    base, z, s = torch.zeros(batch, 300), torch.ones(batch, 16), torch.zeros(batch, 16)
    codebook = torch.ones(300, 16) + 0.03 * torch.rand(300, 16, generator=generator)
    codebook[:, 0] = 4.0  # sets the scale of every row: one step of int8 is 0.03
    return [tensor.to(DEVICE) for tensor in (base, z, s, codebook)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "vocab", "rank"), SIZES)
def test_int8_rows_give_the_full_kernels_token_and_logit(batch, vocab, rank, dtype):
    given = inputs(batch, vocab, rank, dtype)
    token_ids, logits, contenders = certified(*given)
    want_token, want_logit = triton_ops.fused_logit_correction(*given)
    assert torch.equal(token_ids, want_token)
    assert torch.equal(logits, want_logit)  # bit for bit: the same sums in the same order
    assert torch.equal(token_ids, reference.fused_logit_correction(*given)[0])
    assert (contenders >= 1).all()
    assert (contenders <= vocab).all()


def test_int8_rows_rule_most_tokens_out():
    contenders = certified(*inputs(2, 900, 64, torch.bfloat16))[2]
    assert (contenders < 45).all()  # 5 %


@pytest.mark.parametrize("batch", [1, 2])
def test_near_ties_are_decided_by_the_exact_rows(batch):
    given = near_ties(batch)
    token_ids, _, contenders = certified(*given)
    assert token_ids.tolist() == reference.fused_logit_correction(*given)[0].tolist()
    assert (contenders > 100).all()


def test_the_bound_is_what_decides_near_ties():
    """Without the errors of the rows the int8 logits alone would choose which rows are corrected, and the token is another one."""
    base, z, s, codebook = near_ties(1)
    approximation = triton_bounds.by_int8_rows(codebook)
    blind = dataclasses.replace(approximation, errors=torch.zeros_like(approximation.errors))
    token_ids = triton_ops.certified_logit_correction(base, z, s, codebook, blind)[0]
    assert token_ids.tolist() != reference.fused_logit_correction(base, z, s, codebook)[0].tolist()


@pytest.mark.parametrize("batch", [1, 2])
def test_ties_go_to_the_lowest_id(batch):
    base, z, s, codebook = inputs(batch, 261, 16)
    base[:, [3, 140, 260]], codebook[[3, 140, 260]] = 50.0, 0.0
    assert certified(base, z, s, codebook)[0].tolist() == [3] * batch


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("where", ["base", "codebook", "projection"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_wins_and_is_reported(batch, where):
    base, z, s, codebook = inputs(batch, 261, 16)
    {"base": base[0, 150:], "codebook": codebook[150:, 3], "projection": z[0, 3:]}[where][0] = torch.nan
    token_ids, logits, _ = certified(base, z, s, codebook)
    assert token_ids.tolist() == reference.fused_logit_correction(base, z, s, codebook)[0].tolist()
    assert torch.isnan(logits[0])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_impossible_tokens_are_no_contenders():
    base, z, s, codebook = inputs(1, 261, 16)
    base[0, :200] = -torch.inf
    token_ids, _, contenders = certified(base, z, s, codebook)
    assert token_ids.tolist() == reference.fused_logit_correction(base, z, s, codebook)[0].tolist()
    assert contenders.item() <= 61 + 128  # a tile without a possible token has nothing to rule its tokens out by, if it comes first
    base[:] = -torch.inf
    assert certified(base, z, s, codebook)[0].tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "scale"), [(1, 1.0), (40, 1e-3), (256, 1.0), (256, 1e3)])
def test_bound_covers_the_difference_of_the_computed_logits(rank, scale, dtype):
    base, z, s, codebook = inputs(1, 500, rank, torch.float32)
    codebook = (codebook * scale).to(dtype)
    bottleneck = torch.nn.functional.silu(z + s)[0]
    for approximation, about in (
        (rows := triton_bounds.by_int8_rows(codebook), base[0] + rows.scales * (rows.quantised.float() @ bottleneck)),
        (mean := triton_bounds.by_mean(*reference.deviations(codebook)), base[0] + mean.mean @ bottleneck),
    ):
        exact = base[0].double() + codebook.double() @ bottleneck.double()
        bound = approximation.errors * bottleneck.norm() + triton_bounds.slack(rank) * base[0].abs()
        assert ((about - exact).abs() <= bound).all()
    assert (bound > 0).all()


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(("batch", "vocab", "rank", "size"), [(1, 97, 5, 1), (3, 389, 100, 40), (2, 40, 8, 40)])
def test_pool_matches_the_reference(batch, vocab, rank, size, is_exact):
    base, z, s, codebook = inputs(batch, vocab, rank)
    base[0] *= 20  # a row whose pool settles it
    given = base, z, s, codebook, *reference.deviations(codebook), reference.candidates(base, size), is_exact
    token_ids, logits, is_uncertified = triton_ops.pooled_logit_correction(*given)
    want_token, want_logit, want_uncertified = reference.pooled_logit_correction(*given)
    assert torch.equal(token_ids, want_token)
    torch.testing.assert_close(logits, want_logit, rtol=2e-6, atol=2e-6)
    assert torch.equal(is_uncertified, want_uncertified)


def test_pool_certifies_some_rows_and_not_others():
    base, z, s, codebook = inputs(2, 389, 20)
    base[0], base[0, 300], base[1] = 0.0, 1e3, 0.0
    given = base, z, s, codebook, *reference.deviations(codebook), reference.candidates(base, 8)
    assert triton_ops.pooled_logit_correction(*given, False)[2].tolist() == [False, True]


def test_pool_that_misses_the_best_token_finds_it_when_exact():
    base, z, s, codebook = inputs(1, 389, 20)
    best = reference.fused_logit_correction(base, z, s, codebook)[0].item()
    pool = torch.tensor([[token for token in (5, 9, 200) if token != best]], device=DEVICE)
    given = base, z, s, codebook, *reference.deviations(codebook), pool
    assert triton_ops.pooled_logit_correction(*given, True)[0].item() == best
    assert triton_ops.pooled_logit_correction(*given, False)[0].item() != best
