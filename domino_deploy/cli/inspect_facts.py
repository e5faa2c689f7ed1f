"""Facts about a bundle, a checkpoint or an ONNX file: headers and metadata, no weights."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_deploy.bundle import DRAFT_VOCAB, DRAFTER_FOLDER, MANIFEST, TARGET_FOLDER, Bundle, open_bundle
from domino_deploy.checkpoint import CONFIG, Checkpoint, open_drafter, open_target
from domino_deploy.checkpoint_config import is_drafter
from domino_deploy.checkpoint_tensors import without_derived
from domino_deploy.cli.extras import needs
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import BundleError, MissingDependencyError
from domino_deploy.safetensors_header import TensorEntry, read_header
from domino_deploy.stored_weights import DRAFT_VOCABULARY, PARTS, part_of
from domino_deploy.strict_json import read_object

if TYPE_CHECKING:
    import onnx

Facts = dict[str, Any]
AnyCheckpoint = Checkpoint[TargetConfig] | Checkpoint[DrafterConfig]

_HEAD_NEST = "logit_head."  # of linked early SpecForge files, whose names stay


def describe(path: Path) -> Facts:
    """Facts about `path`, ready for JSON; `kind` says what it is.

    Raises:
        BundleError: neither of the three, or a bundle that is incomplete.
        CheckpointError: a checkpoint that cannot be used.
        MissingDependencyError: an ONNX file is inspected without the package onnx.
    """
    if os.path.isfile(path) and path.suffix == ".onnx":
        return {"kind": "onnx", "path": str(path), "bytes": path.stat().st_size, "graphs": {path.stem: _graph(path)}}
    if os.path.isfile(path / MANIFEST):
        return _bundle(path)
    if os.path.isfile(path / CONFIG):
        return _checkpoint(path)
    found = "a folder with neither" if os.path.isdir(path) else f"a file {path.name}" if os.path.exists(path) else "nothing there"
    raise BundleError(
        f"{path}: expected a bundle (a folder with {MANIFEST}), a checkpoint (a folder with {CONFIG}) or an .onnx file, "
        f"found {found}. Check the path."
    )


def open_checkpoint(path: Path) -> AnyCheckpoint:
    """Target or drafter, whichever its config.json says.

    Raises:
        CheckpointError: a checkpoint that cannot be used.
    """
    return open_drafter(path) if is_drafter(read_object(path / CONFIG)) else open_target(path)


def bundle_parts(bundle: Bundle) -> dict[str, int]:
    """Bytes of a bundle's weights by part (`stored_weights.PARTS`), as its files' headers have them.

    Raises:
        CheckpointError: a header that contradicts its file.
    """
    sizes: Counter[str] = Counter()
    configs: Mapping[str, TargetConfig | DrafterConfig] = {TARGET_FOLDER: bundle.target, DRAFTER_FOLDER: bundle.drafter}
    for file in bundle.manifest.files:
        folder, _, name = file.partition("/")
        if folder not in configs or not name.endswith(".safetensors"):
            continue
        for tensor, entry in without_derived(read_header(bundle.path / file)).items():
            part = DRAFT_VOCABULARY if name == DRAFT_VOCAB else part_of(tensor.removeprefix(_HEAD_NEST), configs[folder])
            sizes[part] += entry.nbytes
    return _ordered(sizes)


def _bundle(path: Path) -> Facts:
    bundle = open_bundle(path)
    facts: Facts = {"kind": "bundle", "path": str(path), **bundle.manifest.to_dict()}
    for graph in facts["graphs"].values():
        try:
            graph.update(_graph(path / graph["file"]))
        except MissingDependencyError:
            graph["operators"] = None  # a serving machine has no onnx; inputs and outputs are in the manifest as well
    facts["hard_links"] = [name for name in bundle.manifest.files if (path / name).stat().st_nlink > 1]
    facts["parts"] = bundle_parts(bundle)
    return facts


def _checkpoint(path: Path) -> Facts:
    checkpoint = open_checkpoint(path)
    tensors = {name: {"dtype": entry.dtype, "shape": list(entry.shape)} for name, entry in checkpoint.tensors.items()}
    return {
        "kind": "drafter checkpoint" if isinstance(checkpoint.config, DrafterConfig) else "target checkpoint",
        "path": str(path),
        "config": dataclasses.asdict(checkpoint.config),
        "parameters": sum(math.prod(entry.shape) for entry in checkpoint.tensors.values()),
        "bytes": sum(entry.nbytes for entry in checkpoint.tensors.values()),
        "dtypes": dict(Counter(entry.dtype for entry in checkpoint.tensors.values())),
        "tensors": tensors,
        "parts": _parts(checkpoint.tensors, checkpoint.config),
    }


def _parts(tensors: Mapping[str, TensorEntry], config: TargetConfig | DrafterConfig) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for name, entry in tensors.items():
        sizes[part_of(name, config)] += entry.nbytes
    return _ordered(sizes)


def _ordered(sizes: Mapping[str, int]) -> dict[str, int]:
    return {part: sizes[part] for part in PARTS if part in sizes}


def _graph(path: Path) -> Facts:
    with needs("export"):
        import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's errors have no common base but this
        raise BundleError(f"{path}: expected an ONNX graph, found: {error}. Export the bundle again.") from error
    if not model.HasField("graph"):  # an empty file parses, too
        raise BundleError(f"{path}: expected an ONNX graph, found none in the file. Export the bundle again.")
    return {
        "opset": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "inputs": [_tensor(value) for value in model.graph.input],
        "outputs": [_tensor(value) for value in model.graph.output],
        "operators": dict(Counter(_operators(model.graph.node)).most_common()),
        "functions": [f"{function.domain}::{function.name}" for function in model.functions],
    }


def _operators(nodes: Iterable[onnx.NodeProto]) -> Iterable[str]:
    for node in nodes:
        yield f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        for attribute in node.attribute:
            yield from _operators(attribute.g.node)


def _tensor(value: onnx.ValueInfoProto) -> Facts:

    tensor = value.type.tensor_type
    return {
        "name": value.name,
        "dtype": _dtype(tensor.elem_type),
        "shape": [dim.dim_param or dim.dim_value for dim in tensor.shape.dim],
    }


def _dtype(number: int) -> str:
    import onnx

    known = onnx.helper.get_all_tensor_dtypes()
    return onnx.helper.tensor_dtype_to_np_dtype(number).name if number in known else f"type {number} of ONNX"
