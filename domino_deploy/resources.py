"""Room on this machine: memory and disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path


def free_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that a new process could have without swapping; None where the system does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:  # not Linux
        return None
    return int(found[1]) * 1024 if found else None


def free_disk(path: Path) -> int | None:
    """Bytes free where `path` is or would be; None where the system does not say."""
    try:
        return shutil.disk_usage(existing(path)).free
    except OSError:
        return None


def are_on_one_filesystem(one: Path, other: Path) -> bool:
    """Whether two paths, there or not yet, lie on one file system, so that hard links between them are possible."""
    return existing(one).stat().st_dev == existing(other).stat().st_dev


def existing(path: Path) -> Path:
    """`path` with links followed, or the nearest folder above it that exists."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:  # false too for a name that is too long
        path = path.parent
    return path.resolve()
