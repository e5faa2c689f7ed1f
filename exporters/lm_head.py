"""The LM head as a graph of its own, for runtimes that keep a copy of the weights for each graph: target and backbone share it.

Both graphs are cut where their shared LM head begins; nodes and weights are those of the whole graphs, which stay beside them for
runtimes that gain by one graph (TensorRT).
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from domino_deploy.errors import ExportError
from domino_deploy.exporters.passes import check_signature
from domino_deploy.exporters.precision import DATA_TYPES
from domino_deploy.precision import Dtype
from domino_deploy.signature import BASE_LOGITS, HIDDEN, LOGITS, GraphSignature

_REPORT = "Please report this fault of the exporter."


def target_trunk(target_file: Path, signature: GraphSignature) -> ir.Model:
    """`target.onnx` up to its LM head, whose input becomes the output `hidden`.

    Raises:
        ExportError: its logits are no product with weights.
    """
    model = ir.load(target_file)
    logits, hidden = _output(model, LOGITS), _rows_of(model, LOGITS)
    _shaped(hidden, signature, is_output=True)
    model.graph.outputs[model.graph.outputs.index(logits)] = hidden
    return _checked(model, "TargetTrunk", signature)


def backbone_trunk(backbone_file: Path, signature: GraphSignature) -> ir.Model:
    """`backbone.onnx` without base logits; its output `hidden` is what the LM head reads.

    Raises:
        ExportError: its base logits are no product with weights, or one that reads something else.
    """
    model = ir.load(backbone_file)
    rows = _rows_of(model, BASE_LOGITS)
    if _before_casts(rows) is not _before_casts(_output(model, HIDDEN)):  # each use has a cast of its own
        raise ExportError(f"{backbone_file.name}: expected an LM head on {HIDDEN}, found one on {rows.name}. {_REPORT}")
    model.graph.outputs.remove(_output(model, BASE_LOGITS))
    return _checked(model, "BackboneTrunk", signature)


def lm_head(target_file: Path, signature: GraphSignature) -> ir.Model:
    """What `target_trunk` leaves out.

    Raises:
        ExportError: as there.
    """
    model = ir.load(target_file)
    hidden = ir.val(HIDDEN)
    ir.convenience.replace_all_uses_with(_rows_of(model, LOGITS), hidden)
    _shaped(hidden, signature, is_output=False)
    model.graph.outputs[:] = [_output(model, LOGITS)]
    RemoveUnusedNodesPass()(model)
    model.graph.inputs[:] = [hidden]
    return _checked(model, "LmHead", signature)


def _rows_of(model: ir.Model, logits: str) -> ir.Value:
    """What the product with the LM head's weights reads to make an output."""
    node = _before_casts(_output(model, logits)).producer()
    if node is None or node.op_type not in ("MatMul", "MatMulNBits") or node.inputs[0] is None:
        raise ExportError(f"{model.graph.name}: expected {logits} to be a matrix product, found {node and node.op_type}. {_REPORT}")
    return node.inputs[0]


def _before_casts(value: ir.Value) -> ir.Value:
    while (node := value.producer()) is not None and node.op_type in ("Cast", "Identity") and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _output(model: ir.Model, name: str) -> ir.Value:
    return next(value for value in model.graph.outputs if value.name == name)


def _shaped(value: ir.Value, signature: GraphSignature, *, is_output: bool) -> None:
    specs = signature.outputs if is_output else signature.inputs
    spec = next(spec for spec in specs if spec.name == HIDDEN)
    value.name, value.shape = spec.name, ir.Shape(spec.shape)
    value.type = ir.TensorType(DATA_TYPES[Dtype(spec.dtype)])


def _checked(model: ir.Model, name: str, signature: GraphSignature) -> ir.Model:
    RemoveUnusedNodesPass()(model)
    model.graph.name = name
    check_signature(model, signature)
    return model
