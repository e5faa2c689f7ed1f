"""A Loop over proposals around one exported step: the form of a greedy rollout of symbolic length.

Shape legend: B batch, N proposals, G GRU width, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
from onnx_ir.tape import Tape

from domino_deploy.plugins import op


def looped_over_proposals(
    outer: ir.Graph, step: ir.Graph, anchor_B: ir.Value, base_BNV: ir.Value, projected_BNR: ir.Value, *, prefix_len: int, state_size: int
) -> ir.Value:
    """Append to `outer` a Loop that runs `step` once per proposal; returns the drafted tokens [B, N].

    Weights of the step, and whatever is computed from weights alone, go to `outer`, so that no trip repeats it.

    Args:
        outer: the graph to extend; its weights of the same name are shared.
        step: inputs token ids [B], state [B, G], base row [B, V], projected row [B, R]; outputs next token ids, next
            state.  It is emptied.
        anchor_B: the first token.
        base_BNV: base logits of all proposals.
        projected_BNR: hidden projections of all proposals.
        prefix_len: leading proposals that are the base logits' argmax, uncorrected.
        state_size: G; the state starts from zeros.
    """
    _hoist_invariants(outer, step)
    body = _body(step, base_BNV, projected_BNR, prefix_len)
    tape = Tape(outer)
    batch = tape.op("Shape", [anchor_B], {"start": 0, "end": 1})
    zero_state = tape.op(
        "ConstantOfShape",
        [tape.op("Concat", [batch, tape.op("Constant", [], {"value_ints": [state_size]})], {"axis": 0})],
        {"value": ir.tensor([0.0], dtype=ir.DataType.FLOAT)},
    )
    trips = tape.op("Squeeze", [tape.op("Shape", [base_BNV], {"start": 1, "end": 2})])
    always = tape.op("Constant", [], {"value": ir.tensor(True)})
    drafted_NB = tape.op_multi_out("Loop", [trips, always, anchor_B, zero_state], {"body": body}, num_outputs=3)[2]
    return tape.op("Transpose", [drafted_NB], {"perm": [1, 0]})


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


def _body(step: ir.Graph, base_BNV: ir.Value, projected_BNR: ir.Value, prefix_len: int) -> ir.Graph:
    """The step with the loop's own counter and condition; rows are taken from the outer graph's tensors."""
    token, state, base_row, projected_row = step.inputs
    next_token, next_state = step.outputs
    nodes = list(step)
    _prefix_names(nodes)
    step.outputs.clear()
    step.remove(nodes)

    trip, going = ir.val("step.trip", ir.DataType.INT64, []), ir.val("step.going", ir.DataType.BOOL, [])
    rows = Tape()
    row_of_base = rows.op("Gather", [base_BNV, trip], {"axis": 1})
    row_of_projected = rows.op("Gather", [projected_BNR, trip], {"axis": 1})
    ir.convenience.replace_all_uses_with([base_row, projected_row], [row_of_base, row_of_projected])

    ends = Tape()
    if prefix_len:
        corrected = next(node for node in nodes if node.op_type == op.NAME)
        nodes.remove(corrected)
        next_token = _corrected_after(ends, trip, prefix_len, row_of_base, corrected)
    results = [ends.op("Identity", [value]) for value in (going, next_token, next_state, next_token)]
    for result, like in zip(results, (going, token, state, token), strict=True):
        result.type, result.shape = like.type, like.shape
    inputs = [trip, going, token, state]
    step.inputs.clear()
    return ir.Graph(inputs, results, nodes=[*rows.nodes, *nodes, *ends.nodes], name="step")


def _corrected_after(ends: Tape, trip: ir.Value, prefix_len: int, base_row: ir.Value, corrected: ir.Node) -> ir.Value:
    """The next token of trip j: plain argmax while j < prefix_len, corrected afterwards; only one of them is computed."""
    is_uncorrected = ends.op("Less", [trip, ends.op("Constant", [], {"value_int": prefix_len})])
    plain = ir.node("ArgMax", [base_row], {"axis": -1, "keepdims": 0})
    token = corrected.outputs[0]
    plain.outputs[0].type, plain.outputs[0].shape = token.type, token.shape
    branches = {
        "then_branch": ir.Graph([], [plain.outputs[0]], nodes=[plain], name="uncorrected"),
        "else_branch": ir.Graph([], [token], nodes=[corrected], name="corrected"),
    }
    return ends.op("If", [is_uncorrected], branches)


def _prefix_names(nodes: Iterable[ir.Node]) -> None:
    # Names in a loop body must not shadow those of the graph around it.
    for node in nodes:
        node.name = f"step.{node.name}"
        for value in node.outputs:
            value.name = f"step.{value.name}"
