"""The Domino head (arXiv 2605.29707, section 5): a GRU over the draft tokens so far, then a low-rank logit correction.

The GRU cell is written out: exporters of `nn.GRU` are known to write the wrong reset-gate convention silently.

Shape legend: B batch, N proposals, M model width, G GRU width, R rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from domino_deploy.config import DrafterConfig
from domino_deploy.model.draft_vocab import DraftVocab
from domino_deploy.plugins.reference import candidates, deviations
from domino_deploy.plugins.torch_op import fused_logit_correction, pooled_logit_correction


@dataclass(frozen=True, kw_only=True)
class CandidatePool:
    """How many tokens per proposal the correction looks at, and whether it looks at all that could beat the best of these."""

    size: int
    is_certified: bool = False


class Drafted(NamedTuple):
    """token_ids: int64 [B, N]; uncertified: int64 [B], proposals for which a token outside the candidate pool could have won."""

    token_ids: Tensor
    uncertified: Tensor


class PrefixGRU(nn.Module):
    """A bias-free GRU whose parameters carry `nn.GRU`'s names; gates in the order reset, update, new."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        for weight in (self.weight_ih_l0, self.weight_hh_l0):
            nn.init.uniform_(weight, -(hidden_size**-0.5), hidden_size**-0.5)  # nn.GRU's own default

    def forward(self, input_projection_B3G: Tensor, state_BG: Tensor) -> Tensor:
        """One step (torch.nn.GRU's equations) on an input already multiplied by `weight_ih_l0`."""
        in_reset, in_update, in_new = input_projection_B3G.chunk(3, dim=-1)
        old_reset, old_update, old_new = F.linear(state_BG, self.weight_hh_l0).chunk(3, dim=-1)
        reset = torch.sigmoid(in_reset + old_reset)
        update = torch.sigmoid(in_update + old_update)
        new = torch.tanh(in_new + reset * old_new)
        return (1 - update) * new + update * state_BG


class DominoHead(nn.Module):
    """Prefix GRU and correction; tensor names are those of a public checkpoint (`prefix_gru.*`, `embed_proj.{0,2}`)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.width = config.hidden_size
        self.prefix_len = config.pure_draft_prefix_len
        self.state_size = config.gru_hidden_dim
        self.prefix_gru = PrefixGRU(config.hidden_size, config.gru_hidden_dim)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.vocab_size, bias=False),
        )

    @property
    def codebook_VR(self) -> Tensor:
        """W2 of the correction: one row per token of the vocabulary."""
        return self.embed_proj[2].weight  # type: ignore[return-value]  # a Sequential does not know its elements' type

    def project_hidden(self, hidden: Tensor) -> Tensor:
        """z = W1[:, :M] h for all positions at once: [..., R]."""
        return F.linear(hidden, self.embed_proj[0].weight[:, : self.width])  # type: ignore[index]

    def project_state(self, state: Tensor) -> Tensor:
        """s = W1[:, M:] state: [..., R]."""
        return F.linear(state, self.embed_proj[0].weight[:, self.width :])  # type: ignore[index]

    def initial_state(self, batch: int) -> Tensor:
        """The zero state [B, G] that every block starts from."""
        return self.prefix_gru.weight_hh_l0.new_zeros(batch, self.state_size)

    def step(self, token_embedding_BM: Tensor, state_BG: Tensor) -> Tensor:
        """The state after consuming one more token's target embedding row."""
        return self.prefix_gru(F.linear(token_embedding_BM, self.prefix_gru.weight_ih_l0), state_BG)

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
        """Draft greedily, token by token.

        Proposal j (offset j + 1 from the anchor) uses the state after offsets 0..j; the first `prefix_len` proposals
        are the base logits' argmax.

        Args:
            embed: the target's embedding.
            anchor_ids_B: the last committed tokens.
            hidden_BNM: the backbone's proposal rows.
            base_logits_BNV: the LM head on them; `vocab`'s LM head, if there is one.
            pool: None to look at the whole vocabulary.
            vocab: None for the target's own.
        """
        state, token, drafted = self.initial_state(anchor_ids_B.shape[0]), anchor_ids_B, []
        projected_BNR = self.project_hidden(hidden_BNM)
        codebook = self.codebook_VR if vocab is None or vocab.codebook is None else vocab.codebook
        mean_and_deviations = None if pool is None else deviations(codebook)
        uncertified_B = torch.zeros_like(anchor_ids_B)
        for j in range(hidden_BNM.shape[1]):
            state = self.step(embed(token), state)
            base_BV = base_logits_BNV[:, j]
            if j < self.prefix_len:
                token = base_BV.argmax(dim=-1)
            elif pool is None or mean_and_deviations is None:
                token, _ = fused_logit_correction(base_BV, projected_BNR[:, j], self.project_state(state), codebook)
            else:
                token, _, is_uncertified_B = pooled_logit_correction(
                    base_BV,
                    projected_BNR[:, j],
                    self.project_state(state),
                    codebook,
                    *mean_and_deviations,
                    candidates(base_BV, pool.size),
                    pool.is_certified,
                )
                uncertified_B = uncertified_B + is_uncertified_B
            token = token if vocab is None else vocab.token_ids[token]
            drafted.append(token)
        return Drafted(torch.stack(drafted, dim=1), uncertified_B)

    def teacher_forced(self, prefix_embeddings_BNM: Tensor, hidden_BNM: Tensor) -> Tensor:
        """Bottleneck SiLU(z + s) [B, N, R] with the true tokens fed to the GRU (training).

        Args:
            prefix_embeddings_BNM: embedding rows of the true tokens at offsets 0..N-1, the anchor first.
            hidden_BNM: backbone hidden states that predict offsets 1..N.

        The corrected logits are `base + bottleneck @ codebook^T`; the first `prefix_len` rows must stay uncorrected.
        """
        inputs_BN3G = F.linear(prefix_embeddings_BNM, self.prefix_gru.weight_ih_l0)
        state, states = self.initial_state(hidden_BNM.shape[0]), []
        for j in range(hidden_BNM.shape[1]):
            state = self.prefix_gru(inputs_BN3G[:, j], state)
            states.append(state)
        return F.silu(self.project_hidden(hidden_BNM) + self.project_state(torch.stack(states, dim=1)))
