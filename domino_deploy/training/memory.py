"""Allocations that fail, on a CPU or a GPU, as errors in our own words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from domino_deploy.errors import TrainingError


@contextmanager
def enough_memory(purpose: str, advice: str) -> Iterator[None]:
    """A block that may ask for more memory than there is.

    Args:
        purpose: what the memory is for.
        advice: what the user can do about it.

    Raises:
        TrainingError: in place of an allocation's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):  # PyTorch's, on a CPU
            raise
        raise TrainingError(f"Expected memory for {purpose}, found too little ({error}). {advice}") from error
