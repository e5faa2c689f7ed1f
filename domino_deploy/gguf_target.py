"""A safetensors checkpoint out of a Llama-family GGUF file (the demo target comes as one).

Weights are dequantised to fp32; tokenizer and chat template are read by transformers' own GGUF reader.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from domino_deploy.aside import written_aside
from domino_deploy.checkpoint import CONFIG, WEIGHTS
from domino_deploy.checkpoint_tensors import LM_HEAD
from domino_deploy.errors import CheckpointError, MissingDependencyError, listed

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def checkpoint_from_gguf(gguf_file: Path, folder: Path, *, sha256: str | None = None) -> Path:
    """Write config.json, model.safetensors and the tokenizer of a Llama GGUF into `folder`; returns the folder.

    Written aside and renamed, so `folder` is whole or absent.

    Args:
        gguf_file: the quantised model.
        folder: must not exist yet.
        sha256: expected hash of the file, checked when given.

    Raises:
        CheckpointError: the folder exists, no such file, wrong hash, another architecture, a setting that would be lost,
            or a tensor that has no place in a Llama model.
        MissingDependencyError: transformers, gguf or safetensors is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _missing("transformers") from error
    if folder.exists():
        raise CheckpointError(f"{folder}: expected no such folder yet, found one. Remove it, or name another.")
    if not gguf_file.is_file():
        raise CheckpointError(f"{gguf_file}: expected a GGUF file, found none. Install the package again, or correct the path.")
    if sha256 is not None:
        _check_hash(gguf_file, sha256)
    with written_aside(folder) as aside:
        weights_from_gguf(gguf_file, aside)
        AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).save_pretrained(aside)
    return folder


def weights_from_gguf(gguf_file: Path, folder: Path) -> None:
    """Write config.json and model.safetensors alone, into an existing folder; needs no transformers.

    Raises:
        CheckpointError: another architecture, a setting that would be lost, or a tensor that has no place in a Llama model.
        MissingDependencyError: gguf or safetensors is not installed.
    """
    try:
        from gguf import GGUFReader
        from safetensors.numpy import save_file
    except ImportError as error:
        raise _missing("gguf and safetensors") from error
    reader = GGUFReader(gguf_file)
    config = _config(reader)
    names = _names([tensor.name for tensor in reader.tensors])
    config["tie_word_embeddings"] = LM_HEAD not in names.values()
    tensors = {names[tensor.name]: _weight(tensor, config) for tensor in reader.tensors}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", "source": gguf_file.name})
    # safetensors writes with mode 0600; the other files follow the umask.
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)


def _check_hash(gguf_file: Path, expected: str) -> None:
    with gguf_file.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(f"{gguf_file.name}: expected sha256 {expected}, found {found}. Install the package again.")


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise CheckpointError(f"GGUF: expected the field {key}, found none. Only Llama-family files with full metadata can be converted.")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"GGUF: expected architecture llama, found {architecture}. Convert this model with its own tools.")
    heads = int(_field(reader, "llama.attention.head_count"))
    width = int(_field(reader, "llama.embedding_length"))
    _check_settings(reader, head_dim=width // heads)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": int(_field(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv")),
        "head_dim": width // heads,
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        # Stored in fp32: rounding gives 1e-05 back for 9.99999974e-06.
        "rms_norm_eps": round(float(_field(reader, "llama.attention.layer_norm_rms_epsilon")), 12),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base"))},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
        "dtype": "float32",
    }


def _check_settings(reader: GGUFReader, head_dim: int) -> None:
    """Optional fields that `_config` does not carry over may only say what it assumes."""
    assumed = {
        "llama.rope.scaling.type": "none",
        "llama.rope.dimension_count": head_dim,
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.expert_count": 0,
    }
    fields = {key: reader.get_field(key) for key in assumed}
    found = {key: field.contents() for key, field in fields.items() if field is not None}
    problems = [f"{key}: expected {assumed[key]}, found {value}" for key, value in found.items() if value != assumed[key]]
    if problems:
        raise CheckpointError(
            listed("GGUF: settings that a plain Llama model does not have", problems, "Convert this model with its own tools.")
        )


def _names(gguf_names: Sequence[str]) -> dict[str, str]:
    """Each tensor's name in a transformers checkpoint."""
    names = {name: _name(name) for name in gguf_names}
    problems = [name for name, ours in names.items() if ours is None]
    if problems:
        raise CheckpointError(
            listed("GGUF: tensors that have no place in a Llama model", problems, "Convert this model with its own tools.")
        )
    return {name: ours for name, ours in names.items() if ours is not None}


def _name(gguf_name: str) -> str | None:
    stem = gguf_name.removesuffix(".weight")
    if stem == gguf_name:
        return None
    if stem in _TOP_TENSORS:
        return f"{_TOP_TENSORS[stem]}.weight"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _LAYER_TENSORS:
        return None
    return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.weight"


def _missing(packages: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"Expected {packages} to read a GGUF file, found them not installed. Run: pip install 'domino-deploy[train]'"
    )


def _weight(tensor: ReaderTensor, config: dict[str, Any]) -> np.ndarray:
    from gguf.quants import dequantize

    weight = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)]).astype(np.float32)
    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    for suffix, count in heads.items():
        if tensor.name.endswith(suffix):
            # GGUF interleaves the rotary halves of each head; the transformers layout keeps them apart.
            pairs = weight.reshape(count, weight.shape[0] // count // 2, 2, weight.shape[1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    return np.ascontiguousarray(weight)
