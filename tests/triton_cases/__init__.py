"""Tests of the Triton kernels that run where Triton interprets, or on a GPU.

Triton decides when it is imported whether it interprets, so `test_triton_kernels.py` runs each file in a process of its own.  On a machine
with a GPU, `pytest tests/triton_cases/*.py` runs the compiled kernels.
"""

import torch
import triton

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
# Sums are in float32 whatever the inputs' types, which are exact in it; on a GPU their order is another one.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2e-6}
