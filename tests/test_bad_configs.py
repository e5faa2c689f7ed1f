"""Every bad config.json is refused with one CheckpointError that names each setting that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from domino_deploy.checkpoint import open_drafter, open_target
from tests.support.checkpoints import ABSENT, target_config, write_drafter, write_target
from tests.support.refusals import CONFIG, named, refusal

# config.json of a target: overrides, and what the message must name.

TARGET_CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no vocab_size": ({"vocab_size": ABSENT}, ("vocab_size is missing",)),
    "several fields missing": (
        {"hidden_size": ABSENT, "rms_norm_eps": ABSENT, "model_type": ABSENT},
        ("hidden_size is missing", "rms_norm_eps is missing", "model_type is missing"),
    ),
    "a bool for an integer": ({"num_hidden_layers": True}, ("num_hidden_layers must be an integer, found true",)),
    "a string for an integer": ({"hidden_size": "32"}, ("hidden_size must be an integer, found '32'",)),
    "a float for an integer": ({"num_attention_heads": 4.0}, ("num_attention_heads must be an integer, found 4.0",)),
    "an integer for a bool": ({"tie_word_embeddings": 1}, ("tie_word_embeddings must be true or false, found 1",)),
    "a bool for a number": ({"rms_norm_eps": True}, ("rms_norm_eps must be a finite number", "true")),
    "a list for a string": ({"model_type": ["llama"]}, ("model_type must be a string",)),
    "several types wrong": (
        {"vocab_size": None, "intermediate_size": [64], "rope_theta": "1e6"},
        ("vocab_size is missing", "intermediate_size must be an integer", "rope_theta must be a finite number"),
    ),
    "a negative size": ({"intermediate_size": -64}, ("intermediate_size", "-64")),
    "a zero size": ({"num_key_value_heads": 0}, ("num_key_value_heads", "found 0")),
    "a billion layers": ({"num_hidden_layers": 10**9}, ("num_hidden_layers", "1000000000")),
    "more layers than tensors": ({"num_hidden_layers": 900}, ("900 layers", "hold only")),
    "heads no multiple of key-value heads": ({"num_key_value_heads": 3}, ("multiple of num_kv_heads", "4 and 3")),
    "an odd head_dim": ({"head_dim": 15}, ("head_dim must be even", "15")),
    "rms_norm_eps of one": ({"rms_norm_eps": 1.0}, ("rms_norm_eps",)),
    "an eos id outside the vocabulary": ({"eos_token_id": [2, 300]}, ("eos token id 300", "300")),
    "a bos id outside the vocabulary": ({"bos_token_id": 4000}, ("bos token id 4000",)),
    "a negative eos id": ({"eos_token_id": -1}, ("eos_token_id", "-1")),
    "an eos name": ({"eos_token_id": "</s>"}, ("eos_token_id", "'</s>'")),
    "mistral": ({"model_type": "mistral"}, ("'mistral'", "llama, qwen2, qwen3")),
    "a multimodal config": ({"text_config": {}}, ("multimodal",)),
    "sliding windows in use": ({"family": "qwen3", "use_sliding_window": True}, ("use_sliding_window is true",)),
    "sliding layers": ({"family": "qwen2", "layer_types": ["sliding_attention"] * 4}, ("layer_types", "sliding_attention")),
    "gelu": ({"hidden_act": "gelu"}, ("hidden_act is 'gelu'", "'silu'")),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
    "experts": ({"num_local_experts": 8}, ("num_local_experts is 8",)),
    "partial rotary": ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor is 0.5",)),
    "interleaved rotary": ({"rope_interleaved": True}, ("rope_interleaved",)),
    "several settings not honoured": (
        {"hidden_act": "relu", "final_logit_softcapping": 30.0, "model_type": "gemma2"},
        ("hidden_act", "final_logit_softcapping", "gemma2"),
    ),
    "rope theta in two places": (
        {"rope_parameters": {"rope_theta": 5e5}},
        ("contradiction", "rope_parameters.rope_theta", "500000", "10000"),
    ),
    "rope type in two spellings": (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
        ("contradiction", "'linear'", "'yarn'"),
    ),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("'dynamic'", "default, linear, llama3, yarn")),
    "longrope": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [2.0]}},
        ("'longrope'", "rope_scaling.short_factor", "rope_scaling.long_factor"),
    ),
    "rope scaling without a type": ({"rope_scaling": {"factor": 2.0}}, ("rope_type / type is missing",)),
    "rope scaling without a factor": ({"rope_scaling": {"type": "linear"}}, ("factor is missing",)),
    "a factor that default rope ignores": ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, ("factor is 4.0",)),
    "rope scaling of a wrong type": ({"rope_scaling": "linear"}, ("rope_scaling must be an object",)),
    "a shrinking rope factor": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ("factor must be at least 1", "0.5")),
    "llama3 without its frequencies": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ("low_freq_factor is missing", "high_freq_factor is missing", "original_max_position_embeddings is missing"),
    ),
    "llama3 with its frequencies swapped": (
        {
            "rope_scaling": {
                "type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 1,
                "original_max_position_embeddings": 64,
            }
        },
        ("low_freq_factor < high_freq_factor",),
    ),
    "yarn with mscale": (
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.8}},
        ("mscale is 1.0", "mscale_all_dim is 0.8"),
    ),
    "yarn without truncation": (
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "truncate": False}},
        ("truncate is false",),
    ),
    "theta of one": ({"rope_theta": 1.0}, ("rope_theta", "1.0")),
}


@pytest.mark.parametrize(("overrides", "items"), TARGET_CONFIGS.values(), ids=TARGET_CONFIGS)
def test_a_target_with_a_bad_config_is_refused(tmp_path: Path, overrides: dict[str, Any], items: tuple[str, ...]) -> None:
    write_target(tmp_path, **{key: value for key, value in overrides.items() if key == "family"})
    family = overrides.get("family", "llama")
    fields = {key: value for key, value in overrides.items() if key != "family"}
    (tmp_path / CONFIG).write_text(json.dumps(target_config(family=family, **fields)))
    assert named(refusal(open_target, tmp_path), *items)


DRAFTER_CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no block_size": ({"block_size": ABSENT}, ("block_size is missing", "dflash_config", "top level")),
    "no mask token": ({"mask_token_id": ABSENT}, ("mask_token_id is missing",)),
    "no num_target_layers": ({"num_target_layers": ABSENT}, ("num_target_layers is missing",)),
    "a Domino drafter without its fields": (
        {"shift_label": ABSENT, "pure_draft_prefix_len": ABSENT, "emb_dim": ABSENT, "gru_hidden_dim": ABSENT},
        ("shift_label is missing", "pure_draft_prefix_len is missing", "emb_dim is missing", "gru_hidden_dim is missing"),
    ),
    "a block of one": ({"block_size": 1}, ("block_size",)),
    "a mask token outside the vocabulary": ({"mask_token_id": 300}, ("mask_token_id", "300")),
    "a prefix as long as the block": ({"pure_draft_prefix_len": 6}, ("pure_draft_prefix_len must lie in [0, 6)",)),
    "a prefix as long as an unshifted block's proposals": (
        {"pure_draft_prefix_len": 5, "shift_label": False},
        ("pure_draft_prefix_len must lie in [0, 5)",),
    ),
    "a negative prefix": ({"pure_draft_prefix_len": -1}, ("pure_draft_prefix_len", "-1")),
    "shift_label as a number": ({"shift_label": 1}, ("shift_label must be true or false",)),
    "emb_dim in two places": (
        {"dflash_config": {"emb_dim": 8}, "emb_dim": 16},
        ("contradiction", "dflash_config.emb_dim is 8", "emb_dim is 16"),
    ),
    "true beside 1": (
        {"dflash_config": {"pure_draft_prefix_len": 1}, "pure_draft_prefix_len": True},
        ("contradiction", "dflash_config.pure_draft_prefix_len is 1", "pure_draft_prefix_len is true"),
    ),
    "target layers out of range": ({"target_layer_ids": [0, 4]}, ("target_layer_ids", "[0, 4]")),
    "target layers that fall": ({"target_layer_ids": [2, 1]}, ("target_layer_ids must rise",)),
    "target layers that repeat": ({"target_layer_ids": [1, 1]}, ("target_layer_ids must rise",)),
    "no target layer": ({"target_layer_ids": []}, ("at least one target layer",)),
    "target layers as text": ({"target_layer_ids": "0,2"}, ("target_layer_ids must be a list",)),
    "target layers with a bool": ({"target_layer_ids": [True, 2]}, ("target_layer_ids must be a list",)),
    **{
        f"projector {name}": ({"projector_type": name}, (f"projector_type {name!r}", "domino, causal_v5"))
        for name in ("causal_v1", "v1_plus", "v2", "v3", "v3_reverse", "v4", "v5", "v5_reverse", "dspark", "")
    },
    "projector absent": ({"projector_type": ABSENT}, ("projector_type is absent", "emb_dim", "must never run as plain DFlash")),
    "use_bias_gate": ({"use_bias_gate": True}, ("use_bias_gate is true",)),
    "use_bias_norm": ({"use_bias_norm": True}, ("use_bias_norm is true",)),
    "an unknown drafter field": (
        {"dflash_config": {"markov_rank": 256, "selector_top_k": 16}},
        ("dflash_config.markov_rank", "selector_top_k"),
    ),
    "dflash_config of a wrong type": ({"dflash_config": [1]}, ("dflash_config must be an object",)),
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, ("DFlash2DraftModel", "DominoDraftModel")),
    "layers of another model": ({"model_type": "llama"}, ("model_type is 'llama'",)),
    "a reduced draft vocabulary": ({"draft_vocab_size": 100}, ("draft_vocab_size is 100",)),
    "the speculators format": ({"transformer_layer_config": {"hidden_size": 32}}, ("transformer_layer_config", "speculators")),
    "a causal block": ({"is_causal": True}, ("is_causal is true",)),
    "sliding layers without a window": ({"layer_types": ["sliding_attention"] * 2}, ("sliding_window is missing",)),
    "layer types for another depth": ({"layer_types": ["full_attention"] * 5}, ("layer_types must have one entry per layer (2), found 5",)),
    "unknown layer types": ({"layer_types": ["full_attention", "linear_attention"]}, ("layer_types", "linear_attention")),
    "sliding layers switched off": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": False},
        ("contradiction", "use_sliding_window is false"),
    ),
    "a window without layers": ({"use_sliding_window": True, "sliding_window": 4}, ("use_sliding_window", "layer_types")),
    "a quantised drafter": ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config", "fp8")),
    "several problems": (
        {"block_size": "6", "use_bias_norm": True, "projector_type": "v2", "emb_dim": 0},
        ("block_size", "use_bias_norm", "'v2'", "emb_dim"),
    ),
}


@pytest.mark.parametrize(("overrides", "items"), DRAFTER_CONFIGS.values(), ids=DRAFTER_CONFIGS)
def test_a_drafter_with_a_bad_config_is_refused(tmp_path: Path, overrides: dict[str, Any], items: tuple[str, ...]) -> None:
    write_drafter(tmp_path, target_config())
    raw = json.loads((tmp_path / CONFIG).read_text())
    for name, value in overrides.items():
        if name == "dflash_config" and isinstance(value, dict):
            raw["dflash_config"] |= value
            continue
        place = raw["dflash_config"] if name in raw["dflash_config"] and "dflash_config" not in overrides else raw
        place[name] = value
    raw["dflash_config"] = _present(raw["dflash_config"])
    (tmp_path / CONFIG).write_text(json.dumps(_present(raw)))
    assert named(refusal(open_drafter, tmp_path), *items)


def _present(raw: Any) -> Any:
    return {name: value for name, value in raw.items() if value is not ABSENT} if isinstance(raw, dict) else raw


# config.json as text


@pytest.mark.parametrize(
    ("text", "item"),
    [
        pytest.param(b"", "valid JSON", id="empty"),
        pytest.param(b"{'vocab_size': 1}", "valid JSON", id="not JSON"),
        pytest.param(b'{"vocab_size": 1', "valid JSON", id="truncated"),
        pytest.param(b"[1, 2]", "found list", id="a list"),
        pytest.param(b"null", "found NoneType", id="null"),
        pytest.param(b'{"a": "\xff"}', "valid JSON", id="not UTF-8"),
        pytest.param(b'{"vocab_size": 1, "vocab_size": 2}', "duplicate key(s) 'vocab_size'", id="a key twice"),
        pytest.param(b'{"dflash_config": {"emb_dim": 1, "emb_dim": 1}}', "duplicate key(s) 'emb_dim'", id="a nested key twice"),
        pytest.param(b'{"rms_norm_eps": NaN}', "NaN", id="NaN"),
        pytest.param(b'{"rope_theta": -Infinity}', "-Infinity", id="infinity"),
        pytest.param(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply", id="nested too deeply"),
        pytest.param(b'{"vocab_size": ' + b"9" * 5000 + b"}", "valid JSON", id="an endless number"),
    ],
)
@pytest.mark.parametrize("opener", [open_target, open_drafter])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, opener: Callable[[Path], object], text: bytes, item: str) -> None:
    write_target(tmp_path)
    (tmp_path / CONFIG).write_bytes(text)
    assert named(refusal(opener, tmp_path), CONFIG, item)


def test_a_number_that_overflows_is_not_finite(tmp_path: Path) -> None:
    text = json.dumps(target_config(rope_theta="THETA")).replace('"THETA"', "1e999")
    write_target(tmp_path)
    (tmp_path / CONFIG).write_text(text)
    assert named(refusal(open_target, tmp_path), "rope_theta must be a finite number", "inf")
