"""An ONNX Runtime session whose inputs and outputs are bound to memory that is reused from pass to pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from domino_deploy.runtime.backends.ort_graph import failing_as_bundle_error, open_graph
from domino_deploy.runtime.backends.ort_provider import Provider
from domino_deploy.signature import GraphSignature, updated

# ONNX Runtime's name of an NVIDIA GPU's memory.
_DEVICE = "cuda"

Array = NDArray[Any]
Bind = Callable[..., None]  # IOBinding.bind_input or bind_output


class BoundGraph:
    """An ONNX Runtime session whose inputs and outputs live in numpy arrays.

    Args:
        graph_file: the graph.
        signature: its inputs and outputs.
        threads: threads inside an operator; None for ONNX Runtime's default, one per physical core.
        provider: what computes it; on a GPU the caches stay in its memory, everything else is copied from and to the host.

    Raises:
        BundleError: ONNX Runtime refuses the graph, or it is not the graph of this signature.
        MissingDependencyError: ONNX Runtime lacks the provider, or cannot start it.
    """

    def __init__(self, graph_file: Path, signature: GraphSignature, threads: int | None = None, provider: Provider = Provider.CPU) -> None:
        self._file = graph_file
        self._signature = signature
        self._cache_device = None if provider is Provider.CPU else _DEVICE
        self._session = open_graph(graph_file, signature, _options(threads), provider=provider)
        self._bind_nothing()

    def sharing_session(self) -> BoundGraph:
        """The same graph with inputs and outputs of its own."""
        other = copy.copy(self)
        other._bind_nothing()
        return other

    def _bind_nothing(self) -> None:
        signature = self._signature
        self._binding = self._session.io_binding()
        specs = (*signature.inputs, *signature.outputs)
        self._dtypes = {spec.name: np.dtype(spec.dtype) for spec in specs}
        outputs = {spec.name for spec in signature.outputs}
        caches = [spec for spec in signature.inputs if updated(spec.name) in outputs]
        self._heads_and_width = {spec.name: (int(spec.shape[1]), int(spec.shape[3])) for spec in caches}
        self._caches: dict[str, Array] = {}
        self._device_caches: dict[str, onnxruntime.OrtValue] = {}
        self._slots = 0
        self._buffers: dict[str, Array] = {}
        self._bound: dict[str, Array] = {}

    def input(self, name: str, shape: tuple[int, ...]) -> Array:
        """The memory of an input, to be filled before `run`."""
        return self._memory(name, shape, self._binding.bind_input)

    def output(self, name: str, shape: tuple[int, ...]) -> Array:
        """The memory of an output, filled by `run`."""
        return self._memory(name, shape, self._binding.bind_output)

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of an input or output."""
        return self._dtypes[name]

    def bind_input(self, name: str, array: Array) -> None:
        """Read an input from an array of the caller's (contiguous, of the signature's dtype); it is kept alive until the next one."""
        self._bind(name, array, self._binding.bind_input)

    @property
    def cache_shapes(self) -> dict[str, tuple[int, int, np.dtype[Any]]]:
        """Every cache's heads, width and dtype."""
        return {name: (heads, width, self._dtypes[name]) for name, (heads, width) in self._heads_and_width.items()}

    def bind_cache(self, name: str, cache: Array) -> None:
        """Bind a cache and its update to one memory [batch, heads, cache slots, width], contiguous; kept alive until the next one."""
        if self._cache_device is None:
            self._caches[name] = cache
            self._bind(name, cache, self._binding.bind_input)
            self._bind(updated(name), cache, self._binding.bind_output)
        else:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(cache, self._cache_device, 0)
            self._device_caches[name] = value
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(updated(name), value)

    def unbind_caches(self) -> None:
        """Let go of the caches' memory; others must be bound before the next pass."""
        for name in self._heads_and_width:
            for memory in (self._caches, self._bound, self._device_caches):
                memory.pop(name, None)
            self._bound.pop(updated(name), None)
        self._slots = 0

    def grow_caches(self, slots: int) -> int:
        """Make the caches at least `slots` long, rows kept; returns their length."""
        if slots > self._slots:
            for name, (heads, width) in self._heads_and_width.items():
                # Zeros: a masked slot still takes part, times 0, and garbage may be NaN.
                cache = np.zeros((1, heads, slots, width), self._dtypes[name])
                if self._slots:
                    cache[:, :, : self._slots] = self._cached(name)
                self.bind_cache(name, cache)
            self._slots = slots
        return self._slots

    def release_caches(self) -> None:
        """Start over with short ones: a pass takes as long as the caches bound."""
        if self._cache_device is None:  # a GPU is given the longest ones at once
            self._slots = 0

    def run(self) -> None:
        """One pass.

        Raises:
            BundleError: an operator of the graph fails.
        """
        with failing_as_bundle_error(self._file, "runs"):
            self._session.run_with_iobinding(self._binding)

    def _cached(self, name: str) -> Array:
        value = self._device_caches.get(name)
        content: Array = self._caches[name] if value is None else value.numpy()
        return content

    def _memory(self, name: str, shape: tuple[int, ...], bind: Bind) -> Array:
        array = self._bound.get(name)
        if array is None or array.shape != shape:
            size = int(np.prod(shape))
            if name not in self._buffers or self._buffers[name].size < size:
                self._buffers[name] = np.empty(size, self._dtypes[name])
            array = self._buffers[name][:size].reshape(shape)
            self._bind(name, array, bind)
        return array

    def _bind(self, name: str, array: Array, bind: Bind) -> None:
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._bound[name] = array


def _options(threads: int | None) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0  # 0: one per physical core
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors: it warns of optimisations that it leaves out, such as turning a large LM head at once
    # Threads wait for the next operator by spinning, which is ONNX Runtime's default; but not beyond the pass, since the
    # sessions of target, backbone and head take turns and would take each other's cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options
