"""Norm, MLP and attention projections shared by target and drafter layers.

Shape legend: B batch, S rows, M model width, H query heads, K key-value heads, D head width, C cache capacity.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from domino_deploy.config import DecoderConfig
from domino_deploy.model import ops


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the activations are narrower than the weight; F.rms_norm is fused for equal types only.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        wide, narrow, bias = config.intermediate_size, config.hidden_size, config.has_mlp_bias
        self.gate_proj = nn.Linear(narrow, wide, bias=bias)
        self.up_proj = nn.Linear(narrow, wide, bias=bias)
        self.down_proj = nn.Linear(wide, narrow, bias=bias)

    def forward(self, x_BSM: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSM)) * self.up_proj(x_BSM))


class Attention(nn.Module):
    """Grouped-query projections with optional q/k norms; the caller owns positions, cache and mask."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.has_qkv_bias
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, width, bias=config.has_output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norm else nn.Identity()

    def queries(self, x_BSM: Tensor, cos_BSd: Tensor, sin_BSd: Tensor) -> Tensor:
        """Rotated queries [B, H, S, D]."""
        q_BSHD = self.q_norm(self.q_proj(x_BSM).unflatten(-1, (-1, self.head_dim)))
        return ops.rotary_embedding(q_BSHD.transpose(1, 2), cos_BSd, sin_BSd)

    def keys_and_values(self, x_BSM: Tensor, cos_BSd: Tensor, sin_BSd: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values [B, K, S, D]."""
        k_BSKD = self.k_norm(self.k_proj(x_BSM).unflatten(-1, (-1, self.head_dim)))
        v_BSKD = self.v_proj(x_BSM).unflatten(-1, (-1, self.head_dim))
        return ops.rotary_embedding(k_BSKD.transpose(1, 2), cos_BSd, sin_BSd), v_BSKD.transpose(1, 2)

    def attend(self, q_BHSD: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, mask: Tensor) -> Tensor:
        """Softmax(q k^T / sqrt(D) where mask) v, projected back: [B, S, M].

        Args:
            mask: bool, broadcastable to [B, H, S, C]; True means "may see".
        """
        if q_BHSD.is_cuda and k_BKCD.shape[1] != q_BHSD.shape[1]:
            # CUDA's fused kernels that take a mask know no grouped heads: without this, all scores would be kept in memory.
            groups = q_BHSD.shape[1] // k_BKCD.shape[1]
            k_BKCD, v_BKCD = k_BKCD.repeat_interleave(groups, dim=1), v_BKCD.repeat_interleave(groups, dim=1)
        mixed_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BKCD, v_BKCD, attn_mask=mask, enable_gqa=True)
        return self.o_proj(mixed_BHSD.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """What a target's and a drafter's layer share: pre-norm attention and MLP; where keys come from is the subclass's."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def mix(self, x_BSM: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """The residual stream behind attention and MLP."""
        return self.residual(x_BSM, self.self_attn.attend(queries, keys, values, mask))

    def residual(self, x_BSM: Tensor, attended_BSM: Tensor) -> Tensor:
        """The residual stream behind the MLP, given what attention adds to it."""
        x_BSM = x_BSM + attended_BSM
        return x_BSM + self.mlp(self.post_attention_layernorm(x_BSM))


def empty_caches(config: DecoderConfig, like: Tensor, batch: int, capacity: int) -> tuple[list[Tensor], list[Tensor]]:
    """Zeroed key and value caches, per layer [batch, K, capacity, D], with the dtype and device of `like`."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    keys, values = ([like.new_zeros(shape) for _ in range(config.num_layers)] for _ in ("keys", "values"))
    return keys, values


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """Lower-triangular bool mask [1, 1, length, length]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def cached_mask(start_B: Tensor, rows: int, capacity: int) -> Tensor:
    """Causal mask [B, 1, rows, capacity] for `rows` new rows written from `start_B` on (int64)."""
    last_visible_BS = start_B[:, None] + torch.arange(rows, device=start_B.device)
    return (torch.arange(capacity, device=start_B.device) <= last_visible_BS[..., None])[:, None]
