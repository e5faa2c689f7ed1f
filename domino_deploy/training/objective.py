"""The Domino objective: causal encoding of true tokens with a base-anchored curriculum (arXiv 2605.29707, section 5).

    loss = (1 - lambda) CE(corrected) + lambda CE(base),   each sum(w CE) / W,   w = keep exp(-j / gamma)

for proposal j = 0, 1, ... of a block, and W the sum of w over the whole draw of the step.  Embedding and LM head are the
target's, frozen.  What may be switched, each by a field of `Recipe`:

    causal_encoding     what the GRU reads: the true tokens (teacher forcing), or the drafter's own (training-time test)
    accept_until_fail   proposals behind the first wrong one weigh nothing, as verification would discard them
    soft_labels         share of the target's own distribution in the labels; the rest is the true token

Shape legend: S sequences, A anchors, B = S * A blocks, P block positions, N proposals, M model width, V vocabulary,
U tokens in the softmax, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.head import DominoHead
from domino_deploy.training.batches import Batch, Draw, block_tokens, kept_labels
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.samples import Sample

# Rows of logits that exist at once: fp32 logits of 1024 rows and 151,936 tokens are 0.6 GB, of a whole public batch 20 GB.
CHUNK_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Sums over one pass; `total` carries the gradient, and adds up over the passes of a step.

    total: scalar, already divided by W; sums: [5] CE(base) / W, CE(corrected) / W, leading base hits, leading corrected hits, blocks.
    """

    total: Tensor
    sums: Tensor


def curriculum(step: int, steps: int, start: float, decay_ratio: float) -> float:
    """Weight lambda of the base loss: from `start` linearly to 0 over `decay_ratio` of the run."""
    span = decay_ratio * steps
    return start * max(0.0, 1.0 - step / span) if span > 0 else 0.0


def position_weights(proposals: int, gamma: float) -> np.ndarray:
    """exp(-j / gamma) for proposals j = 0 .. proposals - 1, fp32."""
    return np.exp(-np.arange(proposals, dtype=np.float32) / np.float32(gamma))


def total_weight(samples: Sequence[Sample], draw: Draw, proposals: int, gamma: float) -> float:
    """W of a step: the weights of all its labels, over all passes and processes."""
    return float((kept_labels(samples, draw, proposals) * position_weights(proposals, gamma)).sum(dtype=np.float64))


class SoftmaxVocabulary:
    """Which tokens the softmax of a step runs over: the whole vocabulary, or frequent, drawn and random ones.

    A function of the step and its draw, so that every process and every resumed run has the same.

    Args:
        frequent: token ids that are always in; None for the whole vocabulary.
        random_tokens: ids drawn anew each step.
        vocab_size: V.
        seed: of the random ids.
    """

    def __init__(self, frequent: Sequence[int] | None, random_tokens: int, vocab_size: int, seed: int) -> None:
        self._frequent = None if frequent is None else np.array(frequent, dtype=np.int64)
        self._random_tokens, self._vocab_size, self._seed = random_tokens, vocab_size, seed

    def at(self, step: int, samples: Sequence[Sample], draw: Draw, proposals: int) -> Tensor:
        """Sorted ids [U]; every label of the draw is among them."""
        if self._frequent is None:
            return torch.arange(self._vocab_size)
        negatives = np.random.default_rng([self._seed, 2, step]).integers(self._vocab_size, size=self._random_tokens)
        return torch.from_numpy(np.unique(np.concatenate([self._frequent, block_tokens(samples, draw, proposals), negatives])))


class DraftLoss(nn.Module):
    """Drafter and loss in one forward pass (parameters that FSDP has sharded are whole inside it and nowhere else).

    Args:
        drafter: for features divided by the taps' rms.
        recipe: names the parts of the loss.
    """

    def __init__(self, drafter: DrafterModel, recipe: Recipe) -> None:
        super().__init__()
        self.drafter = drafter
        self._recipe = recipe

    def forward(
        self, batch: Batch, vocabulary_U: Tensor, embed: nn.Embedding, lm_head: nn.Linear, base_weight: float, weight_total: float
    ) -> Losses:
        """Both cross-entropies on one batch.

        Args:
            batch: see `Batch`; with `outputs` if the recipe has soft labels.
            vocabulary_U: sorted token ids of the softmax, int64; must contain every label.
            embed: the target's, frozen.
            lm_head: the target's, frozen.
            base_weight: lambda.
            weight_total: W of the whole step, of which the batch may be a part.
        """
        drafter, recipe = self.drafter, self._recipe
        count, anchors, proposals = batch.labels.shape
        # No sliding windows here: `Recipe` cannot ask for any.
        hidden = drafter(embed(batch.block_ids), batch.features, batch.position_ids, batch.mask)
        hidden_BNM = drafter.proposal_rows(hidden.view(count * anchors, -1, hidden.shape[-1]))
        weight_UM = lm_head.weight if len(vocabulary_U) == len(lm_head.weight) else lm_head.weight[vocabulary_U]
        bottleneck_BNR = codebook_UR = None
        if drafter.head is not None:
            codebook_UR = drafter.head.codebook_VR[vocabulary_U]
            if recipe.causal_encoding == "teacher-forced":
                bottleneck_BNR = drafter.head.teacher_forced(embed(batch.prefix_ids).flatten(0, 1), hidden_BNM)
            else:
                anchor_ids = batch.prefix_ids[..., 0].flatten()
                bottleneck_BNR = _self_fed(drafter.head, embed, anchor_ids, hidden_BNM, weight_UM, codebook_UR, vocabulary_U)
        labels_BN = torch.searchsorted(vocabulary_U, batch.labels.contiguous()).flatten(0, 1)
        weights_BN = batch.keep.flatten(0, 1) * torch.from_numpy(position_weights(proposals, recipe.gamma)).to(labels_BN.device)
        outputs_BNM = None if batch.outputs is None else batch.outputs.flatten(0, 1)

        size = max(1, CHUNK_ROWS // proposals)
        parts = []
        for rows in (slice(start, start + size) for start in range(0, len(labels_BN), size)):
            inputs = (
                hidden_BNM[rows],
                None if bottleneck_BNR is None else bottleneck_BNR[rows],
                None if outputs_BNM is None else outputs_BNM[rows],
                labels_BN[rows],
                weights_BN[rows],
                weight_UM,
                codebook_UR,
            )
            # One chunk keeps its logits for the way back, several compute them again.
            parts.append(self._sums(*inputs) if size >= len(labels_BN) else checkpoint(self._sums, *inputs, use_reentrant=False))
        sums = torch.stack(parts).sum(dim=0)
        cross_entropies, hits = sums[:2] / weight_total, sums[2:].detach()
        total = base_weight * cross_entropies[0] + (1 - base_weight) * cross_entropies[1]
        return Losses(total=total, sums=torch.cat([cross_entropies.detach(), hits]))

    def _sums(
        self,
        hidden_BNM: Tensor,
        bottleneck_BNR: Tensor | None,
        outputs_BNM: Tensor | None,
        labels_BN: Tensor,
        weights_BN: Tensor,
        weight_UM: Tensor,
        codebook_UR: Tensor | None,
    ) -> Tensor:
        """[5]: weighted CE(base) and CE(corrected), leading hits of each, blocks."""
        base_BNU = F.linear(hidden_BNM, weight_UM)
        final_BNU = base_BNU
        if bottleneck_BNR is not None and codebook_UR is not None and self.drafter.head is not None:
            correction = F.linear(bottleneck_BNR, codebook_UR)
            is_corrected = torch.arange(labels_BN.shape[1], device=labels_BN.device) >= self.drafter.head.prefix_len
            final_BNU = base_BNU + correction * is_corrected[:, None]
        soft_BNU = None
        if outputs_BNM is not None and self._recipe.soft_labels:
            with torch.no_grad():
                soft_BNU = F.linear(outputs_BNM.to(weight_UM.dtype), weight_UM).float().softmax(dim=-1)
        base, base_hits = self._cross_entropy(base_BNU, labels_BN, weights_BN, soft_BNU)
        final, final_hits = (base, base_hits) if final_BNU is base_BNU else self._cross_entropy(final_BNU, labels_BN, weights_BN, soft_BNU)
        return torch.stack([base, final, base_hits, final_hits, base.new_tensor(float(len(labels_BN)))])

    def _cross_entropy(self, logits_BNU: Tensor, labels_BN: Tensor, weights_BN: Tensor, soft_BNU: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weighted sum of the cross-entropies, and the leading hits of all blocks together."""
        with torch.no_grad():
            # max, not argmax: several times faster on a CPU, and the index is the same.
            hits_BN = ((logits_BNU.max(dim=-1).indices == labels_BN) & (weights_BN > 0)).float().cumprod(dim=-1)
        if self._recipe.accept_until_fail:
            weights_BN = weights_BN * F.pad(hits_BN[:, :-1], (1, 0), value=1.0)
        logits_BNU = logits_BNU.float()
        if soft_BNU is None:
            entropy = F.cross_entropy(logits_BNU.flatten(0, 1), labels_BN.flatten(), reduction="none").view(labels_BN.shape)
        else:
            share = self._recipe.soft_labels
            on_label = logits_BNU.gather(-1, labels_BN[..., None])[..., 0]
            expected = (1 - share) * on_label + share * (soft_BNU * logits_BNU).sum(dim=-1)
            entropy = logits_BNU.logsumexp(dim=-1) - expected
        return (entropy * weights_BN).sum(), hits_BN.sum()


def _self_fed(
    head: DominoHead,
    embed: nn.Embedding,
    anchor_ids_B: Tensor,
    hidden_BNM: Tensor,
    weight_UM: Tensor,
    codebook_UR: Tensor,
    vocabulary_U: Tensor,
) -> Tensor:
    """Bottleneck SiLU(z + s) [B, N, R] with the head's own greedy tokens fed to the GRU, as when it drafts."""
    projected_BNR = head.project_hidden(hidden_BNM)
    state, token_B, rows = head.initial_state(len(anchor_ids_B)), anchor_ids_B, []
    for j in range(hidden_BNM.shape[1]):
        state = head.step(embed(token_B), state)
        rows.append(F.silu(projected_BNR[:, j] + head.project_state(state)))
        with torch.no_grad():
            logits_BU = F.linear(hidden_BNM[:, j], weight_UM)
            if j >= head.prefix_len:
                logits_BU = logits_BU + F.linear(rows[-1], codebook_UR)
            token_B = vocabulary_U[logits_BU.max(dim=-1).indices]
    return torch.stack(rows, dim=1)
