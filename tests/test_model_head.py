"""The Domino head: its GRU against `torch.nn.GRU`, its rollout against a slow loop in the paper's terms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from domino_deploy.config import DrafterKind
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.head import PrefixGRU
from domino_deploy.plugins import reference
from domino_deploy.plugins.torch_op import fused_logit_correction
from tests.support.tiny_models import VOCAB, WIDTH, randomize, tiny_drafter

BATCH = 3
LAYOUTS = pytest.mark.parametrize(("shift_label", "prefix"), [(True, 0), (True, 1), (True, 3), (False, 0), (False, 1), (False, 3)])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def torch_gru(gru: PrefixGRU) -> nn.GRU:
    """PyTorch's GRU with the same weights, loaded by the same names."""
    theirs = nn.GRU(gru.weight_ih_l0.shape[1], gru.weight_hh_l0.shape[1], bias=False, batch_first=True)
    theirs.load_state_dict(gru.state_dict(), strict=True)
    return theirs


def embedding() -> nn.Embedding:
    return randomize(nn.Embedding(VOCAB, WIDTH), seed=2)


def backbone_outputs(drafter: DrafterModel) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors [B], hidden states of all block positions [B, P, M], base logits of all positions [B, P, V]."""
    block = drafter.config.block_size
    anchors = torch.randint(VOCAB, (BATCH,), generator=torch.Generator().manual_seed(3))
    return anchors, normal(BATCH, block, WIDTH, seed=4), normal(BATCH, block, VOCAB, seed=5)


@torch.inference_mode()
def drafted_tokens(drafter: DrafterModel, embed: nn.Embedding) -> Tensor:
    anchors, hidden, base = backbone_outputs(drafter)
    return drafter.draft(embed, anchors, drafter.proposal_rows(hidden), drafter.proposal_rows(base))


@torch.inference_mode()
def slow_draft(drafter: DrafterModel, embed: nn.Embedding, b: int) -> list[int]:
    """One sequence in the terms of design notes and paper: offsets j, block positions p, `torch.nn.GRU` from scratch each time."""
    config, gru = drafter.config, torch_gru(drafter.prefix_gru)
    anchors, hidden, base = backbone_outputs(drafter)
    first_layer, codebook = drafter.embed_proj[0].weight, drafter.embed_proj[2].weight
    # Shifted labels: position p predicts offset p + 1.  Otherwise position p predicts offset p, and position 0 nothing.
    first_corrected_position = config.pure_draft_prefix_len + (0 if config.shift_label else 1)
    tokens = [int(anchors[b])]  # tokens[j] is the token at offset j
    for j in range(1, config.num_proposals + 1):
        position = j - 1 if config.shift_label else j
        logits = base[b, position]
        if position >= first_corrected_position:
            state = gru(embed(torch.tensor([tokens[:j]])))[1][0, 0]  # has consumed offsets 0..j-1, no more and no less
            bottleneck = first_layer @ torch.cat([hidden[b, position], state])
            logits = logits + codebook @ (bottleneck * torch.sigmoid(bottleneck))
        tokens.append(int(logits.argmax()))
    return tokens[1:]


def test_gru_equals_torch_gru_over_fifteen_steps() -> None:
    gru = randomize(PrefixGRU(WIDTH, 10), seed=1)
    inputs = 3 * normal(BATCH, 15, WIDTH, seed=6)
    with torch.inference_mode():
        expected, _ = torch_gru(gru)(inputs)
        state, states = torch.zeros(BATCH, 10), []
        for step in range(15):
            state = gru(inputs[:, step] @ gru.weight_ih_l0.T, state)
            states.append(state)
    torch.testing.assert_close(torch.stack(states, dim=1), expected, atol=1e-6, rtol=0)


def test_gru_gradients_equal_torch_gru() -> None:
    ours = randomize(PrefixGRU(WIDTH, 10), seed=1)
    theirs = torch_gru(ours)
    inputs, weights = normal(BATCH, 6, WIDTH, seed=6), normal(BATCH, 10, seed=7)
    state = torch.zeros(BATCH, 10)
    for step in range(6):
        state = ours(inputs[:, step] @ ours.weight_ih_l0.T, state)
    (state * weights).sum().backward()
    (theirs(inputs)[1][0] * weights).sum().backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, getattr(theirs, name).grad, atol=1e-5, rtol=0)


def test_new_gru_has_torch_grus_names_shapes_and_spread() -> None:
    torch.manual_seed(0)
    ours = PrefixGRU(WIDTH, 100).state_dict()
    theirs = nn.GRU(WIDTH, 100, bias=False).state_dict()
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: tensor.shape for name, tensor in theirs.items()}
    for name, tensor in ours.items():
        assert tensor.abs().max() <= 0.1
        assert tensor.std() == pytest.approx(theirs[name].std().item(), rel=0.05)


@LAYOUTS
def test_rollout_equals_the_slow_loop(shift_label: bool, prefix: int) -> None:
    drafter, embed = tiny_drafter(shift_label=shift_label, pure_draft_prefix_len=prefix), embedding()
    drafted = drafted_tokens(drafter, embed)
    assert drafted.dtype == torch.int64
    assert drafted.tolist() == [slow_draft(drafter, embed, b) for b in range(BATCH)]


@LAYOUTS
def test_state_for_offset_j_has_consumed_offsets_below_j(shift_label: bool, prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, embed = tiny_drafter(shift_label=shift_label, pure_draft_prefix_len=prefix), embedding()
    seen: list[Tensor] = []
    project = drafter.head.project_state
    monkeypatch.setattr(drafter.head, "project_state", lambda state: (seen.append(state.clone()), project(state))[1])
    drafted = drafted_tokens(drafter, embed)
    anchors, *_ = backbone_outputs(drafter)
    with torch.inference_mode():
        states, _ = torch_gru(drafter.prefix_gru)(embed(torch.cat([anchors[:, None], drafted], dim=1)))
    # states[:, k] has consumed offsets 0..k; the first corrected offset is prefix + 1.
    offsets = range(prefix + 1, drafter.config.num_proposals + 1)
    assert len(seen) == len(offsets)
    for offset, state in zip(offsets, seen, strict=True):
        torch.testing.assert_close(state, states[:, offset - 1], atol=1e-6, rtol=0)


def test_correction_changes_the_draft_and_spares_the_prefix() -> None:
    corrected = drafted_tokens(tiny_drafter(pure_draft_prefix_len=2), embedding())
    drafter = tiny_drafter(pure_draft_prefix_len=2)
    _, _, base = backbone_outputs(drafter)
    plain = base.argmax(dim=-1)
    assert torch.equal(corrected[:, :2], plain[:, :2])
    assert (corrected[:, 2:] != plain[:, 2:]).any()


def test_shorter_rollout_is_the_beginning_of_the_longer_one() -> None:
    drafter, embed = tiny_drafter(), embedding()
    anchors, hidden, base = backbone_outputs(drafter)
    with torch.inference_mode():
        whole = drafter.draft(embed, anchors, hidden, base)
        for count in range(1, 5):
            assert torch.equal(drafter.draft(embed, anchors, hidden[:, :count], base[:, :count]), whole[:, :count])


def test_dflash_drafts_the_argmax_of_the_base_logits() -> None:
    drafter = tiny_drafter(kind=DrafterKind.DFLASH)
    anchors, hidden, base = backbone_outputs(drafter)
    assert drafter.head is None
    assert torch.equal(drafter.draft(embedding(), anchors, hidden, base), base.argmax(dim=-1))


@pytest.mark.parametrize(("shift_label", "rows"), [(True, [0, 1, 2, 3, 4]), (False, [1, 2, 3, 4])])
def test_proposal_rows_follow_the_label_shift(shift_label: bool, rows: list[int]) -> None:
    drafter = tiny_drafter(shift_label=shift_label)
    _, hidden, _ = backbone_outputs(drafter)
    assert torch.equal(drafter.proposal_rows(hidden), hidden[:, rows])
    assert drafter.config.num_proposals == len(rows)


def test_block_is_the_anchor_and_masks() -> None:
    drafter = tiny_drafter(mask_token_id=9)
    assert drafter.block_ids(torch.tensor([3, 5])).tolist() == [[3, 9, 9, 9, 9], [5, 9, 9, 9, 9]]


@LAYOUTS
def test_teacher_forced_bottleneck_equals_the_rollouts(shift_label: bool, prefix: int) -> None:
    """Fed with the tokens that the rollout drafted, training computes the logits that drafted them."""
    drafter, embed = tiny_drafter(shift_label=shift_label, pure_draft_prefix_len=prefix), embedding()
    anchors, hidden, base = backbone_outputs(drafter)
    drafted = drafted_tokens(drafter, embed)
    with torch.inference_mode():
        fed = embed(torch.cat([anchors[:, None], drafted[:, :-1]], dim=1))
        bottleneck = drafter.head.teacher_forced(fed, drafter.proposal_rows(hidden))
        final = drafter.proposal_rows(base) + bottleneck @ drafter.head.codebook_VR.T
        states, _ = torch_gru(drafter.prefix_gru)(fed)
        joined = torch.cat([drafter.proposal_rows(hidden), states], dim=-1) @ drafter.embed_proj[0].weight.T
    torch.testing.assert_close(bottleneck, nn.functional.silu(joined), atol=1e-5, rtol=0)
    assert torch.equal(final[:, prefix:].argmax(dim=-1), drafted[:, prefix:])


def test_embed_proj_applied_as_a_module_equals_its_two_halves() -> None:
    head = tiny_drafter().head
    hidden, state = normal(4, WIDTH, seed=8), normal(4, 10, seed=9)
    with torch.inference_mode():
        expected = head.embed_proj(torch.cat([hidden, state], dim=-1))
        bottleneck = nn.functional.silu(head.project_hidden(hidden) + head.project_state(state))
        torch.testing.assert_close(bottleneck @ head.codebook_VR.T, expected, atol=1e-5, rtol=0)


def test_head_keeps_using_the_drafters_tensors_after_copy_cast_and_load() -> None:
    drafter = copy.deepcopy(tiny_drafter()).double()
    drafter.load_state_dict({name: tensor.double() for name, tensor in tiny_drafter(seed=12).state_dict().items()}, assign=True)
    assert drafter.head.codebook_VR is drafter.embed_proj[2].weight
    assert drafter.head.prefix_gru.weight_hh_l0 is drafter.prefix_gru.weight_hh_l0
    assert torch.equal(drafter.head.codebook_VR, tiny_drafter(seed=12).embed_proj[2].weight.double())


# Largest difference from float64, by dtype: fp32 rounding, then one rounding of a logit of size 8 to half precision.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("batch", "vocab", "rank"), [(1, 1, 1), (2, 63, 5), (3, 100, 8), (0, 16, 4)])
def test_operator_equals_float64_formula(batch: int, vocab: int, rank: int, dtype: torch.dtype) -> None:
    inputs = [normal(batch, vocab, seed=1), normal(batch, rank, seed=2), normal(batch, rank, seed=3), normal(vocab, rank, seed=4)]
    inputs = [tensor.to(dtype) for tensor in inputs]
    base, z, s, codebook = (tensor.double() for tensor in inputs)
    expected = base + ((z + s) * torch.sigmoid(z + s)) @ codebook.T
    tokens, logits = fused_logit_correction(*inputs)
    torch.testing.assert_close(reference.corrected_logits(*inputs).double(), expected, atol=TOLERANCES[dtype], rtol=0)
    assert tokens.shape == logits.shape == (batch,)
    assert (tokens.dtype, logits.dtype) == (torch.int64, dtype)
    best = torch.gather(expected, 1, tokens[:, None])[:, 0]
    torch.testing.assert_close(best, expected.amax(dim=-1), atol=2 * TOLERANCES[dtype], rtol=0)
    torch.testing.assert_close(logits.double(), best, atol=TOLERANCES[dtype], rtol=0)


def test_operator_equals_its_reference_exactly() -> None:
    inputs = (normal(3, 100, seed=1), normal(3, 8, seed=2), normal(3, 8, seed=3), normal(100, 8, seed=4))
    for ours, theirs in zip(fused_logit_correction(*inputs), reference.fused_logit_correction(*inputs), strict=True):
        assert torch.equal(ours, theirs)


def test_ties_go_to_the_lowest_id() -> None:
    base = torch.zeros(3, 50)
    base[0, [7, 8, 49]] = 1.0
    base[1, [0, 49]] = 1.0
    zeros, codebook = torch.zeros(3, 4), normal(50, 4, seed=4)
    tokens, logits = fused_logit_correction(base, zeros, zeros, codebook)  # SiLU(0) = 0: no correction
    assert tokens.tolist() == [7, 0, 0]
    assert logits.tolist() == [1.0, 1.0, 0.0]


def test_operator_passes_opcheck() -> None:
    inputs = (normal(3, 20, seed=1), normal(3, 8, seed=2), normal(3, 8, seed=3), normal(20, 8, seed=4))
    torch.library.opcheck(fused_logit_correction, inputs)
