"""Which tensors a config calls for, and how those found differ.  Names are those of `model/`'s state dicts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from domino_deploy.checkpoint_drafter import NEVER_AS_DFLASH
from domino_deploy.config import DecoderConfig, DrafterConfig, DrafterKind, Family, TargetConfig
from domino_deploy.errors import shortened
from domino_deploy.safetensors_header import TensorEntry

Shapes = dict[str, tuple[int, ...]]

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_DTYPES = ("F32", "F16", "BF16")
_HEAD_PARTS = ("prefix_gru.", "embed_proj.")
_HEAD_NEST = "logit_head."  # early SpecForge checkpoints; domino.py there renames it likewise
# Derived from rope_theta; early Llama checkpoints store it.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_REASONS = {
    "d2t": "a reduced draft vocabulary is not supported",
    "t2d": "a reduced draft vocabulary is not supported",
    "bias_gate": "use_bias_gate is not supported",
    "bias_norm": "use_bias_norm is not supported",
    "embed_tokens": "a drafter uses the target's embedding",
    "lm_head": "a drafter uses the target's LM head",
}


def expected_target_tensors(config: TargetConfig) -> Shapes:
    """Canonical names and shapes of a target's tensors; a tied LM head is none of them."""
    width = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, width), "model.norm.weight": (width,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, width)
    for layer in range(config.num_layers):
        shapes |= _layer(config, f"model.layers.{layer}.")
    return shapes


def expected_drafter_tensors(config: DrafterConfig) -> Shapes:
    """Canonical names and shapes of a drafter's tensors."""
    width = config.hidden_size
    shapes: Shapes = {"fc.weight": (width, config.feature_size), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    for layer in range(config.num_layers):
        shapes |= _layer(config, f"layers.{layer}.")
    if config.kind is DrafterKind.DOMINO:
        state, rank = config.gru_hidden_dim, config.emb_dim
        shapes |= {
            "prefix_gru.weight_ih_l0": (3 * state, width),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (rank, width + state),
            "embed_proj.2.weight": (config.vocab_size, rank),
        }
    return shapes


def canonical_drafter_names(entries: Mapping[str, TensorEntry], problems: list[str]) -> dict[str, TensorEntry]:
    """The entries with the head's tensors at top level, wherever the checkpoint nests them."""
    result = {}
    for name, entry in entries.items():
        inner = name.removeprefix(_HEAD_NEST)
        canonical = inner if inner.startswith(_HEAD_PARTS) else name
        if canonical in result:
            problems.append(f"{canonical} is present twice, at top level and as {_HEAD_NEST}{canonical}")
        result[canonical] = entry
    return result


def without_derived(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries less the rotary frequencies that old checkpoints store beside the weights."""
    return {name: entry for name, entry in entries.items() if not _DERIVED.fullmatch(name)}


def tensor_problems(entries: Mapping[str, TensorEntry], expected: Shapes, config: DecoderConfig) -> list[str]:
    """Every missing, surplus, misshapen or mistyped tensor, one line each (the first 200 and a count)."""
    if config.num_layers > len(entries):
        return [f"config.json says {config.num_layers} layers, but the weights hold only {len(entries)} tensors"]
    missing = expected.keys() - entries.keys()
    surplus = entries.keys() - expected.keys()
    problems = [f"missing: {name}, expected shape {list(expected[name])}" for name in sorted(missing)]
    problems += [f"surplus: {name} of shape {list(entries[name].shape)}{_reason(name, config)}" for name in sorted(surplus)]
    for name in sorted(entries.keys() & expected.keys()):
        entry = entries[name]
        if entry.shape != expected[name]:
            problems.append(f"misshapen: {name}, expected {list(expected[name])}, found {list(entry.shape)}")
        if entry.dtype not in _DTYPES:
            problems.append(f"mistyped: {name}, expected {', '.join(_DTYPES)}, found {entry.dtype}")
    return shortened(problems, most=200)


def _reason(name: str, config: DecoderConfig) -> str:
    if isinstance(config, DrafterConfig):
        if config.kind is DrafterKind.DFLASH and name.startswith(_HEAD_PARTS):
            return f" - a Domino head, but config.json has no projector_type: {NEVER_AS_DFLASH}"
        reasons = [reason for part, reason in _REASONS.items() if part in name.split(".")]
        return f" - {reasons[0]}" if reasons else ""
    if isinstance(config, TargetConfig) and name.endswith(".bias") and config.family is not Family.QWEN2:
        return " - attention_bias and mlp_bias in config.json say which biases there are"
    return ""


def _layer(config: DecoderConfig, prefix: str) -> Shapes:
    width, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = {
        "self_attn.q_proj": (queries, width, config.has_qkv_bias),
        "self_attn.k_proj": (keys, width, config.has_qkv_bias),
        "self_attn.v_proj": (keys, width, config.has_qkv_bias),
        "self_attn.o_proj": (width, queries, config.has_output_bias),
        "mlp.gate_proj": (wide, width, config.has_mlp_bias),
        "mlp.up_proj": (wide, width, config.has_mlp_bias),
        "mlp.down_proj": (width, wide, config.has_mlp_bias),
    }
    shapes: Shapes = {f"{prefix}{name}.weight": (out, into) for name, (out, into, _) in linear.items()}
    shapes |= {f"{prefix}{name}.bias": (out,) for name, (out, _, has_bias) in linear.items() if has_bias}
    shapes |= {f"{prefix}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
    if config.has_qk_norm:
        shapes |= {f"{prefix}self_attn.{norm}.weight": (config.head_dim,) for norm in ("q_norm", "k_norm")}
    return shapes
