"""Stage: TensorRT-RTX on this GPU, if it was carried (`gpu_check_pack.py`) or is installed: a tiny engine built, run and compared.

NVIDIA's list of supported GPUs has no Hopper; whether it runs there is what this stage finds out.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_train_demo_pieces as pieces
import torch
from gpu_check_context import Context, NotHereError
from gpu_check_corrections import CheckFailed, random_correction
from gpu_check_pack import NAME, unpack


def run(context: Context) -> None:
    """Notes version, seconds of the build, and whether an engine of the correction finds PyTorch's tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        trt = _imported(context.carried, Path(scratch))
        context.note(version=trt.__version__)
        if not context.is_cuda:
            raise NotHereError("expected a CUDA GPU to build for and run on, found none asked for: the device is the CPU")
        _build_and_run(context, trt)


def _imported(carried: Path, scratch: Path) -> Any:
    if not any(carried.rglob(f"{NAME}.json")):
        try:
            import tensorrt_rtx
        except ImportError:
            raise NotHereError(f"expected tensorrt-rtx installed, or packed under {carried}, found neither (docs/gpu.md)") from None
        return tensorrt_rtx
    absent = pieces.missing(carried, NAME)
    if absent:
        raise NotHereError(f"expected every piece of {NAME} under {carried}, found none of these: {', '.join(absent)}")
    sys.path.insert(0, str(unpack(carried, scratch)))
    import tensorrt_rtx

    return tensorrt_rtx


def _build_and_run(context: Context, trt: Any) -> None:
    inputs = random_correction(context, 1, context.sizes.vocab_size, torch.float16)
    bottleneck = torch.nn.functional.silu(inputs.z + inputs.s).half()
    base = inputs.base.half()
    log = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    given = {"base": base, "bottleneck": bottleneck, "codebook": inputs.codebook}
    tensors = {name: network.add_input(name, trt.float16, tuple(tensor.shape)) for name, tensor in given.items()}
    product = network.add_matrix_multiply(
        tensors["bottleneck"], trt.MatrixOperation.NONE, tensors["codebook"], trt.MatrixOperation.TRANSPOSE
    ).get_output(0)
    logits = network.add_elementwise(tensors["base"], product, trt.ElementWiseOperation.SUM).get_output(0)
    best = network.add_topk(logits, trt.TopKOperation.MAX, 1, 1 << 1).get_output(1)
    best.name = "token"
    network.mark_output(best)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.CURRENT, 0)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise CheckFailed("expected an engine for this GPU, found that the builder made none; its messages are in the log")
    context.note(engine_bytes=plan.nbytes)
    runtime = trt.Runtime(log)  # outlives its engine
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise CheckFailed("expected the engine to load on this GPU, found that it did not; the messages are in the log")
    execution, token = engine.create_execution_context(), torch.full((1, 1), -1, dtype=torch.int32, device=context.device)
    for name, tensor in {**given, "token": token}.items():
        execution.set_tensor_address(name, tensor.data_ptr())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    is_run = execution.execute_async_v3(stream.cuda_stream)
    stream.synchronize()
    expected = base.double() + bottleneck.double() @ inputs.codebook.double().T
    found = int(token)
    lost = float(expected.max() - expected[0, found]) if 0 <= found < expected.shape[1] else float("inf")
    context.note(is_run=bool(is_run), token=found, lost=lost)
    if not is_run or not lost < 0.1:  # fp16 logits near 10 are 0.008 apart
        raise CheckFailed(f"expected the token of PyTorch's float64 logits, found {found}, whose logit is {lost} less")
