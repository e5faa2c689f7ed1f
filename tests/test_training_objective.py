"""Mask, labels, weights, curriculum and loss against slow loops written from the formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from domino_deploy.config import DrafterKind
from domino_deploy.errors import TrainingError
from domino_deploy.training import objective
from domino_deploy.training.batches import Draw, Drawer, assemble, block_tokens, kept_labels
from domino_deploy.training.features import Corpus
from domino_deploy.training.objective import DraftLoss, SoftmaxVocabulary, curriculum, position_weights, total_weight
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.samples import Sample
from domino_deploy.training.trainer import frequent_tokens, learning_rate
from tests.support.tiny_models import VOCAB, WIDTH, drafter_config, tiny_drafter, tiny_target

SAMPLES = [Sample(prompt_ids=(3, 4, 5), response_ids=(6, 7, 8, 9, 10, 11, 12)), Sample(prompt_ids=(20, 21), response_ids=(22, 23, 24))]
ANCHORS = [[3, 8], [2, 3]]
LAYOUTS = [(True, 0), (True, 1), (True, 2), (False, 0), (False, 1)]
CPU = torch.device("cpu")
LAYERS, TAPS = (0, 1, 2), (0, 2)


class RowsInMemory:
    layers = LAYERS

    def __init__(self, samples: Sequence[Sample], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.all = [torch.randn(len(sample.token_ids), len(LAYERS) * WIDTH, generator=generator) for sample in samples]

    def rows(self, indices):
        return [self.all[index] for index in indices]


def corpus_with(samples: Sequence[Sample] = SAMPLES) -> Corpus:
    source = RowsInMemory(samples)
    return Corpus(samples=samples, source=source, tapped_layers=TAPS, scales=torch.tensor([2.0, 0.5]), width=WIDTH)


def draw_of(anchors=ANCHORS, indices=(0, 1)) -> Draw:
    return Draw(indices=tuple(indices), anchors_SA=np.array(anchors))


def recipe_of(**changes) -> Recipe:
    return Recipe(**({"gamma": 3.0, "frequent_tokens": 0} | changes))


def losses_of(drafter, batch, recipe, base_weight=0.3, vocabulary=None, target=None):
    target = target or tiny_target()
    vocabulary = torch.arange(VOCAB) if vocabulary is None else vocabulary
    weight = float((batch.keep * torch.from_numpy(position_weights(batch.labels.shape[-1], recipe.gamma))).sum())
    return DraftLoss(drafter, recipe)(batch, vocabulary, target.model.embed_tokens, target.lm_head, base_weight, weight)


def test_every_position_of_the_mask_follows_the_rule():
    config = drafter_config()
    batch = assemble(corpus_with(), draw_of([[3, 6], [2, 3]]), config, CPU)
    block, longest = config.block_size, 10
    for row, anchors in enumerate([[3, 6], [2, 3]]):
        for query in range(2 * block):
            for key in range(longest + 2 * block):
                expected = key < anchors[query // block] if key < longest else (key - longest) // block == query // block
                assert batch.mask[row, 0, query, key].item() == expected, (row, query, key)


@pytest.mark.parametrize("shift_label", [True, False])
def test_labels_prefix_positions_and_keep_follow_the_sequence(shift_label):
    config = drafter_config(shift_label=shift_label)
    batch = assemble(corpus_with(), draw_of(), config, CPU)
    assert batch.labels.shape[-1] == (config.block_size if shift_label else config.block_size - 1)
    for row, anchors in enumerate(ANCHORS):
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


def test_features_are_the_taps_divided_by_their_rms():
    corpus = corpus_with()
    batch = assemble(corpus, draw_of(), drafter_config(), CPU)
    rows = corpus.source.all[1]
    torch.testing.assert_close(batch.features[1, :5, :WIDTH], rows[:, :WIDTH] / 2.0)
    torch.testing.assert_close(batch.features[1, :5, WIDTH:], rows[:, 2 * WIDTH :] / 0.5)
    assert not batch.features[1, 5:].any()


def test_outputs_are_those_that_predict_the_labels():
    corpus = corpus_with()
    batch = assemble(corpus, draw_of(), drafter_config(), CPU, with_outputs=True)
    for row, anchors in enumerate(ANCHORS):
        for a, anchor in enumerate(anchors):
            for j in range(drafter_config().num_proposals):
                if anchor + j + 1 < len(SAMPLES[row].token_ids):
                    torch.testing.assert_close(batch.outputs[row, a, j], corpus.source.all[row][anchor + j, 2 * WIDTH :])


def slow_losses(drafter, target, recipe, corpus, base_weight):
    """The objective's formula, one block and one proposal at a time: (base, final, total, base tau, final tau)."""
    embed, head, proposals = target.model.embed_tokens, drafter.head, drafter.config.num_proposals
    sums, weight_sum, hits = [0.0, 0.0], 0.0, [0, 0]
    features = assemble(corpus, draw_of(), drafter.config, CPU).features
    for row, anchors in enumerate(ANCHORS):
        ids = torch.tensor(SAMPLES[row].token_ids)
        for anchor in anchors:
            hidden = one_block(drafter, target, features[row, :anchor], ids[anchor], anchor)
            state, fed, run_on = head.initial_state(1) if head else None, ids[anchor], [True, True]
            for j in range(proposals):
                base = final = target.lm_head(hidden[j])
                if head:
                    state = head.step(embed(fed)[None], state)
                    if j >= head.prefix_len:
                        bottleneck = torch.nn.functional.silu(head.project_hidden(hidden[j]) + head.project_state(state[0]))
                        final = base + head.codebook_VR @ bottleneck
                is_inside = anchor + j + 1 < len(ids)
                if is_inside:
                    weight, label = math.exp(-j / recipe.gamma), ids[anchor + j + 1]
                    weight_sum += weight
                    wanted = torch.nn.functional.one_hot(label, VOCAB).float() * (1 - recipe.soft_labels)
                    outputs = corpus.source.all[row][anchor + j, 2 * WIDTH :]
                    wanted += recipe.soft_labels * target.lm_head(outputs).softmax(-1)
                    for which, logits in enumerate((base, final)):
                        if run_on[which] or not recipe.accept_until_fail:
                            sums[which] += weight * -(wanted * logits.log_softmax(-1)).sum().item()
                        run_on[which] = run_on[which] and bool(logits.argmax() == label)
                        hits[which] += run_on[which]
                if head and recipe.causal_encoding == "training-time-test":
                    fed = final.argmax()
                elif is_inside:
                    fed = ids[anchor + j + 1]
    base, final = sums[0] / weight_sum, sums[1] / weight_sum
    return base, final, base_weight * base + (1 - base_weight) * final, hits[0], hits[1]


def one_block(drafter, target, features, anchor_id, anchor):
    """Hidden rows that predict offsets 1..N, the block alone against the context before its anchor."""
    positions = torch.arange(anchor + drafter.config.block_size)[None]
    mask = torch.ones(1, 1, 1, positions.shape[1], dtype=torch.bool)
    block = target.model.embed_tokens(drafter.block_ids(anchor_id[None]))
    return drafter.proposal_rows(drafter(block, features[None], positions, mask))[0]


PARTS = {
    "as published": {},
    "training-time test": {"causal_encoding": "training-time-test"},
    "accept until fail": {"accept_until_fail": True},
    "soft labels": {"soft_labels": 0.7},
    "all of them": {"causal_encoding": "training-time-test", "accept_until_fail": True, "soft_labels": 0.4},
}


@pytest.mark.parametrize("chunk_rows", [1024, 7], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize(("shift_label", "prefix"), LAYOUTS)
def test_loss_equals_a_slow_loop_over_blocks_and_proposals(shift_label, prefix, parts, chunk_rows, monkeypatch):
    monkeypatch.setattr(objective, "CHUNK_ROWS", chunk_rows)
    target, recipe, corpus = tiny_target(), recipe_of(**parts), corpus_with()
    drafter = tiny_drafter(shift_label=shift_label, pure_draft_prefix_len=prefix)
    batch = assemble(corpus, draw_of(), drafter.config, CPU, with_outputs=recipe.soft_labels > 0)
    with torch.no_grad():  # make some proposals hits, or nothing behind the first is ever told apart
        target.lm_head.weight[list(range(6, 13))] *= 1.5
        found = losses_of(drafter, batch, recipe, target=target)
        base, final, total, base_hits, final_hits = slow_losses(drafter, target, recipe, corpus, 0.3)
    assert found.sums[:2].tolist() == pytest.approx([base, final], rel=1e-4)
    assert found.sums[2:].tolist() == [base_hits, final_hits, 4]
    assert found.total.item() == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
def test_chunks_change_no_gradient(parts, monkeypatch):
    recipe, gradients = recipe_of(**parts), []
    for chunk_rows in (1024, 5):
        monkeypatch.setattr(objective, "CHUNK_ROWS", chunk_rows)
        drafter = tiny_drafter()
        batch = assemble(corpus_with(), draw_of(), drafter.config, CPU, with_outputs=recipe.soft_labels > 0)
        losses_of(drafter, batch, recipe).total.backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_parts_of_a_draw_add_up_to_its_loss_and_gradient():
    recipe, corpus, draw = recipe_of(sequences=2), corpus_with(), draw_of()
    whole, parts = tiny_drafter(), tiny_drafter()
    target = tiny_target()
    weight = total_weight(SAMPLES, draw, whole.config.num_proposals, recipe.gamma)
    ends = (torch.arange(VOCAB), target.model.embed_tokens, target.lm_head, 0.3, weight)
    total = DraftLoss(whole, recipe)(assemble(corpus, draw, whole.config, CPU), *ends).total
    total.backward()
    found = 0.0
    for rank in range(2):
        for share in draw.shares(rank, 2, 1):
            part = DraftLoss(parts, recipe)(assemble(corpus, share, parts.config, CPU), *ends).total
            part.backward()
            found += part.item()
    assert found == pytest.approx(total.item(), rel=1e-5)
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_gradient_reaches_the_drafter_and_not_the_frozen_target():
    target, drafter = tiny_target().requires_grad_(False), tiny_drafter()
    batch = assemble(corpus_with(), draw_of(), drafter.config, CPU)
    losses_of(drafter, batch, recipe_of(), base_weight=0.5, target=target).total.backward()
    without = [name for name, parameter in drafter.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert without == []
    assert all(parameter.grad is None for parameter in target.parameters())


def test_head_gets_a_zero_gradient_while_lambda_is_one():
    drafter = tiny_drafter()
    batch = assemble(corpus_with(), draw_of(), drafter.config, CPU)
    losses_of(drafter, batch, recipe_of(), base_weight=1.0).total.backward()
    assert not drafter.prefix_gru.weight_hh_l0.grad.any()  # zero, not absent: processes exchange it
    assert not drafter.embed_proj[2].weight.grad.any()


def test_a_dflash_drafter_has_one_loss():
    drafter = tiny_drafter(kind=DrafterKind.DFLASH)
    batch = assemble(corpus_with(), draw_of(), drafter.config, CPU)
    recipe = recipe_of(kind="dflash")
    with torch.no_grad():
        found = losses_of(drafter, batch, recipe)
        base, final, total, base_hits, final_hits = slow_losses(drafter, tiny_target(), recipe, corpus_with(), 0.3)
    assert found.sums[0] == found.sums[1] == found.total
    assert found.sums.tolist() == pytest.approx([base, final, base_hits, final_hits, 4], rel=1e-4)
    assert found.total.item() == pytest.approx(total, rel=1e-4)


def test_reduced_softmax_holds_every_label_and_only_leaves_tokens_out():
    drafter, draw = tiny_drafter(), draw_of()
    batch = assemble(corpus_with(), draw, drafter.config, CPU)
    vocabulary = SoftmaxVocabulary([40, 41], 3, VOCAB, 0).at(0, SAMPLES, draw, drafter.config.num_proposals)
    kept = batch.labels[batch.keep > 0]
    assert set(kept.tolist()) | {40, 41} <= set(vocabulary.tolist())
    assert vocabulary.tolist() == sorted(set(vocabulary.tolist()))
    reduced = losses_of(drafter, batch, recipe_of(), vocabulary=vocabulary)
    whole = losses_of(drafter, batch, recipe_of())
    assert reduced.sums[1] < whole.sums[1]  # the same logits over fewer tokens


def test_random_tokens_change_with_the_step_and_nothing_else():
    vocabulary = SoftmaxVocabulary([], 10, VOCAB, 5)
    at = [vocabulary.at(step, SAMPLES, draw_of(), 5).tolist() for step in (3, 3, 4)]
    assert at[0] == at[1] != at[2]


def test_block_tokens_are_anchors_and_labels():
    assert block_tokens(SAMPLES, draw_of([[3, 8], [2, 2]]), 2).tolist() == [6, 7, 8, 11, 12, 22, 23, 24]


def test_total_weight_counts_every_label_once():
    kept = kept_labels(SAMPLES, draw_of(), 5)
    expected = sum(math.exp(-j / 3.0) for j in range(5) for row in kept.reshape(-1, 5) if row[j])
    assert total_weight(SAMPLES, draw_of(), 5, 3.0) == pytest.approx(expected, rel=1e-6)


def test_curriculum_falls_linearly_and_stays_at_zero():
    assert [curriculum(step, 10, 1.0, 0.5) for step in (0, 2, 5, 9)] == pytest.approx([1.0, 0.6, 0.0, 0.0])
    assert curriculum(3, 10, 0.8, 1.0) == pytest.approx(0.56)
    assert curriculum(0, 10, 1.0, 0.0) == 0.0


def test_position_weights_decay_from_one():
    assert position_weights(3, 4.0).tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])


def test_learning_rate_warms_up_then_falls_to_zero():
    recipe = Recipe(learning_rate=1.0, warmup_ratio=0.1)
    rates = [learning_rate(step, 100, recipe) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.5)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert rates[-1] < 1e-3


def test_a_draw_depends_on_seed_and_step_alone():
    samples = [Sample(prompt_ids=(1, 2), response_ids=tuple(range(20))) for _ in range(7)]
    make = lambda seed: Drawer(samples, range(7), sequences=3, anchors=4, seed=seed)  # noqa: E731
    in_order, out_of_order = make(1), make(1)
    forwards = [in_order.at(step) for step in range(9)]
    for step in (8, 0, 5, 3):
        again = out_of_order.at(step)
        assert again.indices == forwards[step].indices
        assert np.array_equal(again.anchors_SA, forwards[step].anchors_SA)
    assert any(make(2).at(step).indices != forwards[step].indices for step in range(3))


def test_every_sample_is_drawn_once_an_epoch():
    samples = [Sample(prompt_ids=(1, 2), response_ids=tuple(range(20))) for _ in range(7)]
    drawer = Drawer(samples, [0, 2, 3, 5, 6], sequences=2, anchors=1, seed=0)
    order = [index for step in range(10) for index in drawer.at(step).indices]
    for epoch in range(4):
        assert sorted(order[5 * epoch : 5 * epoch + 5]) == [0, 2, 3, 5, 6]


def test_anchors_cover_the_response_but_its_last_token_and_differ_while_they_can():
    samples = [Sample(prompt_ids=(1, 2, 3), response_ids=(4, 5, 6, 7))]
    drawer = Drawer(samples, [0], sequences=1, anchors=3, seed=0)
    assert all(sorted(drawer.at(step).anchors_SA[0].tolist()) == [3, 4, 5] for step in range(5))
    more = Drawer(samples, [0], sequences=1, anchors=50, seed=0).at(0).anchors_SA[0]
    assert set(more.tolist()) == {3, 4, 5}


def test_responses_without_a_label_are_refused():
    samples = [Sample(prompt_ids=(1,), response_ids=(2, 3)), Sample(prompt_ids=(1,), response_ids=(2,))]
    with pytest.raises(TrainingError, match="too short: samples 1"):
        Drawer(samples, [0, 1], sequences=1, anchors=1, seed=0)
    with pytest.raises(TrainingError, match="no samples"):
        Drawer(samples, [], sequences=1, anchors=1, seed=0)


def test_frequent_tokens_do_not_depend_on_the_order_of_samples():
    samples = [Sample(prompt_ids=(1,), response_ids=(5, 6, 6)), Sample(prompt_ids=(1,), response_ids=(7, 5, 9))]
    assert frequent_tokens(samples, 3) == frequent_tokens(samples[::-1], 3) == [5, 6, 7]
