"""Function bodies of the logit correction's operators, in standard ONNX operators: what a runtime without the plugin runs.

They compute in float32 what `plugins/reference.py` computes, except with NaN.  `top_k_correction` and `tiles_correction` report it, but
do not tell it from +inf in their order; the others leave it to the runtime's ArgMax, and ONNX Runtime's mostly passes over it.

Shape legend: B batch, R rank, V vocabulary, K candidates, T tiles of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnx_ir.tape import Tape

from domino_deploy.plugins import op
from domino_deploy.plugins.reference import rounding_slack

# A row of the codebook that is picked out costs two to three times as much as one in sequence (ONNX Runtime, 151936 x 256, fp32).
_GATHER_COST = 3


def fused_correction(opset: int) -> ir.Function:
    """`domino::FusedLogitCorrection` by the operators of ONNX opset `opset`."""
    base, hidden, state, codebook = inputs = [ir.val(name) for name in op.INPUTS]
    tape = Tape()
    tokens, best = _whole_vocabulary(tape, base, _bottleneck(tape, hidden, state), codebook)
    tokens.name, best.name = op.OUTPUTS
    graph = ir.Graph(inputs, [tokens, best], nodes=tape.nodes, opset_imports={"": opset})
    return ir.Function(op.DOMAIN, op.NAME, graph=graph, attributes=())


def top_k_correction(opset: int) -> ir.Function:
    """`domino::TopKLogitCorrection` by the operators of ONNX opset `opset`.

    Ties go to the lowest id by the definition of ONNX's TopK.
    """
    base, hidden, state, codebook = inputs = [ir.val(name) for name in op.INPUTS]
    tape = Tape()
    corrected = _corrected(tape, base, _bottleneck(tape, hidden, state), codebook)
    k = tape.op("Constant", [], {"value_int": ir.RefAttr("value_int", op.K_ATTRIBUTE, ir.AttributeType.INT)})
    _, tokens = tape.op_multi_out(
        "TopK", [_ranked(tape, corrected), tape.op("Unsqueeze", [k, _ints(tape, 0)])], {"axis": -1}, num_outputs=2
    )
    values = tape.op("GatherElements", [corrected, tokens], {"axis": -1})
    # Log-softmax of the values alone.  The highest logit is at hand: nothing overflows, and the vocabulary is passed over once.
    highest = tape.op("Gather", [values, _ints(tape, 0)], {"axis": -1})  # [B, 1]
    total = tape.op("ReduceSum", [tape.op("Exp", [tape.op("Sub", [corrected, highest])]), _ints(tape, -1)], {"keepdims": 1})
    log_probs = tape.op("Sub", [tape.op("Sub", [values, highest]), tape.op("Log", [total])])
    tokens.name, values.name, log_probs.name = op.TOP_K_OUTPUTS
    graph = ir.Graph(inputs, [tokens, values, log_probs], nodes=tape.nodes, opset_imports={"": opset})
    return ir.Function(op.DOMAIN, op.TOP_K_NAME, graph=graph, attributes=[ir.Attr(op.K_ATTRIBUTE, ir.AttributeType.INT, None)])


def tiles_correction(opset: int) -> ir.Function:
    """`domino::LogitCorrectionTiles` by the operators of ONNX opset `opset`, for a batch of at least one row and a codebook in float32."""
    base, hidden, state, codebook = inputs = [ir.val(name) for name in op.INPUTS]
    tape = Tape()
    corrected = _corrected(tape, base, _bottleneck(tape, hidden, state), codebook)
    size, vocab = _ints(tape, op.TILE_SIZE), tape.op("Shape", [codebook], {"end": 1})
    count = tape.op("Div", [tape.op("Add", [vocab, _ints(tape, op.TILE_SIZE - 1)]), size])  # T, [1]
    missing = tape.op("Sub", [tape.op("Mul", [count, size]), vocab])
    padded = tape.op("Pad", [corrected, tape.op("Concat", [_ints(tape, 0, 0, 0), missing], {"axis": 0}), _constant(tape, -math.inf)])
    tiles = tape.op("Reshape", [padded, _ints(tape, 0, -1, op.TILE_SIZE)])  # [B, T, TILE_SIZE]
    places = tape.op("ArgMax", [_ranked(tape, tiles)], {"axis": -1, "keepdims": 0})
    values = _at(tape, tiles, places)
    numbers = tape.op("Range", [_constant(tape, 0), tape.op("Squeeze", [count]), _constant(tape, 1)])
    ids = tape.op("Add", [places, tape.op("Mul", [numbers, size])])
    tokens = tape.op("Cast", [ids], {"to": int(ir.DataType.INT32)})
    values.name, tokens.name = op.TILES_OUTPUTS
    graph = ir.Graph(inputs, [values, tokens], nodes=tape.nodes, opset_imports={"": opset})
    return ir.Function(op.DOMAIN, op.TILES_NAME, graph=graph, attributes=())


def pooled_correction(opset: int) -> ir.Function:
    """`domino::PooledLogitCorrection` by the operators of ONNX opset `opset`."""
    base, hidden, state, codebook, mean, deviations, candidates = inputs = [ir.val(name) for name in op.POOLED_INPUTS]
    tape = Tape()
    bottleneck = _bottleneck(tape, hidden, state)
    tokens, best = _best_candidate(tape, base, bottleneck, codebook, candidates)
    bounds, surely_is, slack = _bounds(tape, base, bottleneck, mean, deviations, candidates, tokens, best)
    outside = tape.op("ReduceMax", [bounds, _ints(tape, -1)], {"keepdims": 0})
    uncertified = _could_win(tape, outside, surely_is, slack)
    uncertified.name = op.POOLED_OUTPUTS[2]

    exact = tape.op("Constant", [], {"value_int": ir.RefAttr("value_int", op.EXACT_ATTRIBUTE, ir.AttributeType.INT)})
    rows = tape.op("ReduceSum", [tape.op("Cast", [uncertified], {"to": int(ir.DataType.INT64)})], {"keepdims": 0})
    looks_further = tape.op("Greater", [tape.op("Mul", [exact, rows]), _constant(tape, 0)])
    further, same = Tape(), Tape()
    could_win = _could_win(further, bounds, further.op("Unsqueeze", [surely_is, _ints(further, -1)]), slack)
    branches = {
        "then_branch": _graph("further", further, _best_of_all(further, base, bottleneck, codebook, could_win, tokens, best)),
        "else_branch": _graph("pool", same, (same.op("Identity", [tokens]), same.op("Identity", [best]))),
    }
    outputs = tape.op_multi_out("If", [looks_further], branches, num_outputs=2)
    for value, name in zip(outputs, op.POOLED_OUTPUTS, strict=False):
        value.name = name
    graph = ir.Graph(inputs, [*outputs, uncertified], nodes=tape.nodes, opset_imports={"": opset})
    return ir.Function(op.DOMAIN, op.POOLED_NAME, graph=graph, attributes=[ir.Attr(op.EXACT_ATTRIBUTE, ir.AttributeType.INT, None)])


def _bottleneck(tape: Tape, hidden: ir.Value, state: ir.Value) -> ir.Value:
    """m = SiLU(z + s): [B, R]."""
    mixed = tape.op("Add", [hidden, state])
    return tape.op("Mul", [mixed, tape.op("Sigmoid", [mixed])])


def _corrected(tape: Tape, base: ir.Value, bottleneck: ir.Value, codebook: ir.Value) -> ir.Value:
    """Corrected logits of the rows of `codebook`, whose base logits `base` holds."""
    return tape.op("Gemm", [bottleneck, codebook, base], {"transB": 1})


def _ranked(tape: Tape, corrected: ir.Value) -> ir.Value:
    """The same with +inf for NaN, whose order ONNX does not define."""
    return tape.op("Where", [tape.op("IsNaN", [corrected]), _constant(tape, math.inf), corrected])


def _whole_vocabulary(tape: Tape, base: ir.Value, bottleneck: ir.Value, codebook: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Token ids [B] and their corrected logits [B]."""
    corrected = _corrected(tape, base, bottleneck, codebook)
    tokens = tape.op("ArgMax", [corrected], {"axis": -1, "keepdims": 0})
    return tokens, _at(tape, corrected, tokens)


def _best_candidate(
    tape: Tape, base: ir.Value, bottleneck: ir.Value, codebook: ir.Value, candidates: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Token ids [B] and their corrected logits [B], of the candidates alone."""
    last = _ints(tape, -1)
    rows = tape.op("Gather", [codebook, candidates], {"axis": 0})  # [B, K, R]
    corrections = tape.op("Squeeze", [tape.op("MatMul", [rows, tape.op("Unsqueeze", [bottleneck, last])]), last])
    corrected = tape.op("Add", [tape.op("GatherElements", [base, candidates], {"axis": -1}), corrections])
    place = tape.op("ArgMax", [corrected], {"axis": -1, "keepdims": 0})
    return _at(tape, candidates, place), _at(tape, corrected, place)


def _bounds(
    tape: Tape,
    base: ir.Value,
    bottleneck: ir.Value,
    mean: ir.Value,
    deviations: ir.Value,
    candidates: ir.Value,
    tokens: ir.Value,
    best: ir.Value,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Bounds [B, V] of tokens outside the pool, what the pool's best surely is [B], and the rounding slack [1].

    For the terms see `reference.pooled_logit_correction` and `rounding_slack`.
    """
    rank = tape.op("Cast", [tape.op("Shape", [mean])], {"to": int(ir.DataType.FLOAT)})
    per_rank = rounding_slack(1) - rounding_slack(0)
    slack = tape.op("Add", [tape.op("Mul", [rank, _constant(tape, per_rank)]), _constant(tape, rounding_slack(0))])
    last = _ints(tape, -1)
    length = tape.op("ReduceL2", [bottleneck, last], {"keepdims": 1})  # [B, 1]
    widened = tape.op("Add", [tape.op("Mul", [slack, _constant(tape, 4.0)]), _constant(tape, 1.0)])
    bounds = tape.op("Add", [base, tape.op("Mul", [deviations, tape.op("Mul", [length, widened])])])
    lowest = tape.op("Expand", [_constant(tape, torch.finfo(torch.float32).min), tape.op("Shape", [candidates])])
    bounds = tape.op("ScatterElements", [bounds, candidates, lowest], {"axis": -1})

    length = tape.op("Squeeze", [length, last])  # [B]
    shared = tape.op("MatMul", [bottleneck, mean])
    shared_size = tape.op("Mul", [length, tape.op("ReduceL2", [mean], {"keepdims": 0})])
    reach = tape.op("Mul", [tape.op("Gather", [deviations, tokens]), length])
    scale = tape.op("Add", [tape.op("Abs", [best]), tape.op("Mul", [reach, _constant(tape, 2.0)])])
    scale = tape.op("Add", [scale, tape.op("Mul", [shared_size, _constant(tape, 5.0)])])
    return bounds, tape.op("Sub", [tape.op("Sub", [best, shared]), tape.op("Mul", [slack, scale])]), slack


def _could_win(tape: Tape, bounds: ir.Value, surely_is: ir.Value, slack: ir.Value) -> ir.Value:
    """Whether tokens with these bounds could beat what surely is, bool; written so that NaN could."""
    could_be = tape.op("Add", [bounds, tape.op("Mul", [slack, tape.op("Abs", [bounds])])])
    return tape.op("Not", [tape.op("Less", [could_be, surely_is])])


def _best_of_all(
    tape: Tape, base: ir.Value, bottleneck: ir.Value, codebook: ir.Value, could_win: ir.Value, tokens: ir.Value, best: ir.Value
) -> Sequence[ir.Value]:
    """Token ids [B] and their corrected logits [B], of the pool's winners and all tokens that could win in any row of the batch."""
    in_any_row = tape.op("ReduceMax", [tape.op("Cast", [could_win], {"to": int(ir.DataType.INT32)}), _ints(tape, 0)], {"keepdims": 0})
    others = tape.op("Squeeze", [tape.op("NonZero", [in_any_row]), _ints(tape, 0)])
    enlarged = tape.op("Mul", [tape.op("Size", [others]), _constant(tape, _GATHER_COST)])
    are_many = tape.op("Greater", [enlarged, tape.op("Size", [in_any_row])])
    whole, some = Tape(), Tape()
    branches = {
        "then_branch": _graph("whole_vocabulary", whole, _whole_vocabulary(whole, base, bottleneck, codebook)),
        "else_branch": _graph("some", some, _best_of_some(some, base, bottleneck, codebook, others, tokens, best)),
    }
    return tape.op_multi_out("If", [are_many], branches, num_outputs=2)


def _best_of_some(
    tape: Tape, base: ir.Value, bottleneck: ir.Value, codebook: ir.Value, others: ir.Value, tokens: ir.Value, best: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Token ids [B] and their corrected logits [B], of the pool's winners and `others` [n], ties to the lowest id."""
    rows, base_of_others = tape.op("Gather", [codebook, others]), tape.op("Gather", [base, others], {"axis": 1})
    corrected = _corrected(tape, base_of_others, bottleneck, rows)
    place = tape.op("ArgMax", [corrected], {"axis": -1, "keepdims": 0})
    token, value = tape.op("Gather", [others, place]), _at(tape, corrected, place)
    ties_lower = tape.op("And", [tape.op("Equal", [value, best]), tape.op("Less", [token, tokens])])
    wins = tape.op("Or", [tape.op("Greater", [value, best]), ties_lower])
    return tape.op("Where", [wins, token, tokens]), tape.op("Where", [wins, value, best])


def _at(tape: Tape, values: ir.Value, places: ir.Value) -> ir.Value:
    """One element of each row of values: [B] of [B, ...], [B, T] of [B, T, ...]."""
    last = _ints(tape, -1)
    return tape.op("Squeeze", [tape.op("GatherElements", [values, tape.op("Unsqueeze", [places, last])], {"axis": -1}), last])


def _ints(tape: Tape, *values: int) -> ir.Value:
    return tape.op("Constant", [], {"value_ints": list(values)})


def _constant(tape: Tape, value: int | float) -> ir.Value:
    return tape.op("Constant", [], {"value_int" if isinstance(value, int) else "value_float": value})


def _graph(name: str, tape: Tape, outputs: Sequence[ir.Value]) -> ir.Graph:
    """A branch whose outputs are token ids and corrected logits; its names must not be those of the function around it."""
    for number, value in enumerate(value for node in tape.nodes for value in node.outputs):
        value.name = f"{name}.{number}"
    for value, kind in zip(outputs, (ir.DataType.INT64, ir.DataType.FLOAT), strict=True):
        value.type = ir.TensorType(kind)
    return ir.Graph([], outputs, nodes=tape.nodes, name=name)


# One per operator of `plugins/op.py`.
BODIES = (fused_correction, top_k_correction, pooled_correction, tiles_correction)
