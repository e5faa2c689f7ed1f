"""Tapped target features of the training samples, computed once and kept in a memory-mapped file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from domino_deploy.model.target import TargetModel
from domino_deploy.training.regenerate import Sample

_BATCH_TOKENS = 2048  # padded tokens per target pass; larger ones were no faster on two cores
_FP16_LIMIT = 6e4  # fp16 ends at 65504; the first token's spikes reach 2.5e4 on the demo target
_SCALE_ROWS = 4096  # rows that the taps' scales are measured on: a median needs no more


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Samples and their features, row after row.

    rows: fp16 [total, F]; starts: first row of each sample, and the end; scales: fp32 [T], rms of each tap over all rows.
    """

    samples: Sequence[Sample]
    rows: np.ndarray
    starts: np.ndarray
    scales: Tensor

    def features(self, index: int) -> np.ndarray:
        """Features [L, F] of one sample, prompt and response."""
        return self.rows[self.starts[index] : self.starts[index + 1]]


def corpus_of(
    model: TargetModel, samples: Sequence[Sample], path: Path, *, dtype: torch.dtype, on_rows: Callable[[int], None] = lambda rows: None
) -> Corpus:
    """The samples with their features at the model's tapped layers, in `path` (fp16; size = rows x taps x width x 2 bytes).

    A file that was made for the same samples in the same order, taps and dtype is taken as it is, so an interrupted run does
    not compute it twice.  The model itself is not compared: keep one `path` per target.

    Args:
        model: the target with its taps.
        samples: what to run through it.
        path: the file; written aside and renamed.  What it was made for is noted beside it, in a .json.
        dtype: of the matrix products (autocast); the residual stream stays fp32.
        on_rows: told how many rows each pass brought.
    """
    lengths = np.array([len(sample.token_ids) for sample in samples])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    shape = (int(starts[-1]), len(model.tapped_layers) * model.config.hidden_size)
    note, made_for = path.with_suffix(".json"), _made_for(model, samples, dtype)
    if not (path.exists() and note.exists() and json.loads(note.read_text(encoding="utf-8")) == made_for):
        note.unlink(missing_ok=True)  # first: a note must never stand beside rows of other samples
        aside = path.with_suffix(".part")
        rows = np.memmap(aside, dtype=np.float16, mode="w+", shape=shape)
        for group in _by_length(lengths):
            _fill(model, [samples[index] for index in group], rows, starts[group], dtype)
            on_rows(int(lengths[group].sum()))
        rows.flush()
        aside.rename(path)
        note.write_text(json.dumps(made_for) + "\n", encoding="utf-8")
    rows = np.memmap(path, dtype=np.float16, mode="r", shape=shape)
    return Corpus(samples=samples, rows=rows, starts=starts, scales=_tap_scales(rows, len(model.tapped_layers)))


def _made_for(model: TargetModel, samples: Sequence[Sample], dtype: torch.dtype) -> dict[str, object]:
    token_ids = json.dumps([sample.token_ids for sample in samples]).encode()
    return {"samples": hashlib.sha256(token_ids).hexdigest(), "tapped_layers": list(model.tapped_layers), "dtype": str(dtype)}


def _by_length(lengths: np.ndarray) -> list[np.ndarray]:
    """Sample indices in groups of like length, at most `_BATCH_TOKENS` padded tokens each (but at least one sample)."""
    groups, start, order = [], 0, np.argsort(lengths, kind="stable")[::-1]
    while start < len(order):
        size = max(1, _BATCH_TOKENS // int(lengths[order[start]]))
        groups.append(order[start : start + size])
        start += size
    return groups


@torch.inference_mode()
def _fill(model: TargetModel, samples: Sequence[Sample], rows: np.ndarray, starts: np.ndarray, dtype: torch.dtype) -> None:
    """One target pass: features of `samples` to `rows`, from `starts` on."""
    sequences = [torch.tensor(sample.token_ids) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # causal: padding behind changes nothing before it
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        _, features = model.hidden_states(padded)
    for sequence, start, found in zip(sequences, starts, features, strict=True):
        kept = found[: len(sequence)].clamp(-_FP16_LIMIT, _FP16_LIMIT)
        rows[start : start + len(sequence)] = kept.to(torch.float16).numpy()


def _tap_scales(rows: np.ndarray, taps: int) -> Tensor:
    """Rms of each tap [T]: the median over rows of the row's rms, so that the spikes of first tokens do not count."""
    chosen = torch.from_numpy(np.asarray(rows[:: max(1, len(rows) // _SCALE_ROWS)], dtype=np.float32))
    per_row = chosen.view(len(chosen), taps, -1).square().mean(dim=-1).sqrt()
    return per_row.median(dim=0).values.clamp_min(1e-6)  # it divides
