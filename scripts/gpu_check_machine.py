"""First stage: what the figures of a run must name, and the bandwidth that they are compared with."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from typing import Any

from gpu_check_context import ROOT, Context

_QUERIES = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu")
_PACKAGES = ("torch", "triton", "numpy", "onnx", "onnxruntime", "transformers", "cuda-bindings", "tensorrt", "tensorrt-rtx")


def run(context: Context) -> None:
    """Notes machine, clocks before and under load, versions; bandwidth of a copy and of reading."""
    context.note(machine=machine(context), versions=versions(), clocks_idle=clocks(), sources_sha256=sources_sha256())
    context.note(bandwidth=bandwidth(context), clocks_under_load=clocks())


def machine(context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {"system": platform.platform(), "architecture": platform.machine(), "python": platform.python_version()}
    if context.is_cuda:
        import torch

        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
        }
    return found


def versions() -> dict[str, str]:
    """Of the packages that are there."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def sources_sha256() -> str:
    """Of the kernels and of this check, names and contents: which code the figures are of."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "plugins").glob("*.py"), *(ROOT / "scripts").glob("gpu_check*.py")]):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def clocks() -> dict[str, str]:
    """What nvidia-smi says about the first GPU; why not, where it says nothing."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": f"no answer: {error}"}
    return dict(zip(_QUERIES, (value.strip() for value in answer.split(",")), strict=False))


def bandwidth(context: Context) -> dict[str, Any]:
    """GB/s of a large copy, bytes read and bytes written, and of a large sum, bytes read."""
    import torch

    source = torch.randint(256, (context.sizes.copy_bytes,), dtype=torch.uint8, device=context.device, generator=context.generator())
    goal, numbers = torch.empty_like(source), source.view(torch.int32)
    times = context.times({"copy": lambda: goal.copy_(source), "read": lambda: numbers.sum()})
    moved = {"copy": 2 * len(source), "read": len(source)}
    # Digits that count, not decimals: a tiny copy on a busy CPU is far below 1 GB/s, and others divide by it.
    return {f"{name}_gb_per_s": float(f"{moved[name] / times[name]['median_us'] / 1e3:.4g}") for name in moved} | {"times": times}
