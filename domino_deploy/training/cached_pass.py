"""A pass of the target over new tokens with its caches written in place, and the features it taps on the way.

`TargetModel.forward` copies its caches, which suits a graph; regeneration writes to them for hours.

Shape legend: B rows, S new tokens of a row, C cache slots, K key-value heads, D head width, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from domino_deploy.model import rope
from domino_deploy.model.layers import Attention, cached_mask
from domino_deploy.model.target import TargetModel

_FP16_LIMIT = 6e4  # fp16 ends at 65504; the first token's spikes reach 2.5e4 on the demo target


def as_stored(features: Tensor) -> Tensor:
    """Features as they are kept: clamped to what fp16 holds."""
    return features.clamp(-_FP16_LIMIT, _FP16_LIMIT).to(torch.float16)


def cached_pass(
    model: TargetModel,
    ids_BS: Tensor,
    start_B: Tensor,
    logit_row_B: Tensor,
    caches: Sequence[tuple[Tensor, Tensor]],
    used: int,
    keep_features: bool,
) -> tuple[Tensor, Tensor]:
    """Logits [B, V] of one row each and features fp16 [B, S, F]; caches written in place (TargetModel.forward copies them).

    Args:
        model: the target.
        ids_BS: new tokens, padded behind.
        start_B: cache slots filled so far.
        logit_row_B: which of the S rows decides each sequence's next token.
        caches: per layer keys and values [B, K, C, D].
        used: slots to attend over.
        keep_features: whether features are wanted; without, F is 0.
    """
    x = model.model.embed_tokens(ids_BS)
    slots_BS = start_B[:, None] + torch.arange(ids_BS.shape[1], device=x.device)
    cos, sin = rope.angles(slots_BS, model.inverse_frequencies, model.rope_factor, x.dtype)
    mask = cached_mask(start_B, ids_BS.shape[1], used)
    rows_B = torch.arange(len(x), device=x.device)
    taps, tapped = [], model.tapped_layers if keep_features else ()
    for index, (layer, (key_cache, value_cache)) in enumerate(zip(model.model.layers, caches, strict=True)):
        normed = layer.input_layernorm(x)
        keys, values = layer.self_attn.keys_and_values(normed, cos, sin)
        key_cache[rows_B[:, None], :, slots_BS] = keys.transpose(1, 2)
        value_cache[rows_B[:, None], :, slots_BS] = values.transpose(1, 2)
        attend = layer.self_attn.attend if ids_BS.shape[1] > 1 else partial(_attend_grouped, layer.self_attn)
        queries = layer.self_attn.queries(normed, cos, sin)
        x = layer.residual(x, attend(queries, key_cache[:, :, :used], value_cache[:, :, :used], mask))
        if index in tapped:
            # As TargetModel: the last layer's tap is taken behind the final norm.
            tap = model.model.norm(x) if index == model.config.num_layers - 1 else x
            taps.append(as_stored(tap))
    logits = model.lm_head(model.model.norm(x[rows_B, logit_row_B]))
    return logits, torch.cat(taps, dim=-1) if taps else x[..., :0]


def _attend_grouped(attention: Attention, queries_BH1D: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`Attention.attend` for one row per sequence: query heads that share keys become rows of one head, so no key is repeated."""
    batch, heads, _, width = queries_BH1D.shape
    grouped = queries_BH1D.view(batch, keys.shape[1], heads // keys.shape[1], width)
    mixed = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return attention.o_proj(mixed.reshape(batch, 1, heads * width))
