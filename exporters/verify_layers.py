"""Verification of a target's first layers, for models that do not fit into memory twice.

The graph is the bundle's own, cut behind layer N: the shipped nodes are what runs, on the shipped weights of those layers alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from domino_deploy.bundle import DRAFTER_FOLDER, TARGET_FOLDER, Bundle
from domino_deploy.config import TargetConfig
from domino_deploy.errors import BundleError, RequestError
from domino_deploy.exporters.stored import read_tensor, stored_tensors, target_weights
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.loading import drafter_of, target_of
from domino_deploy.model.target import TargetModel
from domino_deploy.signature import FEATURES, key_cache, updated, value_cache

_FINAL_NORM = "target.model.norm.weight"


def check_layers(target: TargetConfig, num_layers: int) -> None:
    """Raises RequestError unless a target of fewer layers remains."""
    most = target.num_layers - 1
    if not 1 <= num_layers <= most:
        raise RequestError(
            f"Expected --num-layers from 1 to {most}, fewer than this target's layers, found {num_layers}. "
            "Choose a number in that range, or leave it out to verify the whole target."
        )


def truncated_config(bundle: Bundle, num_layers: int) -> TargetConfig:
    return dataclasses.replace(bundle.target, num_layers=num_layers)


def kept_taps(bundle: Bundle, num_layers: int) -> tuple[int, ...]:
    """The tapped layers whose outputs a truncated graph can be compared in: its last layer's would pass the final norm in PyTorch."""
    return tuple(layer for layer in bundle.drafter.target_layer_ids if layer < num_layers - 1)


def load_truncated(bundle: Bundle, num_layers: int) -> tuple[TargetModel, DrafterModel]:
    """The first layers of the target and the whole drafter in float32, from what the bundle stores; nothing else is read.

    The target taps what `Reference.features` needs: the drafter's layers, or its own last one in their place.
    """
    config = truncated_config(bundle, num_layers)
    taps = sorted({min(layer, num_layers - 1) for layer in bundle.drafter.target_layer_ids})
    target = target_of(config, target_weights(config, stored_tensors(bundle.path / TARGET_FOLDER)), taps)
    drafter = {name: read_tensor(tensor) for name, tensor in stored_tensors(bundle.path / DRAFTER_FOLDER).items()}
    return target, drafter_of(bundle.drafter, drafter)


def truncated_graph(graph_file: Path, bundle: Bundle, num_layers: int, content: bytes | None = None) -> bytes:
    """`target.onnx` cut behind `num_layers` layers: the final norm and the LM head read what layer `num_layers` would have.

    Args:
        graph_file: `target.onnx`.
        bundle: it belongs to.
        num_layers: fewer than it has.
        content: another form of the graph, to be cut in its place.

    Raises:
        BundleError: the graph is not built as the exporter builds it.
    """
    model = ir.load(graph_file) if content is None else ir.from_proto(onnx.load_from_string(content))
    graph = model.graph
    try:
        behind = _input_of_norm(graph, f"target.model.layers.{num_layers}.input_layernorm.weight")
        last = _input_of_norm(graph, _FINAL_NORM)
    except LookupError as error:
        raise BundleError(
            f"{graph_file}: expected the norm {error.args[0]} before layer {num_layers}, found none. Export the bundle again."
        ) from error
    features = next(output for output in graph.outputs if output.name == FEATURES)
    kept = len(kept_taps(bundle, num_layers))
    dropped = {name for layer in range(num_layers, bundle.target.num_layers) for name in (key_cache(layer), value_cache(layer))}
    if kept:
        width = kept * bundle.target.hidden_size
        concat = _producer(features, "Concat")
        inputs = list(concat.inputs[:kept])
        concat.resize_inputs(kept)
        for index, value in enumerate(inputs):
            concat.replace_input_with(index, value)
        for value in {features, concat.outputs[0]}:
            value.shape = ir.Shape([*list(value.shape or ("batch", "rows", width))[:-1], width])
    gone = {updated(name) for name in dropped} | (set() if kept else {FEATURES})
    outputs = [output for output in graph.outputs if output.name not in gone]
    graph.outputs[:] = outputs
    ir.convenience.replace_all_uses_with(last, behind)
    RemoveUnusedNodesPass()(model)
    graph.inputs[:] = [value for value in graph.inputs if value.name not in dropped]
    return onnx.ModelProto.SerializeToString(ir.to_proto(model))


def _input_of_norm(graph: ir.Graph, weight: str) -> ir.Value:
    """The residual stream that a norm reads, before casts and the choice of rows."""
    if weight not in graph.initializers:
        raise LookupError(weight)
    pending = list(graph.initializers[weight].uses())
    while pending:
        node = pending.pop().node
        if node.op_type == "RMSNormalization":
            value = node.inputs[0]
            while value is not None and (producer := value.producer()) is not None and producer.op_type in ("Cast", "GatherElements"):
                value = producer.inputs[0]
            if value is not None:
                return value
        pending += [use for output in node.outputs if node.op_type == "Cast" for use in output.uses()]
    raise LookupError(weight)


def _producer(value: ir.Value, op_type: str) -> ir.Node:
    node = value.producer()
    while node is not None and node.op_type in ("Cast", "Identity") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != op_type:
        raise BundleError(f"Expected {value.name} made by {op_type}, found {node and node.op_type}. Export the bundle again.")
    return node
