"""The Triton kernels compute what the references say: each file of `triton_cases`, interpreted, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra tensorrt is not installed")

ROOT = Path(__file__).parent.parent
CASES = sorted(path.name for path in (ROOT / "tests" / "triton_cases").glob("[a-z]*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels(name):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"tests/triton_cases/{name}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env={**environment, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
