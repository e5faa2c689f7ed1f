"""The backends that run bundles: what each needs and which precisions it runs.  Imports none of them, and nothing that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from domino_deploy.errors import RequestError
from domino_deploy.precision import Dtype, Precision


class Backend(StrEnum):
    """What runs the models: ONNX Runtime, TensorRT (of either flavour), or eager PyTorch as the reference."""

    ORT = "ort"
    TENSORRT = "tensorrt"
    EAGER = "eager"


@dataclass(frozen=True, kw_only=True)
class BackendNeeds:
    """A backend's module, what must be installed for it, and what it runs.

    module: of `domino_deploy.runtime.backends`; imported: the top-level module that this imports first, of `package`;
    install: what pip brings all of it by; precisions: those of bundles, each part's.
    """

    module: str
    imported: str
    package: str
    install: str
    precisions: tuple[Dtype, ...]


_FLOATS = (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16)

# ONNX Runtime 1.32 on a CPU lacks bfloat16 products and attention (NOT_IMPLEMENTED).  The operators of quantised bundles are ONNX
# Runtime's own: TensorRT does not read them, and eager PyTorch has no kernels for their layouts.
BACKENDS: Mapping[Backend, BackendNeeds] = {
    Backend.ORT: BackendNeeds(
        module="ort",
        imported="onnxruntime",
        package="onnxruntime",
        install="domino-deploy",
        precisions=(Dtype.FLOAT32, Dtype.FLOAT16, Dtype.INT8, Dtype.INT4),
    ),
    Backend.TENSORRT: BackendNeeds(
        module="trt", imported="cuda", package="cuda-bindings", install="domino-deploy[tensorrt]", precisions=_FLOATS
    ),
    Backend.EAGER: BackendNeeds(module="eager", imported="torch", package="torch", install="domino-deploy[export]", precisions=_FLOATS),
}


def check_precision(backend: Backend, precision: Precision, bundle: Path) -> None:
    """Check that a backend runs a bundle's precision.

    Raises:
        RequestError: it does not.
    """
    parts = {precision.target, precision.drafter, precision.lm_head}
    if parts <= set(BACKENDS[backend].precisions):
        return
    others = " or ".join(f"--backend {other}" for other, needs in BACKENDS.items() if parts <= set(needs.precisions))
    raise RequestError(
        f"{bundle}: expected a precision that the backend {backend} runs ({', '.join(BACKENDS[backend].precisions)}), "
        f"found {precision.name}. Run it with {others}, or export the pair again with another --dtype."
    )
