"""A Loop over proposals around one exported step: the form of a greedy rollout of symbolic length.

Shape legend: B batch, N proposals, G GRU width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir
from onnx_ir.tape import Tape

from domino_deploy.plugins import op


def looped_over_proposals(
    outer: ir.Graph,
    step: ir.Graph,
    anchor_B: ir.Value,
    rows: Sequence[ir.Value],
    *,
    prefix_len: int,
    state_size: int,
    token_ids: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value | None]:
    """Append to `outer` a Loop that runs `step` once per proposal.

    Weights of the step, and whatever is computed from weights alone, go to `outer`, so that no trip repeats it.

    Args:
        outer: the graph to extend; its weights of the same name are shared.
        step: inputs token ids [B], state [B, G], and a row [B, ...] of each of `rows`; outputs next token ids [B], next
            state and, where the correction has a candidate pool, whether the token is uncertified, bool [B].  It is emptied.
        anchor_B: the first token.
        rows: tensors [B, N, ...] of which a trip takes one row each, the base logits first.
        prefix_len: leading proposals that are the base logits' argmax, uncorrected.
        state_size: G; the state starts from zeros.
        token_ids: int64, the tokens that the step's numbers stand for; None where they are token ids already.

    Returns:
        The drafted tokens [B, N], and how many of them are uncertified, int64 [B]; None without a candidate pool.
    """
    _hoist_invariants(outer, step)
    is_pooled = len(step.outputs) == 3
    body = _body(step, rows, prefix_len, token_ids)
    tape = Tape(outer)
    batch = tape.op("Shape", [anchor_B], {"start": 0, "end": 1})
    zero_state = tape.op(
        "ConstantOfShape",
        [tape.op("Concat", [batch, tape.op("Constant", [], {"value_ints": [state_size]})], {"axis": 0})],
        {"value": ir.tensor([0.0], dtype=ir.DataType.FLOAT)},
    )
    trips = tape.op("Squeeze", [tape.op("Shape", [rows[0]], {"start": 1, "end": 2})])
    always = tape.op("Constant", [], {"value": ir.tensor(True)})
    outputs = tape.op_multi_out("Loop", [trips, always, anchor_B, zero_state], {"body": body}, num_outputs=4 if is_pooled else 3)
    drafted = tape.op("Transpose", [outputs[2]], {"perm": [1, 0]})
    if not is_pooled:
        return drafted, None
    uncertified_NB = tape.op("Cast", [outputs[3]], {"to": int(ir.DataType.INT64)})
    return drafted, tape.op("ReduceSum", [uncertified_NB, tape.op("Constant", [], {"value_ints": [0]})], {"keepdims": 0})


def _hoist_invariants(outer: ir.Graph, step: ir.Graph) -> None:
    """Move the step's weights, and the nodes that depend on nothing else, to the outer graph."""
    for name, weight in list(step.initializers.items()):
        del step.initializers[name]
        is_weight = weight.const_value is None  # else a small constant, whose name means nothing outside the step
        if is_weight and name in outer.initializers:
            ir.convenience.replace_all_uses_with(weight, outer.initializers[name])
            continue
        weight.name = name if is_weight else f"step.{name}"
        outer.initializers.add(weight)
    varying = set(step.inputs)
    for node in list(step):
        if varying.isdisjoint(value for value in node.inputs if value is not None):
            step.remove(node)
            _prefix_names([node])
            outer.append(node)
        else:
            varying.update(node.outputs)


def _body(step: ir.Graph, rows: Sequence[ir.Value], prefix_len: int, token_ids: ir.Value | None) -> ir.Graph:
    """The step with the loop's own counter and condition; rows are taken from the outer graph's tensors."""
    token, state, *row_inputs = step.inputs
    next_token, next_state, *flags = step.outputs
    nodes = list(step)
    _prefix_names(nodes)
    step.outputs.clear()
    step.remove(nodes)

    trip, going = ir.val("step.trip", ir.DataType.INT64, []), ir.val("step.going", ir.DataType.BOOL, [])
    starts = Tape()
    taken = [starts.op("Gather", [tensor, trip], {"axis": 1}) for tensor in rows]
    ir.convenience.replace_all_uses_with(row_inputs, taken)

    ends = Tape()
    if prefix_len:
        corrected = next(node for node in nodes if node.domain == op.DOMAIN)
        nodes.remove(corrected)
        next_token, *flags = _corrected_after(ends, trip, prefix_len, taken[0], corrected, [next_token, *flags])
    if token_ids is not None:
        next_token = ends.op("Gather", [token_ids, next_token])
    results = [ends.op("Identity", [value]) for value in (going, next_token, next_state, next_token, *flags)]
    for result, like in zip(results, (going, token, state, token), strict=False):
        result.type, result.shape = like.type, like.shape
    for result in results[4:]:
        result.type, result.shape = ir.TensorType(ir.DataType.BOOL), token.shape
    inputs = [trip, going, token, state]
    step.inputs.clear()
    return ir.Graph(inputs, results, nodes=[*starts.nodes, *nodes, *ends.nodes], name="step")


def _corrected_after(
    ends: Tape, trip: ir.Value, prefix_len: int, base_row: ir.Value, corrected: ir.Node, wanted: Sequence[ir.Value]
) -> Sequence[ir.Value]:
    """Next token and flags (`wanted`, outputs of `corrected`) of trip j; only one way to them is computed.

    While j < prefix_len, the token is the plain argmax, and a flag is false.
    """
    is_uncorrected = ends.op("Less", [trip, ends.op("Constant", [], {"value_int": prefix_len})])
    plain = Tape()
    argmax = plain.op("ArgMax", [base_row], {"axis": -1, "keepdims": 0})
    false = {"value": ir.tensor([False])}
    plain_values = [argmax, *(plain.op("ConstantOfShape", [plain.op("Shape", [argmax])], false) for _ in wanted[1:])]
    for value, like in zip(plain_values, wanted, strict=True):
        value.type, value.shape = like.type, like.shape
    branches = {
        "then_branch": ir.Graph([], plain_values, nodes=plain.nodes, name="uncorrected"),
        "else_branch": ir.Graph([], wanted, nodes=[corrected], name="corrected"),
    }
    return ends.op_multi_out("If", [is_uncorrected], branches, num_outputs=len(wanted))


def _prefix_names(nodes: Iterable[ir.Node]) -> None:
    # Names in a loop body must not shadow those of the graph around it.
    for node in nodes:
        node.name = f"step.{node.name}"
        for value in node.outputs:
            value.name = f"step.{value.name}"
