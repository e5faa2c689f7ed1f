"""Products in float8: scales, the pass over the graphs, calibration, and what TensorRT-RTX makes of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.engine_signatures import engine_signatures
from domino_deploy.engines import Calibration, PluginForm, ProductRange
from domino_deploy.errors import ExportError, RequestError
from domino_deploy.exporters import fp8
from domino_deploy.exporters.engine_graph import write_engine_graph
from domino_deploy.exporters.fp8 import CalibrationText
from domino_deploy.exporters.fp8_calibration import calibrate
from domino_deploy.exporters.precision import as_float32
from domino_deploy.exporters.stored import load_stored
from domino_deploy.model.target import TargetModel
from domino_deploy.runtime.kv_cache import causal_mask

ROOT = Path(__file__).parents[1]
PROMPTS = [[3 + (7 * token) % 290 for token in range(40)], [5, 250, 17, 99, 4, 4, 120, 31]]
TEXT = CalibrationText(source="test", prompts=PROMPTS)
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHARED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@pytest.fixture(scope="module")
def bundle(tiny_float16_bundle: Path) -> Bundle:
    return open_bundle(tiny_float16_bundle)


@pytest.fixture(scope="module")
def calibration(bundle: Bundle) -> Calibration:
    return calibrate(bundle, TEXT)


def quantised(bundle: Bundle, graph: str, ranges: Mapping[str, ProductRange]) -> ir.Model:
    model = ir.load(bundle.path / f"{graph}.onnx")
    fp8.quantise_fp8(model, ranges)
    return model


def session(model: ir.Model) -> onnxruntime.InferenceSession:
    ir.external_data.load_to_model(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def rounded(values: Tensor, scale: float) -> Tensor:
    """To float8 and back, by PyTorch."""
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def single_product(values: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], largest: ProductRange) -> np.ndarray[Any, Any]:
    """What ONNX Runtime makes of values [B, K] times weight [N, K] in float8."""
    name = "target.model.layers.0.mlp.up_proj.weight"
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape(values.shape))
    matrix = ir.Value(name=name, const_value=ir.tensor(weight, name=name), type=ir.TensorType(ir.DataType.FLOAT16))
    turn = ir.node("Transpose", [matrix], {"perm": [1, 0]})
    product = ir.node("MatMul", [x, turn.outputs[0]])
    y = product.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT16), ir.Shape([values.shape[0], weight.shape[0]])
    graph = ir.Graph([x], [y], nodes=[turn, product], initializers=[matrix], opset_imports={"": 24}, name="product")
    model = ir.Model(graph, ir_version=11)
    assert fp8.quantise_fp8(model, {name: largest}) == 1
    (result,) = session(model).run(None, {"x": values})
    return np.asarray(result)


@pytest.mark.parametrize(
    ("largest", "scale"), [(448.0, 1.0), (448.1, 2.0), (224.0, 0.5), (1.0, 2.0**-8), (0.0, 1.0), (1e-9, 2.0**-14), (448.0 * 2**15, 2.0**15)]
)
def test_a_scale_is_the_least_power_of_two_that_brings_the_largest_value_into_float8(largest: float, scale: float) -> None:
    assert fp8.scale_of(largest) == scale


def test_scales_leave_no_factor_of_two_of_the_range_unused() -> None:
    for largest in np.geomspace(0.1, 1e6, 200):
        assert 224 < largest / fp8.scale_of(float(largest)) <= 448


def test_largest_is_pytorchs() -> None:
    assert torch.finfo(torch.float8_e4m3fn).max == fp8.LARGEST


def test_a_product_is_that_of_the_rounded_values() -> None:
    random = np.random.default_rng(0)
    values, weight = random.normal(size=(3, 64)).astype(np.float16), (random.normal(size=(48, 64)) / 8).astype(np.float16)
    largest = ProductRange(input=float(np.abs(values).max()), weight=float(np.abs(weight).max()))
    found = single_product(values, weight, largest)
    left, right = (
        rounded(torch.from_numpy(array).float(), 2.0 ** math.ceil(math.log2(most / 448)))
        for array, most in ((values, largest.input), (weight, largest.weight))
    )
    # Sums of 64 products in float16 at worst: 64 roundings of half a unit in the last place (2^-11) of what is summed.
    bound = 64 * 2.0**-11 * (left.abs() @ right.abs().T)
    assert (torch.from_numpy(found).float() - left @ right.T).abs().le(bound).all()
    assert not np.allclose(found, values.astype(np.float32) @ weight.astype(np.float32).T, rtol=1e-3, atol=1e-3)


def test_values_beyond_the_calibrated_ones_are_clipped_and_stay_finite() -> None:
    values, weight = np.full((1, 4), 1000, np.float16), np.eye(4, dtype=np.float16)
    assert single_product(values, weight, ProductRange(input=4.0, weight=1.0)).tolist() == [[448 * 2.0**-6] * 4]


def test_a_matrix_of_zeros_gives_zeros() -> None:
    found = single_product(np.ones((2, 8), np.float16), np.zeros((3, 8), np.float16), ProductRange(input=1.0, weight=0.0))
    assert found.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(("graph", "layers", "owner"), [("target", 4, "target.model"), ("backbone", 2, "drafter")])
def test_every_matrix_of_the_layers_and_no_other_is_float8(
    bundle: Bundle, calibration: Calibration, graph: str, layers: int, owner: str
) -> None:
    model = quantised(bundle, graph, calibration.products)
    expected = {f"{owner}.layers.{layer}.{part}.weight" for layer in range(layers) for part in PARTS}
    downs = [node for node in model.graph if node.op_type == "QuantizeLinear"]
    matrices = {str(node.inputs[0].name) for node in downs if node.inputs[0] is not None and node.inputs[0].is_initializer()}
    assert matrices == expected
    assert {node.outputs[0].dtype for node in downs} == {ir.DataType.FLOAT8E4M3FN}
    products = [node for node in model.graph if node.op_type == "MatMul"]
    in_float8 = [node for node in products if producer(node, 0) == "DequantizeLinear"]
    assert len(in_float8) == len(expected)
    assert len(products) == len(expected) + (1 if graph == "target" else 2)  # the LM head; and the projection of the features


def producer(node: ir.Node, index: int) -> str | None:
    value = node.inputs[index]
    made_by = None if value is None else value.producer()
    return None if made_by is None else made_by.op_type


def test_products_of_one_input_share_it_and_the_scale_of_their_matrices(bundle: Bundle, calibration: Calibration) -> None:
    uneven = dict(calibration.products)
    name = "target.model.layers.1.self_attn.v_proj.weight"
    uneven[name] = dataclasses.replace(uneven[name], weight=64.0)
    model = quantised(bundle, "target", uneven)
    of_inputs = [
        node for node in model.graph if node.op_type == "QuantizeLinear" and node.inputs[0] and not node.inputs[0].is_initializer()
    ]
    assert len(of_inputs) == 4 * 4  # of a layer: for q, k and v; o; gate and up; down
    for part in ("q", "k", "v"):
        scale = model.graph.initializers[f"target.model.layers.1.self_attn.{part}_proj.weight.float8_scale"].const_value
        assert scale is not None
        assert scale.numpy() == 64 / 256


def relative(found: Tensor, expected: Tensor) -> float:
    """Distance as a part of the expected length."""
    return float((found - expected).norm() / expected.norm())


def simulate(target: TargetModel, ranges: Mapping[str, ProductRange]) -> None:
    """Let PyTorch round inputs and matrices of the layers as the graph does."""
    shared: dict[str, float] = {}
    for name, found in ranges.items():
        shared[group(name)] = max(shared.get(group(name), 0.0), found.weight)
    for name, linear in target.named_modules():
        full = f"target.{name}.weight"
        if isinstance(linear, nn.Linear) and full in ranges:
            by_input, by_matrix = (2.0 ** math.ceil(math.log2(most / 448)) for most in (ranges[full].input, shared[group(full)]))
            with torch.no_grad():
                linear.weight.copy_(rounded(linear.weight, by_matrix))
            linear.register_forward_pre_hook(lambda _, inputs, scale=by_input: (rounded(inputs[0], scale),))  # type: ignore[misc]


def group(name: str) -> str:
    layer, _, part = name.removesuffix(".weight").rpartition(".")
    return f"{layer}.{SHARED.get(part, part)}"


def test_the_target_computes_what_float8_says(bundle: Bundle, calibration: Calibration) -> None:
    """Computed in float32 around the products, so that nothing but them is rounded on either side."""
    target, _ = load_stored(bundle)
    simulate(target, calibration.products)
    with torch.inference_mode():
        expected = target.lm_head(target.hidden_states(torch.tensor([PROMPTS[0]]))[0])[0]
    model = quantised(bundle, "target", calibration.products)
    as_float32(model)
    found, _ = run_target(bundle, model, np.float32)
    # Sums in another order (1e-6) move a value across a step of float8 here and there, and errors of one step (2^-4 of the value) follow.
    assert relative(found, expected) < 0.02
    exact, _ = run_target(bundle, ir.load(bundle.path / "target.onnx"), np.float16)
    assert relative(found, exact) > 0.05


def test_a_product_in_the_target_is_near_its_own_numbers(bundle: Bundle, calibration: Calibration) -> None:
    _, exact = run_target(bundle, ir.load(bundle.path / "target.onnx"), np.float16)
    _, found = run_target(bundle, quantised(bundle, "target", calibration.products), np.float16)
    # Three bits of fraction: an error of at most 2^-4 of a value, 2^-4 / sqrt(3) in the mean, and that twice, for input and matrix.
    assert 0.01 < relative(found, exact) < math.sqrt(2) * 2.0**-4 / math.sqrt(3)


def run_target(bundle: Bundle, model: ir.Model, dtype: type[np.floating[Any]]) -> tuple[Tensor, Tensor]:
    """Logits [S, V] of the first prompt and the values [K, S, D] of the first layer: the embedding's norm times one matrix."""
    rows = len(PROMPTS[0])
    inputs: dict[str, np.ndarray[Any, Any]] = {
        "input_ids": np.array([PROMPTS[0]]),
        "position_ids": np.arange(rows)[None],
        "attention_mask": causal_mask(0, np.empty((rows, rows), np.bool_))[None, None],
        "write_index": np.zeros(1, np.int64),
        "logit_index": np.arange(rows)[None],
    }
    for layer in range(bundle.target.num_layers):
        for kind in ("key", "value"):
            inputs[f"{kind}_cache.{layer}"] = np.zeros((1, bundle.target.num_kv_heads, rows, bundle.target.head_dim), dtype)
    logits, values = session(model).run(["logits", "updated_value_cache.0"], inputs)
    return torch.from_numpy(logits)[0], torch.from_numpy(values)[0].float()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 1e9])
def test_magnitudes_that_are_none_are_refused_by_name_before_the_graph_changes(
    bundle: Bundle, calibration: Calibration, wrong: float
) -> None:
    names = ["target.model.layers.2.mlp.up_proj.weight", "target.model.layers.3.self_attn.o_proj.weight"]
    ranges = dict(calibration.products)
    ranges[names[0]] = ProductRange(input=wrong, weight=1.0)
    ranges[names[1]] = ProductRange(input=1.0, weight=wrong)
    model = ir.load(bundle.path / "target.onnx")
    with pytest.raises(ExportError) as error:
        fp8.quantise_fp8(model, ranges)
    assert all(name in str(error.value) for name in names)
    assert not any(node.op_type == "QuantizeLinear" for node in model.graph)


def test_a_product_that_was_not_calibrated_is_refused_by_name(bundle: Bundle, calibration: Calibration) -> None:
    missing = "drafter.layers.1.mlp.down_proj.weight"
    ranges = {name: found for name, found in calibration.products.items() if name != missing}
    with pytest.raises(ExportError, match=f"{missing}: not calibrated"):
        quantised(bundle, "backbone", ranges)


def test_a_graph_in_float32_is_refused(tiny_bundle: Path, calibration: Calibration) -> None:
    with pytest.raises(RequestError, match="expected the layers' matrices in float16 or bfloat16, found FLOAT"):
        quantised(open_bundle(tiny_bundle), "target", calibration.products)


def test_a_graph_without_matrices_of_layers_is_refused(bundle: Bundle, calibration: Calibration) -> None:
    with pytest.raises(RequestError, match="found none of a floating type"):
        quantised(bundle, "head", calibration.products)


@pytest.mark.parametrize(
    ("capabilities", "named"), [(["8.0"], "8.0"), (["8.9", "7.5", "8.6"], "7.5, 8.6"), ([], "all that TensorRT-RTX supports")]
)
def test_gpus_without_float8_are_refused_by_name(capabilities: list[str], named: str) -> None:
    with pytest.raises(RequestError, match=f"found {named}. Choose others"):
        fp8.check_float8_capabilities(capabilities)


def test_gpus_with_float8_are_accepted() -> None:
    fp8.check_float8_capabilities(["8.9", "9.0", "10.0", "12.0"])


def test_the_benchmark_tells_what_float8_costs_beyond_the_bundles_own_type(bundle: Bundle) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_fp8.py"), str(bundle.path), "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["float16"]["relative_error"] < 0.01 < found["float8"]["relative_error"] < 1
    assert found["float16"]["agreement"] > found["float8"]["agreement"] > 0.1
    assert found["float32"]["perplexity"] == pytest.approx(found["float16"]["perplexity"], rel=0.01)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx (pip install domino-deploy[trt-rtx])")
@pytest.mark.parametrize("capability", ["SM80", "SM89", "SM120"])
def test_tensorrt_rtx_builds_products_in_float8(bundle: Bundle, calibration: Calibration, capability: str, tmp_path: Path) -> None:
    """It makes one product of q, k and v, and of gate and up, on Ada; on Blackwell it keeps them apart."""
    sizes = {"batch": 1, "rows": 5, "logit_rows": 5}
    signature = engine_signatures(bundle.target, bundle.drafter, bundle.form, max_model_len=32, num_speculative_tokens=4)["target"]
    (tmp_path / "target").symlink_to(bundle.path / "target")
    file = tmp_path / "target.onnx"
    write_engine_graph("target", bundle.path / "target.onnx", file, signature, PluginForm.NONE, calibration)
    shapes = {spec.name: [sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape] for spec in signature.inputs}
    command = [sys.executable, "-m", "tests.support.fp8_engine", str(file), capability, json.dumps(shapes)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, cwd=ROOT)
    found = json.loads(answer.stdout.splitlines()[-1])
    if capability == "SM80":
        assert "HW-specific datatypes: fp8_e4m3" in found["refused"]
    else:
        assert found["gemms"].get("FP8*FP8") == {"SM89": 4 * 4, "SM120": 4 * 7}[capability]
