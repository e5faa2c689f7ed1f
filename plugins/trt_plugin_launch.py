"""The correction's compiled kernels at run time: loaded and launched through the CUDA driver, without Triton.

Shape legend: B batch, R rank, V vocabulary, T tiles of `op.TILE_SIZE` vocabulary rows.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from domino_deploy.errors import EngineError, MissingDependencyError
from domino_deploy.plugins import op
from domino_deploy.plugins.ptx import Ptx

# The tile ids follow the tile values in one workspace.
_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class CorrectionKernels:
    """The two kernels of the whole correction, as an engine carries them.

    Args:
        tiles: `correction_tiles_kernel`.
        reduction: `reduce_tiles_kernel`.
        codebook_type: the type that `tiles` reads: "float32", "float16" or "bfloat16".
        rank: the one that `tiles` was compiled for.
        tile_size: vocabulary rows per tile.
    """

    tiles: Ptx
    reduction: Ptx
    codebook_type: str
    rank: int
    tile_size: int = op.TILE_SIZE

    def to_bytes(self) -> bytes:
        """For the plugin's serialised fields."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> CorrectionKernels:
        """Raises EngineError for data that `to_bytes` did not write."""
        try:
            fields = json.loads(data)
            return cls(**{**fields, "tiles": Ptx(**fields["tiles"]), "reduction": Ptx(**fields["reduction"])})
        except (KeyError, TypeError, ValueError) as problem:
            raise EngineError(
                f"Expected the kernels of {op.DOMAIN}::{op.NAME} in the engine, found {len(data)} bytes of something else ({problem}). "
                "Build the engine again: domino-deploy build-engine."
            ) from problem


def workspace_bytes(batch: int, vocab_size: int, tile_size: int = op.TILE_SIZE) -> int:
    """Device memory that the first kernel fills and the second one reads: float32 [B, T] and int32 [B, T]."""
    return 2 * _part_bytes(batch, -(-vocab_size // tile_size))


def cuda_driver() -> ModuleType:
    """`cuda.bindings.driver`, initialised.

    Raises:
        MissingDependencyError: no driver or no `cuda-bindings`.
        EngineError: a driver that cannot start.
    """
    try:
        from cuda.bindings import driver
    except ImportError as problem:
        raise MissingDependencyError(
            "Expected the package cuda-bindings, which the plugin launches its kernels with, found none. "
            "Install it: pip install 'domino-deploy[tensorrt]'."
        ) from problem
    try:
        status = driver.cuInit(0)
    except RuntimeError as problem:  # cuda-bindings looks for libcuda at the first call
        raise MissingDependencyError(
            "Expected an NVIDIA driver (libcuda.so.1), found none. Install the driver, or run on a machine with an NVIDIA GPU."
        ) from problem
    _checked(driver, status, "the driver to start")
    return driver


class LoadedCorrection:
    """The kernels in the current CUDA context; close it in the same context."""

    def __init__(self, kernels: CorrectionKernels) -> None:
        """Load both kernels; the driver compiles their PTX for its GPU.

        Raises:
            MissingDependencyError: no driver or no `cuda-bindings`.
            EngineError: PTX that the driver does not take.
        """
        self._kernels = kernels
        self._driver = cuda_driver()
        self._modules: list[Any] = []
        try:
            self._tiles, self._reduction = (self._function(ptx) for ptx in (kernels.tiles, kernels.reduction))
        except EngineError:
            self.close()
            raise

    def launch(
        self, inputs: Sequence[int], outputs: Sequence[int], workspace: int, batch: int, vocab_size: int, rank: int, stream: int
    ) -> None:
        """Launch both kernels; nothing is allocated and nothing is waited for, so a CUDA graph can capture it.

        Args:
            inputs: device addresses of the inputs, in the order of `op.INPUTS`.
            outputs: device addresses of the outputs, in the order of `op.OUTPUTS`.
            workspace: device address of `workspace_bytes`, aligned to 16 bytes.
            batch: B; 0 launches nothing.
            vocab_size: V.
            rank: R.
            stream: a `cudaStream_t`.

        Raises:
            EngineError: the driver refuses a launch.
        """
        if batch == 0:
            return  # CUDA has no empty grid
        tiles = -(-vocab_size // self._kernels.tile_size)
        parts = (workspace, workspace + _part_bytes(batch, tiles))
        self._launch(self._tiles, self._kernels.tiles, (tiles, batch), [*inputs], [vocab_size, rank], [*parts], stream)
        self._launch(self._reduction, self._kernels.reduction, (batch, 1), [*parts], [tiles], [*outputs], stream)

    def close(self) -> None:
        """Unload the kernels."""
        for module in self._modules:
            self._driver.cuModuleUnload(module)
        self._modules.clear()

    def _function(self, ptx: Ptx) -> Any:
        # A C string, which cuda-bindings takes with its end.
        (module,) = _checked(self._driver, self._driver.cuModuleLoadData(ptx.text.encode() + b"\0"), f"the driver to load {ptx.entry}")
        self._modules.append(module)
        return _checked(self._driver, self._driver.cuModuleGetFunction(module, ptx.entry.encode()), f"{ptx.entry} in its PTX")[0]

    def _launch(
        self, function: Any, ptx: Ptx, grid: tuple[int, int], before: list[int], scalars: list[int], after: list[int], stream: int
    ) -> None:
        # Inputs, scalars, outputs, and two pointers that Triton adds and these kernels do not use.
        values = (*before, *scalars, *after, 0, 0)
        types = (
            *(ctypes.c_void_p for _ in before),
            *(ctypes.c_int32 for _ in scalars),
            *(ctypes.c_void_p for _ in (*after, 0, 0)),
        )
        status = self._driver.cuLaunchKernel(function, *grid, 1, ptx.num_warps * 32, 1, 1, ptx.shared_bytes, stream, (values, types), 0)
        _checked(self._driver, status, f"{ptx.entry} to start")


def _part_bytes(batch: int, tiles: int) -> int:
    return -(-4 * batch * tiles // _ALIGNMENT) * _ALIGNMENT


def _checked(driver: Any, status: Sequence[Any], expected: str) -> Sequence[Any]:
    """What a driver call returned beside its status."""
    result, *rest = status
    if result != driver.CUresult.CUDA_SUCCESS:
        raise EngineError(
            f"Expected {expected}, found the CUDA driver's {result.name}. "
            "Check with nvidia-smi that the GPU is the one the engine was built for, and that its driver is as new as the engine's CUDA."
        )
    return rest
