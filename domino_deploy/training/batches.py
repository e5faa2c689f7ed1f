"""Training batches: whole sequences, each with random blocks that see only the context before their anchor.

Shape legend: S sequences, L padded length, F feature width, A anchors per sequence, P block positions, N proposals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from domino_deploy.config import DrafterConfig
from domino_deploy.errors import TrainingError
from domino_deploy.training.features import Corpus


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's data.

    features: [S, L, F] fp32, each tap divided by its rms; block_ids: [S, A*P]; position_ids: [S, L + A*P];
    mask: bool [S, 1, A*P, L + A*P]; prefix_ids: [S, A, N] true tokens at offsets 0..N-1 (what the GRU consumes);
    labels: [S, A, N] true tokens at offsets 1..N; keep: [S, A, N] fp32, 1 where the label lies inside the response.
    """

    features: Tensor
    block_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    prefix_ids: Tensor
    labels: Tensor
    keep: Tensor


class BatchSampler:
    """Draws batches for ever: sequences by shuffled epochs, anchors uniformly over each response.

    Args:
        corpus: samples and features.
        indices: the samples to draw from.
        config: of the drafter.
        sequences: samples in a batch.
        anchors: blocks in a sample.
        seed: of the order and the anchors.

    Raises:
        TrainingError: a sample without room for an anchor and the token behind it.
    """

    def __init__(self, corpus: Corpus, indices: Sequence[int], config: DrafterConfig, *, sequences: int, anchors: int, seed: int) -> None:
        short = [index for index in indices if len(corpus.samples[index].response_ids) < 2]
        if short:
            found = ", ".join(map(str, short[:8]))
            raise TrainingError(f"Every response needs two tokens (an anchor and a label); too short: samples {found}. Drop them.")
        self.corpus, self.indices, self.config = corpus, list(indices), config
        self.sequences, self.anchors = sequences, anchors
        self.rng = np.random.default_rng(seed)
        self.queue: list[int] = []

    def __iter__(self) -> BatchSampler:
        return self

    def __next__(self) -> Batch:
        while len(self.queue) < self.sequences:
            self.queue += self.rng.permutation(self.indices).tolist()
        chosen, self.queue = self.queue[: self.sequences], self.queue[self.sequences :]
        return assemble(self.corpus, chosen, self.config, self._anchors(chosen))

    def _anchors(self, chosen: Sequence[int]) -> Tensor:
        """Positions [S, A] of random anchors: response tokens with a token behind."""
        rows = []
        for index in chosen:
            sample = self.corpus.samples[index]
            first, last = len(sample.prompt_ids), len(sample.token_ids) - 2
            rows.append(self.rng.integers(first, last + 1, size=self.anchors))
        return torch.from_numpy(np.stack(rows))


def assemble(corpus: Corpus, chosen: Sequence[int], config: DrafterConfig, anchors_SA: Tensor) -> Batch:
    """Pad the chosen samples and lay out a block at each of their anchors.

    Args:
        corpus: samples and features.
        chosen: indices of S samples.
        config: of the drafter.
        anchors_SA: int64 positions within each sample.
    """
    ids = [torch.tensor(corpus.samples[index].token_ids) for index in chosen]
    lengths_S = torch.tensor([len(row) for row in ids])
    longest, (count, anchors), block, proposals = int(lengths_S.max()), anchors_SA.shape, config.block_size, config.num_proposals
    ids_SL = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    features_SLF = torch.zeros(count, longest, config.feature_size)
    for row, index in enumerate(chosen):
        features = torch.from_numpy(corpus.features(index).astype(np.float32))
        features_SLF[row, : len(features)] = features
    features_SLF /= corpus.scales.repeat_interleave(config.hidden_size)

    offsets = torch.arange(proposals + 1)
    span_SAN = anchors_SA[..., None] + offsets
    inside = span_SAN < lengths_S[:, None, None]
    tokens = torch.gather(ids_SL, 1, span_SAN.clamp_max(longest - 1).flatten(1)).view(count, anchors, -1)

    block_ids = torch.full((count, anchors, block), config.mask_token_id)
    block_ids[..., 0] = tokens[..., 0]
    block_positions = (anchors_SA[..., None] + torch.arange(block)).flatten(1)
    context = torch.arange(longest)
    sees_context = (context < anchors_SA[..., None])[:, :, None, :].expand(-1, -1, block, -1).flatten(1, 2)
    same_block = torch.block_diag(*[torch.ones(block, block, dtype=torch.bool)] * anchors).expand(count, -1, -1)
    return Batch(
        features=features_SLF,
        block_ids=block_ids.flatten(1),
        position_ids=torch.cat([context.expand(count, -1), block_positions], dim=1),
        mask=torch.cat([sees_context, same_block], dim=2)[:, None],
        prefix_ids=tokens[..., :-1],
        labels=tokens[..., 1:],
        keep=inside[..., 1:].float(),
    )
