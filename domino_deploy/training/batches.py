"""Training batches: whole sequences, each with random blocks that see only the context before their anchor.

Shape legend: S sequences, L padded length, F feature width, A anchors per sequence, P block positions, N proposals, M model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from domino_deploy.config import DrafterConfig
from domino_deploy.errors import TrainingError
from domino_deploy.training.features import Corpus
from domino_deploy.training.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Which blocks a step trains on: samples, and positions [S, A] of the anchors within each."""

    indices: tuple[int, ...]
    anchors_SA: np.ndarray

    def shares(self, rank: int, world_size: int, micro_batch: int) -> Iterator[Draw]:
        """One process's part of the draw, in passes of `micro_batch` samples (0: all at once)."""
        own = len(self.indices) // world_size
        size = micro_batch or own
        for start in range(rank * own, (rank + 1) * own, size):
            rows = slice(start, start + size)
            yield Draw(indices=self.indices[rows], anchors_SA=self.anchors_SA[rows])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One pass's data.

    features: [S, L, F] fp32, each tap divided by its rms; block_ids: [S, A*P]; position_ids: [S, L + A*P];
    mask: bool [S, 1, A*P, L + A*P]; prefix_ids: [S, A, N] true tokens at offsets 0..N-1 (what the GRU consumes);
    labels: [S, A, N] true tokens at offsets 1..N; keep: [S, A, N] fp32, 1 where the label lies inside the response;
    outputs: [S, A, N, M] the target's normed output that predicts each label, only for soft labels.
    """

    features: Tensor
    block_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    prefix_ids: Tensor
    labels: Tensor
    keep: Tensor
    outputs: Tensor | None = None


class Drawer:
    """The draw of every step, as a pure function of seed and step: a run that resumes needs the step's number only.

    Samples come in shuffled epochs, anchors uniformly over each response, twice in a draw only when the response has too few.

    Args:
        samples: all of them.
        indices: those to draw from.
        sequences: samples in a draw.
        anchors: blocks in a sample.
        seed: of the order and the anchors.

    Raises:
        TrainingError: samples without room for an anchor and the token behind it, or none at all.
    """

    def __init__(self, samples: Sequence[Sample], indices: Sequence[int], *, sequences: int, anchors: int, seed: int) -> None:
        short = [index for index in indices if len(samples[index].response_ids) < 2]
        if short or not indices:
            found = f"too short: samples {', '.join(map(str, short[:8]))}" if short else "no samples"
            raise TrainingError(f"Expected responses of two tokens and more (an anchor and a label), found {found}. Drop them.")
        self._samples, self._indices = samples, np.array(indices)
        self._sequences, self._anchors, self._seed = sequences, anchors, seed
        self._epochs: dict[int, np.ndarray] = {}

    def at(self, step: int) -> Draw:
        """What step number `step` trains on."""
        first = step * self._sequences
        indices = tuple(self._place(place) for place in range(first, first + self._sequences))
        rng = np.random.default_rng([self._seed, 1, step])
        return Draw(indices=indices, anchors_SA=np.stack([self._positions(rng, self._samples[index]) for index in indices]))

    def _place(self, place: int) -> int:
        epoch, within = divmod(place, len(self._indices))
        if epoch not in self._epochs:
            # A draw spans as many epochs as it is larger than the data; of those before, nothing is asked again.
            self._epochs = {number: order for number, order in self._epochs.items() if number >= epoch - 1}
            self._epochs[epoch] = np.random.default_rng([self._seed, 0, epoch]).permutation(self._indices)
        return int(self._epochs[epoch][within])

    def _positions(self, rng: np.random.Generator, sample: Sample) -> np.ndarray:
        """Positions [A]: response tokens with a token behind."""
        first, count = len(sample.prompt_ids), len(sample.response_ids) - 1
        return first + rng.choice(count, size=self._anchors, replace=count < self._anchors)


def kept_labels(samples: Sequence[Sample], draw: Draw, proposals: int) -> np.ndarray:
    """bool [S, A, N]: whether the label of proposal j lies inside the response."""
    lengths = np.array([len(samples[index].token_ids) for index in draw.indices])
    return draw.anchors_SA[..., None] + np.arange(1, proposals + 1) < lengths[:, None, None]


def block_tokens(samples: Sequence[Sample], draw: Draw, proposals: int) -> np.ndarray:
    """Sorted ids of the tokens in the drawn blocks: anchors and labels."""
    spans = [
        samples[index].token_ids[anchor : anchor + proposals + 1]
        for index, anchors in zip(draw.indices, draw.anchors_SA, strict=True)
        for anchor in anchors
    ]
    return np.unique(np.concatenate(spans))


def assemble(corpus: Corpus, draw: Draw, config: DrafterConfig, device: torch.device, *, with_outputs: bool = False) -> Batch:
    """Pad the drawn samples and lay out a block at each of their anchors.

    Args:
        corpus: samples and features.
        draw: S samples, A anchors each.
        config: of the drafter.
        device: where the batch goes.
        with_outputs: also the target's outputs, for soft labels.
    """
    anchors_SA = torch.from_numpy(draw.anchors_SA).to(device)
    ids = [torch.tensor(corpus.samples[index].token_ids) for index in draw.indices]
    longest, (count, anchors), block, proposals = max(map(len, ids)), anchors_SA.shape, config.block_size, config.num_proposals
    ids_SL = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
    outputs = None
    if with_outputs:
        features, outputs_SLM = corpus.features_and_outputs(draw.indices, device)
    else:
        features = corpus.features(draw.indices, device)

    span_SAN = (anchors_SA[..., None] + torch.arange(proposals + 1, device=device)).clamp_max(longest - 1)
    tokens = torch.gather(ids_SL, 1, span_SAN.flatten(1)).view(count, anchors, -1)
    if with_outputs:
        rows = span_SAN[..., :-1].flatten(1)
        outputs = torch.gather(outputs_SLM, 1, rows[..., None].expand(-1, -1, outputs_SLM.shape[-1])).view(count, anchors, proposals, -1)

    block_ids = torch.full((count, anchors, block), config.mask_token_id, device=device)
    block_ids[..., 0] = tokens[..., 0]
    block_positions = (anchors_SA[..., None] + torch.arange(block, device=device)).flatten(1)
    context = torch.arange(longest, device=device)
    sees_context = (context < anchors_SA[..., None])[:, :, None, :].expand(-1, -1, block, -1).flatten(1, 2)
    owner = torch.arange(anchors * block, device=device) // block
    same_block = (owner[:, None] == owner).expand(count, -1, -1)
    keep = torch.from_numpy(kept_labels(corpus.samples, draw, proposals)).to(device)
    return Batch(
        features=features,
        block_ids=block_ids.flatten(1),
        position_ids=torch.cat([context.expand(count, -1), block_positions], dim=1),
        mask=torch.cat([sees_context, same_block], dim=2)[:, None],
        prefix_ids=tokens[..., :-1],
        labels=tokens[..., 1:],
        keep=keep.float(),
        outputs=outputs,
    )
