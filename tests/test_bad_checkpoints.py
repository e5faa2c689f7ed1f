"""Every bad checkpoint is refused with one CheckpointError that names what is wrong, without reading weights.

Settings and tensors one by one; hostile and oversized files, and pairs, are the corpus's (test_bad_checkpoint_corpus.py).
"""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.errors import CheckpointError
from tests.support.checkpoints import ABSENT, target_config, write_drafter, write_target
from tests.support.safetensors_files import edit_header, write_raw

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def refusal(opener: Callable[[Path], object], folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        opener(folder)
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert str(folder) in message
    return message


def named(message: str, *items: str) -> bool:
    missing = [item for item in items if item not in message]
    assert not missing, f"{missing} not in:\n{message}"
    return True


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


# Tensors


def _edit(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


TARGET_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "two missing": (
        lambda t: [t.pop("model.norm.weight"), t.pop("model.layers.3.mlp.up_proj.weight")],
        ("missing: model.norm.weight, expected shape [32]", "missing: model.layers.3.mlp.up_proj.weight, expected shape [64, 32]"),
    ),
    "a layer too many": (
        lambda t: t.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(64, 32)}),
        ("surplus: model.layers.4.mlp.up_proj.weight of shape [64, 32]",),
    ),
    "a bias that the config denies": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        ("surplus: model.layers.0.self_attn.q_proj.bias", "attention_bias"),
    ),
    "misshapen": (
        lambda t: t.update({"model.embed_tokens.weight": torch.zeros(299, 32)}),
        ("misshapen: model.embed_tokens.weight, expected [300, 32], found [299, 32]",),
    ),
    "a head_dim of another model": (
        lambda t: t.update({"model.layers.1.self_attn.q_proj.weight": torch.zeros(32, 32)}),
        ("model.layers.1.self_attn.q_proj.weight, expected [64, 32], found [32, 32]",),
    ),
    "mistyped": (
        lambda t: t.update(
            {"model.norm.weight": torch.zeros(32, dtype=torch.float64), "model.layers.0.mlp.up_proj.weight": torch.zeros(64, 32).char()}
        ),
        ("mistyped: model.norm.weight", "found F64", "mistyped: model.layers.0.mlp.up_proj.weight", "found I8"),
    ),
    "another head than the embedding it is tied to": (
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        ("tie_word_embeddings is true", "lm_head.weight differs from model.embed_tokens.weight"),
    ),
    "everything at once": (
        lambda t: [t.pop("model.norm.weight"), t.update({"extra.weight": torch.zeros(1), "model.embed_tokens.weight": torch.zeros(3)})],
        ("3 problem(s)", "missing: model.norm.weight", "surplus: extra.weight", "misshapen: model.embed_tokens.weight"),
    ),
    "no tensors": (lambda t: t.clear(), ("hold only 0 tensors",)),
}


@pytest.mark.parametrize(("edit", "items"), TARGET_TENSORS.values(), ids=TARGET_TENSORS)
def test_a_target_with_bad_tensors_is_refused(tmp_path: Path, edit: Callable[..., object], items: tuple[str, ...]) -> None:
    _edit(write_target(tmp_path), edit)
    assert named(refusal(open_target, tmp_path), *items)


def test_an_untied_target_needs_its_head(tmp_path: Path) -> None:
    _edit(write_target(tmp_path, tied=False), lambda t: t.pop("lm_head.weight"))
    assert named(refusal(open_target, tmp_path), "missing: lm_head.weight, expected shape [300, 32]")


DRAFTER_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "head dropped when saved": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith(("prefix_gru", "embed_proj"))],
        (
            "missing: prefix_gru.weight_ih_l0, expected shape [48, 32]",
            "prefix_gru.weight_hh_l0",
            "embed_proj.0.weight",
            "embed_proj.2.weight",
        ),
    ),
    "head twice": (
        lambda t: t.update({"logit_head.embed_proj.2.weight": torch.zeros(300, 8)}),
        ("embed_proj.2.weight is present twice", "logit_head."),
    ),
    "a GRU with biases": (lambda t: t.update({"prefix_gru.bias_ih_l0": torch.zeros(48)}), ("surplus: prefix_gru.bias_ih_l0",)),
    "a bias gate": (lambda t: t.update({"bias_gate.weight": torch.zeros(1, 32)}), ("surplus: bias_gate.weight", "use_bias_gate")),
    "a bias norm": (lambda t: t.update({"bias_norm.weight": torch.zeros(16)}), ("surplus: bias_norm.weight", "use_bias_norm")),
    "a reduced draft vocabulary": (
        lambda t: t.update({"d2t": torch.zeros(100, dtype=torch.int64), "t2d": torch.zeros(300, dtype=torch.bool)}),
        ("surplus: d2t", "surplus: t2d", "reduced draft vocabulary"),
    ),
    "an embedding of its own": (
        lambda t: t.update({"embed_tokens.weight": torch.zeros(300, 32), "lm_head.weight": torch.zeros(300, 32)}),
        ("surplus: embed_tokens.weight", "the target's embedding", "surplus: lm_head.weight", "the target's LM head"),
    ),
    "features of one layer less": (
        lambda t: t.update({"fc.weight": torch.zeros(32, 32)}),
        ("misshapen: fc.weight, expected [32, 64], found [32, 32]",),
    ),
}


@pytest.mark.parametrize(("edit", "items"), DRAFTER_TENSORS.values(), ids=DRAFTER_TENSORS)
def test_a_drafter_with_bad_tensors_is_refused(tmp_path: Path, edit: Callable[..., object], items: tuple[str, ...]) -> None:
    _edit(write_drafter(tmp_path, target_config()), edit)
    assert named(refusal(open_drafter, tmp_path), *items)


@pytest.mark.parametrize("nested_head", [False, True])
def test_a_domino_head_is_never_dropped_to_run_as_dflash(tmp_path: Path, nested_head: bool) -> None:
    tensors = load_file(write_drafter(tmp_path, target_config(), nested_head=nested_head) / WEIGHTS)
    write_drafter(tmp_path, target_config(), kind="dflash")
    save_file(tensors, tmp_path / WEIGHTS)
    assert named(
        refusal(open_drafter, tmp_path),
        "prefix_gru.weight_ih_l0",
        "embed_proj.2.weight",
        "a Domino checkpoint must never run as plain DFlash",
    )


# Roles and folders


def test_a_drafter_passed_as_target_is_called_a_drafter(tmp_path: Path) -> None:
    write_drafter(tmp_path, target_config())
    assert named(refusal(open_target, tmp_path), "expected a target, found a drafter", "DFlashDraftModel")


def test_a_target_passed_as_drafter_is_called_a_target(tmp_path: Path) -> None:
    write_target(tmp_path)
    assert named(refusal(open_drafter, tmp_path), "expected a Domino or DFlash drafter", "LlamaForCausalLM", "looks like a target")


def _only_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def _index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def _fifo(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


SINGLE_FOLDERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no config": (lambda f: (f / CONFIG).unlink(), (CONFIG, WEIGHTS)),
    "a folder for a config": (lambda f: [(f / CONFIG).unlink(), (f / CONFIG).mkdir()], (CONFIG, "not a regular file")),
    "an empty folder": (lambda f: [path.unlink() for path in f.iterdir()], (CONFIG, "empty folder")),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), (WEIGHTS, INDEX, "no weights")),
    "pickle only": (_only_pickle, ("pytorch_model.bin", "Only safetensors are read", WEIGHTS)),
    "weights under another name": (lambda f: (f / WEIGHTS).rename(f / "drafter.safetensors"), ("drafter.safetensors", WEIGHTS)),
    "weights that are a pipe": (_fifo, (WEIGHTS, "not a regular file")),
    "an index beside a single file": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}'),
        ("found both", INDEX),
    ),
    "generation_config that is no JSON": (
        lambda f: (f / "generation_config.json").write_text("{"),
        ("generation_config.json", "valid JSON"),
    ),
    "a huge config": (lambda f: os.truncate(f / CONFIG, 2**34), (CONFIG, "at most", str(2**34))),
}


def _named(folder: Path, file: str) -> None:
    """Have the index name `file` for every tensor."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], file)
    (folder / INDEX).write_text(json.dumps(index))


SHARDED_FOLDERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a shard missing": (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), ("model-00002-of-00002.safetensors", "no such file")),
    "an index without weight_map": (lambda f: _index(f, lambda index: index.pop("weight_map")), (INDEX, "weight_map")),
    "an index with numbers for files": (lambda f: _index(f, lambda index: index["weight_map"].update({"a": 1})), (INDEX, "weight_map")),
    "an index with a tensor too many": (
        lambda f: _index(f, lambda index: index["weight_map"].update({"ghost.weight": "model-00001-of-00002.safetensors"})),
        ("ghost.weight is not in model-00001-of-00002.safetensors",),
    ),
    "an index with a tensor too few": (
        lambda f: _index(f, lambda index: index["weight_map"].pop("model.norm.weight")),
        ("model.norm.weight is in model-0000", "not in the index"),
    ),
    "an index that names a pickle": (lambda f: _named(f, "pytorch_model.bin"), (INDEX, ".safetensors files", "pytorch_model.bin")),
    "an index that names another file of the folder": (lambda f: _named(f, "config.json"), (INDEX, ".safetensors files", "config.json")),
    "an index that is no JSON": (lambda f: (f / INDEX).write_text("weights"), (INDEX, "valid JSON")),
}


@pytest.mark.parametrize(("damage", "items"), SINGLE_FOLDERS.values(), ids=SINGLE_FOLDERS)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], object], items: tuple[str, ...]) -> None:
    folder = tmp_path / "checkpoint"
    write_target(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    damage(folder)
    assert named(refusal(open_target, folder), *items)


@pytest.mark.parametrize(("damage", "items"), SHARDED_FOLDERS.values(), ids=SHARDED_FOLDERS)
def test_a_damaged_sharded_folder_is_refused(tmp_path: Path, damage: Callable[[Path], object], items: tuple[str, ...]) -> None:
    folder = write_target(tmp_path / "checkpoint", shards=2)
    damage(folder)
    assert named(refusal(open_target, folder), *items)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path, shards=2)
    first, second = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: load_file(first)[name]}, second)
    assert named(refusal(open_target, folder), name, second.name, first.name)


@pytest.mark.parametrize(
    ("source", "revision", "item"),
    [
        ("no-such-folder", None, "existing folder or a hub id"),
        ("./org/name", None, "existing folder or a hub id"),
        ("/no/such/folder", None, "existing folder or a hub id"),
        ("~/org", None, "existing folder or a hub id"),
        ("a/b/c", None, "existing folder or a hub id"),
        ("", None, "existing folder or a hub id"),
        ("a" * 5000, None, "existing folder or a hub id"),
        ("org/na\0me", None, "existing folder or a hub id"),
        (".", "v1", "no revision"),
    ],
)
def test_a_source_that_is_neither_folder_nor_hub_id_is_refused(source: str, revision: str | None, item: str) -> None:
    with pytest.raises(CheckpointError, match=item):
        open_target(source, revision=revision)


def test_a_file_as_source_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path)
    with pytest.raises(CheckpointError, match="found a file"):
        open_target(tmp_path / WEIGHTS)


# Lying headers


def _tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _raw(header: Any, **options: Any) -> Callable[[Path], None]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda path: write_raw(path, text, **options)


HEADERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "an empty file": (lambda p: p.write_bytes(b""), ("only 0 bytes",)),
    "five bytes": (lambda p: p.write_bytes(b"\x05\0\0\0\0"), ("only 5 bytes",)),
    "half the data": (lambda p: os.truncate(p, p.stat().st_size // 2), ("data_offsets", "bytes of data")),
    "the last byte gone": (lambda p: os.truncate(p, p.stat().st_size - 1), ("data_offsets",)),
    "data after the last tensor": (lambda p: os.truncate(p, p.stat().st_size + 9), ("9 bytes after", "no tensor")),
    "a header longer than the file": (_raw({}, length=1000), ("header of 1000 bytes", "only 2 bytes")),
    "a header of exabytes": (_raw({}, length=2**63), (str(2**63),)),
    "a huge header": (_raw(b"{}", data_bytes=2**35, length=2**34), ("at most 16777216 bytes", str(2**34))),
    "an html page": (lambda p: p.write_bytes(b"<!DOCTYPE html><html>Sign in</html>"), ("expected a header of",)),
    "a header that is no JSON": (_raw(b"not json"), ("(header)", "begins with '{'")),
    "a header that is a list": (_raw([1]), ("(header)", "found b'[1]'")),
    "a tensor named twice": (_raw(b'{"a": {}, "a": {}}'), ("duplicate key(s) 'a'",)),
    "an entry that is no object": (_raw({"a": 3}), ("'a': expected dtype, shape and data_offsets",)),
    "an entry with a field too many": (
        _raw({"a": {**_tensor([1], 0, 4), "extra": 1}}, data_bytes=4),
        ("'a': expected dtype, shape and data_offsets",),
    ),
    "an unknown dtype": (_raw({"a": _tensor([1], 0, 4, "F31")}, data_bytes=4), ("'a'", "dtypes of safetensors", "'F31'")),
    "a negative size": (_raw({"a": _tensor([-1], 0, 4)}, data_bytes=4), ("'a'", "[-1]")),
    "a bool for a size": (_raw({"a": _tensor([True], 0, 4)}, data_bytes=4), ("'a'", "[True]")),
    "sizes whose product overflows": (_raw({"a": _tensor([2**62, 2**62], 0, 4)}, data_bytes=4), ("'a'", "hold 4")),
    "too many dimensions": (_raw({"a": _tensor([1] * 9, 0, 4)}, data_bytes=4), ("'a'", "at most 8 sizes")),
    "offsets beyond the file": (_raw({"a": _tensor([2], 0, 8)}, data_bytes=4), ("'a'", "within 4 bytes")),
    "offsets that fall": (_raw({"a": _tensor([1], 4, 0)}, data_bytes=4), ("'a'", "rising data_offsets")),
    "three offsets": (_raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, data_bytes=8), ("'a'", "[0, 4, 8]")),
    "a shape that takes more than its bytes": (_raw({"a": _tensor([2], 0, 4)}, data_bytes=4), ("takes 8 bytes", "hold 4")),
    "tensors that overlap": (_raw({"a": _tensor([2], 0, 8), "b": _tensor([2], 4, 12)}, data_bytes=12), ("'b' overlaps 'a' by 4 bytes",)),
    "a hole between tensors": (_raw({"a": _tensor([1], 0, 4), "b": _tensor([1], 8, 12)}, data_bytes=12), ("4 bytes between 'a' and 'b'",)),
    "a name with control characters": (_raw({"a\u001b[2J": _tensor([1], 0, 4)}, data_bytes=4), ("printable", "\\x1b")),
    "several lies": (
        _raw({"a": _tensor([2], 0, 4), "b": _tensor([1], 9, 4), "c": 1}, data_bytes=4),
        ("'a'", "'b'", "'c'"),
    ),
    "a wrong shape of the right size": (
        lambda p: edit_header(p, shape=[math.prod(load_file(p)[next(iter(load_file(p)))].shape)]),
        ("misshapen",),
    ),
}


@pytest.mark.parametrize(("damage", "items"), HEADERS.values(), ids=HEADERS)
def test_a_lying_header_is_refused_within_bounded_memory(tmp_path: Path, damage: Callable[[Path], object], items: tuple[str, ...]) -> None:
    write_target(tmp_path)
    damage(tmp_path / WEIGHTS)
    tracemalloc.start()
    message = refusal(open_target, tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert named(message, WEIGHTS if "misshapen" not in items else "", *items)
    assert peak_bytes < 2e6


def test_a_flood_of_surplus_tensors_gives_a_short_message(tmp_path: Path) -> None:
    _edit(write_target(tmp_path), lambda t: t.update({f"surplus.{i}": torch.zeros(1) for i in range(1000)}))
    message = refusal(open_target, tmp_path)
    assert named(message, "surplus.0 ", "and 800 more")
    assert len(message) < 20_000
