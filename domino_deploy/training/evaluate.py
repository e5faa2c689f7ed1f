"""Acceptance length of a drafter on held-out samples, walked along the target's own greedy text.

Greedy verification accepts exactly the drafted tokens that the stored text continues with, so tau needs no target pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel
from domino_deploy.training.batches import assemble
from domino_deploy.training.features import FeatureCache
from domino_deploy.training.regenerate import Sample

_ROWS = 24  # samples walked together


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Committed tokens per verify pass, with the head and with the base logits alone."""

    final_tau: float
    base_tau: float


@torch.inference_mode()
def acceptance(
    drafter: DrafterModel, target: TargetModel, samples: Sequence[Sample], indices: Sequence[int], cache: FeatureCache
) -> Acceptance:
    """Tau over all held-out tokens together (tokens / passes, the first token of each response excluded)."""
    final = _tau(drafter, target, samples, indices, cache, with_head=True)
    base = _tau(drafter, target, samples, indices, cache, with_head=False) if drafter.head is not None else final
    return Acceptance(final_tau=final, base_tau=base)


def _tau(
    drafter: DrafterModel, target: TargetModel, samples: Sequence[Sample], indices: Sequence[int], cache: FeatureCache, *, with_head: bool
) -> float:
    tokens = passes = 0
    for start in range(0, len(indices), _ROWS):
        running = {index: len(samples[index].prompt_ids) for index in indices[start : start + _ROWS]}  # sample -> anchor position
        while running:
            running = {i: a for i, a in running.items() if a + 1 < len(samples[i].prompt_ids) + len(samples[i].response_ids)}
            if not running:
                break
            chosen = list(running)
            anchors = torch.tensor([[running[i]] for i in chosen])
            batch = assemble([samples[i] for i in chosen], [cache.of(i) for i in chosen], cache.scales, drafter.config, anchors)
            block = target.model.embed_tokens(batch.block_ids)
            hidden = drafter.proposal_rows(drafter(block, batch.features, batch.position_ids, batch.mask))
            base_logits = target.lm_head(hidden)
            if with_head:
                drafted = drafter.draft(target.model.embed_tokens, batch.prefix_ids[:, 0, 0], hidden, base_logits)
            else:
                drafted = base_logits.argmax(dim=-1)
            hits = (drafted == batch.labels[:, 0]) & (batch.keep[:, 0] > 0)
            for index, accepted in zip(chosen, hits.int().cumprod(dim=1).sum(dim=1).tolist(), strict=True):
                left = len(samples[index].prompt_ids) + len(samples[index].response_ids) - 1 - running[index]
                committed = min(accepted + 1, left)
                running[index] += committed
                tokens += committed
                passes += 1
    return tokens / passes
