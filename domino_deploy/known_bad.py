"""Combinations of machine and versions that are known to go wrong, each with its source: one entry of `KNOWN_BAD` and one function.

The functions are pure: facts in, what was found out, one line for each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from domino_deploy.doctor_facts import STAND_INS, Facts
from domino_deploy.requirements import Requirement, below, parse_requirement, release


class Severity(StrEnum):
    """BAD: wrong results, or something that cannot run.  NOTE: works, but is good to know."""

    BAD = "bad"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """A combination to look for.

    finds: what was found, in words, for each time it applies; advice: what to do; source: where it is reported or was measured.
    """

    name: str
    severity: Severity
    finds: Callable[[Facts], Iterable[str]]
    advice: str
    source: str


def _both_runtimes(facts: Facts) -> Iterable[str]:
    cpu, gpu = facts.packages.get("onnxruntime"), facts.packages.get("onnxruntime-gpu")
    if cpu and gpu:
        yield f"onnxruntime {cpu} and onnxruntime-gpu {gpu} share one folder; whichever came last wins"


def _no_opset_24(facts: Facts) -> Iterable[str]:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        version = facts.packages.get(name)
        if version and below(version, "1.30"):
            yield f"{name} {version}"


def _gibberish(facts: Facts) -> Iterable[str]:
    version = facts.packages.get("onnxruntime-gpu")
    if version and release(version)[:2] == (1, 24):
        yield f"onnxruntime-gpu {version}"


def _old_runtime_new_numpy(facts: Facts) -> Iterable[str]:
    runtime, numpy = facts.installed("onnxruntime"), facts.packages.get("numpy")
    if runtime and numpy and below(runtime, "1.19") and not below(numpy, "2"):
        yield f"onnxruntime {runtime} with numpy {numpy}"


def _foreign_triton(facts: Facts) -> Iterable[str]:
    """Torch's CUDA builds pin one triton; its CPU builds name none and do not care."""
    triton, torch = facts.packages.get("triton"), facts.packages.get("torch")
    pins = [parse_requirement(line) for line in facts.torch_requirements]
    for pin in pins:
        if pin is not None and pin.name == "triton" and triton and torch and not pin.allows(triton):
            yield f"torch {torch} asks for triton{pin.specifiers}, found {triton}"


def _out_of_range(facts: Facts) -> Iterable[str]:
    """Installed packages outside what domino-deploy's metadata asks for, whichever extra asks."""
    for line in facts.requirements:
        wanted = parse_requirement(line)
        if wanted is None or wanted.extra == "dev" or wanted.name == "domino-deploy":
            continue
        for name in {wanted.name, STAND_INS.get(wanted.name, wanted.name)}:
            version = facts.packages.get(name)
            if version and not wanted.allows(version):
                yield f"{name} {version}, where {_asker(wanted)} asks for {wanted.specifiers}"


def _asker(wanted: Requirement) -> str:
    return f"domino-deploy[{wanted.extra}]" if wanted.extra else "domino-deploy"


def _refuses_links(facts: Facts) -> Iterable[str]:
    version = facts.packages.get("onnx")
    if version and not below(version, "1.21"):
        yield f"onnx {version}"


def _strong_typing_only(facts: Facts) -> Iterable[str]:
    version = facts.packages.get("tensorrt")
    if version and not below(version, "11"):
        yield f"tensorrt {version}"


def _no_avx2(facts: Facts) -> Iterable[str]:
    machine = facts.machine
    if re.fullmatch(r"x86_64|AMD64", machine.architecture) and machine.cpu_flags and "AVX2" not in machine.cpu_flags:
        yield machine.cpu


def _no_integer_products(facts: Facts) -> Iterable[str]:
    flags = facts.machine.cpu_flags
    if "AVX2" in flags and not {"AVX-VNNI", "AVX-512 VNNI", "AMX int8"} & set(flags):
        yield facts.machine.cpu


KNOWN_BAD = (
    KnownBad(
        name="onnxruntime beside onnxruntime-gpu",
        severity=Severity.BAD,
        finds=_both_runtimes,
        advice="Uninstall both, then install one: the GPU package runs on the CPU too.",
        source="github.com/microsoft/onnxruntime/issues/26996",
    ),
    KnownBad(
        name="ONNX Runtime without Attention and TensorScatter of opset 24",
        severity=Severity.BAD,
        finds=_no_opset_24,
        advice="Upgrade it: pip install 'onnxruntime>=1.30'",
        source='docs/architecture.md, "One checkpoint, from safetensors to a bundle"; 1.30, 1.31.1 and 1.32 were run',
    ),
    KnownBad(
        name="Qwen3 gives gibberish on the CUDA provider",
        severity=Severity.BAD,
        finds=_gibberish,
        advice="Install another version of onnxruntime-gpu.",
        source="github.com/microsoft/onnxruntime/issues/27079",
    ),
    KnownBad(
        name="ONNX Runtime built for numpy 1 with numpy 2",
        severity=Severity.BAD,
        finds=_old_runtime_new_numpy,
        advice="Upgrade ONNX Runtime: 1.19 was the first for numpy 2.",
        source="github.com/microsoft/onnxruntime/issues/21063",
    ),
    KnownBad(
        name="a triton that is not torch's",
        severity=Severity.BAD,
        finds=_foreign_triton,
        advice="Install the triton that torch names, or let pip choose both at once.",
        source="torch's own metadata; github.com/triton-lang/triton/issues/4460",
    ),
    KnownBad(
        name="a version outside the supported range",
        severity=Severity.BAD,
        finds=_out_of_range,
        advice="Install domino-deploy again with its extras, and let pip choose the versions.",
        source="pyproject.toml",
    ),
    KnownBad(
        name="onnx refuses hard links",
        severity=Severity.NOTE,
        finds=_refuses_links,
        advice="onnx.load and onnx.checker refuse bundles made with --weights link; ONNX Runtime reads them. "
        "For onnx's own tools: export with --weights copy.",
        source="github.com/onnx/onnx/pull/7717",
    ),
    KnownBad(
        name="TensorRT without weak typing",
        severity=Severity.NOTE,
        finds=_strong_typing_only,
        advice="Precision is what the graph says; builder flags such as FP16 are gone. Bundles are typed that way.",
        source='docs.nvidia.com/deeplearning/tensorrt/latest, "Migrating from TensorRT 10.x to 11.x"',
    ),
    KnownBad(
        name="no AVX2",
        severity=Severity.NOTE,
        finds=_no_avx2,
        advice="ONNX Runtime falls back to its slowest kernels.",
        source="github.com/microsoft/onnxruntime, onnxruntime/core/mlas: kernels by instruction set",
    ),
    KnownBad(
        name="no integer dot products (VNNI)",
        severity=Severity.NOTE,
        finds=_no_integer_products,
        advice="int8 and int4 bundles save memory here, but less time than on a CPU with VNNI.",
        source="github.com/microsoft/onnxruntime, onnxruntime/core/mlas: kernels by instruction set",
    ),
)
