"""Models out of opened checkpoints: strict, and without allocating the weights twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from domino_deploy.checkpoint import Checkpoint, ConfigT, load_tensors
from domino_deploy.checkpoint_tensors import EMBEDDING, LM_HEAD
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import CheckpointError, listed
from domino_deploy.model import rope
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel


def load_target(checkpoint: Checkpoint[TargetConfig], tapped_layers: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> TargetModel:
    """The target in eval mode, weights in `dtype`.

    Args:
        checkpoint: from `open_target`.
        tapped_layers: layers whose outputs feed the drafter (`DrafterConfig.target_layer_ids`), rising.
        dtype: of the weights; rotary frequencies stay fp32.

    Raises:
        CheckpointError: weights that are not finite in `dtype`.
    """
    with torch.device("meta"):
        model = TargetModel(checkpoint.config, tapped_layers)
    weights = _finite_weights(checkpoint, dtype)
    if checkpoint.config.tie_word_embeddings:
        weights[LM_HEAD] = weights[EMBEDDING]
    _fill(model, weights, checkpoint.config)
    if checkpoint.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight  # one parameter again: assignment made two of it
    return model


def load_drafter(checkpoint: Checkpoint[DrafterConfig], dtype: torch.dtype = torch.float32) -> DrafterModel:
    """The drafter in eval mode, weights in `dtype`; errors as `load_target`."""
    with torch.device("meta"):
        model = DrafterModel(checkpoint.config)
    _fill(model, _finite_weights(checkpoint, dtype), checkpoint.config)
    return model


def _finite_weights(checkpoint: Checkpoint[ConfigT], dtype: torch.dtype) -> dict[str, Tensor]:
    weights = dict(load_tensors(checkpoint, dtype))
    problems = [name for name, weight in weights.items() if not torch.isfinite(weight).all()]
    if problems:
        advice = "The checkpoint is damaged, or its weights need a wider dtype."
        raise CheckpointError(
            listed(f"{checkpoint.source}: expected finite weights in {dtype}, found NaN or infinity in", problems, advice)
        )
    return weights


def _fill(model: nn.Module, weights: dict[str, Tensor], config: TargetConfig | DrafterConfig) -> None:
    model.load_state_dict(weights, strict=True, assign=True)
    # Not part of a checkpoint, and the one buffer that was made without memory.
    model.inverse_frequencies = rope.inverse_frequencies(config.rope, config.head_dim)[0]
    model.eval()
