"""`domino-deploy inspect`: what a bundle, a checkpoint or an ONNX file holds."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from domino_deploy.bundle import MANIFEST, open_bundle
from domino_deploy.checkpoint import CONFIG, open_drafter, open_target
from domino_deploy.checkpoint_config import is_drafter
from domino_deploy.cli.console import as_bytes, echo_json, echo_table
from domino_deploy.cli.extras import needs
from domino_deploy.errors import BundleError, MissingDependencyError
from domino_deploy.strict_json import read_object

if TYPE_CHECKING:
    import onnx

Facts = dict[str, Any]
_TABLES = ("graphs", "tensors", "files")


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", is_flag=True, help="Everything as one JSON object.")
def inspect(*, path: Path, json: bool) -> None:
    """Show what a bundle, a checkpoint or an ONNX file holds.

    Graph inputs and outputs, operator counts, sizes, pairing facts and verification figures. Nothing is run, no weight is read.
    """
    facts = describe(path)
    if json:
        echo_json(facts)
    else:
        _show(facts)


def describe(path: Path) -> Facts:
    """Facts about `path`, ready for JSON; `kind` says what it is.

    Raises:
        BundleError: neither of the three, or a bundle that is incomplete.
        CheckpointError: a checkpoint that cannot be used.
        MissingDependencyError: an ONNX file is inspected without the package onnx.
    """
    if path.is_file() and path.suffix == ".onnx":
        return {"kind": "onnx", "path": str(path), "bytes": path.stat().st_size, "graphs": {path.stem: _graph(path)}}
    if (path / MANIFEST).is_file():
        return _bundle(path)
    if (path / CONFIG).is_file():
        return _checkpoint(path)
    found = "a folder with neither" if path.is_dir() else f"a file {path.name}" if path.exists() else "nothing there"
    raise BundleError(
        f"{path}: expected a bundle (a folder with {MANIFEST}), a checkpoint (a folder with {CONFIG}) or an .onnx file, "
        f"found {found}. Check the path."
    )


def _bundle(path: Path) -> Facts:
    bundle = open_bundle(path)
    facts: Facts = {"kind": "bundle", "path": str(path), **bundle.manifest.to_dict()}
    for graph in facts["graphs"].values():
        try:
            graph.update(_graph(path / graph["file"]))
        except MissingDependencyError:
            graph["operators"] = None  # a serving machine has no onnx; inputs and outputs are in the manifest as well
    return facts


def _checkpoint(path: Path) -> Facts:
    is_draft = is_drafter(read_object(path / CONFIG))
    checkpoint = open_drafter(path) if is_draft else open_target(path)
    tensors = {name: {"dtype": entry.dtype, "shape": list(entry.shape)} for name, entry in checkpoint.tensors.items()}
    return {
        "kind": "drafter checkpoint" if is_draft else "target checkpoint",
        "path": str(path),
        "config": dataclasses.asdict(checkpoint.config),
        "parameters": sum(math.prod(entry.shape) for entry in checkpoint.tensors.values()),
        "bytes": sum(entry.nbytes for entry in checkpoint.tensors.values()),
        "dtypes": dict(Counter(entry.dtype for entry in checkpoint.tensors.values())),
        "tensors": tensors,
    }


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
    import onnx

    tensor = value.type.tensor_type
    return {
        "name": value.name,
        "dtype": onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name,
        "shape": [dim.dim_param or dim.dim_value for dim in tensor.shape.dim],
    }


def _show(facts: Facts) -> None:
    for name, value in facts.items():
        if name == "verification":
            click.echo(f"verification: {_verdict(value)}")
        elif name not in _TABLES:
            click.echo(f"{name}: {_line(value)}")
    for name, graph in facts.get("graphs", {}).items():
        counts = graph["operators"]
        operators = "operators not counted, the package onnx is not installed"
        if counts is not None:
            operators = f"{sum(counts.values())} nodes: {', '.join(f'{operator} {count}' for operator, count in counts.items())}"
        click.echo(f"\n{name}: {operators}")
        rows = [("input", *row) for row in _collapsed(graph["inputs"])] + [("output", *row) for row in _collapsed(graph["outputs"])]
        echo_table(("", "name", "dtype", "shape"), rows)
    if "files" in facts:
        click.echo()
        echo_table(("file", "size"), [(name, as_bytes(file["bytes"])) for name, file in facts["files"].items()])


def _verdict(report: Facts | None) -> str:
    if report is None:
        return "none (exported with --skip-verification)"
    failed = sum(not line["passed"] for line in report["lines"])
    return f"{len(report['lines'])} outputs compared with PyTorch, {failed} out of bounds"


def _line(value: Any) -> str:
    """Nested values on one line; what is not set is left out."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} ({_line(item)})" if isinstance(item, Mapping) else f"{name} {_line(item)}"
            for name, item in value.items()
            if item not in (None, (), [])
        )
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _collapsed(tensors: Iterable[Facts]) -> list[tuple[str, str, str]]:
    """One row per tensor; the caches of all layers share one."""
    counts: Counter[tuple[str, str, str]] = Counter(
        (re.sub(r"\.\d+$", ".*", tensor["name"]), tensor["dtype"], " x ".join(map(str, tensor["shape"]))) for tensor in tensors
    )
    return [(f"{name} ({count} layers)" if count > 1 else name, dtype, shape) for (name, dtype, shape), count in counts.items()]
