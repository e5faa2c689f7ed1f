"""`domino::LogitCorrectionTiles` for TensorRT: a quickly deployable plugin, compiled ahead of time from the Triton kernel.

Its PTX lies in the engine, so that running one needs neither Python nor this package nor Triton.  Such a plugin is one kernel launch
without scratch memory, hence the operator that is the first half of the fused one; the second half is built of TensorRT's own layers.
TensorRT alone has these plugins; TensorRT-RTX takes `trt_plugin_v3.py` or the C++ form (plugins/csrc).

TensorRT 11.1 and 11.2 load the kernel again, and keep the old one, whenever an input of the plugin changes its shape (NVIDIA/TensorRT
issue 4849, seen by its reporters; not tried here, nor in later versions).  The correction's shapes depend on the batch size alone:
profiles of one batch size, or one execution context per batch size, avoid it.

Shape legend: B batch, R rank, V vocabulary, T tiles of `op.TILE_SIZE` vocabulary rows.
"""

# No `from __future__ import annotations`: tensorrt.plugin reads the annotations as objects.

from collections.abc import Sequence
from typing import Any

from domino_deploy.errors import EngineError, MissingDependencyError
from domino_deploy.plugins import op
from domino_deploy.plugins.trt_plugin_inputs import TYPE_NAMES, check_shapes, check_types
from domino_deploy.plugins.trt_plugin_kernels import TACTICS, portable_capability, tiles_ptx

IDENTITY = f"{op.DOMAIN}::{op.TILES_NAME}"

# The capability compiled for, once registered.  TensorRT's registry is the process's, and a plugin of it cannot be replaced.
_registered: list[int] = []


def register(compute_capabilities: Sequence[str] = ()) -> None:
    """Make the plugin known to TensorRT's registry, for networks that are built in this process.

    A node of it has the attributes `plugin_namespace` and `aot`.

    Args:
        compute_capabilities: of the GPUs that engines are built for, such as "8.9"; none for all from 8.0 on.

    Raises:
        EngineError: registered before, for GPUs that need another kernel.
        ExportError: GPUs that the kernel is not written for.
        MissingDependencyError: no `tensorrt`, or one without ahead-of-time plugins (before 10.9).
    """
    capability = portable_capability(compute_capabilities)
    if _registered and _registered != [capability]:
        raise EngineError(
            f"Expected one kernel per process for the plugin {IDENTITY}, found one for compute capability {_registered[0] / 10} and now "
            f"for {capability / 10}: TensorRT cannot replace a plugin. Build for these GPUs in a process of its own."
        )
    if not _registered:
        _register(capability)
        _registered.append(capability)


def _register(capability: int) -> None:
    try:
        import tensorrt as trt
        import tensorrt.plugin as trtp
    except ImportError as problem:
        raise MissingDependencyError(
            f"Expected TensorRT 10.9 or newer with its module tensorrt.plugin, found none ({problem}). "
            "Install it: pip install 'domino-deploy[tensorrt]'."
        ) from problem
    if not hasattr(trtp, "aot_impl"):
        raise MissingDependencyError(
            f"Expected TensorRT 10.9 or newer, which has plugins that are compiled ahead of time, found {trt.__version__}. "
            "Upgrade tensorrt, or build without the plugin."
        )

    @trtp.register(IDENTITY)
    def describe(
        base_logits: trtp.TensorDesc, hidden_projection: trtp.TensorDesc, state_projection: trtp.TensorDesc, codebook: trtp.TensorDesc
    ) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
        inputs = (base_logits, hidden_projection, state_projection, codebook)
        check_types([tensor.dtype.name for tensor in inputs])
        if not codebook.shape_expr[0].is_fake:  # at first TensorRT asks for the types alone
            check_shapes([_sizes(tensor) for tensor in inputs])
        shape = (base_logits.shape_expr[0], trtp.cdiv(codebook.shape_expr[0], op.TILE_SIZE))
        return trtp.from_shape_expr(shape, dtype=trt.float32), trtp.from_shape_expr(shape, dtype=trt.int32)

    @trtp.autotune(IDENTITY)
    def combinations(
        base_logits: trtp.TensorDesc,
        hidden_projection: trtp.TensorDesc,
        state_projection: trtp.TensorDesc,
        codebook: trtp.TensorDesc,
        outputs: tuple[trtp.TensorDesc, trtp.TensorDesc],
    ) -> list[trtp.AutoTuneCombination]:
        return [trtp.AutoTuneCombination("FP32, FP32, FP32, FP32*FP16*BF16, FP32, INT32", "LINEAR", tuple(TACTICS))]

    @trtp.aot_impl(IDENTITY)
    def kernel(
        base_logits: trtp.TensorDesc,
        hidden_projection: trtp.TensorDesc,
        state_projection: trtp.TensorDesc,
        codebook: trtp.TensorDesc,
        outputs: tuple[trtp.TensorDesc, trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        vocab, rank = codebook.shape_expr
        ptx = tiles_ptx(TYPE_NAMES[codebook.dtype.name], rank.constant_value(), capability, tactic)
        launch = trtp.KernelLaunchParams(
            grid_x=outputs[0].shape_expr[1], grid_y=outputs[0].shape_expr[0], block_x=ptx.num_warps * 32, shared_mem=ptx.shared_bytes
        )
        return ptx.entry, ptx.text, launch, trtp.SymIntExprs.from_tuple([trtp.SymInt32(vocab), trtp.SymInt32(rank)])


def _sizes(tensor: Any) -> list[int | None]:
    return [size.constant_value() if size.is_constant else None for size in tensor.shape_expr]
