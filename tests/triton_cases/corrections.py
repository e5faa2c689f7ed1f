"""Correction over the whole vocabulary: tiles, the fused token, the k best."""

import pytest
import torch

from domino_deploy.errors import RequestError
from domino_deploy.plugins import op, reference, triton_kernels, triton_ops, triton_tuning
from tests.support.corrections import operands
from tests.triton_cases import DEVICE, TOLERANCES

DTYPES = list(TOLERANCES)
# batch, vocabulary, rank: one token; a partial tile; a whole one; several, with a rank of more and of less than a block of columns.
SIZES = [(1, 1, 1), (1, 97, 5), (2, 128, 64), (3, 389, 100), (17, 260, 33)]


def inputs(batch, vocab, rank, dtype=torch.float32, seed=0):
    """Base logits and projections in float32, as the drafter's graphs have them, and a codebook of `dtype`."""
    base, z, s, codebook = (tensor.to(DEVICE) for tensor in operands(batch, vocab, rank, seed=seed))
    return base, z, s, codebook.to(dtype)


def tiles_of(base, z, s, codebook):
    """`correction_tiles_kernel` on outputs that start as NaN and -1."""
    (batch, vocab), rank = base.shape, codebook.shape[1]
    tiles = triton_tuning.blocks(vocab, op.TILE_SIZE)
    values = torch.full((batch, tiles), torch.nan, device=DEVICE)
    ids = torch.full((batch, tiles), -1, dtype=torch.int32, device=DEVICE)
    triton_kernels.correction_tiles_kernel[(tiles, batch)](
        base, z, s, codebook, vocab, rank, values, ids, BLOCK_V=op.TILE_SIZE, BLOCK_R=triton_tuning.ONE.correction.columns
    )
    return values, ids


def reduced(values, ids):
    """`reduce_tiles_kernel` on outputs that start as NaN and -1."""
    batch, tiles = values.shape
    token_ids = torch.full((batch,), -1, dtype=torch.int64, device=DEVICE)
    logits = torch.full((batch,), torch.nan, device=DEVICE)
    triton_kernels.reduce_tiles_kernel[(batch,)](values, ids, tiles, token_ids, logits, BLOCK_T=2)
    return token_ids, logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "vocab", "rank"), SIZES)
def test_tiles_and_their_reduction_match_the_reference(batch, vocab, rank, dtype):
    given = inputs(batch, vocab, rank, dtype)
    values, ids = tiles_of(*given)
    want_values, want_ids = reference.logit_correction_tiles(*given)
    torch.testing.assert_close(values, want_values, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert torch.equal(ids, want_ids)
    token_ids, logits = reduced(values, ids)
    want_token, want_logit = reference.fused_logit_correction(*given)
    assert torch.equal(token_ids, want_token)
    torch.testing.assert_close(logits, want_logit, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "vocab", "rank"), [*SIZES, (32, 65, 16)])
def test_fused_token_matches_the_reference(batch, vocab, rank, dtype):
    given = inputs(batch, vocab, rank, dtype)
    token_ids, logits = triton_ops.fused_logit_correction(*given)
    want_token, want_logit = reference.fused_logit_correction(*given)
    assert torch.equal(token_ids, want_token)
    torch.testing.assert_close(logits, want_logit, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_projections_of_a_half_type_are_taken_as_they_are(dtype):
    base, z, s, codebook = inputs(2, 200, 24, dtype)
    given = base, z.to(dtype), s.to(dtype), codebook
    token_ids, logits = triton_ops.fused_logit_correction(*given)
    want_token, want_logit = reference.fused_logit_correction(*given)
    assert torch.equal(token_ids, want_token)
    torch.testing.assert_close(logits, want_logit, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("batch", [1, 2])
def test_strides_are_respected(batch):
    base, z, s, codebook = inputs(batch, 150, 20)
    apart = torch.full((batch, 3, 150), 1e9, device=DEVICE)
    apart[:, 1] = base
    wide = torch.full((150, 50), torch.nan, device=DEVICE)
    wide[:, 7:27] = codebook
    given = apart[:, 1], z.T.contiguous().T, s, wide[:, 7:27]  # z lies column by column
    assert torch.equal(triton_ops.fused_logit_correction(*given)[0], reference.fused_logit_correction(base, z, s, codebook)[0])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("places", [(5, 6), (3, 140), (200, 201, 260)])
def test_tie_goes_to_the_lowest_id(batch, places):
    base, z, s, codebook = inputs(batch, 261, 16)
    base[:, list(places)], codebook[list(places)] = 50.0, 0.0
    given = base, z, s, codebook
    assert triton_ops.fused_logit_correction(*given)[0].tolist() == [places[0]] * batch
    assert reduced(*tiles_of(*given))[0].tolist() == [places[0]] * batch


def test_zeros_of_both_signs_are_a_tie():
    base, z, s, codebook = inputs(1, 140, 16)
    base[:], codebook[:] = -1.0, 0.0
    base[0, 3], base[0, 130] = -0.0, 0.0
    assert triton_ops.fused_logit_correction(base, z, s, codebook)[0].tolist() == [3]


@pytest.mark.parametrize("batch", [1, 2])
def test_nan_wins_with_the_lowest_id_and_is_reported(batch):
    base, z, s, codebook = inputs(batch, 261, 16)
    base[0, 7], base[0, 150], base[0, 201] = torch.inf, torch.nan, torch.nan
    for token_ids, logits in (
        triton_ops.fused_logit_correction(base, z, s, codebook),
        reduced(*tiles_of(base, z, s, codebook)),
    ):
        assert token_ids.tolist() == reference.fused_logit_correction(base, z, s, codebook)[0].tolist()
        assert token_ids[0] == 150
        assert torch.isnan(logits[0])
        assert not torch.isnan(logits[1:]).any()


def test_nan_of_a_projection_takes_every_token():
    base, z, s, codebook = inputs(2, 140, 16)
    z[1, 3] = torch.nan
    token_ids, logits = triton_ops.fused_logit_correction(base, z, s, codebook)
    assert token_ids[1] == 0
    assert torch.isnan(logits).tolist() == [False, True]


@pytest.mark.parametrize("batch", [1, 2])
def test_row_without_a_possible_token_gives_the_first(batch):
    base, z, s, codebook = inputs(batch, 261, 16)
    base[:] = -torch.inf
    for token_ids, logits in (
        triton_ops.fused_logit_correction(base, z, s, codebook),
        reduced(*tiles_of(base, z, s, codebook)),
    ):
        assert token_ids.tolist() == [0] * batch
        assert logits.tolist() == [-torch.inf] * batch


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of exp, whose infinity is meant
def test_extreme_projections():
    base, z, s, codebook = inputs(2, 140, 16)
    z[0], s[0], z[1], s[1] = -3e4, -3e4, 200.0, 300.0
    token_ids, logits = triton_ops.fused_logit_correction(base, z, s, codebook)
    want_token, want_logit = reference.fused_logit_correction(base, z, s, codebook)
    assert torch.equal(token_ids, want_token)
    torch.testing.assert_close(logits, want_logit, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "vocab", "rank", "k"), [(1, 1, 3, 1), (1, 300, 20, 5), (2, 130, 20, 33)])
def test_top_k_matches_the_reference(batch, vocab, rank, k, dtype):
    given = inputs(batch, vocab, rank, dtype)
    ids, logits, log_probs = triton_ops.top_k_logit_correction(*given, k)
    want_ids, want_logits, want_log_probs = reference.top_k_logit_correction(*given, k)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(logits, want_logits, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    torch.testing.assert_close(log_probs, want_log_probs, rtol=TOLERANCES[dtype], atol=4 * TOLERANCES[dtype])


def test_top_k_merges_in_more_than_one_round(monkeypatch):
    monkeypatch.setattr(triton_tuning, "MERGED_KEYS", 32)
    monkeypatch.setattr(triton_tuning, "REDUCED_TILES", 2)
    given = inputs(1, 700, 8)
    ids, _, log_probs = triton_ops.top_k_logit_correction(*given, 7)
    want_ids, _, want_log_probs = reference.top_k_logit_correction(*given, 7)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(log_probs, want_log_probs, rtol=2e-6, atol=1e-5)


def test_top_k_of_tied_and_impossible_tokens():
    base, z, s, codebook = inputs(1, 261, 16)
    base[:], codebook[:] = -torch.inf, 0.0
    base[0, [4, 130, 260]] = 2.0
    ids, logits, log_probs = triton_ops.top_k_logit_correction(base, z, s, codebook, 5)
    assert ids.tolist() == [[4, 130, 260, 0, 1]]
    assert logits.tolist() == [[2.0, 2.0, 2.0, -torch.inf, -torch.inf]]
    torch.testing.assert_close(log_probs[0, :3], torch.full((3,), 3.0, device=DEVICE).log().neg())
    assert log_probs[0, 3:].tolist() == [-torch.inf] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_top_k_reports_nan():
    base, z, s, codebook = inputs(2, 261, 16)
    base[0, 140] = torch.nan
    ids, logits, log_probs = triton_ops.top_k_logit_correction(base, z, s, codebook, 3)
    assert torch.equal(ids, reference.top_k_logit_correction(base, z, s, codebook, 3)[0])
    assert ids[0, 0] == 140
    assert torch.isnan(logits).tolist() == [[True, False, False], [False] * 3]
    assert torch.isnan(log_probs).tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("k", [0, 65])
def test_top_k_of_too_many_tokens_is_refused(k):
    with pytest.raises(RequestError, match=f"expected k from 1 to 64, found {k}"):
        triton_ops.top_k_logit_correction(*inputs(1, 100, 8), k)


def test_inputs_that_do_not_fit_are_refused_all_at_once():
    base, z, s, codebook = inputs(33, 40, 8)
    with pytest.raises(RequestError) as caught:
        triton_ops.fused_logit_correction(base[:, :39], z.long(), s, codebook.T.contiguous().T)
    message = str(caught.value)
    assert "base_logits: expected [33, 40]" in message
    assert "hidden_projection: expected [33, 8] of a floating type" in message
    assert "state_projection" not in message
    assert "batch: expected 1 to 32 rows, found 33" in message
    assert "codebook: expected rows of contiguous floats" in message
