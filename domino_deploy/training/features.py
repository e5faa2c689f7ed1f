"""Tapped target features of the training samples: read from what regeneration kept, from a file, or computed when asked for.

Shape legend: L tokens of a sample, T tapped layers of the drafter, M model width, F = T * M.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from domino_deploy.errors import CheckpointError, TrainingError
from domino_deploy.model.target import TargetModel
from domino_deploy.strict_json import read_object
from domino_deploy.training.cached_pass import as_stored
from domino_deploy.training.distributed import ALONE, World
from domino_deploy.training.progress import Progress
from domino_deploy.training.samples import Sample, digest
from domino_deploy.training.store import StoredSamples

_BATCH_TOKENS = 2048  # padded tokens per target pass; larger ones were no faster on two cores
# Kept features against the target's own on a few samples: relative differences. Measured on the demo target: bf16 against fp32 0.01, rows
# of the neighbouring tokens 0.7.
_FOREIGN, _COMPARED_SAMPLES, _COMPARED_TOKENS = 0.4, 8, 256
_SCALE_SAMPLES = 64  # samples that the taps' scales are measured on: some ten thousand rows; a median needs no more


class FeatureSource(Protocol):
    """Three exist: rows that regeneration kept, rows of a file, and rows that the target computes when asked.

    layers: the target layers whose outputs stand side by side in a row; the last layer's is its output after the final norm.
    """

    layers: tuple[int, ...]

    def rows(self, indices: Sequence[int]) -> list[Tensor]:
        """Rows [L, len(layers) * M] of each sample, any float type; the last row of a sample may be zeros (nothing reads it)."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Samples and where their features come from.

    tapped_layers: the drafter's, T of them; scales: fp32 [T], rms of each tap; width: M.
    """

    samples: Sequence[Sample]
    source: FeatureSource
    tapped_layers: tuple[int, ...]
    scales: Tensor
    width: int

    def features(self, indices: Sequence[int], device: torch.device) -> Tensor:
        """Scaled features [S, L, F] of some samples, fp32, zeros behind the shorter ones."""
        rows = self._of_layers(self.source.rows(indices), self.tapped_layers, device)
        return rows / self.scales.to(device).repeat_interleave(self.width)

    def features_and_outputs(self, indices: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """As `features`, with the target's normed outputs [S, L, M] of the same rows.

        The source must hold the last layer (`corpus_of` with `with_outputs`).
        """
        rows = self.source.rows(indices)
        features = self._of_layers(rows, self.tapped_layers, device) / self.scales.to(device).repeat_interleave(self.width)
        return features, self._of_layers(rows, self.source.layers[-1:], device)

    def _of_layers(self, rows: Sequence[Tensor], layers: Sequence[int], device: torch.device) -> Tensor:
        places = [self.source.layers.index(layer) for layer in layers]
        chosen = [
            torch.cat([sample[:, place * self.width : (place + 1) * self.width] for place in places], dim=1).to(device).float()
            for sample in rows
        ]
        return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)


def layers_read(tapped_layers: Sequence[int], num_target_layers: int, *, with_outputs: bool) -> tuple[int, ...]:
    """Target layers whose outputs training reads, rising: the taps and, `with_outputs` (soft labels), the last one."""
    return tuple(sorted({*tapped_layers, *((num_target_layers - 1,) if with_outputs else ())}))


def corpus_of(
    model: TargetModel,
    stored: StoredSamples,
    chosen: Sequence[int],
    tapped_layers: Sequence[int],
    *,
    with_outputs: bool,
    live: bool,
    dtype: torch.dtype,
    path: Path,
    world: World = ALONE,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Corpus:
    """The chosen samples with their features.

    Args:
        model: the target; its taps must be `layers_read`.
        stored: what regeneration left, with features or without.
        chosen: indices into it, in the corpus's order.
        tapped_layers: the drafter's.
        with_outputs: the target's normed outputs are wanted as well (soft labels).
        live: compute features for every batch anew and store none.
        dtype: of the matrix products (autocast); the residual stream keeps the model's own type.
        path: where features go if regeneration kept none: fp16, rows x layers x width x 2 bytes; made once for the same samples, by the
            first process.
        world: this process among others.
        on_progress: told how many rows are done.

    Raises:
        TrainingError: the disk has no room for the features, or kept ones are not those of the responses.
    """
    samples = [stored.samples[index] for index in chosen]
    wanted = layers_read(tapped_layers, model.config.num_layers, with_outputs=with_outputs)
    source: FeatureSource
    if live:
        source = LiveFeatures(model, samples, dtype)
    elif stored.has_features and set(wanted) <= set(stored.tapped_layers):
        _refuse_foreign(model, stored, chosen, dtype, path.parent)
        source = _StoredFeatures(stored, chosen)
    else:
        if world.is_main:
            _make_feature_file(model, samples, path, dtype, on_progress)
        world.wait()
        source = _FileFeatures(path, samples, model)
    scales = _tap_scales(source, tapped_layers, len(samples), model.config.hidden_size)
    return Corpus(samples=samples, source=source, tapped_layers=tuple(tapped_layers), scales=scales, width=model.config.hidden_size)


class LiveFeatures:
    """Features by a target pass each time they are asked for: no disk, at the price of the pass in every step.

    Args:
        model: the target, tapping every layer that is wanted.
        samples: what indices count.
        dtype: of the matrix products.
    """

    def __init__(self, model: TargetModel, samples: Sequence[Sample], dtype: torch.dtype) -> None:
        self.layers = model.tapped_layers
        self._model, self._samples, self._dtype = model, samples, dtype

    def rows(self, indices: Sequence[int]) -> list[Tensor]:
        return target_rows(self._model, [self._samples[index] for index in indices], self._dtype)


class _StoredFeatures:
    def __init__(self, stored: StoredSamples, chosen: Sequence[int]) -> None:
        self.layers = stored.tapped_layers
        self._stored, self._chosen = stored, list(chosen)

    def rows(self, indices: Sequence[int]) -> list[Tensor]:
        # A copy: the memory map is read-only, which torch does not know.
        return [torch.from_numpy(np.array(self._stored.rows(self._chosen[index]))) for index in indices]


class _FileFeatures:
    def __init__(self, path: Path, samples: Sequence[Sample], model: TargetModel) -> None:
        self.layers = model.tapped_layers
        self._starts = np.concatenate([[0], np.cumsum([len(sample.token_ids) for sample in samples])])
        shape = (int(self._starts[-1]), len(self.layers) * model.config.hidden_size)
        self._rows = np.memmap(path, dtype=np.float16, mode="r", shape=shape)

    def rows(self, indices: Sequence[int]) -> list[Tensor]:
        return [torch.from_numpy(np.array(self._rows[self._starts[index] : self._starts[index + 1]])) for index in indices]


@torch.no_grad()
def target_rows(model: TargetModel, samples: Sequence[Sample], dtype: torch.dtype) -> list[Tensor]:
    """Features [L, F] of each sample by one causal pass over all of them, on the model's device."""
    device = model.lm_head.weight.device
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(sample.token_ids) for sample in samples], batch_first=True).to(device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
        _, features = model.hidden_states(padded)  # causal: padding behind changes nothing before it
    return [rows[: len(sample.token_ids)] for rows, sample in zip(features, samples, strict=True)]


def _make_feature_file(
    model: TargetModel, samples: Sequence[Sample], path: Path, dtype: torch.dtype, on_progress: Callable[[Progress], None]
) -> None:
    """All features in one fp16 file, written aside and renamed; what it was made for is noted beside it, in a .json."""
    note, made_for = path.with_suffix(".json"), _made_for(model, samples, dtype)
    aside, total, done = path.with_suffix(".part"), sum(len(sample.token_ids) for sample in samples), 0
    size = total * len(model.tapped_layers) * model.config.hidden_size * 2
    if _is_noted(note, made_for) and path.is_file() and path.stat().st_size == size:
        return
    try:
        note.unlink(missing_ok=True)  # first: a note must never stand beside rows of other samples
        path.unlink(missing_ok=True)
        with aside.open("wb") as file:
            for group in _groups(samples):
                chosen = samples[group]
                for found in target_rows(model, chosen, dtype):
                    file.write(as_stored(found).cpu().numpy().tobytes())
                done += sum(len(sample.token_ids) for sample in chosen)
                on_progress(Progress(phase="target features", done=done, total=total, note=f"{size / 1e9:.1f} GB in all"))
        aside.rename(path)
        note.write_text(json.dumps(made_for) + "\n", encoding="utf-8")
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise TrainingError(
            f"{path}: expected room for {size / 1e9:.1f} GB of features, found: {error}. Free some, name another work folder, or train "
            "with live features."
        ) from error


def _made_for(model: TargetModel, samples: Sequence[Sample], dtype: torch.dtype) -> dict[str, object]:
    return {"samples": digest(samples), "tapped_layers": list(model.tapped_layers), "dtype": str(dtype)}


def _is_noted(note: Path, made_for: Mapping[str, object]) -> bool:
    try:
        return read_object(note) == made_for
    except CheckpointError:  # none, or damaged: features are made again
        return False


def _refuse_foreign(model: TargetModel, stored: StoredSamples, chosen: Sequence[int], dtype: torch.dtype, work: Path) -> None:
    """Stop for kept features that are not the target's for the kept responses: moved lines or parts, another target, damage."""
    advice = f"Lines or files were changed: remove features.json and features-*.f16 from {work}; features are then made anew."
    layers, width = stored.tapped_layers, model.config.hidden_size
    widths = {rows.shape[1] for rows in stored.features}
    if widths != {len(layers) * width}:
        raise TrainingError(
            f"{work}: expected {width} numbers for each of the {len(layers)} tapped layers, found rows of {min(widths)}. {advice}"
        )
    for index in dict.fromkeys([*chosen[:: max(1, len(chosen) // _COMPARED_SAMPLES)], max(chosen)]):
        sample = stored.samples[index]
        start = Sample(prompt_ids=sample.token_ids[:_COMPARED_TOKENS], response_ids=())
        [expected] = target_rows(model, [start], dtype)
        columns = [layers.index(layer) * width + column for layer in model.tapped_layers for column in range(width)]
        expected = expected[:-1].float().cpu()  # of the sample's last token no features are kept
        found = torch.from_numpy(stored.rows(index)[: len(expected), columns]).float()
        difference = ((found - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-6)).median().item()
        if not difference < _FOREIGN:
            raise TrainingError(
                f"{work}: expected features that the target gives for the responses, found others for sample {index} (relative difference "
                f"{difference:.2f}). {advice}"
            )


def _groups(samples: Sequence[Sample]) -> Iterator[slice]:
    """Neighbouring samples, at most `_BATCH_TOKENS` padded tokens together (but at least one sample)."""
    start = 0
    while start < len(samples):
        end, longest = start, 0
        while end < len(samples) and (end == start or max(longest, len(samples[end].token_ids)) * (end + 1 - start) <= _BATCH_TOKENS):
            longest = max(longest, len(samples[end].token_ids))
            end += 1
        yield slice(start, end)
        start = end


def _tap_scales(source: FeatureSource, tapped_layers: Sequence[int], count: int, width: int) -> Tensor:
    """Rms of each tap [T]: the median over rows of the row's rms, so that the spikes of first tokens do not count."""
    indices = range(0, count, max(1, count // _SCALE_SAMPLES))
    rms: list[Tensor] = []
    for index in indices:
        [rows] = source.rows([index])
        per_layer = rows[:-1].float().cpu().view(len(rows) - 1, len(source.layers), width).square().mean(dim=-1).sqrt()
        rms.append(per_layer[:, [source.layers.index(layer) for layer in tapped_layers]])
    return torch.cat(rms).median(dim=0).values.clamp_min(1e-6)  # it divides
