"""Function bodies of the logit correction's operators, in standard ONNX operators: what a runtime without the plugin runs.

They compute in float32 what `plugins/reference.py` computes.  Shape legend: B batch, R rank, V vocabulary, K candidates.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir.tape import Tape

from domino_deploy.plugins import op
from domino_deploy.plugins.reference import rounding_slack


def fused_correction(opset: int) -> ir.Function:
    """`domino::FusedLogitCorrection` by the operators of ONNX opset `opset`."""
    base, hidden, state, codebook = inputs = [ir.val(name) for name in op.INPUTS]
    tape = Tape()
    tokens, best = _whole_vocabulary(tape, base, _bottleneck(tape, hidden, state), codebook)
    tokens.name, best.name = op.OUTPUTS
    graph = ir.Graph(inputs, [tokens, best], nodes=tape.nodes, opset_imports={"": opset})
    return ir.Function(op.DOMAIN, op.NAME, graph=graph, attributes=())


def pooled_correction(opset: int) -> ir.Function:
    """`domino::PooledLogitCorrection` by the operators of ONNX opset `opset`."""
    base, hidden, state, codebook, norms, candidates = inputs = [ir.val(name) for name in op.POOLED_INPUTS]
    tape = Tape()
    bottleneck = _bottleneck(tape, hidden, state)
    tokens, best = _best_candidate(tape, base, bottleneck, codebook, candidates)
    uncertified = _uncertified(tape, base, bottleneck, codebook, norms, candidates, tokens, best)
    uncertified.name = op.POOLED_OUTPUTS[2]

    exact = tape.op("Constant", [], {"value_int": ir.RefAttr("value_int", op.EXACT_ATTRIBUTE, ir.AttributeType.INT)})
    rows = tape.op("ReduceSum", [tape.op("Cast", [uncertified], {"to": int(ir.DataType.INT64)})], {"keepdims": 0})
    falls_back = tape.op("Greater", [tape.op("Mul", [exact, rows]), _constant(tape, 0)])
    whole, same = Tape(), Tape()
    branches = {
        "then_branch": _graph("whole_vocabulary", whole, _whole_vocabulary(whole, base, bottleneck, codebook)),
        "else_branch": _graph("pool", same, (same.op("Identity", [tokens]), same.op("Identity", [best]))),
    }
    outputs = tape.op_multi_out("If", [falls_back], branches, num_outputs=2)
    for value, name in zip(outputs, op.POOLED_OUTPUTS, strict=False):
        value.name = name
    graph = ir.Graph(inputs, [*outputs, uncertified], nodes=tape.nodes, opset_imports={"": opset})
    return ir.Function(op.DOMAIN, op.POOLED_NAME, graph=graph, attributes=[ir.Attr(op.EXACT_ATTRIBUTE, ir.AttributeType.INT, None)])


def _bottleneck(tape: Tape, hidden: ir.Value, state: ir.Value) -> ir.Value:
    """m = SiLU(z + s): [B, R]."""
    mixed = tape.op("Add", [hidden, state])
    return tape.op("Mul", [mixed, tape.op("Sigmoid", [mixed])])


def _whole_vocabulary(tape: Tape, base: ir.Value, bottleneck: ir.Value, codebook: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Token ids [B] and their corrected logits [B]."""
    corrected = tape.op("Gemm", [bottleneck, codebook, base], {"transB": 1})
    tokens = tape.op("ArgMax", [corrected], {"axis": -1, "keepdims": 0})
    return tokens, _at(tape, corrected, tokens)


def _best_candidate(
    tape: Tape, base: ir.Value, bottleneck: ir.Value, codebook: ir.Value, candidates: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Token ids [B] and their corrected logits [B], of the candidates alone."""
    last = _axes(tape, -1)
    rows = tape.op("Gather", [codebook, candidates], {"axis": 0})  # [B, K, R]
    corrections = tape.op("Squeeze", [tape.op("MatMul", [rows, tape.op("Unsqueeze", [bottleneck, last])]), last])
    corrected = tape.op("Add", [tape.op("GatherElements", [base, candidates], {"axis": -1}), corrections])
    place = tape.op("ArgMax", [corrected], {"axis": -1, "keepdims": 0})
    return _at(tape, candidates, place), _at(tape, corrected, place)


def _uncertified(
    tape: Tape,
    base: ir.Value,
    bottleneck: ir.Value,
    codebook: ir.Value,
    norms: ir.Value,
    candidates: ir.Value,
    tokens: ir.Value,
    best: ir.Value,
) -> ir.Value:
    """Bool [B]: a token outside the candidates could have won (`reference.pooled_logit_correction`, `rounding_slack`)."""
    rank = tape.op("Cast", [tape.op("Shape", [codebook], {"start": 1, "end": 2})], {"to": int(ir.DataType.FLOAT)})
    per_rank = rounding_slack(1) - rounding_slack(0)
    slack = tape.op("Add", [tape.op("Mul", [rank, _constant(tape, per_rank)]), _constant(tape, rounding_slack(0))])  # [1]
    last = _axes(tape, -1)
    length = tape.op("ReduceL2", [bottleneck, last], {"keepdims": 1})  # [B, 1]
    widened = tape.op("Add", [tape.op("Mul", [slack, _constant(tape, 4.0)]), _constant(tape, 1.0)])
    bounds = tape.op("Add", [base, tape.op("Mul", [norms, tape.op("Mul", [length, widened])])])  # [B, V]
    lowest = tape.op("Expand", [_constant(tape, torch.finfo(torch.float32).min), tape.op("Shape", [candidates])])
    others = tape.op("ScatterElements", [bounds, candidates, lowest], {"axis": -1})
    outside = tape.op("ReduceMax", [others, last], {"keepdims": 0})  # [B]
    could_be = tape.op("Add", [outside, tape.op("Mul", [slack, tape.op("Abs", [outside])])])
    reach = tape.op("Mul", [tape.op("Gather", [norms, tokens]), tape.op("Squeeze", [length, last])])
    scale = tape.op("Add", [tape.op("Abs", [best]), tape.op("Mul", [reach, _constant(tape, 2.0)])])
    surely_is = tape.op("Sub", [best, tape.op("Mul", [slack, scale])])
    return tape.op("Not", [tape.op("Less", [could_be, surely_is])])  # written so that NaN is uncertified


def _at(tape: Tape, values: ir.Value, places: ir.Value) -> ir.Value:
    """One element [B] of each row of values [B, ...]."""
    last = _axes(tape, -1)
    return tape.op("Squeeze", [tape.op("GatherElements", [values, tape.op("Unsqueeze", [places, last])], {"axis": -1}), last])


def _axes(tape: Tape, axis: int) -> ir.Value:
    return tape.op("Constant", [], {"value_ints": [axis]})


def _constant(tape: Tape, value: int | float) -> ir.Value:
    return tape.op("Constant", [], {"value_int" if isinstance(value, int) else "value_float": value})


def _graph(name: str, tape: Tape, outputs: tuple[ir.Value, ir.Value]) -> ir.Graph:
    """A branch whose outputs are token ids and corrected logits; its names must not be those of the function around it."""
    for number, value in enumerate(value for node in tape.nodes for value in node.outputs):
        value.name = f"{name}.{number}"
    for value, kind in zip(outputs, (ir.DataType.INT64, ir.DataType.FLOAT), strict=True):
        value.type = ir.TensorType(kind)
    return ir.Graph([], outputs, nodes=tape.nodes, name=name)
