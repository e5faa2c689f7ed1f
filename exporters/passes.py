"""Graph passes: each works in place on an onnx_ir model and states what holds afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    NameFixPass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)
from onnxscript import optimizer

from domino_deploy.errors import ExportError, listed
from domino_deploy.exporters import correction_bodies
from domino_deploy.plugins import op
from domino_deploy.signature import GraphSignature

# Shapes and scalars; never a weight.
_FOLDED_ELEMENTS = 64


def clean(model: ir.Model) -> None:
    """Afterwards: unique names; no unused node, output, function or opset; no metadata (the exporter puts file paths there)."""
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.metadata_props.clear()
    ir.passes.Sequential(
        ClearMetadataAndDocStringPass(), RemoveUnusedNodesPass(), RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass(), NameFixPass()
    )(model)


def fold_constants(model: ir.Model) -> None:
    """Afterwards: what depends on small constants alone is a constant."""
    optimizer.fold_constants(model, onnx_shape_inference=False, input_size_limit=_FOLDED_ELEMENTS, output_size_limit=_FOLDED_ELEMENTS)


def reshape_by_position(model: ir.Model) -> None:
    """Afterwards: a Reshape that keeps its leading symbolic axes says so with zeros.

    The exporter assembles [batch, rows, heads, width] at run time, from seven nodes per Reshape.
    """
    for node in model.graph:
        source, wanted = (node.inputs[0], node.outputs[0].shape) if node.op_type == "Reshape" else (None, None)
        if source is None or source.shape is None or wanted is None:
            continue
        sizes = [_kept_or_fixed(source.shape, wanted, axis) for axis in range(len(wanted))]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) or any(size == 0 for size in wanted):
            continue
        shape = ir.node("Constant", [], {"value_ints": known})
        node.prepend(shape)
        node.replace_input_with(1, shape.outputs[0])
        node.attributes.pop("allowzero", None)


def _kept_or_fixed(source: ir.Shape, wanted: ir.Shape, axis: int) -> int | None:
    """What Reshape has to be told about an axis: its size, or 0 for "as in the input"; None if neither will do."""
    size = wanted[axis]
    if isinstance(size, int):
        return size
    return 0 if axis < len(source) and source[axis] == size else None


def name_dimensions(model: ir.Model, names: Mapping[str, str]) -> None:
    """Afterwards: a symbolic size written as an expression (a key of `names`) carries its name."""
    for value in _values(model.graph):
        if value.shape is not None:
            value.shape = ir.Shape([names.get(str(size), size) if isinstance(size, ir.SymbolicDim) else size for size in value.shape])


def add_correction_function(model: ir.Model) -> None:
    """Afterwards: the model holds the body of each logit correction that it uses, for runtimes without the plugin."""
    used = {node.op_identifier() for node in model.graph.all_nodes()}
    for body in correction_bodies.BODIES:
        function = body(model.opset_imports[""])
        if function.identifier() in used:
            model.functions[function.identifier()] = function
            model.opset_imports[op.DOMAIN] = op.DOMAIN_OPSET


def check_signature(model: ir.Model, signature: GraphSignature) -> None:
    """Check a graph's inputs and outputs; changes nothing.

    Raises:
        ExportError: they are not the signature's, in names, types, shapes and order.
    """
    expected = [(spec.name, spec.dtype, list(spec.shape)) for spec in (*signature.inputs, *signature.outputs)]
    found = [_described(value) for value in (*model.graph.inputs, *model.graph.outputs)]
    problems = [f"expected {want}, found {have}" for want, have in zip(expected, found, strict=False) if want != have]
    if len(expected) != len(found):
        problems.append(f"expected {len(expected)} inputs and outputs, found {len(found)}")
    if problems:
        advice = "Change the model and signature.py together."
        raise ExportError(listed(f"Graph {model.graph.name} does not have its signature:", problems, advice))


def _described(value: ir.Value) -> tuple[str | None, str, list[int | str | None]]:
    dtype = "none" if value.dtype is None else value.dtype.numpy().name
    return value.name, dtype, [size.value if isinstance(size, ir.SymbolicDim) else size for size in value.shape or ()]


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs
