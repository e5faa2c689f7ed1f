"""A drafter to start from: layers copied from the target's last ones, context projection set to the nearest tap."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from domino_deploy.checkpoint import Checkpoint
from domino_deploy.checkpoint_drafter import default_target_layer_ids, has_room_for_taps
from domino_deploy.config import DrafterConfig, DrafterKind, TargetConfig
from domino_deploy.errors import TrainingError, listed
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.loading import load_drafter
from domino_deploy.model.target import TargetModel
from domino_deploy.training.recipe import Recipe

_FC_STD = 0.02  # times 1 / sqrt(inputs); the copied tap has weight 1


def drafter_config(target: TargetConfig, recipe: Recipe) -> DrafterConfig:
    """The drafter that `recipe` asks for on this target: layer shape of the target, Qwen3-style q/k norms.

    Raises:
        TrainingError: the target has too few layers for these taps or draft layers, or too few tokens for the mask id.
    """
    problems = []
    if not has_room_for_taps(recipe.num_taps, target.num_layers):
        problems.append(f"num_taps must leave distinct layers in a target of {target.num_layers}, found {recipe.num_taps}")
    if recipe.num_layers > target.num_layers:
        problems.append(f"num_layers must be at most the target's {target.num_layers}, found {recipe.num_layers}")
    mask = recipe.mask_token_id
    if mask is None or not mask < target.vocab_size:
        problems.append(f"mask_token_id must be an id in [0, {target.vocab_size}) that the target's text never holds, found {mask}")
    if problems:
        raise TrainingError(
            listed("The recipe does not fit this target", problems, "Correct these values; docs/training.md finds a free id for MASK.")
        )
    assert mask is not None  # listed above
    head = {name: getattr(recipe, name) for name in ("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim")}
    if recipe.drafter_kind is DrafterKind.DFLASH:
        head = {}
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=recipe.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        max_position_embeddings=target.max_position_embeddings,
        has_qk_norm=True,
        kind=recipe.drafter_kind,
        block_size=recipe.block_size,
        num_target_layers=target.num_layers,
        target_layer_ids=default_target_layer_ids(recipe.num_taps, target.num_layers),
        mask_token_id=mask,
        shift_label=recipe.shift_label,
        **head,
    )


@torch.no_grad()
def new_drafter(target: TargetModel, config: DrafterConfig, sample_ids: Tensor) -> DrafterModel:
    """A drafter with the target's last layers, norms included, for features divided by the taps' rms.

    Args:
        target: the target, of the same layer shape.
        config: the drafter's.
        sample_ids: int64 [B, S] text of the target; q/k norms start at the rms that the copied projections give on it.
    """
    drafter = DrafterModel(config)  # in fp32, whatever the target's type
    first = target.config.num_layers - config.num_layers
    scales = _query_key_rms(target, first, sample_ids)
    for index, layer in enumerate(drafter.layers):
        # The public layout has no room for biases on some projections only (Qwen2), so a drafter starts without any.
        source = target.model.layers[first + index].state_dict()
        copied = {name: tensor for name, tensor in source.items() if not name.endswith(".bias")}
        layer.load_state_dict(layer.state_dict() | copied)
        if not target.config.has_qk_norm:
            layer.self_attn.q_norm.get_parameter("weight").fill_(scales[index][0])
            layer.self_attn.k_norm.get_parameter("weight").fill_(scales[index][1])
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    drafter.hidden_norm.load_state_dict(target.model.layers[first].input_layernorm.state_dict())
    # Next to nothing: at first the nearest tap reaches the layers as they know it, and the others may grow.
    drafter.fc.weight.normal_(std=_FC_STD / config.feature_size**0.5)
    nearest = min(range(len(config.target_layer_ids)), key=lambda tap: abs(config.target_layer_ids[tap] + 1 - first))
    width = config.hidden_size
    drafter.fc.weight[:, nearest * width : (nearest + 1) * width] += torch.eye(width)
    if drafter.head is not None:
        drafter.head.codebook_VR.zero_()  # the first corrected logits are the base logits
    return drafter


def started_drafter(checkpoint: Checkpoint[DrafterConfig], config: DrafterConfig, scales: Tensor) -> DrafterModel:
    """A trained drafter to go on from, made to take features divided by `scales`.

    Raises:
        TrainingError: it is of another shape than the recipe asks for.
    """
    refuse_other_shape(checkpoint, config)
    drafter = load_drafter(checkpoint).train()
    with torch.no_grad():
        # save_drafter's folding, undone; `hidden_norm` makes the common factor immaterial.
        drafter.fc.weight.mul_(scales.repeat_interleave(config.hidden_size))
    return drafter


def refuse_other_shape(checkpoint: Checkpoint[DrafterConfig], config: DrafterConfig) -> None:
    """Stop before anything is computed for a start that cannot be used.

    Raises:
        TrainingError: the checkpoint is of another shape than the recipe asks for.
    """
    if checkpoint.config != config:
        fields = [
            field.name for field in dataclasses.fields(config) if getattr(config, field.name) != getattr(checkpoint.config, field.name)
        ]
        problems = [f"{name} must be {getattr(config, name)}, found {getattr(checkpoint.config, name)}" for name in fields]
        raise TrainingError(
            listed(f"{checkpoint.source}: another shape than the recipe's", problems, "Change the recipe, or start elsewhere.")
        )


def _query_key_rms(target: TargetModel, first: int, sample_ids: Tensor) -> list[tuple[float, float]]:
    """Rms of the query and of the key projection's output in each of the target's layers from `first` on."""
    seen: dict[torch.nn.Module, float] = {}

    def record(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[module] = output.square().mean().sqrt().item()

    attentions = [layer.self_attn for layer in target.model.layers[first:]]
    hooks = [projection.register_forward_hook(record) for attention in attentions for projection in (attention.q_proj, attention.k_proj)]
    target.hidden_states(sample_ids)
    for hook in hooks:
        hook.remove()
    return [(seen[attention.q_proj], seen[attention.k_proj]) for attention in attentions]
