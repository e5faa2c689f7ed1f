"""The ahead-of-time PTX of `plugins/ptx.py`, loaded and launched through the CUDA driver as an engine would, against Triton's own launch.

An engine passes inputs, scalars, outputs, and null for the two pointers that Triton appends (design of TensorRT's plugins).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from gpu_check_context import Context, NotHereError
from gpu_check_corrections import DTYPES, CheckFailed, Correction, random_correction, tiles_then_reduction
from torch import Tensor

from domino_deploy.plugins import op, triton_tuning
from domino_deploy.plugins.ptx import Ptx
from domino_deploy.plugins.trt_plugin_kernels import TACTICS, portable_capability, reduce_ptx, tiles_ptx

WARP = 32
_PLAIN_SHARED_BYTES = 48 * 1024  # of a block; more must be asked for (CUDA C++ programming guide, "Shared memory")
_ROUNDING = 1e-5  # of logits near 10: some ten roundings to float32
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class DriverError(Exception):
    """A call of the driver that did not succeed."""


class Driver:
    """The few calls of libcuda that loading and launching take; the process must have a current context.

    Args:
        library: libcuda, opened by ctypes.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("cuInit", ctypes.c_uint(0))

    def load(self, ptx: Ptx) -> ctypes.c_void_p:
        """The kernel of a module that is never unloaded: the process is short."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx.text.encode()))
        self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(ptx.entry.encode()))
        if ptx.shared_bytes > _PLAIN_SHARED_BYTES:
            self._call("cuFuncSetAttribute", function, ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(ptx.shared_bytes))
        return function

    def launch(self, function: ctypes.c_void_p, ptx: Ptx, grid: tuple[int, int], values: Sequence[Tensor | int], stream: int) -> None:
        """One launch with tensors' addresses and int32 scalars, and the two null pointers behind them."""
        slots: list[Any] = [ctypes.c_int32(value) if isinstance(value, int) else ctypes.c_void_p(value.data_ptr()) for value in values]
        slots += [ctypes.c_void_p(0), ctypes.c_void_p(0)]
        addresses = (ctypes.c_void_p * len(slots))(*(ctypes.addressof(slot) for slot in slots))
        grid_and_block = (*grid, 1, WARP * ptx.num_warps, 1, 1, ptx.shared_bytes)
        numbers = [ctypes.c_uint(number) for number in grid_and_block]
        self._call("cuLaunchKernel", function, *numbers, ctypes.c_void_p(stream), addresses, None)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DriverError(f"expected {name} to succeed, found error {code} of the driver API")


def run(context: Context) -> None:
    """Notes per dtype, batch and tactic whether both kernels, launched through the driver, give what Triton's own launch gives.

    Triton's launch is compiled for sizes that are multiples of 16, where the plugin's PTX takes any: sums may be ordered differently.
    """
    if not context.is_cuda:
        raise NotHereError("expected a CUDA driver, found none asked for: the device is the CPU")
    driver = Driver(ctypes.CDLL("libcuda.so.1"))
    rows: list[dict[str, Any]] = []
    for tactic, (name, dtype), batch in product(TACTICS, DTYPES.items(), context.sizes.batches):
        if context.deadline.left < 0:
            context.note(left_out=f"from tactic {tactic}, {name}, batch {batch} on")
            break
        inputs = random_correction(context, batch, context.sizes.vocab_size, dtype)
        rows.append({"dtype": name, "batch": batch, "tactic": tactic, **_compared(context, driver, inputs, tactic)})
        context.note(launches=rows)
    # Written so that NaN is wrong.
    wrong = [str(row) for row in rows if not (row["tokens_equal"] and row["difference"] <= _ROUNDING)]
    if wrong:
        raise CheckFailed("\n- ".join(["expected the PTX to give Triton's tokens and logits, found:", *wrong]))


def plugin_ptx(inputs: Correction, tactic: int) -> tuple[Ptx, Ptx]:
    """Both kernels as an engine for this GPU carries them, which may be compiled for an earlier one."""
    capability = portable_capability([".".join(map(str, torch.cuda.get_device_capability()))])
    dtype_name = str(inputs.codebook.dtype).removeprefix("torch.")
    return tiles_ptx(dtype_name, inputs.z.shape[1], capability, tactic), reduce_ptx(capability)


def _compared(context: Context, driver: Driver, inputs: Correction, tactic: int) -> dict[str, Any]:
    (batch, vocab), rank = inputs.base.shape, inputs.z.shape[1]
    tiles = triton_tuning.blocks(vocab, op.TILE_SIZE)
    launch_tiles, launch_reduction = tiles_then_reduction(inputs, tactic)
    ids, values = launch_tiles()
    tokens, best = launch_reduction()
    own_values, own_ids, own_tokens, own_best = (torch.zeros_like(tensor) for tensor in (values, ids, tokens, best))
    stream = torch.cuda.current_stream().cuda_stream

    ptx, second_ptx = plugin_ptx(inputs, tactic)
    function, second = driver.load(ptx), driver.load(second_ptx)
    arguments: list[Tensor | int] = [inputs.base, inputs.z, inputs.s, inputs.codebook, vocab, rank, own_values, own_ids]

    def launch() -> None:
        driver.launch(function, ptx, (tiles, batch), arguments, stream)

    launch()
    driver.launch(second, second_ptx, (batch, 1), [own_values, own_ids, tiles, own_tokens, own_best], stream)
    torch.cuda.synchronize()
    return {
        "tokens_equal": torch.equal(own_tokens, tokens),
        "bits_equal": all(map(torch.equal, (own_values, own_ids, own_best), (values, ids, best))),
        "difference": float((own_values - values).abs().max()),
        "ptx_bytes": len(ptx.text),
        "shared_bytes": ptx.shared_bytes,
        "times": context.times({"tiles": launch}),
    }
