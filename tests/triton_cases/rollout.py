"""A block's rollout: the tokens of the PyTorch head, whatever the variant; and as many launches as it says."""

import pytest
import torch
from torch import nn

from domino_deploy.errors import RequestError
from domino_deploy.plugins import (
    reference,
    triton_bounds,
    triton_cell,
    triton_certified,
    triton_kernels,
)
from domino_deploy.plugins.triton_rollout import RolloutWeights, TritonRollout, embedding_table
from domino_deploy.plugins.triton_traffic import Variant
from tests.triton_cases import DEVICE, TOLERANCES

VOCAB, RANK, WIDTH, UNITS, PROPOSALS = 261, 24, 20, 17, 4


def seeded(*shape, scale=1.0, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(scale).to(DEVICE)


def weights(dtype=torch.float32, **changed):
    tensors = {
        "embedding": seeded(VOCAB, WIDTH, seed=1),
        "w_ih": seeded(3 * UNITS, WIDTH, scale=0.5, seed=2),
        "w_hh": seeded(3 * UNITS, UNITS, scale=0.5, seed=3),
        "state_projection": seeded(RANK, 5 + UNITS, seed=4)[:, 5:],  # columns of W1
        "codebook": seeded(VOCAB, RANK, scale=0.3, seed=5),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return RolloutWeights(**{**tensors, "prefilter": triton_bounds.by_int8_rows(tensors["codebook"]), **changed})


def block(batch, seed=7):
    """Anchors, hidden projections and base logits."""
    anchors = torch.randint(0, VOCAB, (batch,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return anchors, seeded(batch, PROPOSALS, RANK, seed=seed + 1), seeded(batch, PROPOSALS, VOCAB, seed=seed + 2)


def drafted(made, anchors, projected, base, prefix_len):
    """The rollout in plain PyTorch: nn.GRU's own cell and the reference correction."""
    cell = nn.GRUCell(WIDTH, UNITS, bias=False, device=DEVICE)
    with torch.no_grad():
        cell.weight_ih.copy_(made.w_ih)
        cell.weight_hh.copy_(made.w_hh)
        state, token, tokens = torch.zeros(anchors.shape[0], UNITS, device=DEVICE), anchors, []
        for step in range(PROPOSALS):
            state = cell(made.embedding[token].float(), state)
            if step < prefix_len:
                token = base[:, step].argmax(dim=-1)
            else:
                s = state @ made.state_projection.float().T
                token, _ = reference.fused_logit_correction(base[:, step], projected[:, step], s, made.codebook)
            token = token if made.token_ids is None else made.token_ids[token]
            tokens.append(token)
    return torch.stack(tokens, dim=1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("prefix_len", [0, 2])
@pytest.mark.parametrize("variant", list(Variant))
def test_drafts_are_those_of_the_plain_loop(variant, prefix_len, batch):
    made, given = weights(), block(batch)
    rollout = TritonRollout(made, batch, PROPOSALS, variant, prefix_len, pool_size=16)
    assert torch.equal(rollout(*given), drafted(made, *given, prefix_len))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("batch", [1, 2])
def test_drafts_of_weights_of_every_type(batch, dtype):
    made, given = weights(dtype), block(batch)
    assert torch.equal(TritonRollout(made, batch, PROPOSALS, "int8")(*given), drafted(made, *given, 0))


@pytest.mark.parametrize("batch", [1, 2])
def test_table_replaces_the_embedding_and_w_ih(batch):
    made, given = weights(), block(batch)
    table = embedding_table(made.embedding, made.w_ih)
    nowhere = {"embedding": torch.full_like(made.embedding, torch.nan), "w_ih": torch.full_like(made.w_ih, torch.nan)}
    assert torch.equal(TritonRollout(weights(table=table, **nowhere), batch, PROPOSALS, "full")(*given), drafted(made, *given, 0))


@pytest.mark.parametrize("variant", list(Variant))
def test_draft_vocabulary(variant):
    kept = torch.arange(0, VOCAB, 2, device=DEVICE)
    codebook = seeded(len(kept), RANK, scale=0.3, seed=5)
    made = weights(codebook=codebook, prefilter=triton_bounds.by_int8_rows(codebook), token_ids=kept)
    anchors, projected, base = block(2)
    given = anchors, projected, base[:, :, : len(kept)].contiguous()
    rollout = TritonRollout(made, 2, PROPOSALS, variant, 1, pool_size=16)
    assert torch.equal(rollout(*given), drafted(made, *given, 1))


def test_a_block_leaves_nothing_to_the_next():
    made, (first, second) = weights(), (block(2), block(2, seed=20))
    rollout = TritonRollout(made, 2, PROPOSALS, "pool", 1, pool_size=8)
    for given in (first, second, first):
        assert torch.equal(rollout(*given), drafted(made, *given, 1))


def test_inputs_may_be_written_to_the_buffers():
    made, given = weights(), block(2)
    rollout = TritonRollout(made, 2, PROPOSALS, "full")
    buffers = rollout.anchor_ids, rollout.hidden_projection, rollout.base_logits
    for buffer, tensor in zip(buffers, given, strict=True):
        buffer.copy_(tensor)
    assert torch.equal(rollout(*buffers), drafted(made, *given, 0))


def test_contenders_are_counted_per_proposal():
    made, given = weights(), block(2)
    rollout = TritonRollout(made, 2, PROPOSALS, "int8", 1)
    rollout(*given)
    assert rollout.contenders[0].tolist() == [0, 0]
    assert (rollout.contenders[1:] >= 1).all()
    assert (rollout.contenders < VOCAB // 4).all()


def test_nan_in_a_block_is_drafted_where_it_is():
    made, (anchors, projected, base) = weights(), block(1)
    base[0, 1, 140] = torch.nan
    rollout = TritonRollout(made, 1, PROPOSALS, "full", 0)
    assert rollout(anchors, projected, base)[0, 1] == 140


@pytest.mark.parametrize("prefix_len", [0, 1, PROPOSALS])
@pytest.mark.parametrize("variant", list(Variant))
def test_launches_are_as_many_as_stated(variant, prefix_len, monkeypatch):
    launches = []
    for module in (triton_kernels, triton_certified, triton_cell):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Counted(getattr(module, name), launches))
    rollout = TritonRollout(weights(), 1, PROPOSALS, variant, prefix_len, pool_size=16)
    launches.clear()
    rollout(*block(1))
    assert len(launches) == rollout.traffic().launches


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        self.launches.append(grid)
        return self.kernel[grid]


def test_numbers_out_of_range_are_refused_all_at_once():
    with pytest.raises(RequestError) as caught:
        TritonRollout(weights(prefilter=None), 33, 0, "int8", -1)
    message = str(caught.value)
    assert "batch: expected 1 to 32, found 33" in message
    assert "proposals: expected 1 or more, found 0" in message
    assert "prefix_len: expected 0 or more, found -1" in message
    assert "variant int8: expected weights with a prefilter, found none" in message


def test_unknown_variant_is_refused():
    with pytest.raises(RequestError, match="variant: expected one of full, int8, pool, found best"):
        TritonRollout(weights(), 1, 1, "best")


def test_weights_that_do_not_fit_are_refused_all_at_once():
    with pytest.raises(RequestError) as caught:
        weights(w_ih=seeded(UNITS, WIDTH), codebook=seeded(VOCAB, RANK + 1), token_ids=torch.arange(3, device=DEVICE))
    message = str(caught.value)
    assert f"w_ih: expected [{3 * UNITS}, {WIDTH}]" in message
    assert f"state_projection: expected [{RANK + 1}, {UNITS}]" in message
    assert f"token_ids: expected [{VOCAB}] of torch.int64, found [3] of torch.int64" in message
    assert "w_hh" not in message


def test_inputs_of_another_batch_are_refused():
    anchors, projected, base = block(2)
    rollout = TritonRollout(weights(), 1, PROPOSALS, "full")
    with pytest.raises(RequestError) as caught:
        rollout(anchors, projected.half(), base[:1])
    message = str(caught.value)
    assert "anchor_ids: expected [1] of torch.int64, found [2]" in message
    assert "hidden_projection: expected" in message
    assert "base_logits" not in message
