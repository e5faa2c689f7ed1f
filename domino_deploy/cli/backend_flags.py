"""Options of the commands that open a session: what runs the models, and on what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from domino_deploy.runtime.session import Backend, Provider

_OPTIONS = (
    click.option(
        "--backend",
        type=click.Choice([backend.value for backend in Backend]),
        default=Backend.ORT.value,
        help="ort: ONNX Runtime; tensorrt: engines that build-engine made; eager: the PyTorch reference.",
    ),
    click.option(
        "--provider",
        type=click.Choice([provider.value for provider in Provider]),
        default=Provider.CPU.value,
        help="What ONNX Runtime computes on; cuda and tensorrt need onnxruntime-gpu.",
    ),
)


def backend_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Backend and provider."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
