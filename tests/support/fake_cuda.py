"""A stand-in for `runtime.backends.trt_cuda.Cuda` in the host's memory: a stream that runs when it is waited for, and graphs that replay.

Because nothing runs earlier, a result that is read without waiting, or an input that is written again before it was copied,
shows as a wrong number.  Misuse that a GPU would punish is an AssertionError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 256
Call = Callable[[], None]


@dataclass
class Counts:
    """What the device was asked to do."""

    synchronisations: int = 0
    captures: int = 0
    launches: int = 0
    bytes_to_host: int = 0


@dataclass
class FakeCuda:
    """Handles of streams, events and graphs are numbers; addresses are real ones."""

    counts: Counts = field(default_factory=Counts)
    memory: dict[int, NDArray[np.uint8]] = field(default_factory=dict)  # by address: a view of the bytes handed out
    pinned: set[int] = field(default_factory=set)
    queues: dict[int, list[Call]] = field(default_factory=dict)
    recording: list[Call] | None = None
    graphs: dict[int, list[Call]] = field(default_factory=dict)
    events: dict[int, float | None] = field(default_factory=dict)  # by event: when it was passed
    left: int = 2**40  # bytes that the device says it has left
    _handles: int = 0
    _clock: float = 0.0

    def allocate(self, size: int) -> int:
        assert self.recording is None, "allocates during capture"
        raw = np.full(size + ALIGNMENT, 0xFF, dtype=np.uint8)  # NaN, -1, true
        skipped = -raw.ctypes.data % ALIGNMENT
        address = raw.ctypes.data + skipped
        self.memory[address] = raw[skipped : skipped + size]
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def free_memory(self) -> int:
        return self.left

    def allocate_pinned(self, size: int) -> int:
        address = self.allocate(size)
        self.pinned.add(address)
        return address

    def free_pinned(self, address: int) -> None:
        self.pinned.remove(address)
        self.free(address)

    def create_stream(self) -> int:
        self.queues[self._handle()] = []
        return self._handles

    def destroy_stream(self, stream: int) -> None:
        del self.queues[stream]

    def synchronise(self, stream: int) -> None:
        assert self.recording is None, "synchronises during capture"
        self.counts.synchronisations += 1
        calls, self.queues[stream] = self.queues[stream], []
        for call in calls:
            call()

    def submit(self, stream: int, call: Call) -> None:
        """Put a call on a stream, or into the graph that is being captured."""
        (self.queues[stream] if self.recording is None else self.recording).append(call)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        def call() -> None:
            if any(base <= destination < base + self.memory[base].size for base in self.pinned):
                self.counts.bytes_to_host += size
            ctypes.memmove(self.checked(destination, size), self.checked(source, size), size)

        self.submit(stream, call)

    def zero(self, address: int, size: int, stream: int) -> None:
        self.submit(stream, lambda: ctypes.memset(self.checked(address, size), 0, size) and None)

    def create_event(self) -> int:
        self.events[self._handle()] = None
        return self._handles

    def destroy_event(self, event: int) -> None:
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        assert self.recording is None, "records an event for timing during capture"

        def call() -> None:
            self._clock += 1.0
            self.events[event] = self._clock

        self.submit(stream, call)

    def elapsed_ms(self, start: int, end: int) -> float:
        times = self.events[start], self.events[end]
        assert None not in times, "reads an event that was not passed"
        return times[1] - times[0]

    def begin_capture(self, stream: int) -> None:
        assert self.recording is None, "captures within a capture"
        self.recording = []

    def end_capture(self, stream: int) -> int:
        assert self.recording is not None, "ends a capture that did not begin"
        self.graphs[self._handle()], self.recording = self.recording, None
        self.counts.captures += 1
        return self._handles

    def abandon_capture(self, stream: int) -> None:
        assert self.recording is not None, "abandons a capture that did not begin"
        self.recording = None

    def launch(self, graph: int, stream: int) -> None:
        self.counts.launches += 1
        for call in self.graphs[graph]:
            self.submit(stream, call)

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]

    def checked(self, address: int, size: int) -> int:
        """The address, if so many bytes from there were handed out and not freed."""
        inside = any(base <= address and address + size <= base + bytes_.size for base, bytes_ in self.memory.items())
        assert inside, f"{size} bytes at {address:#x} lie outside of any memory"
        return address

    def _handle(self) -> int:
        self._handles += 1
        return self._handles
