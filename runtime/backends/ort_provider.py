"""What ONNX Runtime computes on: its execution providers by the names of `--provider`, and the refusal to fall back to another one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from domino_deploy.errors import MissingDependencyError
from domino_deploy.runtime.kv_cache import GROWTH_ROWS


class Provider(StrEnum):
    """The CPU, an NVIDIA GPU with ONNX Runtime's own kernels, or with TensorRT below ONNX Runtime."""

    CPU = "cpu"
    CUDA = "cuda"
    TENSORRT = "tensorrt"

    @property
    def execution_providers(self) -> list[str]:
        """ONNX Runtime's names, in order: an operator that one lacks is computed by the next."""
        # The CPU stays the last: graphs compute shapes there.
        gpu = {Provider.CPU: [], Provider.CUDA: ["CUDA"], Provider.TENSORRT: ["Tensorrt", "CUDA"]}[self]
        return [f"{name}ExecutionProvider" for name in (*gpu, "CPU")]

    def check_offered(self, offered: Sequence[str]) -> None:
        """Refuse what the installed ONNX Runtime was not built with; it would compute on the CPU with no more than a warning.

        Args:
            offered: `onnxruntime.get_available_providers()`.

        Raises:
            MissingDependencyError: a provider is missing.
        """
        missing = [name for name in self.execution_providers if name not in offered]
        if missing:
            raise MissingDependencyError(
                f"Expected an ONNX Runtime with {' and '.join(missing)} for the provider {self}, found one with {', '.join(offered)}. "
                "Run: pip uninstall onnxruntime, then pip install onnxruntime-gpu (the two must not be installed together); "
                "or leave out --provider."
            )

    def check_started(self, started: Sequence[str]) -> None:
        """Refuse a session in which the provider did not start.

        Args:
            started: `InferenceSession.get_providers()`.

        Raises:
            MissingDependencyError: it is not among them.
        """
        missing = [name for name in self.execution_providers if name not in started]
        if missing:
            raise MissingDependencyError(
                f"Expected ONNX Runtime to start {' and '.join(missing)} for the provider {self}, found that it could not (see above). "
                "Check the driver and the CUDA, cuDNN and TensorRT libraries that this onnxruntime-gpu needs, or leave out --provider."
            )


def growth_rows(limit: int, provider: Provider) -> int:
    """By how many rows caches of at most `limit` grow; a GPU gets all at once, since growing would copy them through the host."""
    return GROWTH_ROWS if provider is Provider.CPU else limit
