"""Quantised graphs with exact products: the shipped nodes on the shipped integers, but for the rounding of activations to 8 bits.

That rounding is far larger than what a wrong weight, angle or epsilon does; without it a quantised graph is held to float32's bound.
"""

from __future__ import annotations

from pathlib import Path

import onnx

_ROUNDING = "accuracy_level"


def exact_copy(graph_file: Path, content: bytes | None = None) -> bytes:
    """A graph of a bundle whose products take activations as they are; its external data are still those of the graph's folder.

    Args:
        graph_file: of the bundle.
        content: another form of the graph, to be changed in its place.
    """
    model = onnx.load(graph_file, load_external_data=False) if content is None else onnx.load_from_string(content)
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            kept = [attribute for attribute in node.attribute if attribute.name != _ROUNDING]
            del node.attribute[:]
            node.attribute.extend(kept)
    return bytes(model.SerializeToString())
