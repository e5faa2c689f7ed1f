"""`import tensorrt` on a machine without TensorRT's libraries, for tests of plugins through NVIDIA's own Python classes.

The wheel of the bindings is NVIDIA's, with `tensorrt.plugin`; behind it lie the lean runtime's logger and plugin registry, and three
small libraries, built here, that answer for what the lean runtime lacks.  There is no builder, no parser and no driver.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.source_copy import ROOT

_HERE = Path(__file__).parent
# Where scripts/environment.sh unpacks the wheels; another folder by the environment variable.
WHEELS = Path(os.environ.get("TENSORRT_LEAN", ROOT / "build" / "tensorrt-lean"))


def environment(folder: Path) -> dict[str, str]:
    """The environment of a child process that can `import tensorrt`; its libraries are built in `folder`.

    Without the wheels the test is skipped, and fails on CI.
    """
    try:
        (runtime,) = (WHEELS / "tensorrt_lean_libs").glob("libnvinfer_lean.so.*")
    except ValueError:
        reason = (
            f"needs tensorrt_cu13_bindings and tensorrt_lean_cu13_libs in {WHEELS}, as scripts/test puts them there: "
            "pip install --no-deps --target build/tensorrt-lean PACKAGE==VERSION"
        )
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    major = runtime.suffix
    for source in sorted(_HERE.glob("*.c")):
        name = f"{source.stem}.so{major}"
        linked = ["-Wl,--no-as-needed", str(runtime), f"-Wl,-rpath,{runtime.parent}"] if source.stem == "libnvinfer" else []
        command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source), *linked]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    path = os.pathsep.join(str(entry) for entry in (_HERE / "front", WHEELS, ROOT, os.environ.get("PYTHONPATH", "")) if str(entry))
    child = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**child, "TENSORRT_STAND_IN": str(folder), "PYTHONPATH": path}
