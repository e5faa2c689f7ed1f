"""What a bad checkpoint folder is refused with, and what the message names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from domino_deploy.errors import CheckpointError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def refusal(opener: Callable[[Path], object], folder: Path) -> str:
    """The message of the one error that opening raises; it names the folder."""
    with pytest.raises(CheckpointError) as caught:
        opener(folder)
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert str(folder) in message
    return message


def named(message: str, *items: str) -> bool:
    """That a message names all items."""
    missing = [item for item in items if item not in message]
    assert not missing, f"{missing} not in:\n{message}"
    return True
