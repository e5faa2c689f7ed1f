"""The parallel draft backbone (DFlash, arXiv 2602.06036): one pass gives hidden states for a whole block.

Queries come from the block [anchor, MASK, ...]; keys and values from the block and from the target's tapped features
of the tokens before the anchor.  Features pass one shared projection (`fc`, `hidden_norm`) and then each layer's own
key and value projections; they are never queries.

Shape legend: B batch, P block positions, L feature rows, M model width, T tapped layers, K key-value heads, D head width,
C cache capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from domino_deploy.config import DrafterConfig
from domino_deploy.model import ops, rope
from domino_deploy.model.layers import DecoderLayer, RMSNorm, empty_caches


class BackboneOutput(NamedTuple):
    """hidden [B, P, M] after the final norm; updated caches."""

    hidden: Tensor
    key_caches: list[Tensor]
    value_caches: list[Tensor]


class BackboneLayer(DecoderLayer):
    """A layer of the backbone: keys and values also come from the context."""

    def keys_and_values(self, context_BLM: Tensor, normed_BPM: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, L + P, D] of context rows followed by block rows; angles cover both."""
        rows = torch.cat([context_BLM, normed_BPM], dim=1)
        return self.self_attn.keys_and_values(rows, cos, sin)


class Backbone(nn.Module):
    """Draft backbone; tensor names are those of a public checkpoint (`layers.*`, `fc`, `hidden_norm`, `norm`)."""

    inverse_frequencies: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        layers = nn.ModuleList(BackboneLayer(config) for _ in range(config.num_layers))
        self.layers: Sequence[BackboneLayer] = layers  # type: ignore[assignment]  # a ModuleList does not know its elements' type
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        frequencies, self.rope_factor = rope.inverse_frequencies(config.rope, config.head_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(
        self,
        block_embeddings_BPM: Tensor,
        features_BLF: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        sliding_mask: Tensor | None = None,
    ) -> Tensor:
        """The block against its whole context, no cache: hidden states [B, P, M].

        Args:
            block_embeddings_BPM: the target's embedding rows of [anchor, MASK, ...].
            features_BLF: tapped target features, F = T * M.
            position_ids: int64 [B, L + P], context rows first.
            mask: bool, broadcastable to [B, H, P, L + P].
            sliding_mask: the same for sliding-window layers; needed when the drafter has any.
        """
        context = self.hidden_norm(self.fc(features_BLF))
        cos, sin = rope.angles(position_ids, self.inverse_frequencies, self.rope_factor, context.dtype)
        rows = features_BLF.shape[1]
        x = block_embeddings_BPM
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            keys, values = layer.keys_and_values(context, normed, cos, sin)
            queries = layer.self_attn.queries(normed, cos[:, rows:], sin[:, rows:])
            x = layer.mix(x, queries, keys, values, self._mask_of(index, mask, sliding_mask))
        return self.norm(x)

    def cached(
        self,
        block_embeddings_BPM: Tensor,
        features_BLF: Tensor,
        position_ids: Tensor,
        mask_B1PC: Tensor,
        write_index_B: Tensor,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        sliding_mask_B1PC: Tensor | None = None,
    ) -> BackboneOutput:
        """The block against a cache to which the newly accepted features are appended.

        Feature rows go to slots `write_index .. write_index + L`, block rows to the P slots behind them.  Only the
        feature rows are meant to stay: the next call writes from the end of the *accepted* rows, over the block's.

        Args: as `forward`, with
            features_BLF: features of the newly accepted tokens only.
            mask_B1PC: bool over cache slots; hides padding rows and whatever lies beyond the block.
            write_index_B: int64; `write_index + L + P <= C`.
            key_caches: per layer [B, K, C, D].
            value_caches: per layer [B, K, C, D].
        """
        context = self.hidden_norm(self.fc(features_BLF))
        cos, sin = rope.angles(position_ids, self.inverse_frequencies, self.rope_factor, context.dtype)
        block = block_embeddings_BPM.shape[1]
        x, new_keys, new_values = block_embeddings_BPM, [], []
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            keys, values = layer.keys_and_values(context, normed, cos, sin)
            keys = ops.cache_update(key_caches[index], keys, write_index_B)
            values = ops.cache_update(value_caches[index], values, write_index_B)
            queries = layer.self_attn.queries(normed, cos[:, -block:], sin[:, -block:])
            x = layer.mix(x, queries, keys, values, self._mask_of(index, mask_B1PC, sliding_mask_B1PC))
            new_keys.append(keys)
            new_values.append(values)
        return BackboneOutput(self.norm(x), new_keys, new_values)

    def empty_caches(self, batch: int, capacity: int) -> tuple[list[Tensor], list[Tensor]]:
        """Zeroed key and value caches, per layer [batch, K, capacity, D]."""
        return empty_caches(self.config, self.norm.weight, batch, capacity)

    def _mask_of(self, layer: int, mask: Tensor, sliding_mask: Tensor | None) -> Tensor:
        is_sliding = bool(self.config.sliding_layers) and self.config.sliding_layers[layer]
        if not is_sliding:
            return mask
        assert sliding_mask is not None, "a drafter with sliding layers is always called with a sliding mask"
        return sliding_mask
