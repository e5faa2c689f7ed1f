"""Acceptance length of a drafter on held-out samples, walked along the target's own greedy text.

Greedy verification accepts exactly the drafted tokens that the stored text continues with, so tau needs no target pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel
from domino_deploy.training.batches import assemble
from domino_deploy.training.features import Corpus

_ROWS = 24  # samples walked together: bounds the memory of a pass

# Anchor ids [S], hidden states [S, N, M] and base logits [S, N, V] -> drafted tokens [S, N].
Draft = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Committed tokens per verify pass, with the head and with the base logits alone."""

    final_tau: float
    base_tau: float


@torch.inference_mode()
def acceptance(drafter: DrafterModel, target: TargetModel, corpus: Corpus, indices: Sequence[int]) -> Acceptance:
    """Tau over all held-out tokens together (tokens / passes, the first token of each response excluded).

    Args:
        drafter: for features divided by the taps' rms, as in training.
        target: gives embedding and LM head.
        corpus: samples and features.
        indices: the held-out samples, of at least two response tokens each.
    """

    def with_head(anchor_ids: Tensor, hidden: Tensor, base_logits: Tensor) -> Tensor:
        return drafter.draft(target.model.embed_tokens, anchor_ids, hidden, base_logits)

    def without_head(anchor_ids: Tensor, hidden: Tensor, base_logits: Tensor) -> Tensor:
        return base_logits.argmax(dim=-1)

    final_tau = _tau(drafter, target, corpus, indices, with_head)
    base_tau = final_tau if drafter.head is None else _tau(drafter, target, corpus, indices, without_head)
    return Acceptance(final_tau=final_tau, base_tau=base_tau)


def _tau(drafter: DrafterModel, target: TargetModel, corpus: Corpus, indices: Sequence[int], draft: Draft) -> float:
    tokens = passes = 0
    last = {index: len(corpus.samples[index].token_ids) - 1 for index in indices}  # position of the last token
    for start in range(0, len(indices), _ROWS):
        anchors = {index: len(corpus.samples[index].prompt_ids) for index in indices[start : start + _ROWS]}
        while anchors := {index: anchor for index, anchor in anchors.items() if anchor < last[index]}:
            for index, accepted in zip(anchors, _accepted(drafter, target, corpus, anchors, draft), strict=True):
                committed = min(accepted + 1, last[index] - anchors[index])
                anchors[index] += committed
                tokens += committed
                passes += 1
    return tokens / passes


def _accepted(drafter: DrafterModel, target: TargetModel, corpus: Corpus, anchors: Mapping[int, int], draft: Draft) -> list[int]:
    """Drafted tokens that the stored text continues with, of one block per sample (sample index -> anchor position)."""
    batch = assemble(corpus, list(anchors), drafter.config, torch.tensor(list(anchors.values()))[:, None])
    block = target.model.embed_tokens(batch.block_ids)
    hidden = drafter.proposal_rows(drafter(block, batch.features, batch.position_ids, batch.mask))
    drafted = draft(batch.prefix_ids[:, 0, 0], hidden, target.lm_head(hidden))
    hits = (drafted == batch.labels[:, 0]) & (batch.keep[:, 0] > 0)
    return hits.int().cumprod(dim=1).sum(dim=1).tolist()
