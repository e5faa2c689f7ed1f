"""The Domino objective: teacher-forced causal encoding with a base-anchored curriculum (arXiv 2605.29707, section 5).

    loss = (1 - lambda) CE(corrected) + lambda CE(base),   each sum(w CE) / sum(w),   w = keep exp(-j / gamma)

for proposal j = 0, 1, ... of a block.  Embedding and LM head are the target's, frozen.

Shape legend: S sequences, A anchors, P block positions, N proposals, M model width, V vocabulary, U tokens in the softmax, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel
from domino_deploy.training.batches import Batch


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Scalars of one step; total carries the gradient.

    base_tau and final_tau: 1 + mean number of leading proposals that equal their labels, true tokens fed to the head.
    """

    total: Tensor
    base: float
    final: float
    base_tau: float
    final_tau: float


def curriculum(step: int, steps: int, start: float, decay_ratio: float) -> float:
    """Weight lambda of the base loss: from `start` linearly to 0 over `decay_ratio` of the run."""
    span = decay_ratio * steps
    return start * max(0.0, 1.0 - step / span) if span > 0 else 0.0


def position_weights(proposals: int, gamma: float) -> Tensor:
    """exp(-j / gamma) for proposals j = 0 .. proposals - 1."""
    return torch.exp(-torch.arange(proposals) / gamma)


def losses(drafter: DrafterModel, target: TargetModel, batch: Batch, vocabulary_U: Tensor, *, gamma: float, base_weight: float) -> Losses:
    """Both cross-entropies on one batch.

    Args:
        drafter: in train mode, for features already divided by the taps' rms.
        target: frozen; its embedding and LM head are used.
        batch: see `Batch`.
        vocabulary_U: sorted token ids of the softmax; must contain every label.
        gamma: position decay.
        base_weight: lambda.
    """
    embed = target.model.embed_tokens
    count, anchors, proposals = batch.labels.shape
    # Sliding-window layers see the same blocks; the demo recipe has none, and `Recipe` cannot ask for any.
    hidden = drafter(embed(batch.block_ids), batch.features, batch.position_ids, batch.mask)
    hidden_BNM = drafter.proposal_rows(hidden.view(count * anchors, -1, hidden.shape[-1]))
    base_BNU = F.linear(hidden_BNM, target.lm_head.weight[vocabulary_U])
    final_BNU = base_BNU
    if drafter.head is not None:
        bottleneck = drafter.head.teacher_forced(embed(batch.prefix_ids).flatten(0, 1), hidden_BNM)
        correction = F.linear(bottleneck, drafter.head.codebook_VR[vocabulary_U])
        is_corrected = (torch.arange(proposals) >= drafter.head.prefix_len)[:, None]
        final_BNU = base_BNU + correction * is_corrected
    labels_BN = torch.searchsorted(vocabulary_U, batch.labels.contiguous()).flatten(0, 1)
    keep_BN = batch.keep.flatten(0, 1)
    weights_BN = keep_BN * position_weights(proposals, gamma)
    base, final = (_weighted_cross_entropy(logits, labels_BN, weights_BN) for logits in (base_BNU, final_BNU))
    return Losses(
        total=base_weight * base + (1 - base_weight) * final,
        base=base.item(),
        final=final.item(),
        base_tau=_tau(base_BNU, labels_BN, keep_BN),
        final_tau=_tau(final_BNU, labels_BN, keep_BN),
    )


def softmax_vocabulary(batch: Batch, frequent: Tensor, random_tokens: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Sorted ids of the reduced softmax: frequent tokens, the batch's own, and random negatives."""
    negatives = torch.randint(vocab_size, (random_tokens,), generator=generator)
    return torch.unique(torch.cat([frequent, batch.labels.flatten(), batch.prefix_ids.flatten(), negatives]))


def _weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    entropy = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (entropy * weights.flatten()).sum() / weights.sum()


@torch.no_grad()
def _tau(logits: Tensor, labels: Tensor, keep: Tensor) -> float:
    hits = (logits.argmax(dim=-1) == labels) & (keep > 0)
    return 1.0 + hits.int().cumprod(dim=-1).sum(dim=-1).float().mean().item()
