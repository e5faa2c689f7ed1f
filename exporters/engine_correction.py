"""What an engine makes of the logit correction: nodes that a plugin takes, or standard operators."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass, RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from domino_deploy.engines import PluginForm
from domino_deploy.exporters.correction_bodies import fused_correction
from domino_deploy.plugins import op

_FUSED, _POOLED = (op.DOMAIN, op.NAME, ""), (op.DOMAIN, op.POOLED_NAME, "")
# By it TensorRT knows that a node wants the form of a plugin that is compiled into the engine.
_AOT_ATTRIBUTE = "aot"
_CODEBOOK = op.INPUTS.index("codebook")


def lower_correction(model: ir.Model, plugin: PluginForm) -> None:
    """Afterwards: the logit correction over the whole vocabulary is what `plugin` computes; all other functions are inlined.

    The Python and the C++ plugin take the operator itself, the one compiled ahead of time the first half of it.  Each takes the codebook
    as it is stored.  A certified pool's tokens are those of the whole vocabulary by definition, and are computed that way: looking at as
    many tokens as need be takes operators that TensorRT-RTX lacks (NonZero).
    """
    _certify_by_the_whole_vocabulary(model)
    if plugin is not PluginForm.NONE and _FUSED in model.functions:
        for node in _nodes(model, _FUSED):
            codebook = node.inputs[_CODEBOOK]
            cast = None if codebook is None else codebook.producer()
            if cast is not None and cast.op_type == "Cast":
                node.replace_input_with(_CODEBOOK, cast.inputs[0])
            if plugin is PluginForm.AOT:
                _use_tiles(node)
        del model.functions[_FUSED]
    InlinePass()(model)
    RemoveUnusedFunctionsPass()(model)
    RemoveUnusedNodesPass()(model)


def _nodes(model: ir.Model, identifier: tuple[str, str, str]) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if node.op_identifier() == identifier]


def _certify_by_the_whole_vocabulary(model: ir.Model) -> None:
    """Pooled corrections say what their pools leave open and never look further; where they should, a fused one gives the tokens."""
    if _POOLED not in model.functions:
        return
    for pooled in _nodes(model, _POOLED):
        if not pooled.attributes[op.EXACT_ATTRIBUTE].as_int():
            continue
        tape = Tape()
        inputs, namespace = pooled.inputs[: len(op.INPUTS)], {op.NAMESPACE_ATTRIBUTE: op.DOMAIN}
        whole = tape.op_multi_out(op.NAME, inputs, namespace, num_outputs=len(op.OUTPUTS), domain=op.DOMAIN)
        pooled.append(tape.nodes)
        _take_over(pooled, whole)
        model.functions[_FUSED] = fused_correction(model.opset_imports[""])
    further = next(node for node in model.functions[_POOLED] if node.op_type == "If")
    pool = further.attributes["else_branch"].as_graph()
    results, nodes = list(pool.outputs), list(pool)
    pool.outputs.clear()
    pool.remove(nodes)
    further.append(nodes)
    _take_over(further, results)
    model.functions[_POOLED].remove(further, safe=True)


def _use_tiles(fused: ir.Node) -> None:
    """The operator as the best of its tiles, and the best of these."""
    tape = Tape()
    attributes: dict[str, str | int] = {op.NAMESPACE_ATTRIBUTE: op.DOMAIN, _AOT_ATTRIBUTE: 1}
    values, ids = tape.op_multi_out(op.TILES_NAME, list(fused.inputs), attributes, num_outputs=2, domain=op.DOMAIN)
    place = tape.op("ArgMax", [values], {"axis": -1, "keepdims": 1})
    last = tape.op("Constant", [], {"value_ints": [-1]})
    token, value = (tape.op("Squeeze", [tape.op("GatherElements", [each, place], {"axis": -1}), last]) for each in (ids, values))
    results = [tape.op("Cast", [token], {"to": int(ir.DataType.INT64)}), value]
    fused.append(tape.nodes)
    _take_over(fused, results)
    assert fused.graph is not None, "the node stands in a graph"
    fused.graph.remove(fused, safe=True)


def _take_over(node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Use values in place of a node's first outputs."""
    for old, new in zip(node.outputs, values, strict=False):
        new.type = old.type
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
