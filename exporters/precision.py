"""Precision is decided in the graph: this pass gives every weight the type it is stored in, and every node the type it computes in.

Graphs come in as float32.  Where activations are float16 or bfloat16, islands stay float32: norms, softmax, the projection of the
tapped features (its sums exceed float16: above 2e4 with Qwen3-8B), rotary angles, the whole head (GRU gates, correction), logits.
Quantised matrices become com.microsoft MatMulNBits, a quantised embedding GatherBlockQuantized: operators of ONNX Runtime.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from domino_deploy.errors import ExportError
from domino_deploy.exporters.stored import SCALES, ZERO_POINTS, Stored, StoredTensor, tied_name
from domino_deploy.precision import Dtype, Precision
from domino_deploy.signature import GraphSignature

_MICROSOFT = "com.microsoft"
# Activations are rounded to 8 bits in blocks, and products are sums of integers: several times as fast as exact products with 4 bits,
# and with 8 bits the only form that is fast at all, at a relative error below 1e-2 (scripts/bench_products.py).
_INTEGER_PRODUCTS = 4

DATA_TYPES = {Dtype.FLOAT32: ir.DataType.FLOAT, Dtype.FLOAT16: ir.DataType.FLOAT16, Dtype.BFLOAT16: ir.DataType.BFLOAT16}
_FLOATS = frozenset(DATA_TYPES.values())
_ISLANDS = frozenset({"RMSNormalization"})
_ISLAND_WEIGHTS = frozenset({"drafter.fc.weight"})
# These hand on what they are given, whatever its type.
_MOVERS = frozenset({"Expand", "Gather", "GatherElements", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
# Sums and products of positions stay float32; those of activations do not.
_ELEMENTWISE = frozenset({"Add", "Concat", "Cos", "Mul", "Sin"})


def apply_precision(model: ir.Model, stored: dict[str, Stored], precision: Precision, signature: GraphSignature) -> None:
    """Afterwards: initializers have the types of `stored`, inputs and outputs those of `signature`, and every node is typed.

    Args:
        model: target or backbone, float32, weights without data.
        stored: per owner, what the bundle holds.
        precision: the bundle's.
        signature: of the graph, with the activations' type.
    """
    _quantise_operators(model, stored, precision)
    _set_stored_types(model, stored)
    _Typing(model.graph, DATA_TYPES[precision.activations]).run(signature)
    RemoveUnusedNodesPass()(model)


def apply_precision_to_head(model: ir.Model, stored: dict[str, Stored], precision: Precision, signature: GraphSignature) -> None:
    """As `apply_precision` for the head, which computes in float32 throughout: what is narrower is cast once, outside its loop."""
    graph = model.graph
    _quantise_operators(model, stored, precision)
    _set_stored_types(model, stored)
    narrow = [value for value in graph.initializers.values() if value.const_value is None and value.dtype in _FLOATS - {ir.DataType.FLOAT}]
    for value, spec in zip(graph.inputs, signature.inputs, strict=True):
        if value.dtype in _FLOATS and DATA_TYPES[Dtype(spec.dtype)] != value.dtype:
            value.type = ir.TensorType(DATA_TYPES[Dtype(spec.dtype)])
            narrow.append(value)
    _cast_to_float32(graph, narrow)
    RemoveUnusedNodesPass()(model)


def as_float32(model: ir.Model) -> None:
    """Afterwards: a graph with bfloat16 activations computes the same in float32, for a runtime without bfloat16; weights stay stored as
    they are and are cast where they are used.
    """
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.dtype in _FLOATS:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type == "Cast" and ir.DataType(node.attributes["to"].as_int()) in _FLOATS:
            source = node.inputs[0]
            if source is not None and source.dtype in _FLOATS and not source.is_initializer():
                node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
            if not node.outputs[0].is_graph_output():
                node.outputs[0].name = f"{node.outputs[0].name}.exported"  # its name is wanted for the casts made below
        for output in node.outputs:
            if output.dtype in _FLOATS:
                output.type = ir.TensorType(ir.DataType.FLOAT)
    _cast_to_float32(model.graph, [value for value in model.graph.initializers.values() if value.dtype in _FLOATS - {ir.DataType.FLOAT}])


def float32_copy(graph_file: Path) -> bytes:
    """`as_float32` of a graph in a bundle, serialised; its external data are still those of the graph's folder."""
    import onnx

    model = ir.load(graph_file)
    as_float32(model)
    return onnx.ModelProto.SerializeToString(ir.to_proto(model))


class _Typing:
    """Walks a graph once and inserts casts where what a node computes in is not what it is given."""

    def __init__(self, graph: ir.Graph, low: ir.DataType) -> None:
        self._graph = graph
        self._low = low
        self._types: dict[ir.Value, ir.DataType] = {}
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def run(self, signature: GraphSignature) -> None:
        for value, spec in zip(self._graph.inputs, signature.inputs, strict=True):
            if value.dtype in _FLOATS:
                value.type = ir.TensorType(DATA_TYPES[Dtype(spec.dtype)])
        for node in list(self._graph):
            self._type(node)
        for index, spec in enumerate(signature.outputs):
            if spec.dtype in [str(dtype) for dtype in DATA_TYPES]:
                self._give_output(index, DATA_TYPES[Dtype(spec.dtype)])

    def _type(self, node: ir.Node) -> None:
        floats = [(index, value) for index, value in enumerate(node.inputs) if value is not None and self._type_of(value) in _FLOATS]
        if node.op_type == "Constant" or not floats:
            for output in node.outputs:
                if output.dtype is not None:
                    self._types[output] = output.dtype
            return
        wanted = self._wanted(node, [value for _, value in floats])
        if node.op_type not in _MOVERS:
            for index, value in floats:
                node.replace_input_with(index, self._as(value, wanted))
        if node.op_type == "Attention" and wanted is not ir.DataType.FLOAT:
            node.attributes["softmax_precision"] = ir.AttrInt64("softmax_precision", ir.DataType.FLOAT)
        for output in node.outputs:
            if output.dtype is None or output.dtype in _FLOATS:
                self._types[output] = wanted
                output.type = ir.TensorType(wanted)

    def _wanted(self, node: ir.Node, floats: list[ir.Value]) -> ir.DataType:
        first = self._type_of(floats[0])
        assert first is not None, "floats have a type"
        if node.op_type in _MOVERS:
            return first
        is_island = node.op_type in _ISLANDS or any(_weight_of(value) in _ISLAND_WEIGHTS for value in floats)
        stays = node.op_type in _ELEMENTWISE and all(self._type_of(value) is ir.DataType.FLOAT for value in floats)
        if node.domain == _MICROSOFT or is_island or stays:
            return ir.DataType.FLOAT
        return self._low

    def _type_of(self, value: ir.Value) -> ir.DataType | None:
        return self._types.get(value, value.dtype)

    def _as(self, value: ir.Value, wanted: ir.DataType) -> ir.Value:
        """The value in a type, cast once; the cast stands behind what makes the value, since later nodes share it."""
        if self._type_of(value) is wanted:
            return value
        known = self._casts.get((value, wanted))
        if known is not None:
            return known
        cast = _cast(value, wanted)
        producer = value.producer()
        if producer is None:
            self._graph.insert_before(self._graph[0], cast)
        else:
            producer.append(cast)
        self._casts[value, wanted] = cast.outputs[0]
        self._types[cast.outputs[0]] = wanted
        return cast.outputs[0]

    def _give_output(self, index: int, wanted: ir.DataType) -> None:
        value = self._graph.outputs[index]
        if self._type_of(value) is wanted:
            return
        name, shape = value.name, value.shape
        cast = _cast(value, wanted)
        value.name = f"{name}.computed"
        cast.outputs[0].name, cast.outputs[0].shape = name, shape
        self._graph.append(cast)
        self._graph.outputs[index] = cast.outputs[0]


def _set_stored_types(model: ir.Model, stored: dict[str, Stored]) -> None:
    for name, value in model.graph.initializers.items():
        tensor = _stored(stored, name) if value.const_value is None and value.dtype in _FLOATS else None
        if tensor is not None and tensor.dtype in DATA_TYPES:
            value.type = ir.TensorType(DATA_TYPES[tensor.dtype])


def _quantise_operators(model: ir.Model, stored: dict[str, Stored], precision: Precision) -> None:
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        tensor = _stored(stored, name) if value.const_value is None else None
        if tensor is None or tensor.dtype is None or not tensor.dtype.is_quantised:
            continue
        parts = [_part(graph, name, tensor, end) for end in (str(tensor.dtype), SCALES, ZERO_POINTS) if end in tensor.parts]
        for use in list(value.uses()):
            if use.node.op_type == "Gather" and use.idx == 0:
                _look_up(graph, use.node, name, tensor, parts, precision)
            elif use.node.op_type == "Transpose":
                for product in [inner.node for inner in use.node.outputs[0].uses()]:
                    _multiply(product, tensor, parts, precision)
            else:
                raise ExportError(
                    f"{name}: expected a quantised matrix in products and look-ups only, found {use.node.op_type}. Please report it."
                )
        graph.remove([use.node for use in value.uses()])
        del graph.initializers[name]
        model.opset_imports[_MICROSOFT] = 1


def _part(graph: ir.Graph, name: str, tensor: StoredTensor, end: str, shape: tuple[int, ...] | None = None, suffix: str = "") -> ir.Value:
    """The initializer of a part; `suffix` tells two shapes of the same bytes apart."""
    full = f"{name}.{end}{suffix}"
    if full in graph.initializers:
        return graph.initializers[full]
    kind = ir.DataType.FLOAT if end == SCALES else ir.DataType.UINT8
    value = ir.Value(name=full, type=ir.TensorType(kind), shape=ir.Shape(shape or tensor.parts[end].shape))
    graph.initializers.add(value)
    return value


def _multiply(product: ir.Node, tensor: StoredTensor, parts: list[ir.Value], precision: Precision) -> None:
    """MatMul(x, W^T) -> MatMulNBits(x, W)."""
    assert tensor.dtype is not None, "only quantised tensors get here"
    outputs, inputs = tensor.shape
    attributes = {
        "K": inputs,
        "N": outputs,
        "bits": tensor.dtype.bits,
        "block_size": precision.block_size,
        "accuracy_level": _INTEGER_PRODUCTS,
    }
    _replace(product, ir.node("MatMulNBits", [product.inputs[0], *parts], attributes, domain=_MICROSOFT))


def _look_up(graph: ir.Graph, gather: ir.Node, name: str, tensor: StoredTensor, parts: list[ir.Value], precision: Precision) -> None:
    """Gather(W, ids) -> GatherBlockQuantized on the same bytes, whose blocks it takes as one axis."""
    assert tensor.dtype is not None, "only quantised tensors get here"
    shape = tensor.parts[str(tensor.dtype)].shape
    rows = _part(graph, name, tensor, str(tensor.dtype), (shape[0], math.prod(shape[1:])), suffix=".rows")
    attributes = {"bits": tensor.dtype.bits, "block_size": precision.block_size, "gather_axis": 0, "quantize_axis": 1}
    _replace(gather, ir.node("GatherBlockQuantized", [rows, gather.inputs[1], *parts[1:]], attributes, domain=_MICROSOFT))


def _replace(old: ir.Node, new: ir.Node) -> None:
    before, after = old.outputs[0], new.outputs[0]
    after.name, after.type, after.shape = before.name, before.type, before.shape
    old.append(new)
    ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    assert old.graph is not None, "the node stands in a graph"
    old.graph.remove(old, safe=True)


def _cast(value: ir.Value, wanted: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], {"to": int(wanted)})
    node.outputs[0].name = f"{value.name}.{wanted.name.lower()}"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(wanted), value.shape
    return node


def _cast_to_float32(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Afterwards: what uses these values gets them as float32; casts that stand there already stay."""
    casts = []
    for value in values:
        uses = [use for use in value.uses() if use.node.op_type != "Cast"]
        # A row of an embedding is cast behind the look-up, not the whole matrix before it.
        for use in uses:
            if use.node.op_type == "Gather" and use.idx == 0:
                _cast_behind(use.node)
        others = [use for use in uses if use.node.op_type != "Gather" or use.idx != 0]
        if others:
            casts.append(_cast(value, ir.DataType.FLOAT))
            for use in others:
                use.node.replace_input_with(use.idx, casts[-1].outputs[0])
    if casts:
        graph.insert_before(graph[0], casts)


def _cast_behind(gather: ir.Node) -> None:
    """A look-up in a narrow matrix, cast to float32."""
    found = gather.outputs[0]
    uses = list(found.uses())
    cast = _cast(found, ir.DataType.FLOAT)
    found.type = ir.TensorType(gather.inputs[0].dtype or ir.DataType.FLOAT)  # type: ignore[union-attr]  # a Gather has its input
    gather.append(cast)
    for use in uses:
        use.node.replace_input_with(use.idx, cast.outputs[0])


def _stored(stored: dict[str, Stored], initializer: str) -> StoredTensor | None:
    owner, _, name = initializer.partition(".")
    tensors = stored.get(owner, {})
    return tensors.get(tied_name(tensors, name))


def _weight_of(value: ir.Value) -> str | None:
    """The initializer behind a value, looking through what only turns or casts it."""
    producer = value.producer()
    while producer is not None and producer.op_type in ("Cast", "Transpose") and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value.name if value.is_initializer() else None
