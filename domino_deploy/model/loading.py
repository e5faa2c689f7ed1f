"""Models out of opened checkpoints: strict, and without allocating the weights twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from domino_deploy.checkpoint import Checkpoint, ConfigT, load_tensors
from domino_deploy.checkpoint_tensors import EMBEDDING, LM_HEAD
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import CheckpointError, listed
from domino_deploy.model import rope
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel
from domino_deploy.precision import Dtype

# The floating precisions.
TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}


def load_target(checkpoint: Checkpoint[TargetConfig], tapped_layers: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> TargetModel:
    """The target in eval mode, weights in `dtype`.

    Args:
        checkpoint: from `open_target`.
        tapped_layers: layers whose outputs feed the drafter (`DrafterConfig.target_layer_ids`), rising.
        dtype: of the weights; rotary frequencies stay fp32.

    Raises:
        CheckpointError: weights that are not finite in `dtype`.
    """
    return target_of(checkpoint.config, _finite_weights(checkpoint, dtype), tapped_layers)


def load_drafter(checkpoint: Checkpoint[DrafterConfig], dtype: torch.dtype = torch.float32) -> DrafterModel:
    """The drafter in eval mode, weights in `dtype`; errors as `load_target`."""
    return drafter_of(checkpoint.config, _finite_weights(checkpoint, dtype))


def target_of(config: TargetConfig, weights: Mapping[str, Tensor], tapped_layers: Sequence[int] = ()) -> TargetModel:
    """A target in eval mode out of weights that are in memory; a tied LM head is none of them."""
    with torch.device("meta"):
        model = TargetModel(config, tapped_layers)
    is_tied = config.tie_word_embeddings
    _fill(model, {**weights, LM_HEAD: weights[EMBEDDING]} if is_tied else weights, config)
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight  # one parameter again: assignment made two of it
    return model


def drafter_of(config: DrafterConfig, weights: Mapping[str, Tensor]) -> DrafterModel:
    """A drafter in eval mode out of weights that are in memory."""
    with torch.device("meta"):
        model = DrafterModel(config)
    _fill(model, weights, config)
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


def _fill(model: nn.Module, weights: Mapping[str, Tensor], config: TargetConfig | DrafterConfig) -> None:
    model.load_state_dict(weights, strict=True, assign=True)
    # Not part of a checkpoint, and the one buffer that was made without memory.
    model.inverse_frequencies = rope.inverse_frequencies(config.rope, config.head_dim)[0]
    model.eval()
