"""Weights on their way into a bundle, and the graphs' initializers that point at them.

A source file whose tensors all stay as they are is linked or copied whole; any other is converted in pieces into a new file of the
same name.  An initializer's name says where it lies: `target.model.norm.weight` is tensor `model.norm.weight` of `target/`,
`target.model.layers.0.mlp.up_proj.weight.int4` the integers of a quantised one.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import onnx_ir as ir
import torch
from torch import Tensor

from domino_deploy.checkpoint import INDEX, Checkpoint
from domino_deploy.errors import CheckpointError, ExportError, listed
from domino_deploy.exporters.placement import FilePlan, Placement, file_plans
from domino_deploy.exporters.quantisation import quantise
from domino_deploy.exporters.stored import SCALES, TORCH_DTYPES, ZERO_POINTS, Stored, rows_of, stored_tensors, tied_name
from domino_deploy.precision import Dtype, Precision
from domino_deploy.safetensors_header import TensorEntry, header_for, read_header
from domino_deploy.stored_weights import SAFETENSORS, blocks_of

_REPORT = "Please report this fault of the exporter."
_ONNX_DTYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "U8": ir.DataType.UINT8,
    "I64": ir.DataType.INT64,
}
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP)


def write_weights(checkpoint: Checkpoint[Any], folder: Path, precision: Precision, placement: Placement) -> Stored:
    """The weights of a checkpoint in `folder` of a bundle, with an index where the source has one.

    Returns:
        Where each tensor lies now, by its canonical name.

    Raises:
        RequestError: matrices that do not divide into blocks.
        CheckpointError: a weight that is not finite in the type asked for.
    """
    plans = file_plans(checkpoint, precision)
    for plan in plans:
        file = folder / plan.source.name
        if plan.is_unchanged:
            _place(plan.source, file, placement)
        else:
            _convert(plan, file, precision)
    if (checkpoint.folder / INDEX).is_file():
        _write_index(folder, [plan.source.name for plan in plans])
    stored = stored_tensors(folder)
    return {name: stored[name] for name in checkpoint.tensors}


def bind_weights(model: ir.Model, stored: Mapping[str, Stored]) -> set[str]:
    """Make every weight of the graph a range of a file; returns the names of the tensors used, with their owner.

    Args:
        model: as the exporters make it: initializers without data are weights, of the types in which they are stored.
        stored: per owner ("target", "drafter", "draft_vocab"), tensors in the bundle's own folders.

    Raises:
        ExportError: an initializer that has no tensor, or one of another type or size.
    """
    used, problems = set(), []
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue  # a small constant, kept in the graph
        found = _found(stored, name)
        shape = () if value.shape is None else value.shape.numpy()
        if found is None or _ONNX_DTYPES[found[1].dtype] != value.dtype or math.prod(found[1].shape) != math.prod(shape):
            problems.append(f"{name}: the graph has {value.dtype} {list(shape)}, the weights {found and (found[1].dtype, found[1].shape)}")
            continue
        tensor, entry = found
        used.add(tensor)
        location = f"{entry.file.parent.name}/{entry.file.name}"
        value.const_value = ir.ExternalTensor(
            location, entry.offset, entry.nbytes, _ONNX_DTYPES[entry.dtype], shape=ir.Shape(shape), name=name
        )
    if problems:
        raise ExportError(listed("Weights that do not fit the graph", problems, _REPORT))
    return used


def check_all_used(stored: Mapping[str, Stored], used: Sequence[set[str]], *, replaced: Iterable[str] = ()) -> None:
    """Check that the graphs together use every tensor.

    Args:
        stored: as for `bind_weights`.
        used: what it returned for each graph.
        replaced: tensors, with their owner, that others stand in for.

    Raises:
        ExportError: a tensor appears in none of the graphs.
    """
    unused = {f"{owner}.{name}" for owner, tensors in stored.items() for name in tensors} - set().union(*used, replaced)
    if unused:
        raise ExportError(listed("Tensors that no graph uses", sorted(unused), _REPORT))


def _place(source: Path, file: Path, placement: Placement) -> None:
    """A file as it is."""
    if placement is Placement.LINK:
        try:
            os.link(source.resolve(), file)  # hubs keep files behind symbolic links
            return
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
    shutil.copyfile(source, file)


def _convert(plan: FilePlan, file: Path, precision: Precision) -> None:
    """A new safetensors file with the plan's tensors in their types."""
    layout = {
        full: _part_layout(part, entry.shape, dtype, precision)
        for name, (entry, dtype) in plan.tensors.items()
        for part, full in _parts(name, dtype, precision)
    }
    begin, places = header_for(layout)
    problems = []
    with file.open("xb") as output:
        output.write(begin)
        for name, (entry, dtype) in plan.tensors.items():
            if not _write_tensor(output, entry, dtype, precision, {part: places[full] for part, full in _parts(name, dtype, precision)}):
                problems.append(name)
    if problems:
        advice = "The checkpoint is damaged, or its weights need a wider type."
        raise CheckpointError(
            listed(f"{plan.source}: expected finite weights in the types asked for, found NaN or infinity in", problems, advice)
        )


def _parts(name: str, dtype: Dtype, precision: Precision) -> list[tuple[str, str]]:
    """Ends and full names of what stands for a tensor in a file."""
    if not dtype.is_quantised:
        return [("", name)]
    ends = [str(dtype), SCALES] + ([] if precision.symmetric else [ZERO_POINTS])
    return [(end, f"{name}.{end}") for end in ends]


def _part_layout(part: str, shape: tuple[int, ...], dtype: Dtype, precision: Precision) -> tuple[str, tuple[int, ...]]:
    if part == "":
        return SAFETENSORS[dtype], shape
    blocks, block_bytes, zero_bytes = blocks_of(shape[1], dtype.bits, precision.block_size)
    if part == SCALES:
        return "F32", (shape[0], blocks)
    return "U8", (shape[0], zero_bytes) if part == ZERO_POINTS else (shape[0], blocks, block_bytes)


def _write_tensor(output: BinaryIO, entry: TensorEntry, dtype: Dtype, precision: Precision, places: dict[str, int]) -> bool:
    """Convert a tensor piece by piece to its places in the file; whether all of it was finite."""
    is_finite = True
    for piece in rows_of(entry):
        if dtype.is_quantised:
            rows = piece.float()
            is_finite = is_finite and bool(torch.isfinite(rows).all())
            found = quantise(rows, dtype.bits, precision.block_size, symmetric=precision.symmetric)
            parts: dict[str, Tensor | None] = {str(dtype): found.packed, SCALES: found.scales, ZERO_POINTS: found.zero_points}
        else:
            parts = {"": piece.to(TORCH_DTYPES[SAFETENSORS[dtype]])}
            is_finite = is_finite and bool(torch.isfinite(parts[""]).all())  # type: ignore[arg-type]  # there is one
        for end, part in parts.items():
            if part is not None:
                output.seek(places[end])
                output.write(part.contiguous().view(torch.uint8).numpy().data)
                places[end] = output.tell()
    return is_finite


def _write_index(folder: Path, files: Iterable[str]) -> None:
    """Of what lies in the folder now: names change with quantisation, and a file of nothing but copies or frequencies is left out."""
    index = {"metadata": {}, "weight_map": {name: file for file in files for name in read_header(folder / file)}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _found(stored: Mapping[str, Stored], initializer: str) -> tuple[str, TensorEntry] | None:
    """The tensor, with its owner, and the entry that an initializer's name stands for."""
    owner, _, name = initializer.partition(".")
    tensors = stored.get(owner, {})
    base, _, end = name.rpartition(".")
    # The last is another shape of the same bytes.
    for tensor, part in ((name, ""), (base, end), tuple(base.rpartition(".")[::2])):
        tensor = tied_name(tensors, tensor)
        if tensor in tensors and part in tensors[tensor].parts:
            return f"{owner}.{tensor}", tensors[tensor].parts[part]
    return None
