"""The Triton kernels of the correction as TensorRT's plugins carry them: compiled for one GPU, one codebook type and one rank.

Both Python forms of the plugin take their kernels from here (`trt_plugin.py`, `trt_plugin_v3.py`).  Compiling needs Triton and no GPU.

Shape legend: B batch, R rank, V vocabulary, T tiles of `op.TILE_SIZE` vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from domino_deploy.errors import ExportError
from domino_deploy.plugins import op, triton_tuning
from domino_deploy.plugins.ptx import Ptx, compile_ptx

# PTX of these runs on every later GPU too; for 9.0 and up Triton writes PTX for one architecture alone (sm_90a).  The kernels load and
# multiply, for which the later architectures have nothing that the driver's own compiler would not use.
PORTABLE_CAPABILITIES = (80, 86, 89)

# Triton's words for the types that a codebook may have.
_TRITON_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class Tactic:
    """One way to run `correction_tiles_kernel`; TensorRT times them and keeps the fastest.

    num_warps: warps that share a tile.
    rank_block: rank columns that a program multiplies at a time, a power of two.
    """

    num_warps: int
    rank_block: int


# A tile of 128 rows is 16 to 64 loads of 16 bytes per thread and rank block; which of them hides memory latency best is the GPU's.
# TensorRT knows a tactic by a positive number, and 0 stands for "none chosen".
TACTICS = {
    1: Tactic(num_warps=4, rank_block=64),
    2: Tactic(num_warps=8, rank_block=64),
    3: Tactic(num_warps=4, rank_block=32),
    4: Tactic(num_warps=8, rank_block=128),
}
DEFAULT_TACTIC = 1


def portable_capability(compute_capabilities: Sequence[str]) -> int:
    """What to compile for so that the kernels run on GPUs of all these capabilities ("8.9"), or of all from 8.0 on where there are none.

    Raises:
        ExportError: a capability below 8.0.
    """
    wanted = [int(each.replace(".", "")) for each in compute_capabilities]
    lowest = min(wanted, default=PORTABLE_CAPABILITIES[0])
    if lowest < PORTABLE_CAPABILITIES[0]:
        raise ExportError(
            f"Expected GPUs of compute capability 8.0 or higher, which the plugin's kernels are written for, found {lowest / 10}. "
            "Build without the plugin: --plugin none."
        )
    return max(each for each in PORTABLE_CAPABILITIES if each <= lowest)


def tiles_ptx(codebook_type: str, rank: int, capability: int, tactic: int = DEFAULT_TACTIC) -> Ptx:
    """`correction_tiles_kernel`: grid (T, B), parameters base, z, s, codebook, int32 V, int32 R, tile_values, tile_ids.

    Args:
        codebook_type: "float32", "float16" or "bfloat16".
        rank: R; where it is a multiple of 16, rows are read 16 bytes at a time.
        capability: of `portable_capability`.
        tactic: one of `TACTICS`.

    Raises:
        ExportError: see `ptx.compile_ptx`.
    """
    from domino_deploy.plugins.triton_kernels import correction_tiles_kernel

    chosen = TACTICS[tactic]
    # TensorRT asks 256 bytes of what a user binds, and says nothing of tensors between layers.  If it passes a row of a larger one, z and
    # s start at a multiple of R all the same, and are read in wide loads only where that is one of 16; nothing else but weights is.
    types = {"base": "*fp32", "z": "*fp32:16", "s": "*fp32:16", "codebook": f"*{_TRITON_TYPES[codebook_type]}:16"}
    types |= {"V": "i32", "R": "i32:16" if rank % 16 == 0 else "i32", "tile_values": "*fp32", "tile_ids": "*i32"}
    constants = {"BLOCK_V": op.TILE_SIZE, "BLOCK_R": chosen.rank_block}
    return compile_ptx(correction_tiles_kernel, types, constants, capability, num_warps=chosen.num_warps)


def reduce_ptx(capability: int) -> Ptx:
    """`reduce_tiles_kernel`: grid (B,), parameters tile_values, tile_ids, int32 T, token_ids, corrected_logits.

    Raises:
        ExportError: see `ptx.compile_ptx`.
    """
    from domino_deploy.plugins.triton_kernels import reduce_tiles_kernel

    types = {"tile_values": "*fp32", "tile_ids": "*i32", "T": "i32", "token_ids": "*i64", "corrected_logits": "*fp32"}
    return compile_ptx(reduce_tiles_kernel, types, {"BLOCK_T": triton_tuning.REDUCED_TILES}, capability)
