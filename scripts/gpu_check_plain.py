"""The rollout of a block in plain PyTorch: what the Triton rollout is measured against, and its float64 truth.

Shape legend: B batch, N proposals, R rank, G GRU width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from gpu_check_graphs import Replay
from torch import Tensor

from domino_deploy.plugins.triton_rollout import RolloutWeights

# (weights, token ids [B], state [B, G], z [B, R], base logits [B, V]) -> (token ids [B], state [B, G])
Step = Callable[[RolloutWeights, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def next_state(token_embedding_BE: Tensor, state_BG: Tensor, w_ih: Tensor, w_hh: Tensor) -> Tensor:
    """torch.nn.GRU's equations, without biases, in the weights' type."""
    in_reset, in_update, in_new = F.linear(token_embedding_BE, w_ih).chunk(3, dim=-1)
    old_reset, old_update, old_new = F.linear(state_BG, w_hh).chunk(3, dim=-1)
    reset, update = torch.sigmoid(in_reset + old_reset), torch.sigmoid(in_update + old_update)
    return (1 - update) * torch.tanh(in_new + reset * old_new) + update * state_BG


def plain_step(weights: RolloutWeights, token_B: Tensor, state_BG: Tensor, z_BR: Tensor, base_BV: Tensor) -> tuple[Tensor, Tensor]:
    """One corrected proposal, as PyTorch users write it: products in the weights' type."""
    state_BG = next_state(F.embedding(token_B, weights.embedding), state_BG, weights.w_ih, weights.w_hh)
    bottleneck_BR = F.silu(z_BR + F.linear(state_BG, weights.state_projection)).to(weights.codebook.dtype)
    return (base_BV + F.linear(bottleneck_BR, weights.codebook)).argmax(dim=-1), state_BG


class PlainRollout:
    """`TritonRollout` in plain PyTorch: the same call, the same buffers, one CUDA graph.

    Args:
        step: one proposal; `plain_step`, or that compiled.
        is_graph: False for launch after launch.
    """

    def __init__(
        self, weights: RolloutWeights, batch: int, proposals: int, prefix_len: int = 0, *, step: Step = plain_step, is_graph: bool = True
    ) -> None:
        self._weights, self._prefix_len, self._step = weights, prefix_len, step
        (vocab_size, rank), device = weights.codebook.shape, weights.codebook.device
        self.anchor_ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self.hidden_projection = torch.zeros(batch, proposals, rank, device=device)
        self.base_logits = torch.zeros(batch, proposals, vocab_size, device=device)
        self._replay = Replay(self.eager, is_cuda=is_graph and device.type == "cuda")

    def __call__(self, anchor_ids: Tensor, hidden_projection: Tensor, base_logits: Tensor) -> Tensor:
        """Draft a block: int64 [B, N]."""
        buffers = (self.anchor_ids, self.hidden_projection, self.base_logits)
        for buffer, given in zip(buffers, (anchor_ids, hidden_projection, base_logits), strict=True):
            if given is not buffer:
                buffer.copy_(given)
        return self._replay()

    @torch.inference_mode()
    def eager(self) -> Tensor:
        """The block in the buffers, launch by launch."""
        weights, token = self._weights, self.anchor_ids
        state = weights.w_hh.new_zeros(len(token), weights.w_hh.shape[1])
        drafted = []
        for j in range(self.base_logits.shape[1]):
            if j < self._prefix_len:
                state = next_state(F.embedding(token, weights.embedding), state, weights.w_ih, weights.w_hh)
                token = self.base_logits[:, j].argmax(dim=-1)
            else:
                token, state = self._step(weights, token, state, self.hidden_projection[:, j], self.base_logits[:, j])
            drafted.append(token)
        return torch.stack(drafted, dim=1)


def logit_lost(
    weights: RolloutWeights, anchor_ids_B: Tensor, z_BNR: Tensor, base_BNV: Tensor, draft_ids_BN: Tensor, prefix_len: int
) -> float:
    """By how much the worst of the drafted tokens misses the best corrected logit, in float64, behind the tokens as they were drafted."""
    w_ih, w_hh, projection, codebook = (
        tensor.double() for tensor in (weights.w_ih, weights.w_hh, weights.state_projection, weights.codebook)
    )
    read_BN = torch.cat([anchor_ids_B[:, None], draft_ids_BN[:, :-1]], dim=1)
    state_BG, lost = w_hh.new_zeros(len(anchor_ids_B), w_hh.shape[1]), w_hh.new_zeros(())
    for j in range(draft_ids_BN.shape[1]):
        state_BG = next_state(weights.embedding[read_BN[:, j]].double(), state_BG, w_ih, w_hh)
        logits_BV = base_BNV[:, j].double()
        if j >= prefix_len:
            logits_BV = logits_BV + F.silu(z_BNR[:, j].double() + state_BG @ projection.T) @ codebook.T
        chosen_B = logits_BV.gather(1, draft_ids_BN[:, j : j + 1])[:, 0]
        lost = torch.maximum(lost, (logits_BV.max(dim=-1).values - chosen_B).max())  # keeps NaN
    return float(lost)
