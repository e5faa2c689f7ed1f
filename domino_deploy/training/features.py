"""Tapped target features of the training samples, computed once and kept in a memory-mapped file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from domino_deploy.model.target import TargetModel
from domino_deploy.training.regenerate import Sample

_BATCH_TOKENS = 2048  # padded tokens per target pass; larger ones were no faster on two cores


@dataclass(frozen=True, kw_only=True)
class FeatureCache:
    """Features of all samples, row after row.

    rows: [total, F] fp16; starts: first row of each sample; scales: rms of each tap over all rows, fp32.
    """

    rows: np.ndarray
    starts: np.ndarray
    scales: Tensor

    def of(self, sample: int) -> np.ndarray:
        """Features [L, F] of one sample, prompt and response."""
        return self.rows[self.starts[sample] : self.starts[sample + 1]]


def cached_features(
    model: TargetModel, samples: Sequence[Sample], path: Path, *, dtype: torch.dtype, on_rows: Callable[[int], None] = lambda rows: None
) -> FeatureCache:
    """Features of every sample at the model's tapped layers, in `path` (fp16; size = rows x taps x width x 2 bytes).

    A file of the right size is taken as it is, so an interrupted run does not compute it twice.

    Args:
        model: the target with its taps.
        samples: what to run through it.
        path: the file; written aside and renamed.
        dtype: of the matrix products (autocast); the residual stream stays fp32.
        on_rows: told how many rows each pass brought.
    """
    lengths = np.array([len(sample.prompt_ids) + len(sample.response_ids) for sample in samples])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    width = len(model.tapped_layers) * model.config.hidden_size
    shape = (int(starts[-1]), width)
    if not (path.exists() and path.stat().st_size == shape[0] * width * 2):
        aside = path.with_suffix(".part")
        rows = np.memmap(aside, dtype=np.float16, mode="w+", shape=shape)
        for group in _by_length(lengths):
            _fill(model, samples, group, rows, starts, dtype)
            on_rows(int(lengths[group].sum()))
        rows.flush()
        aside.rename(path)
    rows = np.memmap(path, dtype=np.float16, mode="r", shape=shape)
    return FeatureCache(rows=rows, starts=starts, scales=_tap_scales(rows, len(model.tapped_layers)))


def _by_length(lengths: np.ndarray) -> list[np.ndarray]:
    groups, start, order = [], 0, np.argsort(lengths, kind="stable")[::-1]
    while start < len(order):
        size = max(1, _BATCH_TOKENS // int(lengths[order[start]]))
        groups.append(order[start : start + size])
        start += size
    return groups


@torch.inference_mode()
def _fill(
    model: TargetModel, samples: Sequence[Sample], group: np.ndarray, rows: np.ndarray, starts: np.ndarray, dtype: torch.dtype
) -> None:
    sequences = [torch.tensor(samples[index].prompt_ids + samples[index].response_ids) for index in group]
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # causal: padding behind changes nothing before it
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        _, features = model.hidden_states(padded)
    for row, index in enumerate(group):
        # fp16 ends at 65504; the first token's spikes reach 2.5e4 on the demo target.
        rows[starts[index] : starts[index + 1]] = features[row, : len(sequences[row])].clamp(-6e4, 6e4).to(torch.float16).numpy()


def _tap_scales(rows: np.ndarray, taps: int) -> Tensor:
    """Rms of each tap over a sample of rows, the spikes of first tokens left out (the median row's rms is used)."""
    chosen = torch.from_numpy(np.asarray(rows[:: max(1, len(rows) // 4096)], dtype=np.float32))
    per_row = chosen.unflatten(-1, (taps, -1)).square().mean(dim=-1).sqrt()
    return per_row.median(dim=0).values.clamp_min(1e-6)
