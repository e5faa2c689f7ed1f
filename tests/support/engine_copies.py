"""Private copies of a bundle's graphs, as engines are built from them, run by ONNX Runtime."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from domino_deploy.bundle import DRAFTER_FOLDER, GRAPHS, TARGET_FOLDER, Bundle
from domino_deploy.engine_signatures import engine_signatures
from domino_deploy.engines import PluginForm
from domino_deploy.exporters import correction_bodies
from domino_deploy.exporters.engine_graph import write_engine_graph
from domino_deploy.plugins import op
from domino_deploy.signature import GraphSignature

Arrays = dict[str, NDArray[Any]]


def write_copies(
    bundle: Bundle, folder: Path, *, max_model_len: int = 40, count: int, plugin: PluginForm = PluginForm.NONE
) -> dict[str, GraphSignature]:
    """All three copies in `folder`, weights beside them; their signatures."""
    for weights in (TARGET_FOLDER, DRAFTER_FOLDER):
        shutil.copytree(bundle.path / weights, folder / weights)
    signatures = engine_signatures(bundle.target, bundle.drafter, bundle.form, max_model_len=max_model_len, num_speculative_tokens=count)
    for name, signature in signatures.items():
        write_engine_graph(name, bundle.path / GRAPHS[name], folder / GRAPHS[name], signature, plugin)
    return signatures


def run(file: Path, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """Every output by name; plugins are computed by the bodies of their operators."""
    model = ir.load(file)
    bodies = (correction_bodies.fused_correction, correction_bodies.tiles_correction)
    for function in [body(model.opset_imports[""]) for body in bodies]:
        model.functions[function.identifier()] = function
    model.opset_imports[op.DOMAIN] = op.DOMAIN_OPSET
    with_bodies = file.with_name(f"with-bodies-{file.name}")  # its weights are named by where it lies
    try:
        ir.save(model, with_bodies)
        session = onnxruntime.InferenceSession(with_bodies, providers=["CPUExecutionProvider"])
    finally:
        with_bodies.unlink(missing_ok=True)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def random_inputs(signature: GraphSignature, seed: int, **sizes: int) -> Arrays:
    """Seeded inputs of a graph: normal floats, token ids below 100, masks that show every slot."""
    random = np.random.default_rng(seed)
    arrays = {}
    for spec in signature.inputs:
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        if spec.dtype == "bool":
            arrays[spec.name] = np.ones(shape, bool)
        elif spec.dtype == "int64":
            arrays[spec.name] = random.integers(0, 100, shape)
        else:
            arrays[spec.name] = random.standard_normal(shape).astype(spec.dtype)
    return arrays
