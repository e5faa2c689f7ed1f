"""A trained drafter as a folder in the public checkpoint layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from domino_deploy.checkpoint import CONFIG, WEIGHTS
from domino_deploy.config import DrafterConfig, DrafterKind, RopeConfig, RopeType
from domino_deploy.model.drafter import DrafterModel

_STORED_RMS = 0.02  # of `fc`'s entries: that of a freshly initialised linear layer of the supported families


def save_drafter(drafter: DrafterModel, scales: Tensor, folder: Path, *, dtype: torch.dtype = torch.float16) -> None:
    """Write config.json and model.safetensors into `folder`.

    Args:
        drafter: trained on features divided by `scales`.
        scales: [T] rms of each tap; folded into `fc`, so that the checkpoint takes raw features.
        folder: made if it does not exist.
        dtype: of the stored tensors.
    """
    from safetensors.torch import save_file

    config = drafter.config
    tensors = {name: tensor.detach().float() for name, tensor in drafter.state_dict().items()}
    folded = tensors["fc.weight"] / scales.repeat_interleave(config.hidden_size)
    # `hidden_norm` undoes any common factor; this one keeps fp16 away from its subnormals.
    tensors["fc.weight"] = folded * (_STORED_RMS / folded.square().mean().sqrt())
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(public_config(config, dtype), indent=2) + "\n", encoding="utf-8")
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors writes with mode 0600


def public_config(config: DrafterConfig, dtype: torch.dtype) -> dict[str, object]:
    """config.json of the public Domino checkpoints: backbone as Qwen3, the rest under `dflash_config`."""
    special: dict[str, object] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "shift_label": config.shift_label,
    }
    if config.kind is DrafterKind.DOMINO:
        special |= {
            "projector_type": "domino",
            "pure_draft_prefix_len": config.pure_draft_prefix_len,
            "emb_dim": config.emb_dim,
            "gru_hidden_dim": config.gru_hidden_dim,
        }
    return {
        **_rope(config.rope),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_target_layers": config.num_target_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": [
            "sliding_attention" if sliding else "full_attention" for sliding in config.sliding_layers or [False] * config.num_layers
        ],
        "sliding_window": config.sliding_window,
        "dtype": str(dtype).removeprefix("torch."),
        "dflash_config": special,
    }


def _rope(rope: RopeConfig) -> dict[str, object]:
    """`rope_theta`, and `rope_scaling` with the settings of its type."""
    keys = {
        RopeType.DEFAULT: (),
        RopeType.LINEAR: ("factor",),
        RopeType.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        RopeType.YARN: ("factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings"),
    }[rope.type]
    if not keys:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": str(rope.type)} | {key: getattr(rope, key) for key in keys}}
