"""A child process that launches the V3 plugin's kernels through a CUDA driver that Triton's interpreter stands in for.

The driver's memory is the process's own: addresses are those of torch's CPU tensors.  What a launch gets is taken at its word: the entry
point, grid, number of threads, and the parameters in the order in which PTX has them.

    TRITON_INTERPRET=1 python -m tests.support.interpreted_driver KERNELS OPERANDS RESULTS

KERNELS is what the plugin serialises, OPERANDS and RESULTS are files of torch.save: the operator's inputs and its outputs.
"""

from __future__ import annotations

import ctypes
import enum
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from domino_deploy.plugins import triton_kernels, triton_tuning, trt_plugin_launch
from domino_deploy.plugins.trt_plugin_kernels import DEFAULT_TACTIC, TACTICS
from domino_deploy.plugins.trt_plugin_launch import CorrectionKernels, LoadedCorrection, workspace_bytes

POINTED_TO = {"*fp32": torch.float32, "*fp16": torch.float16, "*bf16": torch.bfloat16, "*i32": torch.int32, "*i64": torch.int64}
# Any stream: what the launches are given must come through.
STREAM = 7


class CUresult(enum.IntEnum):
    """As far as `trt_plugin_launch` looks at it."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Driver(ModuleType):
    """`cuda.bindings.driver`, for the calls that the plugin makes."""

    CUresult = CUresult

    def __init__(self, kernels: CorrectionKernels) -> None:
        super().__init__("driver")
        codebook = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}[kernels.codebook_type]
        self._parameters = {
            kernels.tiles.entry: ("*fp32", "*fp32", "*fp32", codebook, "i32", "i32", "*fp32", "*i32"),
            kernels.reduction.entry: ("*fp32", "*i32", "i32", "*i64", "*fp32"),
        }
        self._ptx = {ptx.entry: ptx for ptx in (kernels.tiles, kernels.reduction)}
        rank_block = TACTICS[DEFAULT_TACTIC].rank_block
        self._blocks = {kernels.tiles.entry: (kernels.tile_size, rank_block), kernels.reduction.entry: (triton_tuning.REDUCED_TILES,)}
        self.loaded: list[str] = []

    def cuInit(self, flags: int) -> tuple[CUresult]:
        return (CUresult.CUDA_SUCCESS,)

    def cuModuleLoadData(self, image: bytes) -> tuple[CUresult, str]:
        assert image.endswith(b"\0"), "PTX is a C string"
        self.loaded.append(image.decode())
        return CUresult.CUDA_SUCCESS, image.decode()

    def cuModuleUnload(self, module: str) -> tuple[CUresult]:
        self.loaded.remove(module)
        return (CUresult.CUDA_SUCCESS,)

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[CUresult, str]:
        return (CUresult.CUDA_SUCCESS if f".entry {name.decode()}(" in module else CUresult.CUDA_ERROR_INVALID_VALUE), name.decode()

    def cuLaunchKernel(self, function: str, *launch: Any) -> tuple[CUresult]:
        *grid, threads, _, _, shared_bytes, stream, (values, types), extra = launch
        parameters, ptx = self._parameters[function], self._ptx[function]
        kinds = [ctypes.c_void_p if each.startswith("*") else ctypes.c_int32 for each in (*parameters, "*", "*")]
        if (list(types), values[-2:], threads, shared_bytes, stream, extra) != (
            kinds,
            (0, 0),
            32 * ptx.num_warps,
            ptx.shared_bytes,
            STREAM,
            0,
        ):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        arguments = [
            _memory(value, POINTED_TO[each]) if each in POINTED_TO else value for value, each in zip(values, parameters, strict=False)
        ]
        getattr(triton_kernels, function)[tuple(grid)](*arguments, *self._blocks[function])
        return (CUresult.CUDA_SUCCESS,)


def _memory(address: int, dtype: torch.dtype) -> Tensor:
    """One element at an address; the interpreter goes on from there, as a GPU does from a pointer."""
    size = torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def launched(kernels: CorrectionKernels, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids and corrected logits, by the plugin's own launches; outputs and workspace start as NaN."""
    driver = Driver(kernels)
    trt_plugin_launch.cuda_driver = lambda: driver
    batch, vocab_size, rank = operands[0].shape[0], *operands[3].shape
    outputs = (torch.full((batch,), -1), torch.full((batch,), torch.nan))
    room = torch.full((workspace_bytes(batch, vocab_size) // 4 + 1,), torch.nan)
    room[-1] = 5.0
    loaded = LoadedCorrection(kernels)
    addresses = [tensor.data_ptr() for tensor in operands]
    loaded.launch(addresses, [tensor.data_ptr() for tensor in outputs], room.data_ptr(), batch, vocab_size, rank, STREAM)
    loaded.close()
    assert not driver.loaded, "a module stayed loaded"
    assert room[-1] == 5.0, "a launch wrote behind its workspace"
    return outputs


def main(kernels: str, operands: str, results: str) -> None:
    loaded = CorrectionKernels.from_bytes(Path(kernels).read_bytes())
    torch.save([launched(loaded, case) for case in torch.load(operands)], results)


if __name__ == "__main__":
    main(*sys.argv[1:])
