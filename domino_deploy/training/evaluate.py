"""Acceptance length of a drafter on held-out samples, walked along the target's own text.

Greedy verification accepts exactly the drafted tokens that the stored text continues with, so tau needs no target pass.

Shape legend: B samples walked together, N proposals, L feature rows, P block positions, C cache slots, M model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from domino_deploy.model.drafter import DrafterModel
from domino_deploy.training.features import Corpus

_ROWS = 64  # samples walked together: bounds the memory of a pass
_COMPACT_SHARE = 0.25  # rows are dropped once this share of them has come to its end: each drop copies the caches

# Anchor ids [B], hidden states [B, N, M] and base logits [B, N, V] -> drafted tokens [B, N].
Draft = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Committed tokens and verify passes of each sample, the first token of each response left out."""

    tokens: tuple[int, ...]
    passes: tuple[int, ...]

    @property
    def tau(self) -> float:
        """All tokens by all passes."""
        return sum(self.tokens) / sum(self.passes)


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Walks with the head and with the base logits alone, over the same samples."""

    final: Walk
    base: Walk

    @property
    def final_tau(self) -> float:
        return self.final.tau

    @property
    def base_tau(self) -> float:
        return self.base.tau


def acceptance(drafter: DrafterModel, embed: nn.Embedding, lm_head: nn.Linear, corpus: Corpus, indices: Sequence[int]) -> Acceptance:
    """Walk every sample to its end, with the head and without.

    Args:
        drafter: in eval mode, for features divided by the taps' rms, of the same type and device as the target's ends.
        embed: the target's.
        lm_head: the target's.
        corpus: samples and features.
        indices: the held-out samples, of at least two response tokens each.
    """

    def with_head(anchor_ids: Tensor, hidden: Tensor, base_logits: Tensor) -> Tensor:
        return drafter.draft(embed, anchor_ids, hidden, base_logits)

    def without_head(anchor_ids: Tensor, hidden: Tensor, base_logits: Tensor) -> Tensor:
        return base_logits.max(dim=-1).indices

    base = _walk(drafter, embed, lm_head, corpus, indices, without_head)
    final = base if drafter.head is None else _walk(drafter, embed, lm_head, corpus, indices, with_head)
    return Acceptance(final=final, base=base)


def _walk(drafter: DrafterModel, embed: nn.Embedding, lm_head: nn.Linear, corpus: Corpus, indices: Sequence[int], draft: Draft) -> Walk:
    counts: dict[int, tuple[int, int]] = {}
    # Like lengths together: a group runs as long as its longest sample.
    order = sorted(indices, key=lambda index: len(corpus.samples[index].response_ids))
    for start in range(0, len(order), _ROWS):
        group = _Group(drafter, embed, lm_head, corpus, order[start : start + _ROWS])
        while group.members:
            group.cycle(draft)
        counts |= group.counts
    tokens, passes = zip(*(counts[index] for index in indices), strict=True)
    return Walk(tokens=tokens, passes=passes)


class _Group:
    """Samples that are walked together, with the drafter's caches of their contexts."""

    def __init__(self, drafter: DrafterModel, embed: nn.Embedding, lm_head: nn.Linear, corpus: Corpus, members: Sequence[int]) -> None:
        self.drafter, self.embed, self.lm_head = drafter, embed, lm_head
        self.members = list(members)
        self.counts = dict.fromkeys(members, (0, 0))
        self._device, self._dtype = lm_head.weight.device, lm_head.weight.dtype
        samples = [corpus.samples[index] for index in members]
        self._prompt_lengths = {index: len(sample.prompt_ids) for index, sample in zip(members, samples, strict=True)}
        self._lengths = {index: len(sample.token_ids) for index, sample in zip(members, samples, strict=True)}
        longest = max(self._lengths.values())
        # Room behind the text: padded feature rows and the block are written past it.
        block, proposals = drafter.config.block_size, drafter.config.num_proposals
        self._ids = torch.zeros(len(members), longest + proposals + 1, dtype=torch.int64, device=self._device)
        for row, sample in enumerate(samples):
            self._ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        self._features = corpus.features(members, self._device).to(self._dtype)
        capacity = longest + max(proposals + 1, max(self._prompt_lengths.values())) + block
        self._caches = drafter.empty_caches(len(members), capacity)
        self._known = torch.zeros(len(members), dtype=torch.int64, device=self._device)  # context rows in the cache
        self._anchors = torch.tensor(list(self._prompt_lengths.values()), device=self._device)
        self._ends = torch.tensor([self._lengths[index] - 1 for index in members], device=self._device)  # the last token's position
        self._drop(self._anchors >= self._ends)

    @torch.inference_mode()
    def cycle(self, draft: Draft) -> None:
        """One block for every member: draft, compare with the text, commit."""
        config, rows_B = self.drafter.config, torch.arange(len(self.members), device=self._device)[:, None]
        new_B = self._anchors - self._known
        rows = int(new_B.max())
        sources = (self._known[:, None] + torch.arange(rows, device=self._device)).clamp_max(self._features.shape[1] - 1)
        block_positions = self._anchors[:, None] + torch.arange(config.block_size, device=self._device)
        position_ids = torch.cat([sources, block_positions], dim=1)
        slots = torch.arange(self._caches[0][0].shape[2], device=self._device)
        first_block_slot = (self._known + rows)[:, None]
        seen = (slots < self._anchors[:, None]) | ((slots >= first_block_slot) & (slots < first_block_slot + config.block_size))
        anchor_ids = self._ids[rows_B[:, 0], self._anchors]
        output = self.drafter.cached(
            self.embed(self.drafter.block_ids(anchor_ids)),
            self._features[rows_B, sources],
            position_ids,
            seen[:, None, None].expand(-1, -1, config.block_size, -1),
            self._known,
            *self._caches,
        )
        self._caches = output.key_caches, output.value_caches
        self._known = self._anchors
        hidden = self.drafter.proposal_rows(output.hidden)
        drafted = draft(anchor_ids, hidden, self.lm_head(hidden))
        places = self._anchors[:, None] + torch.arange(1, config.num_proposals + 1, device=self._device)
        hits = (drafted == self._ids[rows_B, places]) & (places <= self._ends[:, None])
        committed = torch.minimum(hits.int().cumprod(dim=1).sum(dim=1) + 1, self._ends - self._anchors)
        self._anchors = self._anchors + committed
        for index, tokens in zip(self.members, committed.tolist(), strict=True):
            if tokens:
                self.counts[index] = (self.counts[index][0] + tokens, self.counts[index][1] + 1)
        self._drop(self._anchors >= self._ends)

    def _drop(self, ended: Tensor) -> None:
        """Take members out that have come to their end, when there are enough of them."""
        count = int(ended.sum())
        if count < len(self.members) and count <= _COMPACT_SHARE * len(self.members):
            return
        keep = (~ended).nonzero()[:, 0]
        self.members = [self.members[row] for row in keep.tolist()]
        self._ids, self._features = self._ids[keep], self._features[keep]
        self._known, self._anchors, self._ends = self._known[keep], self._anchors[keep], self._ends[keep]
        self._caches = tuple([cache[keep] for cache in caches] for caches in self._caches)  # type: ignore[assignment]
