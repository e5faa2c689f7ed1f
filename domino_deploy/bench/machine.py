"""The machine and the versions that figures belong to."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_PACKAGES = ("domino-deploy", "onnxruntime", "numpy")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """cores: physical ones; threads: what the system can run at once; None where it does not say."""

    cpu: str
    cores: int | None
    threads: int | None
    memory_bytes: int | None
    os: str

    def __str__(self) -> str:
        cores = "" if self.cores is None else f", {self.cores} cores"
        threads = "" if self.threads is None else f", {self.threads} threads"
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / 2**30:.0f} GiB"
        return f"{self.cpu}{cores}{threads}{memory}, {self.os}"


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """What the operating system says of the machine; on Linux, /proc/cpuinfo."""
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return Machine(
        cpu=model[1].strip() if model else platform.processor() or platform.machine(),
        cores=_physical_cores(text),
        threads=os.cpu_count(),
        memory_bytes=_memory_bytes(),
        os=f"{platform.system()} {platform.release()}",
    )


def versions() -> dict[str, str]:
    """Python and the packages that decode."""
    return {"python": platform.python_version()} | {package: metadata.version(package) for package in _PACKAGES}


def _physical_cores(cpuinfo: str) -> int | None:
    """Distinct (physical id, core id) pairs; virtual machines may show none."""
    sockets = re.findall(r"^physical id\s*: (\d+)$", cpuinfo, re.MULTILINE)
    cores = re.findall(r"^core id\s*: (\d+)$", cpuinfo, re.MULTILINE)
    return len(set(zip(sockets, cores, strict=True))) if cores and len(sockets) == len(cores) else None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not POSIX, or the name is unknown there
        return None
