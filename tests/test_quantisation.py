"""Blocks of integers: what they stand for, how they lie in bytes, and that ONNX Runtime reads them so."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

from domino_deploy.exporters.quantisation import Quantised, dequantise, quantise
from domino_deploy.stored_weights import blocks_of

BITS = pytest.mark.parametrize("bits", [4, 8])
SYMMETRIC = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
BLOCK = 16


def weight(outputs: int = 5, inputs: int = 3 * BLOCK) -> Tensor:
    """An odd number of blocks, so that four-bit zero points have a half byte to spare; one block of zeros, one of one sign."""
    matrix = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    matrix[1, :BLOCK] = 0
    matrix[2, BLOCK : 2 * BLOCK] = matrix[2, BLOCK : 2 * BLOCK].abs() + 1
    return matrix


@BITS
@SYMMETRIC
def test_a_weight_moves_by_half_a_step_at_most(bits: int, symmetric: bool) -> None:
    original = weight()
    found = quantise(original, bits, BLOCK, symmetric=symmetric)
    error = (dequantise(found, bits) - original).abs().unflatten(1, (-1, BLOCK)).amax(-1)
    # Symmetric integers reach one step less on the side away from the largest magnitude.
    steps = 1.0 if symmetric else 0.5
    assert (error <= steps * found.scales.abs() * 1.001 + 1e-7).all()
    assert error.max() > 0, "nothing was rounded: the test proves nothing"


@BITS
def test_the_largest_magnitude_of_a_symmetric_block_is_met(bits: int) -> None:
    original = weight()
    blocks = original.unflatten(1, (-1, BLOCK))
    place = blocks.abs().argmax(-1, keepdim=True)
    restored = dequantise(quantise(original, bits, BLOCK, symmetric=True), bits).unflatten(1, (-1, BLOCK))
    torch.testing.assert_close(restored.gather(-1, place), blocks.gather(-1, place), rtol=1e-6, atol=0)


@BITS
@SYMMETRIC
def test_sizes_are_those_of_the_parts(bits: int, symmetric: bool) -> None:
    found = quantise(weight(), bits, BLOCK, symmetric=symmetric)
    blocks, block_bytes, zero_bytes = blocks_of(3 * BLOCK, bits, BLOCK)
    assert found.packed.shape == (5, blocks, block_bytes)
    assert found.scales.shape == (5, blocks)
    assert found.zero_points is None if symmetric else found.zero_points is not None and found.zero_points.shape == (5, zero_bytes)


@BITS
@SYMMETRIC
def test_onnx_runtime_multiplies_and_looks_up_what_they_stand_for(bits: int, symmetric: bool) -> None:
    original = weight(outputs=7, inputs=4 * BLOCK)
    found = quantise(original, bits, BLOCK, symmetric=symmetric)
    rows = torch.randn(3, 4 * BLOCK, generator=torch.Generator().manual_seed(1))
    product, looked_up = run(found, rows, np.array([6, 0, 1]), bits)
    restored = dequantise(found, bits)
    torch.testing.assert_close(torch.from_numpy(product), rows @ restored.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.from_numpy(looked_up), restored[[6, 0, 1]])


def run(found: Quantised, rows: Tensor, ids: np.ndarray, bits: int) -> list[np.ndarray]:
    """Products with exact activations, and rows."""
    outputs, blocks, block_bytes = found.packed.shape
    parts = {"q": found.packed.numpy(), "s": found.scales.numpy()}
    if found.zero_points is not None:
        parts["z"] = found.zero_points.numpy()
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in parts.items()]
    initializers.append(onnx.numpy_helper.from_array(parts["q"].reshape(outputs, blocks * block_bytes), "q.rows"))
    shared = {"bits": bits, "block_size": BLOCK, "domain": "com.microsoft"}
    nodes = [
        helper.make_node("MatMulNBits", ["x", *parts], ["y"], K=blocks * BLOCK, N=outputs, accuracy_level=1, **shared),
        helper.make_node("GatherBlockQuantized", ["q.rows", "i", *list(parts)[1:]], ["r"], gather_axis=0, quantize_axis=1, **shared),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "quantised",
        [value("x", TensorProto.FLOAT, list(rows.shape)), value("i", TensorProto.INT64, [len(ids)])],
        [value("y", TensorProto.FLOAT, [len(rows), outputs]), value("r", TensorProto.FLOAT, [len(ids), blocks * BLOCK])],
        initializers,
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y", "r"], {"x": rows.numpy(), "i": ids})
