"""What `doctor` looks at: the machine, Python and the installed packages.  Collected here, judged in `doctor.py`.

Versions come from the packages' metadata: none is imported, so a broken one does no harm.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from domino_deploy.bench.machine import this_machine
from domino_deploy.resources import free_disk, free_memory

# Of /proc/cpuinfo -> what kernels make of it.
CPU_FLAGS: Mapping[str, str] = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 bf16",
    "amx_tile": "AMX",
    "amx_int8": "AMX int8",
    "amx_bf16": "AMX bf16",
    "asimddp": "Arm dot product",
    "i8mm": "Arm int8 matrix product",
    "bf16": "Arm bf16",
}
# Everything that a part of the project imports or will, in any extra.
PACKAGES = (
    "domino-deploy",
    "click",
    "cuda-bindings",
    "gguf",
    "h11",
    "huggingface-hub",
    "jinja2",
    "llguidance",
    "matplotlib",
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxscript",
    "prometheus-client",
    "pydantic",
    "rich",
    "safetensors",
    "starlette",
    "tensorrt",
    "tensorrt-rtx",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
)
# The CUDA build brings the same module under another name.
STAND_INS: Mapping[str, str] = {"onnxruntime": "onnxruntime-gpu"}
_SMI_FIELDS = ("name", "driver_version", "memory.total", "compute_cap")
_SMI_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One line of nvidia-smi."""

    name: str
    driver: str
    memory_bytes: int | None
    compute_capability: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """None where the system does not say.

    cores: physical ones; cpu_flags: those of `CPU_FLAGS` that it has, in our words; free_disk_bytes: at the current folder.
    """

    os: str
    architecture: str
    cpu: str
    cpu_flags: tuple[str, ...]
    cores: int | None
    threads: int | None
    memory_bytes: int | None
    free_memory_bytes: int | None
    free_disk_bytes: int | None
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the checks of `doctor.py` judge.

    packages: version, or None where one is not installed; requirements: of domino-deploy, as its metadata states them;
    torch_requirements: of the installed torch, whose CUDA builds name the one triton they work with.
    """

    machine: Machine
    python: str
    packages: Mapping[str, str | None]
    requirements: tuple[str, ...]
    torch_requirements: tuple[str, ...] = ()

    def installed(self, package: str) -> str | None:
        """Version of a package, or of what stands in for it."""
        return self.packages.get(package) or self.packages.get(STAND_INS.get(package, package))


def collect() -> Facts:
    """The facts of this machine and this environment."""
    return Facts(
        machine=_machine(),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        requirements=_requirements("domino-deploy"),
        torch_requirements=_requirements("torch"),
    )


def cpu_flags(cpuinfo: str) -> tuple[str, ...]:
    """Those of `CPU_FLAGS` that a text in the format of /proc/cpuinfo lists."""
    found = re.search(r"^(?:flags|Features)\s*: (.+)$", cpuinfo, re.MULTILINE)
    names = set(found[1].split()) if found else set()
    return tuple(words for name, words in CPU_FLAGS.items() if name in names)


def gpus_of(listing: str) -> tuple[Gpu, ...]:
    """GPUs of nvidia-smi's answer to a query of name, driver, memory in MiB and compute capability as CSV."""
    gpus = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(_SMI_FIELDS):
            name, driver, mebibytes, capability = fields
            memory = int(mebibytes) * 2**20 if mebibytes.isdecimal() else None
            gpus.append(Gpu(name=name, driver=driver, memory_bytes=memory, compute_capability=capability))
    return tuple(gpus)


def _machine() -> Machine:
    found = this_machine()
    return Machine(
        os=found.os,
        architecture=platform.machine(),
        cpu=found.cpu,
        cpu_flags=cpu_flags(_text(Path("/proc/cpuinfo"))),
        cores=found.cores,
        threads=found.threads,
        memory_bytes=found.memory_bytes,
        free_memory_bytes=free_memory(),
        free_disk_bytes=free_disk(Path()),
        gpus=_gpus(),
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""


def _gpus() -> tuple[Gpu, ...]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):  # not installed, or a driver that does not answer
        return ()
    return gpus_of(done.stdout) if done.returncode == 0 else ()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements(package: str) -> tuple[str, ...]:
    try:
        return tuple(metadata.requires(package) or ())
    except metadata.PackageNotFoundError:
        return ()
