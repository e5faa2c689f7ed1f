"""Fields of the public targets' config.json that the shipped recipes are made for, by the recipe's name."""

from __future__ import annotations

from typing import Any

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
PUBLIC: dict[str, dict[str, Any]] = {
    "qwen3-4b-domino-b16": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b-domino-b16": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}
