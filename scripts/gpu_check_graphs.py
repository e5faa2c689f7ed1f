"""A function of static tensors as one CUDA graph; on the CPU, where nothing can be captured, the function itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Replay(Generic[T]):
    """Runs `action` as it was captured: on the same memory, its outputs included.

    Args:
        action: reads and writes tensors that stay where they are; run twice before it is captured.
        is_cuda: False to call it each time.
    """

    def __init__(self, action: Callable[[], T], *, is_cuda: bool) -> None:
        self._action, self._graph = action, None
        if is_cuda:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries allocate what they need before the capture
                action()
                action()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outputs = action()

    def __call__(self) -> T:
        if self._graph is None:
            return self._action()
        self._graph.replay()
        return self._outputs
