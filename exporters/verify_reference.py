"""What PyTorch computes, in the form in which a bundle's graphs answer: the truth of every comparison.

Candidate pools and draft vocabularies change what is drafted; a narrow type of caches and features rounds what goes in.

Shape legend: B batch, S rows, N proposals, M model width, F feature width, R rank, V vocabulary (of the draft, where there is one).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from domino_deploy.model.draft_vocab import DraftVocab
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.head import CandidatePool, Drafted
from domino_deploy.model.target import TargetModel
from domino_deploy.plugins.reference import candidates


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Both models in fp32, and what of the bundle's form changes their answers.

    activations: type of caches, features and hidden states, to which inputs are rounded before either side sees them.
    pool: tokens that a proposal is chosen from; None for all.
    vocab: the drafter's own vocabulary; None for the target's.
    is_truncated: the target lacks its last layers, so that features are made of those it has.
    """

    target: TargetModel
    drafter: DrafterModel
    activations: torch.dtype = torch.float32
    pool: CandidatePool | None = None
    vocab: DraftVocab | None = None
    is_truncated: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the drafts are those of `DrafterModel.draft`, as they are with a certified pool too."""
        return self.vocab is None and (self.pool is None or self.pool.is_certified)

    def rounded(self, values: Tensor) -> Tensor:
        """What a graph is given in place of float32 values, again as float32."""
        return values.to(self.activations).float()

    def features(self, ids_BS: Tensor) -> Tensor:
        """Tapped features [B, S, F].  Of a truncated target a layer that it lacks is stood in for by its last one: numbers of the
        right kind and size, and the same for both sides.
        """
        _, features = self.target.hidden_states(ids_BS)
        if not self.is_truncated:
            return self.rounded(features)
        width, last, taps = self.target.config.hidden_size, self.target.config.num_layers - 1, self.target.tapped_layers
        places = [taps.index(min(layer, last)) for layer in self.drafter.config.target_layer_ids]
        return self.rounded(torch.cat([features[..., place * width : (place + 1) * width] for place in places], dim=-1))

    def base_logits(self, hidden_BNM: Tensor) -> Tensor:
        """[B, N, V]."""
        return (self.target if self.vocab is None else self.vocab).lm_head(hidden_BNM)

    def draft(self, anchor_B: Tensor, hidden_BNM: Tensor, base_BNV: Tensor) -> Drafted:
        """Greedy proposals."""
        embed = self.target.model.embed_tokens
        return self.drafter.rollout(embed, anchor_B, hidden_BNM, base_BNV, pool=self.pool, vocab=self.vocab)

    def draft_logits(self, anchor_B: Tensor, hidden_BNM: Tensor, base_BNV: Tensor, drafted: Tensor) -> Tensor:
        """The logits [B, N, V] that proposals are chosen by, given those before them; -inf outside the candidate pool.

        Args:
            anchor_B: last committed tokens.
            hidden_BNM: from the backbone.
            base_BNV: base logits.
            drafted: int64 [B, N], token ids.
        """
        head = self.drafter.head
        if head is None:
            return base_BNV
        consumed = torch.cat([anchor_B[:, None], drafted], dim=1)[:, : hidden_BNM.shape[1]]
        codebook = head.codebook_VR if self.vocab is None or self.vocab.codebook is None else self.vocab.codebook
        corrected = base_BNV + head.teacher_forced(self.target.model.embed_tokens(consumed), hidden_BNM) @ codebook.T
        if self.pool is not None and not self.pool.is_certified:
            inside = torch.zeros_like(base_BNV, dtype=torch.bool)
            inside.scatter_(-1, candidates(base_BNV, self.pool.size), True)
            corrected = corrected.masked_fill(~inside, -torch.inf)
        is_plain = torch.arange(base_BNV.shape[1]) < self.drafter.config.pure_draft_prefix_len
        return torch.where(is_plain[:, None], base_BNV, corrected)
