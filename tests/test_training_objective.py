"""Mask, labels, weights, curriculum and loss against slow loops written from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from domino_deploy.config import DrafterKind
from domino_deploy.errors import TrainingError
from domino_deploy.training.batches import BatchSampler, assemble
from domino_deploy.training.features import Corpus
from domino_deploy.training.objective import curriculum, losses, position_weights, softmax_vocabulary
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.regenerate import Sample
from domino_deploy.training.trainer import learning_rate
from tests.support.tiny_models import VOCAB, drafter_config, tiny_drafter, tiny_target

SAMPLES = [Sample(prompt_ids=(3, 4, 5), response_ids=(6, 7, 8, 9, 10, 11, 12)), Sample(prompt_ids=(20, 21), response_ids=(22, 23, 24))]
LAYOUTS = [(True, 0), (True, 1), (False, 0), (False, 1)]


def corpus_with(samples: list[Sample], width: int, seed: int = 0) -> Corpus:
    lengths = [len(sample.token_ids) for sample in samples]
    rows = np.random.default_rng(seed).standard_normal((sum(lengths), width)).astype(np.float16)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Corpus(samples=samples, rows=rows, starts=starts, scales=torch.tensor([2.0, 0.5]))


def batch_of(config, anchors):
    corpus = corpus_with(SAMPLES, config.feature_size)
    return assemble(corpus, [0, 1], config, torch.tensor(anchors)), corpus


def test_every_position_of_the_mask_follows_the_rule():
    config = drafter_config()
    batch, _ = batch_of(config, [[3, 6], [2, 3]])
    block, longest = config.block_size, 10
    for row, anchors in enumerate([[3, 6], [2, 3]]):
        for query in range(2 * block):
            for key in range(longest + 2 * block):
                expected = key < anchors[query // block] if key < longest else (key - longest) // block == query // block
                assert batch.mask[row, 0, query, key].item() == expected, (row, query, key)


def test_labels_prefix_positions_and_keep_follow_the_sequence():
    config = drafter_config()
    batch, _ = batch_of(config, [[3, 8], [2, 3]])
    for row, anchors in enumerate([[3, 8], [2, 3]]):
        ids = SAMPLES[row].token_ids
        for a, anchor in enumerate(anchors):
            block = batch.block_ids[row].view(2, -1)[a].tolist()
            assert block == [ids[anchor]] + [config.mask_token_id] * (config.block_size - 1)
            positions = batch.position_ids[row, 10:].view(2, -1)[a].tolist()
            assert positions == [anchor + offset for offset in range(config.block_size)]
            for j in range(config.num_proposals):
                is_inside = anchor + j + 1 < len(ids)
                assert batch.keep[row, a, j].item() == float(is_inside)
                if is_inside:
                    assert batch.labels[row, a, j].item() == ids[anchor + j + 1]
                    assert batch.prefix_ids[row, a, j].item() == ids[anchor + j]


def test_features_are_divided_by_the_rms_of_their_tap():
    config = drafter_config()
    batch, corpus = batch_of(config, [[3, 6], [2, 3]])
    rows = torch.from_numpy(corpus.features(1).astype(np.float32))
    torch.testing.assert_close(batch.features[1, :5, : config.hidden_size], rows[:, : config.hidden_size] / 2.0)
    torch.testing.assert_close(batch.features[1, :5, config.hidden_size :], rows[:, config.hidden_size :] / 0.5)
    assert not batch.features[1, 5:].any()


@pytest.mark.parametrize(("shift_label", "prefix"), LAYOUTS)
def test_loss_equals_a_slow_loop_over_blocks_and_proposals(shift_label, prefix):
    target = tiny_target()
    drafter = tiny_drafter(shift_label=shift_label, pure_draft_prefix_len=prefix)
    batch, _ = batch_of(drafter.config, [[3, 8], [2, 3]])
    result = losses(drafter, target, batch, torch.arange(VOCAB), gamma=3.0, base_weight=0.3)

    base_sum = final_sum = weight_sum = 0.0
    embed, head = target.model.embed_tokens, drafter.head
    for row, anchors in enumerate([[3, 8], [2, 3]]):
        ids = torch.tensor(SAMPLES[row].token_ids)
        for anchor in anchors:
            hidden = one_block(drafter, target, batch.features[row, :anchor], ids[anchor], anchor)
            state = head.initial_state(1)
            for j in range(drafter.config.num_proposals):
                state = head.step(embed(ids[anchor + j])[None], state) if anchor + j < len(ids) else state
                if anchor + j + 1 >= len(ids):
                    continue
                base = target.lm_head(hidden[j])
                final = base
                if j >= prefix:
                    final = base + head.codebook_VR @ torch.nn.functional.silu(
                        head.project_hidden(hidden[j]) + head.project_state(state[0])
                    )
                weight = math.exp(-j / 3.0)
                label = ids[anchor + j + 1]
                base_sum += weight * -base.log_softmax(-1)[label].item()
                final_sum += weight * -final.log_softmax(-1)[label].item()
                weight_sum += weight
    assert result.base == pytest.approx(base_sum / weight_sum, rel=1e-4)
    assert result.final == pytest.approx(final_sum / weight_sum, rel=1e-4)
    assert result.total.item() == pytest.approx(0.3 * result.base + 0.7 * result.final, rel=1e-5)


def one_block(drafter, target, features, anchor_id, anchor):
    """Hidden rows that predict offsets 1..N, the block alone against the context before its anchor."""
    positions = torch.arange(anchor + drafter.config.block_size)[None]
    mask = torch.ones(1, 1, 1, positions.shape[1], dtype=torch.bool)
    block = target.model.embed_tokens(drafter.block_ids(anchor_id[None]))
    return drafter.proposal_rows(drafter(block, features[None], positions, mask))[0]


def test_gradient_reaches_the_drafter_and_not_the_frozen_target():
    target, drafter = tiny_target().requires_grad_(False), tiny_drafter()
    batch, _ = batch_of(drafter.config, [[3, 6], [2, 3]])
    losses(drafter, target, batch, torch.arange(VOCAB), gamma=3.0, base_weight=0.5).total.backward()
    without = [name for name, parameter in drafter.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert without == []
    assert all(parameter.grad is None for parameter in target.parameters())


def test_head_gets_no_gradient_while_lambda_is_one():
    target, drafter = tiny_target().requires_grad_(False), tiny_drafter()
    batch, _ = batch_of(drafter.config, [[3, 6], [2, 3]])
    losses(drafter, target, batch, torch.arange(VOCAB), gamma=3.0, base_weight=1.0).total.backward()
    assert not drafter.prefix_gru.weight_hh_l0.grad.any()
    assert not drafter.embed_proj[2].weight.grad.any()


def test_a_dflash_drafter_has_one_loss():
    target, drafter = tiny_target(), tiny_drafter(kind=DrafterKind.DFLASH)
    batch, _ = batch_of(drafter.config, [[3, 6], [2, 3]])
    result = losses(drafter, target, batch, torch.arange(VOCAB), gamma=3.0, base_weight=0.5)
    assert result.base == result.final
    assert result.base_tau == result.final_tau


def test_reduced_softmax_holds_every_label_and_lowers_no_logit():
    target, drafter = tiny_target(), tiny_drafter()
    batch, _ = batch_of(drafter.config, [[3, 6], [2, 3]])
    vocabulary = softmax_vocabulary(batch, torch.tensor([40, 41]), 3, VOCAB, torch.Generator().manual_seed(0))
    assert set(batch.labels.flatten().tolist()) <= set(vocabulary.tolist())
    assert vocabulary.tolist() == sorted(set(vocabulary.tolist()))
    reduced = losses(drafter, target, batch, vocabulary, gamma=3.0, base_weight=0.5)
    whole = losses(drafter, target, batch, torch.arange(VOCAB), gamma=3.0, base_weight=0.5)
    assert reduced.final < whole.final  # the same logits over fewer tokens


def test_curriculum_falls_linearly_and_stays_at_zero():
    assert [curriculum(step, 10, 1.0, 0.5) for step in (0, 2, 5, 9)] == pytest.approx([1.0, 0.6, 0.0, 0.0])
    assert curriculum(3, 10, 0.8, 1.0) == pytest.approx(0.56)
    assert curriculum(0, 10, 1.0, 0.0) == 0.0


def test_position_weights_decay_from_one():
    assert position_weights(3, 4.0).tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])


def test_learning_rate_warms_up_then_falls_to_zero():
    recipe = Recipe(steps=100, warmup_ratio=0.1, learning_rate=1.0)
    rates = [learning_rate(step, recipe) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[-1] < 1e-3


def test_sampler_sees_every_sequence_once_an_epoch_and_keeps_anchors_inside():
    config = drafter_config()
    sampler = BatchSampler(corpus_with(SAMPLES, config.feature_size), [0, 1], config, sequences=2, anchors=50, seed=0)
    anchors_seen: dict[int, set[int]] = {}
    for _ in range(20):
        batch = next(sampler)
        firsts = batch.prefix_ids[:, :, 0]
        for row in firsts.tolist():
            sample = 0 if set(row) <= set(SAMPLES[0].response_ids) else 1
            anchors_seen.setdefault(sample, set()).update(row)
        assert batch.keep[:, :, 0].all()
    # Every response token but the last can be an anchor, and nothing else.
    assert anchors_seen == {0: set(SAMPLES[0].response_ids[:-1]), 1: set(SAMPLES[1].response_ids[:-1])}


def test_a_response_without_an_anchor_is_refused():
    config, short = drafter_config(), [Sample(prompt_ids=(1, 2), response_ids=(3,))]
    with pytest.raises(TrainingError, match="samples 0"):
        BatchSampler(corpus_with(short, config.feature_size), [0], config, sequences=1, anchors=2, seed=0)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"block_size": 1}, "block_size"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"gamma": -1.0}, "gamma"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"lambda_start": 1.5}, "lambda_start"),
        ({"pure_draft_prefix_len": 8}, "pure_draft_prefix_len"),
        ({"dtype": "float16"}, "dtype"),
        ({"steps": 0, "anchors": 0}, "anchors"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_recipe_values_out_of_range_are_named(change, found):
    with pytest.raises(TrainingError, match=found):
        Recipe(**change)
