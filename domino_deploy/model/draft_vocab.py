"""A reduced draft vocabulary (FR-Spec, arXiv 2502.14856): the drafter ranks some of the target's tokens only.

The target verifies with its own, whole LM head, so the text is the same; only proposals outside the selection are lost.

Shape legend: D draft vocabulary, M model width, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

TOKEN_IDS, LM_HEAD, CODEBOOK = "token_ids", "lm_head.weight", "codebook"


class DraftVocab(nn.Module):
    """Selected rows of LM head and codebook, and the target's ids of the selected tokens.

    Args:
        size: D.
        width: M.
        rank: R; 0 for a DFlash drafter, which has no codebook.
    """

    token_ids: Tensor

    def __init__(self, size: int, width: int, rank: int) -> None:
        super().__init__()
        self.register_buffer(TOKEN_IDS, torch.zeros(size, dtype=torch.int64))
        self.lm_head = nn.Linear(width, size, bias=False)
        self.codebook = nn.Parameter(torch.empty(size, rank)) if rank else None


def draft_vocab_of(tensors: Mapping[str, Tensor]) -> DraftVocab:
    """A draft vocabulary in eval mode out of its tensors: token_ids [D], lm_head.weight [D, M] and, for Domino, codebook [D, R]."""
    size, width = tensors[LM_HEAD].shape
    with torch.device("meta"):
        vocab = DraftVocab(size, width, tensors[CODEBOOK].shape[1] if CODEBOOK in tensors else 0)
    vocab.load_state_dict(dict(tensors), strict=True, assign=True)
    return vocab.eval()


def selected(token_ids: Tensor, lm_head: Tensor, codebook: Tensor | None) -> DraftVocab:
    """The draft vocabulary `token_ids` (int64 [D]) of whole matrices [V, M] and [V, R], in memory."""
    tensors = {TOKEN_IDS: token_ids, LM_HEAD: lm_head[token_ids]}
    return draft_vocab_of(tensors if codebook is None else tensors | {CODEBOOK: codebook[token_ids]})
