"""Engines of one node of the fused correction, built by TensorRT-RTX in a process of its own; no GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as Type
from onnx import helper

from domino_deploy.engines import Flavour, PluginForm, Profile, ShapeRange
from domino_deploy.exporters.engine_worker import run_job
from domino_deploy.exporters.trt_api import BuildJob, BuiltEngine
from domino_deploy.plugins import op

VOCAB, RANK = 300, 16
ENGINE = "node.engine"

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None and "CI" not in os.environ, reason="needs the package tensorrt-rtx, of the extra dev"
)


def save_node(
    file: Path, base: int = Type.FLOAT, codebook: int = Type.FLOAT, rank: int = RANK, version: str = op.VERSION, has_body: bool = False
) -> None:
    """One node as it stands in an engine's private copy of the head.

    Args:
        file: where to.
        base: type of the base logits.
        codebook: type of the codebook, an initializer.
        rank: of z; all else has `RANK`.
        version: of the plugin that it asks for.
        has_body: give it a function body, which TensorRT takes where the plugin is missing.
    """
    attributes = {op.NAMESPACE_ATTRIBUTE: op.DOMAIN, "plugin_version": version}
    node = helper.make_node(op.NAME, list(op.INPUTS), list(op.OUTPUTS), domain=op.DOMAIN, name="correction", **attributes)
    sizes = ((base, VOCAB), (Type.FLOAT, rank), (Type.FLOAT, RANK))
    inputs = [helper.make_tensor_value_info(name, kind, ["batch", size]) for name, (kind, size) in zip(op.INPUTS, sizes, strict=False)]
    outputs = [
        helper.make_tensor_value_info(name, kind, ["batch"]) for name, kind in zip(op.OUTPUTS, (Type.INT64, Type.FLOAT), strict=True)
    ]
    values = np.random.default_rng(0).standard_normal(VOCAB * RANK)
    weights = helper.make_tensor("codebook", codebook, [VOCAB, RANK], values.astype(np.int32 if codebook == Type.INT32 else np.float32))
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(op.DOMAIN, op.DOMAIN_OPSET)]
    body = [
        helper.make_node("ArgMax", ["base_logits"], ["token_ids"], axis=-1, keepdims=0),
        helper.make_node("ReduceMax", ["base_logits", "last"], ["corrected_logits"], keepdims=0),
    ]
    last = helper.make_node("Constant", [], ["last"], value_ints=[-1])
    function = helper.make_function(op.DOMAIN, op.NAME, list(op.INPUTS), list(op.OUTPUTS), [last, *body], opsets[:1])
    graph = helper.make_graph([node], "correction", inputs, outputs, [weights])
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=[function] if has_body else [], ir_version=10), file)


def build(
    folder: Path, plugin: PluginForm, capabilities: Sequence[str] = ("8.9",), library: Path | None = None, **node: object
) -> BuiltEngine:
    """Parse `save_node` and build its engine, `folder / ENGINE`, for 1 to 4 rows.

    Raises:
        ExportError: TensorRT refuses it.
    """
    save_node(folder / "node.onnx", **node)  # type: ignore[arg-type]
    sizes = {"base_logits": VOCAB, "hidden_projection": node.get("rank", RANK), "state_projection": RANK}
    shapes = {name: ShapeRange(min=(1, size), opt=(2, size), max=(4, size)) for name, size in sizes.items()}  # type: ignore[arg-type]
    job = BuildJob(
        flavour=Flavour.TENSORRT_RTX,
        graph="head",
        onnx_file=str(folder / "node.onnx"),
        engine_file=str(folder / ENGINE),
        profiles=(Profile(name="rows", shapes=shapes),),
        compute_capabilities=tuple(capabilities),
        workspace=2**24,
        opt_level=3,
        plugin=plugin,
        plugin_library=None if library is None else str(library),
    )
    return run_job(job, folder, lambda step: None)
