"""What a bundle holds of each tensor: its place in a file and its type; and back to PyTorch, dequantised.

A tensor `NAME` of a floating type is one entry of a safetensors file.  A quantised one is two or three: `NAME.int4` or `NAME.int8`,
`NAME.scales` and, unless symmetric, `NAME.zero_points` (layout: quantisation.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from domino_deploy.bundle import DRAFTER_FOLDER, TARGET_FOLDER, WEIGHTS, Bundle
from domino_deploy.checkpoint import INDEX
from domino_deploy.checkpoint_source import file_in
from domino_deploy.checkpoint_tensors import EMBEDDING, LM_HEAD, canonical_drafter_names, without_derived
from domino_deploy.config import TargetConfig
from domino_deploy.errors import BundleError
from domino_deploy.exporters.quantisation import Quantised, dequantise
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.loading import drafter_of, target_of
from domino_deploy.model.target import TargetModel
from domino_deploy.precision import Dtype
from domino_deploy.safetensors_header import TensorEntry, read_header
from domino_deploy.stored_weights import DTYPES
from domino_deploy.strict_json import read_object

SCALES, ZERO_POINTS = "scales", "zero_points"

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "I64": torch.int64}
# Matrices are converted in pieces of at most this many values, so that memory does not follow their size.
PIECE_VALUES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a bundle.

    dtype: None for int64, which only draft vocabularies hold; shape: of the weight itself; parts: one entry under "", or those of
    a quantised tensor under the ends of their names.
    """

    dtype: Dtype | None
    shape: tuple[int, ...]
    parts: Mapping[str, TensorEntry]


Stored = Mapping[str, StoredTensor]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in `target/` or `drafter/` of a bundle, by its canonical name.

    Raises:
        BundleError: a quantised tensor of which a part is missing.
        CheckpointError: a header that contradicts its file.
    """
    entries = canonical_drafter_names(without_derived(_entries(folder)), [])
    parts: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        base, _, end = name.rpartition(".")
        is_part = end in (Dtype.INT4, Dtype.INT8, SCALES, ZERO_POINTS)
        parts.setdefault(base if is_part else name, {})[end if is_part else ""] = entry
    return {name: _stored(folder, name, found) for name, found in parts.items()}


def floating_tensors(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file that holds no quantised ones."""
    return {name: _stored(file.parent, name, {"": entry}) for name, entry in read_header(file).items()}


def rows_of(entry: TensorEntry) -> Iterator[Tensor]:
    """The rows of a tensor's first axis in order, in pieces of at most `PIECE_VALUES` values (or one row), in the type of the file.

    Read, not mapped: mapped pages would count as memory of the process.
    """
    dtype = TORCH_DTYPES[entry.dtype]
    rows, width = (entry.shape[0], math.prod(entry.shape[1:])) if entry.shape else (1, 1)
    count = max(1, PIECE_VALUES // max(1, width))
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        for start in range(0, rows, count):
            shape = (min(count, rows - start), *entry.shape[1:])
            content = bytearray(math.prod(shape) * dtype.itemsize)
            file.readinto(content)
            yield torch.frombuffer(content, dtype=dtype).reshape(shape if entry.shape else ())


def read_tensor(stored: StoredTensor) -> Tensor:
    """A stored tensor as float32 (int64 as it is)."""
    parts = {end: _read(entry) for end, entry in stored.parts.items()}
    if "" in parts:
        return parts[""] if stored.dtype is None else parts[""].float()
    assert stored.dtype is not None, "quantised tensors have a type"
    return dequantise(Quantised(parts[stored.dtype], parts[SCALES], parts.get(ZERO_POINTS)), stored.dtype.bits)


def load_stored(bundle: Bundle) -> tuple[TargetModel, DrafterModel]:
    """Target and drafter of a bundle in float32 PyTorch, with the weights that the bundle stores: what its graphs should compute."""
    target, drafter = stored_tensors(bundle.path / TARGET_FOLDER), stored_tensors(bundle.path / DRAFTER_FOLDER)
    return (
        target_of(bundle.target, target_weights(bundle.target, target), bundle.drafter.target_layer_ids),
        drafter_of(bundle.drafter, {name: read_tensor(tensor) for name, tensor in drafter.items()}),
    )


def target_weights(config: TargetConfig, stored: Stored) -> dict[str, Tensor]:
    """The float32 weights that a target of `config` needs; of a target with fewer layers only theirs are read."""
    layers = tuple(f"model.layers.{layer}." for layer in range(config.num_layers))
    return {
        name: read_tensor(tensor)
        for name, tensor in stored.items()
        if (not name.startswith("model.layers.") or name.startswith(layers)) and not (name == LM_HEAD and config.tie_word_embeddings)
    }


def tied_name(stored: Stored, name: str) -> str:
    """The tensor that stands for `name`: a tied target has no LM head of its own."""
    return EMBEDDING if name == LM_HEAD and LM_HEAD not in stored else name


def _entries(folder: Path) -> dict[str, TensorEntry]:
    if not (folder / INDEX).is_file():
        return read_header(folder / WEIGHTS)
    names = sorted(set(read_object(folder / INDEX)["weight_map"].values()))
    entries: dict[str, TensorEntry] = {}
    for name in names:
        entries |= read_header(file_in(folder, name))
    return entries


def _stored(folder: Path, name: str, parts: Mapping[str, TensorEntry]) -> StoredTensor:
    if "" in parts:
        entry = parts[""]
        return StoredTensor(dtype=DTYPES.get(entry.dtype), shape=entry.shape, parts={"": entry})
    integers = [dtype for dtype in (Dtype.INT4, Dtype.INT8) if dtype in parts]
    if len(integers) != 1 or SCALES not in parts:
        raise BundleError(
            f"{folder}: expected {name}.int4 or {name}.int8 with {name}.{SCALES}, found {', '.join(sorted(parts))}. "
            "Export the bundle again."
        )
    outputs, blocks, block_bytes = parts[integers[0]].shape
    shape = (outputs, blocks * block_bytes * 8 // integers[0].bits)
    return StoredTensor(dtype=integers[0], shape=shape, parts=dict(parts))


def _read(entry: TensorEntry) -> Tensor:
    pieces = list(rows_of(entry))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
