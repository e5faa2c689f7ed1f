"""Memory on the device and pinned memory on the host, freed with the objects that hold it."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# TensorRT wants addresses of tensors aligned to so many bytes.
_ALIGNMENT = 256
_ITEM_BYTES = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int64": 8}

Shape = tuple[int, ...]


class Cuda(Protocol):
    """What `trt_cuda.Cuda` offers; tests run without a GPU on a stand-in."""

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def free_memory(self) -> int: ...
    def allocate_pinned(self, size: int) -> int: ...
    def free_pinned(self, address: int) -> None: ...
    def create_stream(self) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def synchronise(self, stream: int) -> None: ...
    def copy(self, destination: int, source: int, size: int, stream: int) -> None: ...
    def zero(self, address: int, size: int, stream: int) -> None: ...
    def create_event(self) -> int: ...
    def destroy_event(self, event: int) -> None: ...
    def record(self, event: int, stream: int) -> None: ...
    def elapsed_ms(self, start: int, end: int) -> float: ...
    def begin_capture(self, stream: int) -> None: ...
    def end_capture(self, stream: int) -> int: ...
    def abandon_capture(self, stream: int) -> None: ...
    def launch(self, graph: int, stream: int) -> None: ...
    def destroy_graph(self, graph: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A tensor's type and its largest shape."""

    dtype: str
    shape: Shape

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class Stream:
    """All work of a session, in order."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.handle = cuda.create_stream()
        weakref.finalize(self, cuda.destroy_stream, self.handle)

    def synchronise(self) -> None:
        self.cuda.synchronise(self.handle)

    def copy(self, destination: int, source: int, size: int) -> None:
        self.cuda.copy(destination, source, size, self.handle)


class Stopwatch:
    """Times between marks that the stream passes."""

    def __init__(self, stream: Stream, marks: int) -> None:
        self._stream = stream
        self._events = [stream.cuda.create_event() for _ in range(marks)]
        for event in self._events:
            weakref.finalize(self, stream.cuda.destroy_event, event)

    def mark(self, index: int) -> None:
        self._stream.cuda.record(self._events[index], self._stream.handle)

    def spans_ms(self) -> list[float]:
        """Milliseconds from each mark to the next, behind a synchronisation."""
        return [self._stream.cuda.elapsed_ms(start, end) for start, end in pairwise(self._events)]


class DeviceMemory:
    """Zeroed bytes on the device: a masked slot still takes part, times 0, and garbage may be NaN."""

    def __init__(self, stream: Stream, size: int) -> None:
        self.size = size
        self.address = stream.cuda.allocate(size)
        weakref.finalize(self, stream.cuda.free, self.address)
        self.clear(stream)

    def clear(self, stream: Stream) -> None:
        stream.cuda.zero(self.address, self.size, stream.handle)


class PinnedMemory:
    """Zeroed bytes on the host, as numpy sees them; they live as long as any view of them."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.address = cuda.allocate_pinned(size)
        memory = (ctypes.c_uint8 * size).from_address(self.address)
        weakref.finalize(memory, cuda.free_pinned, self.address)
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
        self.bytes[:] = 0


class Block:
    """Tensors side by side, on the device and in pinned memory: one copy takes all of them across.

    Args:
        stream: that copies.
        tensors: by name.
    """

    def __init__(self, stream: Stream, tensors: Mapping[str, Layout]) -> None:
        self._stream = stream
        self._tensors = tensors
        self._offsets: dict[str, int] = {}
        size = 0
        for name, tensor in tensors.items():
            self._offsets[name] = size
            size += -(-tensor.size // _ALIGNMENT) * _ALIGNMENT
        self._device, self._host = DeviceMemory(stream, size), PinnedMemory(stream.cuda, size)

    def address(self, name: str) -> int:
        """On the device."""
        return self._device.address + self._offsets[name]

    def array(self, name: str, shape: Shape | None = None) -> NDArray[Any]:
        """The tensor on the host, whole, or packed as one of a smaller shape; only to be touched while no copy is under way."""
        tensor = self._tensors[name]
        shape = tensor.shape if shape is None else shape
        return self.bytes(name).view(tensor.dtype)[: math.prod(shape)].reshape(shape)

    def bytes(self, name: str) -> NDArray[np.uint8]:
        """The tensor on the host, whatever its type."""
        offset = self._offsets[name]
        return self._host.bytes[offset : offset + self._tensors[name].size]

    @property
    def addresses(self) -> dict[str, int]:
        """Of all tensors, on the device."""
        return {name: self.address(name) for name in self._tensors}

    def upload(self, size: int | None = None) -> None:
        """Copy all of it, or the first bytes, to the device."""
        self._stream.copy(self._device.address, self._host.address, self._device.size if size is None else size)

    def download(self) -> None:
        """Copy all of it to the host."""
        self._stream.copy(self._host.address, self._device.address, self._device.size)
