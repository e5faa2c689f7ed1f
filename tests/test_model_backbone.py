"""The draft backbone: uncached against a slow float64 twin, cached against uncached over several rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from domino_deploy.config import DrafterConfig, DrafterKind
from domino_deploy.model.backbone import Backbone
from tests.support.tiny_models import WIDTH, slow_backbone, tiny_drafter

ATOL = 1e-5
WINDOW = 4
# Finite, since 0 * NaN is NaN: softmax gives a hidden slot the weight 0, and the graph multiplies it all the same.
POISON = 1e12

DRAFTERS = {
    "domino": {},
    "labels not shifted": {"shift_label": False},
    "one key head": {"num_kv_heads": 1},
    "three tapped layers": {"target_layer_ids": (0, 1, 2)},
    "all layers slide": {"sliding_window": WINDOW, "sliding_layers": (True, True)},
    "first layer slides": {"sliding_window": WINDOW, "sliding_layers": (True, False)},
    "last layer slides": {"sliding_window": WINDOW, "sliding_layers": (False, True)},
}


@pytest.fixture(params=DRAFTERS.values(), ids=DRAFTERS.keys())
def model(request: pytest.FixtureRequest) -> Backbone:
    return tiny_drafter(**request.param)


@dataclass
class Timeline:
    """One sequence's features and blocks, drawn in advance: round r drafts after `sum(counts[: r + 1])` context rows."""

    config: DrafterConfig
    counts: list[int]
    seed: int
    features: Tensor = field(init=False)
    blocks: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.features = torch.randn(sum(self.counts), self.config.feature_size, generator=generator)
        self.blocks = [torch.randn(self.config.block_size, WIDTH, generator=generator) for _ in self.counts]

    def new_features(self, round_: int) -> Tensor:
        start = sum(self.counts[:round_])
        return self.features[start : start + self.counts[round_]]


def whole_context(model: Backbone, sequence: Timeline, round_: int) -> Tensor:
    """`forward` over everything the sequence has seen up to this round."""
    rows = sum(sequence.counts[: round_ + 1])
    positions = torch.arange(rows + model.config.block_size)
    full, sliding = masks_of(model.config, positions)
    return model(sequence.blocks[round_][None], sequence.features[None, :rows], positions[None], full[None, None], sliding[None, None])[0]


def masks_of(config: DrafterConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """[P, slots]: every block row sees all; in sliding layers only what is less than a window behind its own position."""
    block = positions[-config.block_size :]
    distance = block[:, None] - positions
    return torch.ones_like(distance, dtype=torch.bool), distance < WINDOW


class Rounds:
    """Cached passes of a ragged batch: every sequence writes behind its own committed rows."""

    def __init__(self, model: Backbone, sequences: list[Timeline], capacity: int) -> None:
        self.model, self.sequences, self.capacity = model, sequences, capacity
        self.caches = model.empty_caches(len(sequences), capacity)
        self.committed = [0] * len(sequences)

    def draft(self, round_: int) -> Tensor:
        """Hidden states [B, P, M] of this round; then only the accepted feature rows count as committed."""
        config, block = self.model.config, self.model.config.block_size
        new = [sequence.counts[round_] for sequence in self.sequences]
        rows, batch = max(new), len(self.sequences)
        # Padding rows hold what must not matter: large features, positions of their own.
        features = torch.full((batch, rows, config.feature_size), 50.0)
        positions = torch.full((batch, rows + block), 77)
        full = torch.zeros(batch, 1, block, self.capacity, dtype=torch.bool)
        sliding = full.clone()
        for b, (sequence, count, start) in enumerate(zip(self.sequences, new, self.committed, strict=True)):
            features[b, :count] = sequence.new_features(round_)
            positions[b, :count] = torch.arange(start, start + count)
            positions[b, rows:] = torch.arange(start + count, start + count + block)
            visible = torch.tensor([*range(start + count), *range(start + rows, start + rows + block)])
            ours, slides = masks_of(config, torch.arange(start + count + block))
            full[b, 0, :, visible], sliding[b, 0, :, visible] = ours, slides
        blocks = torch.stack([sequence.blocks[round_] for sequence in self.sequences])
        output = self.model.cached(blocks, features, positions, full, torch.tensor(self.committed), *self.caches, sliding)
        self.caches = (output.key_caches, output.value_caches)
        self.committed = [start + count for start, count in zip(self.committed, new, strict=True)]
        return output.hidden

    def poison(self, value: float) -> None:
        """Overwrite every slot that is not committed, the last block's rows among them."""
        for cache in (*self.caches[0], *self.caches[1]):
            for b, start in enumerate(self.committed):
                cache[b, :, start:] = value


def test_uncached_pass_equals_the_slow_twin(model: Backbone) -> None:
    sequence = Timeline(model.config, counts=[7], seed=3)
    positions = torch.arange(7 + model.config.block_size)
    full, sliding = masks_of(model.config, positions)
    per_layer = [sliding if slides else full for slides in model.config.sliding_layers or (False, False)]
    with torch.inference_mode():
        expected = slow_backbone(model, sequence.blocks[0], sequence.features, positions, per_layer)
        torch.testing.assert_close(whole_context(model, sequence, 0).double(), expected, atol=ATOL, rtol=0)


def test_cached_rounds_equal_the_whole_context(model: Backbone) -> None:
    # A prompt, then rounds that accept some, one, all and many tokens.
    sequence = Timeline(model.config, counts=[9, 2, 1, 5, 6, 1], seed=4)
    rounds = Rounds(model, [sequence], capacity=24 + model.config.block_size + 3)
    with torch.inference_mode():
        for round_ in range(len(sequence.counts)):
            hidden = rounds.draft(round_)[0]
            torch.testing.assert_close(hidden, whole_context(model, sequence, round_), atol=ATOL, rtol=0)


def test_ragged_batch_with_padding_rows_equals_single_sequences(model: Backbone) -> None:
    counts = ([6, 1, 3, 1], [2, 4, 1, 1], [5, 2, 2, 6])
    sequences = [Timeline(model.config, counts=list(each), seed=10 + b) for b, each in enumerate(counts)]
    rounds = Rounds(model, sequences, capacity=32)
    with torch.inference_mode():
        for round_ in range(4):
            hidden = rounds.draft(round_)
            for b, sequence in enumerate(sequences):
                torch.testing.assert_close(hidden[b], whole_context(model, sequence, round_), atol=ATOL, rtol=0)


def test_uncommitted_slots_never_reach_a_later_round(model: Backbone) -> None:
    sequence = Timeline(model.config, counts=[5, 1, 3, 2], seed=5)

    def last_round(poison: float) -> Tensor:
        rounds = Rounds(model, [sequence], capacity=30)
        for round_ in range(4):
            rounds.poison(poison)
            hidden = rounds.draft(round_)
        return hidden

    with torch.inference_mode():
        clean = last_round(0.0)
        assert torch.equal(last_round(POISON), clean)
        assert torch.equal(last_round(-POISON), clean)


def test_rows_of_the_last_block_are_overwritten_before_they_are_read(model: Backbone) -> None:
    sequence = Timeline(model.config, counts=[5, 3], seed=6)
    # No slot is left over in round 2: each is committed, or written anew, so NaN would show wherever one is read first.
    rounds = Rounds(model, [sequence], capacity=8 + model.config.block_size)
    with torch.inference_mode():
        rounds.draft(0)
        rounds.poison(torch.nan)
        torch.testing.assert_close(rounds.draft(1)[0], whole_context(model, sequence, 1), atol=ATOL, rtol=0)


def test_committed_rows_stay_as_they_were_written(model: Backbone) -> None:
    sequence = Timeline(model.config, counts=[5, 3, 2], seed=7)
    rounds = Rounds(model, [sequence], capacity=20)
    with torch.inference_mode():
        rounds.draft(0)
        before = [cache[:, :, :5].clone() for cache in (*rounds.caches[0], *rounds.caches[1])]
        rounds.draft(1)
        rounds.draft(2)
        after = [cache[:, :, :5] for cache in (*rounds.caches[0], *rounds.caches[1])]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_context_rows_do_not_depend_on_the_block() -> None:
    """Context keys come from features alone; only so may they be kept while blocks come and go."""
    model = tiny_drafter()
    one, two = (Timeline(model.config, counts=[4], seed=8) for _ in range(2))
    two.blocks[0] = two.blocks[0] + 1.0
    with torch.inference_mode():
        caches = []
        for sequence in (one, two):
            rounds = Rounds(model, [sequence], capacity=12)
            rounds.draft(0)
            caches.append(rounds.caches)
    for ours, theirs in zip(caches[0][0] + caches[0][1], caches[1][0] + caches[1][1], strict=True):
        assert torch.equal(ours[:, :, :4], theirs[:, :, :4])
        assert not torch.equal(ours[:, :, 4:9], theirs[:, :, 4:9])


def test_block_rows_see_each_other_in_both_directions() -> None:
    model = tiny_drafter()
    sequence = Timeline(model.config, counts=[4], seed=9)
    with torch.inference_mode():
        before = whole_context(model, sequence, 0)
        sequence.blocks[0][-1] += 1.0
        change = (whole_context(model, sequence, 0) - before).abs().amax(dim=-1)
    assert (change > 1e-3).all()


def test_sliding_mask_reaches_sliding_layers_alone() -> None:
    models = [tiny_drafter(**DRAFTERS[name]) for name in ("domino", "all layers slide", "first layer slides", "last layer slides")]
    with torch.inference_mode():
        results = [whole_context(model, Timeline(model.config, counts=[9], seed=11), 0) for model in models]
    for first in range(4):
        for second in range(first):
            assert (results[first] - results[second]).abs().max() > 1e-3


def test_drafter_state_dict_has_the_public_names() -> None:
    layer_names = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer_names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    expected = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in layer_names}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    head = {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}
    assert set(tiny_drafter().state_dict()) == expected | head
    assert set(tiny_drafter(kind=DrafterKind.DFLASH).state_dict()) == expected
