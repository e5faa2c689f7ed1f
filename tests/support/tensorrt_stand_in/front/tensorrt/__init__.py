"""`import tensorrt` over NVIDIA's bindings and the stand-in libraries of TENSORRT_STAND_IN; for a test's child process.

Builder raises TypeError.  Runtime must not be touched: without a driver it wraps a null pointer, and its first use ends the process.
"""

import ctypes
import os
from pathlib import Path

for _name in ("libnvinfer", "libnvonnxparser", "libnvinfer_plugin"):
    (_library,) = Path(os.environ["TENSORRT_STAND_IN"]).glob(f"{_name}.so.*")
    ctypes.CDLL(str(_library), mode=ctypes.RTLD_GLOBAL)

import tensorrt_bindings as _bindings  # noqa: E402
from tensorrt_bindings import *  # noqa: E402, F403

__version__ = _bindings.__version__
__path__ = [*__path__, *_bindings.__path__]  # noqa: F405 (every package has one); where `tensorrt.plugin` is
