"""The calls of the CUDA runtime that the TensorRT backend needs, and no others: memory, one stream, events, graphs.

Thin, so that tests put a stand-in in its place.  Everything is in order of the stream that is given; handles are integers.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import __version__ as bindings_version
from cuda.bindings import runtime as cudart

from domino_deploy.errors import CapacityError, MissingDependencyError


class Cuda:
    """The first GPU of this process.

    Raises:
        MissingDependencyError: the driver is too old for the CUDA runtime of cuda-bindings.
    """

    def __init__(self) -> None:
        error, _ = cudart.cudaGetDeviceCount()
        if error != cudart.cudaError_t.cudaSuccess:
            raise MissingDependencyError(
                f"Expected an NVIDIA driver that serves the installed cuda-bindings {bindings_version}, found: {_described(error)}. "
                "Install a newer driver, or cuda-bindings of the driver's CUDA version."
            )

    def allocate(self, size: int) -> int:
        """Address of `size` bytes on the device, their content undefined.

        Raises:
            CapacityError: the device has too little memory left.
        """
        error, address = cudart.cudaMalloc(size)
        if error == cudart.cudaError_t.cudaErrorMemoryAllocation:
            free, total = _call(cudart.cudaMemGetInfo)
            raise CapacityError(
                f"Expected {size / 2**20:.0f} MiB of free GPU memory, found {free / 2**20:.0f} of {total / 2**20:.0f} MiB. "
                "Free some, or build the engines with a smaller --max-model-len."
            )
        _check(cudart.cudaMalloc, error)
        return int(address)

    def free(self, address: int) -> None:
        _release(cudart.cudaFree, address)

    def free_memory(self) -> int:
        """Bytes that the device has left."""
        free, _ = _call(cudart.cudaMemGetInfo)
        return int(free)

    def allocate_pinned(self, size: int) -> int:
        """Address of `size` bytes on the host that the device copies from and to."""
        return int(_call(cudart.cudaHostAlloc, size, cudart.cudaHostAllocDefault))

    def free_pinned(self, address: int) -> None:
        _release(cudart.cudaFreeHost, address)

    def create_stream(self) -> int:
        return int(_call(cudart.cudaStreamCreateWithFlags, cudart.cudaStreamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        _release(cudart.cudaStreamDestroy, stream)

    def synchronise(self, stream: int) -> None:
        """Wait until all that was put on the stream is done."""
        _call(cudart.cudaStreamSynchronize, stream)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        """Copy between device and pinned memory, in any direction."""
        _call(cudart.cudaMemcpyAsync, destination, source, size, cudart.cudaMemcpyKind.cudaMemcpyDefault, stream)

    def zero(self, address: int, size: int, stream: int) -> None:
        _call(cudart.cudaMemsetAsync, address, 0, size, stream)

    def create_event(self) -> int:
        return int(_call(cudart.cudaEventCreate))

    def destroy_event(self, event: int) -> None:
        _release(cudart.cudaEventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        _call(cudart.cudaEventRecord, event, stream)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Between two events that were passed; synchronise first."""
        return float(_call(cudart.cudaEventElapsedTime, start, end))

    def begin_capture(self, stream: int) -> None:
        """From here on, what is put on the stream is recorded and not run."""
        # Other threads (TensorRT has some) may go on to allocate.
        _call(cudart.cudaStreamBeginCapture, stream, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)

    def end_capture(self, stream: int) -> int:
        """A graph of what was recorded, ready to be launched."""
        graph = _call(cudart.cudaStreamEndCapture, stream)
        try:
            return int(_call(cudart.cudaGraphInstantiate, graph, 0))
        finally:
            _release(cudart.cudaGraphDestroy, graph)

    def abandon_capture(self, stream: int) -> None:
        """End a capture in which a call failed, and keep nothing of it: a stream that is not told stays in its capture."""
        error, graph = cudart.cudaStreamEndCapture(stream)
        if error == cudart.cudaError_t.cudaSuccess:
            _release(cudart.cudaGraphDestroy, graph)

    def launch(self, graph: int, stream: int) -> None:
        _call(cudart.cudaGraphLaunch, graph, stream)

    def destroy_graph(self, graph: int) -> None:
        _release(cudart.cudaGraphExecDestroy, graph)


def _call(function: Any, *arguments: Any) -> Any:
    """What the call gives besides its error code: nothing, a value, or several."""
    error, *values = function(*arguments)
    _check(function, error)
    return values[0] if len(values) == 1 else values


def _release(function: Any, handle: Any) -> None:
    """Give something back, whatever the call says: it also reports what earlier passes did, was told then, and nobody can catch it here."""
    function(handle)


def _check(function: Any, error: Any) -> None:
    """A failure here is a fault of the program or of the machine, so it keeps its traceback."""
    if error != cudart.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{getattr(function, '__name__', function)}: {_described(error)}")


def _described(error: Any) -> str:
    _, text = cudart.cudaGetErrorString(error)
    return f"{error.name} ({text.decode()})"
