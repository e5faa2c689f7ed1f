"""Packs TensorRT-RTX for a machine without a network: library, parser and bindings as one archive in pieces that fit a call.

The wheels are NVIDIA's and proprietary: they come from the user's own package index and are carried, never kept in the repository.
"""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import gpu_train_demo_pieces as pieces
from gpu_train_demo import CALL_BYTES, LARGEST_PIECE, MIB, ROOT, SMALLEST_PIECE, tree_bytes

NAME = "tensorrt-rtx"
WHEELS = ("tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13", "tensorrt-rtx")
PYTHON = "3.12"  # of the machine that is lent
PLATFORM = "manylinux_2_28_x86_64"
_FOLDERS = ("tensorrt_rtx_libs/", "tensorrt_rtx_bindings/", "tensorrt_rtx/")
# x86 code packs better through its own filter; the dictionary spans the whole library (61 MiB of 243 MB, three minutes).
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**28}]


def pack(folder: Path, *, call_bytes: int = CALL_BYTES) -> list[str]:
    """Write `folder`/carry-0, carry-1, ... and return the calls to make, as text.

    Raises:
        SystemExit: a working tree that leaves no room, or wheels that the index does not have.
    """
    tree = tree_bytes()
    piece_bytes = min(LARGEST_PIECE, call_bytes - tree - MIB)
    if piece_bytes < SMALLEST_PIECE:
        raise SystemExit(
            f"expected a working tree well below {call_bytes / MIB:.0f} MiB, found {tree / MIB:.1f} MiB. Move large files to build/."
        )
    with tempfile.TemporaryDirectory() as scratch:
        wheels = download(Path(scratch))
        made = pack_wheels(wheels, folder, piece_bytes)
    return calls(made)


def download(folder: Path) -> list[Path]:
    """The wheels for the lent machine's Python, whatever runs here."""
    version = ["--python-version", PYTHON, "--implementation", "cp", "--platform", PLATFORM, "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    constrained = ["--constraint", str(ROOT / "constraints.txt")]
    for name in WHEELS[:2]:
        if subprocess.run([*command, *constrained, *version, name], check=False).returncode:
            raise SystemExit(f"expected pip to find {name} for Python {PYTHON} on {PLATFORM}, found none. Say which index has it.")
    return sorted(folder.glob("*.whl"))


def pack_wheels(wheels: Sequence[Path], folder: Path, piece_bytes: int) -> list[Path]:
    """The libraries and modules of the wheels as `folder`/carry-0, carry-1, ...; returns these folders."""
    for old in folder.glob("carry-*"):
        shutil.rmtree(old)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        site, archive = Path(scratch) / "site", Path(scratch) / f"{NAME}.tar.xz"
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(site, [name for name in opened.namelist() if name.startswith(_FOLDERS)])
        with lzma.open(archive, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
            for path in sorted(site.iterdir()):
                tar.add(path, arcname=path.name)
        made = pieces.cut({archive.name: archive}, folder, NAME, piece_bytes)
    return pieces.spread(made, folder / f"{NAME}.json")


def unpack(carried: Path, folder: Path) -> Path:
    """What `pack_wheels` packed, in `folder`, which is returned.

    Raises:
        PiecesError: pieces that are missing or damaged.
    """
    archive = pieces.join(carried, NAME, folder) / f"{NAME}.tar.xz"
    with lzma.open(archive) as packed, tarfile.open(fileobj=packed) as tar:
        pieces.extract(tar, folder)
    archive.unlink()
    return folder


def calls(folders: Sequence[Path]) -> list[str]:
    """The calls of the `run` tool, in order: the whole check goes with the first piece, the stage that needs all with the last."""
    lines = []
    for number, folder in enumerate(folders):
        is_last = number == len(folders) - 1
        only = "" if number == 0 else " --stages machine,tensorrt_rtx --minutes 2" if is_last else None
        command = "true" if only is None else f"bash scripts/gpu_check --carried {os.path.relpath(folder.parent, ROOT)} --out $OUT{only}"
        carry = os.path.relpath(folder, ROOT)
        lines.append(
            f'call {number + 1} of {len(folders)}: command "{command}", carry ["{carry}"], timeout_s {540 if number == 0 else 150}'
        )
    return [*lines, "then here: scripts/gpu_check --render GPU_CHECK_JSON...   (of each call, in order)"]
