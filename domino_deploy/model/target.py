"""Targets of the Llama, Qwen2 and Qwen3 families: one decoder, caches as plain inputs and outputs.

Module names give the tensor names of a transformers checkpoint, so its safetensors load as they are.

Shape legend: B batch, S new rows, N rows with logits, C cache capacity, M model width, V vocabulary, K key-value heads,
D head width, T tapped layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from domino_deploy.config import TargetConfig
from domino_deploy.model import ops, rope
from domino_deploy.model.layers import DecoderLayer, RMSNorm, causal_mask, empty_caches


class TargetOutput(NamedTuple):
    """logits [B, N, V]; features [B, S, T*M]: outputs of the tapped layers, side by side; updated caches."""

    logits: Tensor
    features: Tensor
    key_caches: list[Tensor]
    value_caches: list[Tensor]


class TargetLayer(DecoderLayer):
    """A layer of the target, with and without a cache."""

    def forward(self, x_BSM: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """The layer over a whole sequence, no cache."""
        normed = self.input_layernorm(x_BSM)
        keys, values = self.self_attn.keys_and_values(normed, cos, sin)
        return self.mix(x_BSM, self.self_attn.queries(normed, cos, sin), keys, values, mask)

    def cached(
        self, x_BSM: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, write_index_B: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer over new rows that also see the cache; returns the updated cache."""
        normed = self.input_layernorm(x_BSM)
        keys, values = self.self_attn.keys_and_values(normed, cos, sin)
        key_cache = ops.cache_update(key_cache, keys, write_index_B)
        value_cache = ops.cache_update(value_cache, values, write_index_B)
        return self.mix(x_BSM, self.self_attn.queries(normed, cos, sin), key_cache, value_cache, mask), key_cache, value_cache


class TargetTrunk(nn.Module):
    """Embedding, layers and final norm: `model.*` of a transformers checkpoint."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = nn.ModuleList(TargetLayer(config) for _ in range(config.num_layers))
        self.layers: Sequence[TargetLayer] = layers  # type: ignore[assignment]  # a ModuleList does not know its elements' type
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TargetModel(nn.Module):
    """A target LLM.

    Args:
        config: the target's shape.
        tapped_layers: layers whose outputs feed the drafter, rising; empty without a drafter.
    """

    inverse_frequencies: Tensor

    def __init__(self, config: TargetConfig, tapped_layers: Sequence[int] = ()) -> None:
        super().__init__()
        self.config = config
        self.tapped_layers = tuple(tapped_layers)
        self.model = TargetTrunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        frequencies, self.rope_factor = rope.inverse_frequencies(config.rope, config.head_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(
        self,
        input_ids_BS: Tensor,
        position_ids_BS: Tensor,
        attention_mask_B1SC: Tensor,
        write_index_B: Tensor,
        logit_index_BN: Tensor,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
    ) -> TargetOutput:
        """New rows against the cache.

        Args:
            input_ids_BS: int64 tokens.
            position_ids_BS: int64 positions of the rows.
            attention_mask_B1SC: bool, True where a row may see a cache slot (its own included).
            write_index_B: int64, first cache slot of the new rows.
            logit_index_BN: int64, rows whose logits are wanted.
            key_caches: per layer [B, K, C, D].
            value_caches: per layer [B, K, C, D].
        """
        x_BSM = self.model.embed_tokens(input_ids_BS)
        cos, sin = rope.angles(position_ids_BS, self.inverse_frequencies, self.rope_factor, x_BSM.dtype)
        taps, new_keys, new_values = [], [], []
        for index, layer in enumerate(self.model.layers):
            x_BSM, keys, values = layer.cached(x_BSM, cos, sin, attention_mask_B1SC, write_index_B, key_caches[index], value_caches[index])
            new_keys.append(keys)
            new_values.append(values)
            if index in self.tapped_layers:
                taps.append(self._tap(index, x_BSM))
        wanted_BNM = torch.gather(x_BSM, 1, logit_index_BN[..., None].expand(-1, -1, x_BSM.shape[-1]))
        logits_BNV = self.lm_head(self.model.norm(wanted_BNM))
        features = torch.cat(taps, dim=-1) if taps else x_BSM[..., :0]
        return TargetOutput(logits_BNV, features, new_keys, new_values)

    def hidden_states(self, input_ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Causal pass over whole sequences without a cache: normed hidden states [B, S, M] and features [B, S, T*M]."""
        x_BSM = self.model.embed_tokens(input_ids_BS)
        length = input_ids_BS.shape[1]
        positions_1S = torch.arange(length, device=input_ids_BS.device)[None]
        cos, sin = rope.angles(positions_1S, self.inverse_frequencies, self.rope_factor, x_BSM.dtype)
        mask, taps = causal_mask(length, input_ids_BS.device), []
        for index, layer in enumerate(self.model.layers):
            x_BSM = layer(x_BSM, cos, sin, mask)
            if index in self.tapped_layers:
                taps.append(self._tap(index, x_BSM))
        return self.model.norm(x_BSM), torch.cat(taps, dim=-1) if taps else x_BSM[..., :0]

    def _tap(self, index: int, x_BSM: Tensor) -> Tensor:
        # transformers' hidden_states[-1] is taken after the final norm; drafters are trained on that numbering.
        return self.model.norm(x_BSM) if index == self.config.num_layers - 1 else x_BSM

    def empty_caches(self, batch: int, capacity: int) -> tuple[list[Tensor], list[Tensor]]:
        """Zeroed key and value caches, per layer [batch, K, capacity, D]."""
        return empty_caches(self.config, self.model.norm.weight, batch, capacity)
