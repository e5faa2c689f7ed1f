"""Tiny seeded targets and drafters, and a slow backbone written from the formulas alone."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from domino_deploy.config import DrafterConfig, DrafterKind, Family, RopeConfig, TargetConfig
from domino_deploy.model.backbone import Backbone
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel

M = TypeVar("M", bound=nn.Module)
VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 61, 24, 4, 2, 8


def target_config(family: Family = Family.LLAMA, **changes: Any) -> TargetConfig:
    """A 3-layer target; head_dim differs from hidden_size / num_heads on purpose."""
    values: dict[str, Any] = {
        "family": family,
        "tie_word_embeddings": False,
        "has_qk_norm": family is Family.QWEN3,
        "has_qkv_bias": family is Family.QWEN2,
        "num_layers": 3,
        "intermediate_size": 40,
        **_shape(),
    }
    return TargetConfig(**(values | changes))


def drafter_config(kind: DrafterKind = DrafterKind.DOMINO, **changes: Any) -> DrafterConfig:
    """A 2-layer drafter of block 5 for `target_config()`."""
    values: dict[str, Any] = {
        "kind": kind,
        "block_size": 5,
        "num_layers": 2,
        "num_target_layers": 3,
        "target_layer_ids": (0, 2),
        "mask_token_id": VOCAB - 1,
        "shift_label": True,
        "has_qk_norm": True,
        "intermediate_size": 40,
        **_shape(),
    }
    if kind is DrafterKind.DOMINO:
        values |= {"pure_draft_prefix_len": 1, "emb_dim": 6, "gru_hidden_dim": 10}
    return DrafterConfig(**(values | changes))


def _shape() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=10_000.0),
        "max_position_embeddings": 256,
    }


def randomize(module: M, seed: int) -> M:
    """Fill every parameter so that no norm is an identity and no bias is zero; eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
    return module.eval()


def tiny_target(seed: int = 0, tapped_layers: tuple[int, ...] = (0, 2), **changes: Any) -> TargetModel:
    return randomize(TargetModel(target_config(**changes), tapped_layers), seed)


def tiny_drafter(seed: int = 1, kind: DrafterKind = DrafterKind.DOMINO, **changes: Any) -> DrafterModel:
    return randomize(DrafterModel(drafter_config(kind, **changes)), seed)


def slow_backbone(model: Backbone, block_PM: Tensor, features_LF: Tensor, positions: Tensor, masks_PC: list[Tensor]) -> Tensor:
    """Final hidden states [P, M] of one sequence, in float64, head by head (DFlash's formulas, no code of `model/`).

    Args:
        model: gives the weights only.
        positions: int64 [L + P].
        masks_PC: per layer, bool [P, L + P].
    """
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    config, rows = model.config, len(features_LF)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def rotate(x_SD: Tensor, where: Tensor) -> Tensor:
        half = config.head_dim // 2
        angle = where.double()[:, None] * config.rope.theta ** (-2.0 * torch.arange(half, dtype=torch.float64) / config.head_dim)
        # Each half pair is a complex number turned by its angle.
        turned = torch.complex(x_SD[:, :half], x_SD[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1)

    context = norm(features_LF.double() @ weights["fc.weight"].T, "hidden_norm")
    x = block_PM.double()
    for index in range(config.num_layers):
        prefix = f"layers.{index}"
        normed = norm(x, f"{prefix}.input_layernorm")
        both = torch.cat([context, normed])
        q, k, v = (
            (inputs @ weights[f"{prefix}.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, config.head_dim))
            for inputs, part in ((normed, "q"), (both, "k"), (both, "v"))
        )
        heads = []
        for head in range(config.num_heads):
            group = head // (config.num_heads // config.num_kv_heads)
            query = rotate(norm(q[:, head], f"{prefix}.self_attn.q_norm"), positions[rows:])
            key = rotate(norm(k[:, group], f"{prefix}.self_attn.k_norm"), positions)
            scores = (query @ key.T / config.head_dim**0.5).masked_fill(~masks_PC[index], -torch.inf)
            heads.append(scores.softmax(dim=-1) @ v[:, group])
        x = x + torch.cat(heads, dim=-1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{prefix}.post_attention_layernorm")
        gate, up = (normed @ weights[f"{prefix}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T
    return norm(x, "norm")
