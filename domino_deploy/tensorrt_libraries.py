"""TensorRT and TensorRT-RTX as they are installed here, and the NVIDIA driver below them; imports neither until asked to.

A machine without a driver can build TensorRT-RTX engines, but must not make a Runtime of either: without a driver its object is null,
and the first call ends the process.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from domino_deploy.engines import Flavour
from domino_deploy.errors import MissingDependencyError

MODULES = {Flavour.TENSORRT: "tensorrt", Flavour.TENSORRT_RTX: "tensorrt_rtx"}
# The graphs' Attention needs 10.14, their RotaryEmbedding and TensorScatter 10.15, by TensorRT's release notes and its guide "Working with
# Transformers"; of RTX, 1.7 is the oldest that the tests run.
LEAST_VERSIONS = {Flavour.TENSORRT: (10, 15), Flavour.TENSORRT_RTX: (1, 7)}

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# CUdevice_attribute of the driver's interface: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_MAJOR, _MINOR = 75, 76
_RTX_LIBRARIES = "tensorrt_rtx_libs"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: its name, compute capability ("9.0") and memory."""

    name: str
    compute_capability: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The NVIDIA driver: the CUDA version that it supports ("13.0"), and its GPUs."""

    cuda_version: str
    gpus: tuple[Gpu, ...]


def installed() -> dict[Flavour, str]:
    """Versions of the flavours whose packages are here; they are not imported."""
    versions = {flavour: _version(flavour) for flavour in Flavour}
    return {flavour: version for flavour, version in versions.items() if version is not None}


def check_installed(flavour: Flavour) -> str:
    """The version of a flavour.

    Raises:
        MissingDependencyError: not installed, or too old.
    """
    version = _version(flavour)
    if version is None:
        raise MissingDependencyError(f"Expected the package {flavour}, found none. {_advice(flavour)}")
    least = LEAST_VERSIONS[flavour]
    if _numbers(version) < least:
        raise MissingDependencyError(f"Expected {flavour} {'.'.join(map(str, least))} or newer, found {version}. {_advice(flavour)}")
    return version


def load(flavour: Flavour) -> ModuleType:
    """The Python module of a flavour.

    Raises:
        MissingDependencyError: not installed, too old, or its libraries cannot be loaded.
    """
    version = check_installed(flavour)
    try:
        return importlib.import_module(MODULES[flavour])
    except ImportError as error:
        raise MissingDependencyError(f"Expected the libraries of {flavour} {version}, found: {error}. {_advice(flavour)}") from error


def driver() -> Driver | None:
    """The NVIDIA driver; None where there is none, or none that starts."""
    try:
        cuda = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version)) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return None
    gpus = tuple(_gpu(cuda, device) for device in range(count.value))
    return Driver(cuda_version=f"{version.value // 1000}.{version.value % 1000 // 10}", gpus=gpus)


def require_gpu(flavour: Flavour, purpose: str = "") -> Gpu:
    """The first GPU; to be asked for before anything makes a Runtime, or a Builder of TensorRT.

    Args:
        flavour: what needs it.
        purpose: for what, such as " to strip weights"; for the message.

    Raises:
        MissingDependencyError: there is none.
    """
    found = driver()
    if found is None or not found.gpus:
        what = "no driver" if found is None else f"a driver for CUDA {found.cuda_version} and no GPU"
        raise MissingDependencyError(
            f"{flavour}: expected an NVIDIA driver and a GPU{purpose}, found {what}. Run this on a machine with both; "
            f"only building engines by {Flavour.TENSORRT_RTX} needs neither."
        )
    return found.gpus[0]


def rtx_library() -> Path | None:
    """The library of TensorRT-RTX in its wheel; None where it was installed otherwise."""
    spec = importlib.util.find_spec(_RTX_LIBRARIES)
    folders = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return next((file for folder in folders for file in sorted(Path(folder).glob("libtensorrt_rtx.so.*"))), None)


def _advice(flavour: Flavour) -> str:
    return f"Run: pip install 'domino-deploy[{flavour}]'"


def _version(flavour: Flavour) -> str | None:
    if importlib.util.find_spec(MODULES[flavour]) is None:
        return None
    try:
        return importlib.metadata.version(flavour)
    except importlib.metadata.PackageNotFoundError:  # found by path alone
        return str(importlib.import_module(MODULES[flavour]).__version__)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _gpu(cuda: ctypes.CDLL, device: int) -> Gpu:
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = f"{_attribute(cuda, _MAJOR, device)}.{_attribute(cuda, _MINOR, device)}"
    return Gpu(name=name.value.decode(errors="replace"), compute_capability=capability, memory_bytes=memory.value)


def _attribute(cuda: ctypes.CDLL, attribute: int, device: int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value
