"""Graphs opened with ONNX Runtime: held against the signature, and failures named by their file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime
from numpy.typing import NDArray

from domino_deploy.errors import BundleError, listed
from domino_deploy.runtime.backends.ort_provider import Provider
from domino_deploy.signature import GraphSignature, TensorSpec

# ONNX Runtime's names of the dtypes in `signature.py`.
_ORT_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int64": "tensor(int64)", "bool": "tensor(bool)"}


def open_graph(
    graph_file: Path,
    signature: GraphSignature,
    options: onnxruntime.SessionOptions,
    *,
    content: bytes | None = None,
    provider: Provider = Provider.CPU,
) -> onnxruntime.InferenceSession:
    """A graph, its inputs and outputs compared with the signature: memory is bound by it.

    Args:
        graph_file: the graph.
        signature: its inputs and outputs.
        options: of the session.
        content: another graph in its place, whose weights lie where the file's do.
        provider: what computes it.

    Raises:
        BundleError: ONNX Runtime refuses the graph, or it is not the graph of this signature.
        MissingDependencyError: ONNX Runtime lacks the provider, or cannot start it.
    """
    provider.check_offered(onnxruntime.get_available_providers())
    with failing_as_bundle_error(graph_file, "can be opened"):
        if content is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph_file.parent))
        session = onnxruntime.InferenceSession(content or graph_file, options, providers=provider.execution_providers)
    provider.check_started(session.get_providers())
    problems = [
        *_differences("input", signature.inputs, session.get_inputs()),
        *_differences("output", signature.outputs, session.get_outputs()),
    ]
    if problems:
        raise BundleError(
            listed(f"{graph_file}: the graph is not the one that the manifest describes", problems, "Export the bundle again.")
        )
    return session


def run_graph(session: onnxruntime.InferenceSession, graph_file: Path, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Every output of one pass by its name, in memory of its own.

    Raises:
        BundleError: an operator of the graph fails.
    """
    names = [output.name for output in session.get_outputs()]
    with failing_as_bundle_error(graph_file, "runs"):
        return dict(zip(names, session.run(names, inputs), strict=True))


@contextmanager
def failing_as_bundle_error(graph_file: Path, expected: str) -> Iterator[None]:
    """Around a call of ONNX Runtime: its failure becomes a BundleError that names the file; `expected` says what the graph should do."""
    try:
        yield
    except Exception as error:  # ONNX Runtime's errors have no common base but this
        raise BundleError(
            f"Expected a graph that {expected} with ONNX Runtime at {graph_file}, found: {error} Export the bundle again."
        ) from error


def _differences(kind: str, specs: Sequence[TensorSpec], found: Sequence[onnxruntime.NodeArg]) -> Iterator[str]:
    """A line for each input or output that is missing, surplus, or of another type or shape; names of dimensions do not matter."""
    nodes = {node.name: node for node in found}
    for spec in specs:
        node = nodes.pop(spec.name, None)
        if node is None:
            yield f"{kind} {spec.name}: missing"
            continue
        expected = (_ORT_TYPES[spec.dtype], [dim if isinstance(dim, int) else None for dim in spec.shape])
        actual = (node.type, [dim if isinstance(dim, int) else None for dim in node.shape])
        if actual != expected:
            yield f"{kind} {spec.name}: expected {spec.dtype} {list(spec.shape)}, found {node.type} {node.shape}"
    yield from (f"{kind} {name}: unknown" for name in nodes)
