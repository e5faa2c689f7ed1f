"""TargetModel against transformers' models, without and with caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from domino_deploy.config import Family, RopeConfig, RopeType, TargetConfig
from domino_deploy.model.layers import cached_mask
from domino_deploy.model.target import TargetModel
from tests.support.tiny_models import HEAD_DIM, HEADS, VOCAB, randomize, target_config, tiny_target

# fp32, three layers of width 24: two correct implementations differ by rounding only.
ATOL = 1e-4

YARN = {"type": RopeType.YARN, "original_max_position_embeddings": 16}
ROPES = {
    "default": RopeConfig(theta=10_000.0),
    "default, other base": RopeConfig(theta=1_000_000.0),
    "linear": RopeConfig(theta=10_000.0, type=RopeType.LINEAR, factor=2.5),
    "llama3": RopeConfig(
        theta=500.0, type=RopeType.LLAMA3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "yarn": RopeConfig(theta=10_000.0, factor=4.0, **YARN),
    "yarn, other ramp": RopeConfig(theta=1_000.0, factor=8.0, beta_fast=4.0, beta_slow=0.5, **YARN),
    "yarn, given attention factor": RopeConfig(theta=10_000.0, factor=4.0, attention_factor=0.8, **YARN),
    "yarn, factor 1": RopeConfig(theta=10_000.0, factor=1.0, **YARN),
}

CASES: dict[str, TargetConfig] = {
    "llama, untied": target_config(Family.LLAMA),
    "llama, tied": target_config(Family.LLAMA, tie_word_embeddings=True),
    "llama, head_dim = hidden / heads": target_config(Family.LLAMA, head_dim=6),
    "llama, as many key heads as query heads": target_config(Family.LLAMA, num_kv_heads=HEADS),
    "llama, one key head": target_config(Family.LLAMA, num_kv_heads=1),
    "llama, attention bias": target_config(Family.LLAMA, has_qkv_bias=True, has_output_bias=True),
    "llama, MLP bias": target_config(Family.LLAMA, has_mlp_bias=True),
    "llama, large eps": target_config(Family.LLAMA, rms_norm_eps=0.1),
    "llama, one layer": target_config(Family.LLAMA, num_layers=1),
    "qwen2, untied": target_config(Family.QWEN2),
    "qwen2, tied": target_config(Family.QWEN2, tie_word_embeddings=True),
    "qwen3, untied": target_config(Family.QWEN3),
    "qwen3, tied": target_config(Family.QWEN3, tie_word_embeddings=True),
    "qwen3, attention bias": target_config(Family.QWEN3, has_qkv_bias=True, has_output_bias=True),
    **{f"llama, rope {name}": target_config(Family.LLAMA, rope=rope) for name, rope in ROPES.items()},
    "qwen3, rope yarn": target_config(Family.QWEN3, rope=ROPES["yarn"]),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def config(request: pytest.FixtureRequest) -> TargetConfig:
    return request.param


def test_logits_and_every_tapped_layer_equal_transformers(config: TargetConfig) -> None:
    theirs = reference_model(config)
    ours = TargetModel(config, tapped_layers=range(config.num_layers)).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    input_ids = random_ids(2, 40, seed=3)  # longer than the yarn and llama3 cases' original lengths
    with torch.inference_mode():
        expected = theirs(input_ids, output_hidden_states=True)
        hidden, features = ours.hidden_states(input_ids)
        torch.testing.assert_close(ours.lm_head(hidden), expected.logits, atol=ATOL, rtol=0)
    taps = features.unflatten(-1, (config.num_layers, config.hidden_size)).unbind(-2)
    assert len(expected.hidden_states) == config.num_layers + 1
    for layer, tap in enumerate(taps):
        torch.testing.assert_close(
            tap, expected.hidden_states[layer + 1], atol=ATOL, rtol=0, msg=lambda text, layer=layer: f"layer {layer}: {text}"
        )


def test_cached_pass_equals_transformers(config: TargetConfig) -> None:
    theirs = reference_model(config)
    ours = TargetModel(config, tapped_layers=range(config.num_layers)).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    input_ids = random_ids(1, 40, seed=4)
    caches = ours.empty_caches(1, 48)
    logits, features = [], []
    with torch.inference_mode():
        expected = theirs(input_ids, output_hidden_states=True)
        for start, stop in ((0, 23), (23, 24), (24, 40)):
            output = ours(*rows_of(input_ids[:, start:stop], torch.tensor([start]), 48), *caches)
            caches = (output.key_caches, output.value_caches)
            logits.append(output.logits)
            features.append(output.features)
    torch.testing.assert_close(torch.cat(logits, 1), expected.logits, atol=ATOL, rtol=0)
    torch.testing.assert_close(torch.cat(features, 1), torch.cat(expected.hidden_states[1:], dim=-1), atol=ATOL, rtol=0)


def test_tapped_features_stand_side_by_side_in_layer_order() -> None:
    one_by_one = [tiny_target(tapped_layers=(layer,)) for layer in (0, 1, 2)]
    together = tiny_target(tapped_layers=(0, 1, 2))
    input_ids = random_ids(2, 7, seed=5)
    with torch.inference_mode():
        expected = torch.cat([model.hidden_states(input_ids)[1] for model in one_by_one], dim=-1)
        assert torch.equal(together.hidden_states(input_ids)[1], expected)


def test_without_tapped_layers_features_are_empty() -> None:
    model = tiny_target(tapped_layers=())
    input_ids = random_ids(2, 7, seed=5)
    with torch.inference_mode():
        output = model(*rows_of(input_ids, torch.tensor([0, 0]), 8), *model.empty_caches(2, 8))
        assert model.hidden_states(input_ids)[1].shape == output.features.shape == (2, 7, 0)


def test_ragged_batch_in_chunks_equals_uncached_sequences() -> None:
    model = tiny_target(tapped_layers=(0, 1, 2))
    lengths = [11, 7, 9]
    sequences = [random_ids(1, length, seed=10 + length)[0] for length in lengths]
    # Per round, how many tokens each sequence commits; the rest of its rows is padding that the next round overwrites.
    rounds = [[5, 2, 1], [1, 1, 4], [3, 4, 1], [2, 0, 3]]
    assert [sum(counts) for counts in zip(*rounds, strict=True)] == lengths
    capacity, start = 17, torch.zeros(3, dtype=torch.int64)
    caches = model.empty_caches(3, capacity)
    logits: list[list[torch.Tensor]] = [[], [], []]
    features: list[list[torch.Tensor]] = [[], [], []]
    with torch.inference_mode():
        for counts in rounds:
            rows = max(counts)
            input_ids = torch.full((3, rows), VOCAB - 1)
            for b, count in enumerate(counts):
                input_ids[b, :count] = sequences[b][start[b] : start[b] + count]
            output = model(*rows_of(input_ids, start, capacity), *caches)
            caches = (output.key_caches, output.value_caches)
            for b, count in enumerate(counts):
                logits[b].append(output.logits[b, :count])
                features[b].append(output.features[b, :count])
            start = start + torch.tensor(counts)
        for b, sequence in enumerate(sequences):
            hidden, expected_features = model.hidden_states(sequence[None])
            torch.testing.assert_close(torch.cat(logits[b]), model.lm_head(hidden)[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(torch.cat(features[b]), expected_features[0], atol=1e-5, rtol=0)


def test_rejected_rows_leave_no_trace_in_a_later_pass() -> None:
    model = tiny_target()
    committed, rejected, later = random_ids(1, 6, seed=20), random_ids(1, 4, seed=21), random_ids(1, 3, seed=22)
    zero, six = torch.tensor([0]), torch.tensor([6])

    def later_pass(*, with_rejected_rows: bool):
        caches = model.empty_caches(1, 12)
        output = model(*rows_of(committed, zero, 12), *caches)
        if with_rejected_rows:
            output = model(*rows_of(rejected, six, 12), output.key_caches, output.value_caches)
        return model(*rows_of(later, six, 12), output.key_caches, output.value_caches)

    with torch.inference_mode():
        clean, used = later_pass(with_rejected_rows=False), later_pass(with_rejected_rows=True)
    assert torch.equal(clean.logits, used.logits)
    assert torch.equal(clean.features, used.features)


def test_forward_leaves_the_given_caches_alone() -> None:
    model = tiny_target()
    keys, values = model.empty_caches(1, 6)
    with torch.inference_mode():
        output = model(*rows_of(random_ids(1, 4, seed=1), torch.tensor([0]), 6), keys, values)
    assert all(not cache.any() for cache in (*keys, *values))
    assert all(cache[:, :, :4].all() and not cache[:, :, 4:].any() for cache in (*output.key_caches, *output.value_caches))


def test_logit_index_picks_rows_of_each_sequence() -> None:
    model = tiny_target()
    input_ids, start = random_ids(2, 6, seed=30), torch.tensor([0, 0])
    caches = model.empty_caches(2, 6)
    wanted = torch.tensor([[5, 0, 3], [1, 1, 4]])
    with torch.inference_mode():
        every = model(*rows_of(input_ids, start, 6), *caches)
        some = model(*rows_of(input_ids, start, 6, logit_index=wanted), *caches)
    expected = torch.stack([every.logits[b, wanted[b]] for b in range(2)])
    torch.testing.assert_close(some.logits, expected, atol=1e-6, rtol=0)
    assert torch.equal(some.features, every.features)


def test_positions_are_the_callers_not_the_cache_slots() -> None:
    model = tiny_target()
    input_ids = random_ids(1, 5, seed=31)
    caches = model.empty_caches(1, 5)
    ids, positions, *rest = rows_of(input_ids, torch.tensor([0]), 5)
    with torch.inference_mode():
        plain = model(ids, positions, *rest, *caches)
        moved = model(ids, positions + 100, *rest, *caches)
        stretched = model(ids, positions * 2, *rest, *caches)
    # Rotary embedding knows differences of positions only.
    torch.testing.assert_close(moved.logits, plain.logits, atol=ATOL, rtol=0)
    assert (stretched.logits - plain.logits).abs().max() > 100 * ATOL


def test_tied_model_has_one_tensor_for_embedding_and_head() -> None:
    tied, untied = tiny_target(tie_word_embeddings=True), tiny_target(tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.demo
def test_demo_target_equals_transformers() -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    from domino_deploy.checkpoint import open_target
    from domino_deploy.demo import demo_target
    from domino_deploy.model.loading import load_target

    folder = demo_target()
    checkpoint = open_target(folder)
    config = checkpoint.config
    ours = load_target(checkpoint, tapped_layers=range(config.num_layers))
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
    input_ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    length = input_ids.shape[1]
    assert 15 <= length <= 30
    with torch.inference_mode():
        expected = theirs(input_ids, output_hidden_states=True)
        output = ours(*rows_of(input_ids, torch.tensor([0]), length), *ours.empty_caches(1, length))
    torch.testing.assert_close(output.logits, expected.logits, atol=ATOL, rtol=0)
    taps = output.features.unflatten(-1, (config.num_layers, config.hidden_size)).unbind(-2)
    for layer, tap in enumerate(taps):
        # A few channels of this model's residual stream reach thousands; rounding grows with them, hence the rtol.
        torch.testing.assert_close(
            tap, expected.hidden_states[layer + 1], atol=ATOL, rtol=1e-5, msg=lambda text, layer=layer: f"layer {layer}: {text}"
        )


def rows_of(
    input_ids: torch.Tensor, start: torch.Tensor, capacity: int, logit_index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs of `TargetModel.forward` before the caches, all rows' logits wanted unless told."""
    rows = torch.arange(input_ids.shape[1])
    wanted = rows.expand(input_ids.shape) if logit_index is None else logit_index
    return input_ids, start[:, None] + rows, cached_mask(start, len(rows), capacity), start, wanted


def random_ids(batch: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def reference_model(config: TargetConfig) -> Any:
    """transformers' model of the same shape with seeded weights, plain attention."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": rope_parameters(config.rope),
        "attn_implementation": "eager",
    }
    match config.family:
        case Family.LLAMA:
            biases = {"attention_bias": config.has_qkv_bias, "mlp_bias": config.has_mlp_bias}
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **biases))
        case Family.QWEN2:
            model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
        case Family.QWEN3:
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, attention_bias=config.has_qkv_bias))
    assert model.model.layers[0].self_attn.head_dim == config.head_dim
    return randomize(model, seed=7)


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """The same settings under transformers' names."""
    values: dict[str, Any] = {"rope_type": str(rope.type), "rope_theta": rope.theta}
    if rope.type is not RopeType.DEFAULT:
        values["factor"] = rope.factor
    if rope.type is RopeType.LLAMA3:
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type is RopeType.YARN:
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "attention_factor": rope.attention_factor}
    if rope.type in (RopeType.LLAMA3, RopeType.YARN):
        values["original_max_position_embeddings"] = rope.original_max_position_embeddings
    return values


def test_the_tiny_head_dim_differs_from_hidden_over_heads() -> None:
    config = target_config()
    assert config.head_dim == HEAD_DIM != config.hidden_size // config.num_heads
