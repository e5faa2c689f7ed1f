"""Passes that make of a bundle's graph what an engine is built from; each works in place on a private copy.

What TensorRT asks for: caches of fixed length, no operator of another vendor, no TopK above `op.MAX_TOP_K`.  What makes engines fast:
the rollout without a loop, the greedy tokens computed where the logits are, the plugin in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from domino_deploy.engines import Calibration, PluginForm
from domino_deploy.errors import ExportError, listed
from domino_deploy.exporters import passes
from domino_deploy.exporters.engine_correction import lower_correction
from domino_deploy.exporters.fp8 import quantise_fp8
from domino_deploy.plugins import op
from domino_deploy.signature import GREEDY_IDS, HIDDEN, LOGITS, GraphSignature, TensorSpec

_STANDARD = ("", "ai.onnx")
_WITH_LAYERS = ("target", "backbone")
_DATA_TYPES = {"int64": ir.DataType.INT64}


def write_engine_graph(
    graph: str, source: Path, output: Path, signature: GraphSignature, plugin: PluginForm, calibration: Calibration | None = None
) -> None:
    """Write a private copy of a bundle's graph for an engine to be built from; its weights stay where the bundle has them.

    Args:
        graph: "target", "backbone" or "head".
        source: the bundle's graph.
        output: the copy; external data are looked for by the same relative names beside it.
        signature: of the engine (`engine_signatures`).
        plugin: what will compute the logit correction.
        calibration: multiply the layers' matrices in float8, by these ranges.

    Raises:
        ExportError: operators that TensorRT does not build, all of them by name.
    """
    model = ir.load(source)
    _PASSES[graph](model, signature)
    leave_softmax_to_tensorrt(model)
    lower_correction(model, plugin)
    if calibration is not None and graph in _WITH_LAYERS:
        quantise_fp8(model, calibration.products)
    check_operators(model, source.name)
    fix_sizes(model, signature)
    ir.save(model, output)


def fix_sizes(model: ir.Model, signature: GraphSignature) -> None:
    """Afterwards: inputs and outputs have the sizes of the signature, and nothing is said of those in between."""
    specs = {spec.name: spec for spec in (*signature.inputs, *signature.outputs)}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for value in node.outputs:
            value.shape = None
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape(specs[str(value.name)].shape)
    passes.check_signature(model, signature)


def leave_softmax_to_tensorrt(model: ir.Model) -> None:
    """Afterwards: no attention says what type its softmax is computed in, which TensorRT's kernels choose and its parser refuses."""
    for node in model.graph.all_nodes():
        if node.op_type == "Attention":
            node.attributes.pop("softmax_precision", None)


def add_greedy_ids(model: ir.Model, signature: GraphSignature) -> None:
    """Afterwards: the target has the argmax of its logits as an output as well, so that greedy decoding copies no logits.

    A row that is no basis for a choice (NaN, +inf, or nothing but -inf) has -1 there, where the argmax would be some token.
    """
    names = [spec.name for spec in signature.outputs]
    tape = Tape(model.graph)
    logits = model.graph.outputs[names.index(LOGITS)]
    last, none = tape.op("Constant", [], {"value_ints": [-1]}), tape.op("Constant", [], {"value_int": -1})
    # A sum of magnitudes is NaN only if one of them is; a plain sum of finite logits could be, by way of inf - inf.
    has_nan = tape.op("IsNaN", [tape.op("ReduceL1", [logits, last], {"keepdims": 0})])
    has_no_best = tape.op("IsInf", [tape.op("ReduceMax", [logits, last], {"keepdims": 0})])
    best = tape.op("ArgMax", [logits], {"axis": -1, "keepdims": 0})
    greedy = tape.op("Where", [tape.op("Or", [has_nan, has_no_best]), none, best])
    _describe(greedy, signature.outputs[names.index(GREEDY_IDS)])
    model.graph.outputs.insert(names.index(GREEDY_IDS), greedy)


def prepare_backbone(model: ir.Model, signature: GraphSignature) -> None:
    """`keep_first_proposals` and `fix_rotated_rows`."""
    keep_first_proposals(model, signature)
    fix_rotated_rows(model)


def fix_rotated_rows(model: ir.Model) -> None:
    """Afterwards: where the rows to rotate are of fixed number, so are the rows of cosines and sines.

    The block's are cut off behind those of the features, and TensorRT does not follow that the cut is as long as the block.
    """
    for node in [node for node in model.graph if node.op_type == "RotaryEmbedding"]:
        rotated = node.inputs[0]
        rows = None if rotated is None or rotated.shape is None else rotated.shape[2]
        for index, angles in enumerate(node.inputs[1:3], start=1):
            width = None if angles is None or angles.shape is None else angles.shape[2]
            if angles is None or not isinstance(rows, int) or not isinstance(width, int):
                continue
            tape = Tape()
            shape = tape.op("Constant", [], {"value_ints": [0, rows, width]})  # 0: as it is
            node.replace_input_with(index, tape.op("Reshape", [angles, shape]))
            node.prepend(tape.nodes)


def keep_first_proposals(model: ir.Model, signature: GraphSignature) -> None:
    """Afterwards: the backbone's hidden states and base logits are those of the first proposals, and no others reach the LM head."""
    index, spec = next((index, spec) for index, spec in enumerate(signature.outputs) if spec.name == HIDDEN)
    hidden, count = model.graph.outputs[index], spec.shape[1]
    if hidden.shape is not None and hidden.shape[1] == count:
        return
    assert isinstance(count, int), "an engine's proposals are of fixed number"
    rows = hidden
    while (producer := rows.producer()) is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
        rows = producer.inputs[0]  # where the LM head takes them as well
    tape = Tape()
    starts, ends, axes = (tape.op("Constant", [], {"value_ints": [number]}) for number in (0, count, 1))
    first = tape.op("Slice", [rows, starts, ends, axes])
    first.type = rows.type
    ir.convenience.replace_all_uses_with(rows, first, replace_graph_outputs=True)
    tape.nodes[-1].replace_input_with(0, rows)
    rows.name, first.name = f"{rows.name}.all", rows.name
    producer = rows.producer()
    assert producer is not None, "hidden states are computed"
    producer.append(tape.nodes)


def unroll(model: ir.Model, signature: GraphSignature) -> None:
    """Afterwards: the head's loop over proposals is a chain of steps; whether a step corrects its logits is decided.

    A graph without a loop stays as it is.
    """
    loop = next((node for node in model.graph if node.op_type == "Loop"), None)
    if loop is None:
        return
    count = signature.outputs[0].shape[1]
    assert isinstance(count, int), "an engine's proposals are of fixed number"
    always, *carried = [value for value in loop.inputs[1:] if value is not None]
    scans: list[list[ir.Value]] = [[] for _ in loop.outputs[len(carried) :]]
    for trip in range(count):
        results = _trip(loop, trip, always, carried)
        carried = results[: len(carried)]
        for scan, value in zip(scans, results[len(carried) :], strict=True):
            scan.append(value)
    tape = Tape()
    first = tape.op("Constant", [], {"value_ints": [0]})
    stacked = [tape.op("Concat", [tape.op("Unsqueeze", [value, first]) for value in scan], {"axis": 0}) for scan in scans]
    loop.append(tape.nodes)
    for old, new in zip(loop.outputs, [*carried, *stacked], strict=True):
        ir.convenience.replace_all_uses_with(old, new)
    model.graph.remove(loop, safe=True)
    passes.fold_constants(model)
    RemoveUnusedNodesPass()(model)


def _trip(loop: ir.Node, trip: int, always: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
    """Insert one trip before the loop; its results without the condition."""
    body = loop.attributes["body"].as_graph().clone(allow_outer_scope_values=True)
    number = ir.node("Constant", [], {"value_int": trip}, name=f"trip{trip}")
    for old, new in zip(body.inputs, [number.outputs[0], always, *carried], strict=True):
        ir.convenience.replace_all_uses_with(old, new)
    results = list(body.outputs)[1:]
    nodes = list(body)
    body.outputs.clear()
    body.remove(nodes)
    for node in nodes:
        node.name = f"{node.name}.{trip}"
        for value in node.outputs:
            value.name = f"{value.name}.{trip}"
    loop.prepend([number, *nodes])
    return results


def check_operators(model: ir.Model, name: str) -> None:
    """Check a graph for what TensorRT's parser refuses, or accepts and then cannot build; changes nothing.

    Raises:
        ExportError: all such nodes, by name.
    """
    nodes = list(model.graph.all_nodes())
    problems = [f"{node.name}: {node.domain}::{node.op_type}" for node in nodes if node.domain not in (*_STANDARD, op.DOMAIN)]
    for node in nodes:
        count = _top_k(node) if node.op_type == "TopK" and node.domain in _STANDARD else None
        if count is not None and count > op.MAX_TOP_K:
            problems.append(f"{node.name}: TopK of {count}, above {op.MAX_TOP_K}")
    if problems:
        raise ExportError(
            listed(
                f"{name}: expected operators that TensorRT builds, found",
                problems,
                "Export the bundle with --dtype float16, bfloat16 or float32, and with a --candidate-pool of at most "
                f"{op.MAX_TOP_K} tokens, or none.",
            )
        )


def _top_k(node: ir.Node) -> int | None:
    """K of a TopK; None where it is computed."""
    count = node.inputs[1]
    constant = None if count is None else ir.convenience.get_const_tensor(count)
    return None if constant is None else int(constant.numpy().item())


def _describe(value: ir.Value, spec: TensorSpec) -> None:
    value.name, value.type, value.shape = spec.name, ir.TensorType(_DATA_TYPES[spec.dtype]), ir.Shape(spec.shape)


_PASSES: dict[str, Callable[[ir.Model, GraphSignature], None]] = {
    "target": add_greedy_ids,
    "backbone": prepare_backbone,
    "head": unroll,
}
