"""Speed and error of ONNX Runtime's quantised products, exact and in integers.  Prints a tab-separated table.

    python scripts/bench_products.py [--outputs 4096] [--inputs 2560]

Why bundles ask for integer products (`exporters/precision.py`).  One thread, best of ten; the error is the largest one against the
dequantised float32 product, as a part of its largest magnitude.
"""

from __future__ import annotations

from time import perf_counter

import click
import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from domino_deploy.exporters.quantisation import dequantise, quantise

BLOCK_SIZE = 32
EXACT, INTEGER = 1, 4  # accuracy_level of com.microsoft.MatMulNBits


@click.command()
@click.option("--outputs", default=4096)
@click.option("--inputs", default=2560)
def main(*, outputs: int, inputs: int) -> None:
    """Measure one matrix in both widths and both ways."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * 0.02
    rows = torch.randn(1, inputs, generator=torch.Generator().manual_seed(1))
    print("bits", "products", "microseconds", "error", sep="\t")
    for bits in (4, 8):
        packed, scales, _ = found = quantise(weight, bits, BLOCK_SIZE, symmetric=True)
        expected = (rows @ dequantise(found, bits).T).numpy()
        for name, level in (("exact", EXACT), ("integer", INTEGER)):
            session = _session(packed.numpy(), scales.numpy(), bits, level)
            times = []
            for _ in range(10):
                started = perf_counter()
                (product,) = session.run(None, {"x": rows.numpy()})
                times.append(perf_counter() - started)
            error = np.abs(product - expected).max() / np.abs(expected).max()
            print(bits, name, f"{min(times) * 1e6:.0f}", f"{error:.1e}", sep="\t")


def _session(packed: np.ndarray, scales: np.ndarray, bits: int, level: int) -> onnxruntime.InferenceSession:
    outputs, blocks, _ = packed.shape
    node = helper.make_node(
        "MatMulNBits",
        ["x", "q", "s"],
        ["y"],
        domain="com.microsoft",
        K=blocks * BLOCK_SIZE,
        N=outputs,
        bits=bits,
        block_size=BLOCK_SIZE,
        accuracy_level=level,
    )
    ends = (("x", ["rows", blocks * BLOCK_SIZE]), ("y", ["rows", outputs]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ends)
    weights = [numpy_helper.from_array(packed, "q"), numpy_helper.from_array(scales, "s")]
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "product", [x], [y], weights), opset_imports=opsets, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    main()
