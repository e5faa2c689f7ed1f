"""Backbone and head as one checkpoint, and how they draft a block (`spec_generate.py` is the whole loop).

Shape legend: B batch, P block positions, N proposals, L feature rows, M model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from domino_deploy.config import DrafterConfig, DrafterKind
from domino_deploy.model.backbone import Backbone
from domino_deploy.model.draft_vocab import DraftVocab
from domino_deploy.model.head import CandidatePool, DominoHead, Drafted


class DrafterModel(Backbone):
    """A drafter whose state dict has exactly the tensors of a public checkpoint: backbone, and a head if it is Domino.

    Embedding and LM head are the target's and never part of it.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        if config.kind is DrafterKind.DOMINO:
            head = DominoHead(config)
            # Public checkpoints keep the head's tensors at the top level.
            self.prefix_gru = head.prefix_gru
            self.embed_proj = head.embed_proj
            self._head = [head]  # in a list, so that its tensors are not registered twice

    @property
    def head(self) -> DominoHead | None:
        """The Domino head; None for a DFlash drafter."""
        return self._head[0] if self.config.kind is DrafterKind.DOMINO else None

    def block_ids(self, anchor_ids_B: Tensor) -> Tensor:
        """[anchor, MASK, ...]: int64 [B, P]."""
        masks = anchor_ids_B.new_full((len(anchor_ids_B), self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat([anchor_ids_B[:, None], masks], dim=1)

    def proposal_rows(self, hidden_BPM: Tensor) -> Tensor:
        """The rows that predict offsets 1..N from the anchor: all when labels are shifted, else all but the first."""
        return hidden_BPM if self.config.shift_label else hidden_BPM[:, 1:]

    def draft(self, embed: nn.Embedding, anchor_ids_B: Tensor, hidden_BNM: Tensor, base_logits_BNV: Tensor) -> Tensor:
        """Greedy proposals [B, N]: corrected token by token (Domino) or the base logits' argmax (DFlash)."""
        return self.rollout(embed, anchor_ids_B, hidden_BNM, base_logits_BNV).token_ids

    def rollout(
        self,
        embed: nn.Embedding,
        anchor_ids_B: Tensor,
        hidden_BNM: Tensor,
        base_logits_BNV: Tensor,
        *,
        pool: CandidatePool | None = None,
        vocab: DraftVocab | None = None,
    ) -> Drafted:
        """As `draft`, with what an export may choose; arguments as `DominoHead.rollout`'s.  A DFlash drafter has no use for a pool."""
        if self.head is None:
            token_ids_BN = base_logits_BNV.argmax(dim=-1)
            return Drafted(token_ids_BN if vocab is None else vocab.token_ids[token_ids_BN], torch.zeros_like(anchor_ids_B))
        return self.head.rollout(embed, anchor_ids_B, hidden_BNM, base_logits_BNV, pool=pool, vocab=vocab)
