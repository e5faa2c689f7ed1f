"""`domino::FusedLogitCorrection` for TensorRT and TensorRT-RTX: an IPluginV3 in Python that launches the two Triton kernels.

The kernels are compiled when the engine is built and travel in the plugin's serialised fields; running needs this module and
`cuda-bindings`, and no Triton.  The C++ form (plugins/csrc) has the same name and version and needs no Python; it takes what this one
serialises, while this one finds no kernels in an engine that was built with the C++ form.

Shape legend: B batch, R rank, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from domino_deploy.errors import DominoDeployError, EngineError
from domino_deploy.plugins import op
from domino_deploy.plugins.trt_plugin_inputs import TYPE_NAMES, check_shapes, check_types
from domino_deploy.plugins.trt_plugin_kernels import portable_capability, reduce_ptx, tiles_ptx
from domino_deploy.plugins.trt_plugin_launch import CorrectionKernels, LoadedCorrection, workspace_bytes

# The serialised field that holds `CorrectionKernels`.
KERNELS_FIELD = "kernels"


def register(trt: Any, compute_capabilities: Sequence[str] = (), log: Any = None) -> object:
    """Make the plugin known to the registry of TensorRT or TensorRT-RTX, before a network is parsed or an engine is opened.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        compute_capabilities: of the GPUs that engines are built for, such as "8.9"; none for all from 8.0 on.
        log: the builder's ILogger, which is told why a node is refused; TensorRT itself reports but a number.

    Returns:
        What must be kept for as long as the registry is used, which does not keep it itself.

    Raises:
        ExportError: GPUs that the kernels are not written for.
    """
    creator = _creator_class(trt)(portable_capability(compute_capabilities), log)
    trt.get_plugin_registry().register_creator(creator, op.DOMAIN)
    return creator


def _creator_class(trt: Any) -> Any:
    plugin_class = _plugin_class(trt)

    class Creator(trt.IPluginCreatorV3One):
        def __init__(self, capability: int, log: Any) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = op.NAME, op.VERSION, op.DOMAIN
            self.field_names = trt.PluginFieldCollection([])  # the operator has no attributes
            self._capability, self._log = capability, log

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            if phase == trt.TensorRTPhase.BUILD:
                return plugin_class(self._capability, self._log, None)
            data = {field.name: field.data for field in fields}
            if KERNELS_FIELD not in data:
                raise EngineError(
                    f"Expected an engine built with the Python form of {op.DOMAIN}::{op.NAME}, which brings its kernels, found none. "
                    "Load the C++ plugin library that it was built with, or build the engine again."
                )
            return plugin_class(self._capability, self._log, CorrectionKernels.from_bytes(data[KERNELS_FIELD].tobytes()))

    return Creator


def _plugin_class(trt: Any) -> Any:
    interfaces = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime)

    class FusedLogitCorrection(*interfaces):  # type: ignore[misc]
        """One node.  Building fills in the kernels; the first run loads them, so a CUDA graph may capture every run but that one."""

        def __init__(self, capability: int, log: Any, kernels: CorrectionKernels | None) -> None:
            for interface in interfaces:
                interface.__init__(self)
            self.num_outputs = len(op.OUTPUTS)
            self.plugin_name, self.plugin_version, self.plugin_namespace = op.NAME, op.VERSION, op.DOMAIN
            self._capability = capability
            self._log = log
            self._kernels = kernels
            self._loaded: LoadedCorrection | None = None

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return FusedLogitCorrection(self._capability, self._log, self._kernels)

        def destroy(self) -> None:
            if self._loaded is not None:
                self._loaded.close()
                self._loaded = None

        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            with self._told_to_the_log():
                check_types([found.name for found in input_types])
            return [trt.int64, trt.float32]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
            with self._told_to_the_log():
                check_shapes([[size.get_constant_value() if size.is_constant() else None for size in shape] for shape in inputs])
            return [trt.DimsExprs([inputs[0][0]]) for _ in op.OUTPUTS]

        def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
            codebook, token_ids = num_inputs - 1, num_inputs
            types = {codebook: (trt.float32, trt.float16, trt.bfloat16), token_ids: (trt.int64,)}
            found = in_out[pos].desc
            return found.format == trt.TensorFormat.LINEAR and found.type in types.get(pos, (trt.float32,))

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            codebook = inputs[3].desc
            codebook_type, rank = TYPE_NAMES[codebook.type.name], int(codebook.dims[1])
            if self._kernels is not None and (self._kernels.codebook_type, self._kernels.rank) == (codebook_type, rank):
                return  # TensorRT configures a plugin once per profile
            with self._told_to_the_log():
                tiles, reduction = tiles_ptx(codebook_type, rank, self._capability), reduce_ptx(self._capability)
            self._kernels = CorrectionKernels(tiles=tiles, reduction=reduction, codebook_type=codebook_type, rank=rank)

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            return workspace_bytes(*inputs[0].max)

        def get_fields_to_serialize(self) -> Any:
            assert self._kernels is not None, "TensorRT configures a plugin before it serialises it"
            self._serialised = self._kernels.to_bytes()  # kept: a field only points to it
            return trt.PluginFieldCollection([trt.PluginField(KERNELS_FIELD, self._serialised, trt.PluginFieldType.CHAR)])

        def get_valid_tactics(self) -> list[int]:
            return []

        def set_tactic(self, tactic: int) -> None:
            pass  # there is but the default one

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            with self._told_to_the_log():  # sizes that were open when the network was made: the kernels read as far as they tell them
                check_shapes([list(found.dims) for found in inputs])

        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            if self._loaded is None:
                assert self._kernels is not None, "TensorRT configures a plugin before it runs it"
                with self._told_to_the_log():
                    self._loaded = LoadedCorrection(self._kernels)
            batch, vocab_size = input_desc[0].dims
            with self._told_to_the_log():
                self._loaded.launch(inputs, outputs, workspace, batch, vocab_size, input_desc[3].dims[1], stream)

        @contextlib.contextmanager
        def _told_to_the_log(self) -> Iterator[None]:
            try:
                yield
            except DominoDeployError as problem:
                if self._log is not None:
                    self._log.log(trt.ILogger.ERROR, str(problem))
                raise

    return FusedLogitCorrection
