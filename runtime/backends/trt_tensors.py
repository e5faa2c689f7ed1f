"""Tensors of an engine: their shapes for given sizes, the caches' memory, and feature rows as numpy knows them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from domino_deploy.engines import EngineGraph
from domino_deploy.runtime.backends.trt_memory import DeviceMemory, Layout, Shape, Stream
from domino_deploy.runtime.protocols import FloatArray
from domino_deploy.signature import updated


class Tensors:
    """Inputs and outputs of one engine for a single sequence."""

    def __init__(self, graph: EngineGraph) -> None:
        self._inputs = {spec.name: spec for spec in graph.inputs}
        self._specs = self._inputs | {spec.name: spec for spec in graph.outputs}
        self.caches = [name for name in self._inputs if updated(name) in self._specs]

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def layout(self, name: str, **sizes: int) -> Layout:
        """Of one tensor, for the symbolic sizes that it has."""
        spec = self._specs[name]
        return Layout(dtype=spec.dtype, shape=tuple(size if isinstance(size, int) else ({"batch": 1} | sizes)[size] for size in spec.shape))

    def input_shapes(self, **sizes: int) -> dict[str, Shape]:
        """Of all inputs."""
        return {name: self.layout(name, **sizes).shape for name in self._inputs}


class Caches:
    """The caches of one engine, each read and written in its place."""

    def __init__(self, stream: Stream, tensors: Tensors) -> None:
        self._stream = stream
        self._memory = {name: DeviceMemory(stream, tensors.layout(name).size) for name in tensors.caches}
        self.addresses = {name: memory.address for name, memory in self._memory.items()}
        self.addresses |= {updated(name): address for name, address in self.addresses.items()}

    def clear(self) -> None:
        """Leave nothing of one request to the next: what a mask hides still takes part, times 0, and may be infinite."""
        for memory in self._memory.values():
            memory.clear(self._stream)


def rows_from_bytes(content: NDArray[np.uint8], dtype: str, width: int) -> FloatArray:
    """Rows [L, width] of that type; numpy has no bfloat16, so those become float32, which holds them exactly."""
    if dtype == "bfloat16":
        wide = content.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(-1, width)
    rows: FloatArray = content.view(dtype).reshape(-1, width)
    return rows


def bytes_from_rows(rows: FloatArray, dtype: str) -> NDArray[np.uint8]:
    """The way back."""
    if dtype == "bfloat16":
        narrow = (np.ascontiguousarray(rows, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return narrow.reshape(-1).view(np.uint8)
    return np.ascontiguousarray(rows, dtype=dtype).reshape(-1).view(np.uint8)
