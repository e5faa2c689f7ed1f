"""Safetensors files of any header, honest or lying; data are holes, so a 2 GB file takes no disk."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}


def write_sparse(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A valid file of zeros with these tensors."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    write_raw(path, json.dumps(header).encode(), data_bytes=end)


def write_raw(path: Path, header: bytes, *, data_bytes: int = 0, length: int | None = None) -> None:
    """A file that claims a header of `length` bytes (by default the true length) and holds `data_bytes` of zeros."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header) if length is None else length))
        file.write(header)
        file.truncate(8 + len(header) + data_bytes)


def edit_header(path: Path, **changes: Any) -> None:
    """Change fields of the first tensor's entry in place, data untouched; the header keeps its length in the file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
