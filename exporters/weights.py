"""Weights stay in safetensors files: the graphs' initializers are ranges of the bundle's `model.safetensors`.

An initializer's name says where it lies: `target.model.norm.weight` is tensor `model.norm.weight` of `target/`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from domino_deploy.bundle import WEIGHTS
from domino_deploy.checkpoint import Checkpoint, load_tensors
from domino_deploy.checkpoint_tensors import EMBEDDING, LM_HEAD
from domino_deploy.errors import ExportError, listed
from domino_deploy.safetensors_header import TensorEntry

_REPORT = "Please report this fault of the exporter."


def write_weights(checkpoint: Checkpoint[Any], file: Path) -> None:
    """All tensors of a checkpoint as fp32 in one safetensors file, in memory one at a time.

    Always a copy, even where the source is such a file already: ONNX refuses external data with more than one hard link,
    and whoever saves the source again would write into the bundle.
    """
    order = _order_of_loading(checkpoint)
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        shape = checkpoint.tensors[name].shape
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # safetensors asks for 8; 64 suits vector loads of the mapped data
    with file.open("wb") as output:
        output.write(struct.pack("<Q", len(text)) + text)
        for expected, (name, tensor) in zip(order, load_tensors(checkpoint, torch.float32), strict=True):
            assert name == expected, "load_tensors yields in the order of the files"
            output.write(tensor.contiguous().numpy().data.cast("B"))


def bind_weights(model: ir.Model, checkpoints: Mapping[str, Checkpoint[Any]]) -> set[str]:
    """Make every weight of the graph a range of a file; returns the names of the tensors used, with their prefix.

    Args:
        model: as the exporters make it: initializers without data are weights.
        checkpoints: "target" and "drafter", opened from the bundle's own folders.

    Raises:
        ExportError: an initializer that has no tensor, or one of another shape.
    """
    used, problems = set(), []
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue  # a small constant, kept in the graph
        owner, _, tensor = name.partition(".")
        entry = _entry(checkpoints[owner].tensors, tensor) if owner in checkpoints else None
        shape = None if value.shape is None else tuple(value.shape)
        if entry is None or entry.shape != shape or entry.dtype != "F32":
            problems.append(f"{name}: the graph has shape {shape}, the weights {entry and (entry.dtype, entry.shape)}")
            continue
        used.add(f"{owner}.{entry.name}")
        value.const_value = ir.ExternalTensor(
            f"{owner}/{WEIGHTS}", entry.offset, entry.nbytes, ir.DataType.FLOAT, shape=ir.Shape(entry.shape), name=name
        )
    if problems:
        raise ExportError(listed("Weights that do not fit the graph", problems, _REPORT))
    return used


def check_all_used(checkpoints: Mapping[str, Checkpoint[Any]], used: Sequence[set[str]]) -> None:
    """Check that the graphs together use every tensor.

    Args:
        checkpoints: as for `bind_weights`.
        used: what it returned for each graph.

    Raises:
        ExportError: a tensor of a checkpoint appears in none of the graphs.
    """
    unused = {f"{owner}.{name}" for owner, checkpoint in checkpoints.items() for name in checkpoint.tensors} - set().union(*used)
    if unused:
        raise ExportError(listed("Tensors that no graph uses", sorted(unused), _REPORT))


def _entry(tensors: Mapping[str, TensorEntry], name: str) -> TensorEntry | None:
    # A tied target has no LM head of its own.
    return tensors.get(name) or (tensors.get(EMBEDDING) if name == LM_HEAD else None)


def _order_of_loading(checkpoint: Checkpoint[Any]) -> list[str]:
    """Names in the order in which `load_tensors` yields them: file by file."""
    return sorted(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].file)
