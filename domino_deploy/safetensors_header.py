"""The header of a safetensors file: read and checked against the file itself, or made for a new one; weights are never read.

Format: https://huggingface.co/docs/safetensors - eight bytes of header length, a JSON header, then the data, which the
tensors must cover without hole or overlap.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_deploy.errors import CheckpointError, listed, shortened
from domino_deploy.strict_json import parse_object

# The format allows 100 MB.  A header line takes some 150 bytes, so this is room for 100 000 tensors, and it bounds memory.
MAX_HEADER_BYTES = 16 * 2**20

# Bits per element: https://github.com/huggingface/safetensors, `Dtype`.
DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}
# The data of a new file start at a multiple of this, so that a mapped file suits vector loads; the format asks for 8.
_DATA_ALIGNMENT = 64
_MAX_RANK = 8
_MAX_DIMENSION = 2**63 - 1
_ADVICE = "The file is damaged or was not written by safetensors (a Git LFS pointer, a web page?): fetch or export it again."
_MOST_PROBLEMS = 100


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies: `nbytes` bytes at absolute `offset` of `file`, under `name` in the file's header."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def header_for(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a new file, up to where the data start, and the place of each tensor in the file.

    Args:
        tensors: name -> dtype (as safetensors names it) and shape; the data follow in this order, without gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    begin = struct.pack("<Q", len(text)) + text
    return begin, {name: len(begin) + header[name]["data_offsets"][0] for name in tensors}


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file, by its name in the file.

    Raises:
        CheckpointError: truncated, too long, not a safetensors header, or a header that contradicts the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: expected a safetensors file, found only {len(prefix)} bytes. {_ADVICE}")
            (length,) = struct.unpack("<Q", prefix)
            _check_length(path, length, size)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, found: {error.strerror}. Check the checkpoint folder.") from error
    if not text.startswith(b"{"):  # the format's own rule: JSON would allow spaces before
        raise CheckpointError(f"{path} (header): expected a JSON object that begins with '{{', found {text[:20]!r}. {_ADVICE}")
    header = parse_object(text, f"{path} (header)")
    entries, problems = {}, _metadata_problems(header.pop("__metadata__", {}))
    for name, fields in header.items():
        entry = _entry(path, name, fields, data_start=8 + length, data_size=size - 8 - length)
        if isinstance(entry, TensorEntry):
            entries[name] = entry
        else:
            problems.append(entry)
        if len(problems) == _MOST_PROBLEMS:
            problems.append("perhaps more: reading ended here")
            break
    problems = problems or shortened(_coverage_problems(list(entries.values()), 8 + length, size), most=_MOST_PROBLEMS)
    if problems:
        raise CheckpointError(listed(f"{path}: the header contradicts the file", problems, _ADVICE))
    return entries


def _check_length(path: Path, length: int, size: int) -> None:
    if length > size - 8:
        raise CheckpointError(f"{path}: expected a header of {length} bytes, found only {size - 8} bytes after the length. {_ADVICE}")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: expected a header of at most {MAX_HEADER_BYTES} bytes, found {length}. {_ADVICE}")


def _metadata_problems(metadata: Any) -> list[str]:
    if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
        return []
    return [f"'__metadata__': expected an object of texts, found {repr(metadata)[:80]}"]


def _entry(path: Path, name: str, fields: Any, *, data_start: int, data_size: int) -> TensorEntry | str:
    """The entry, or what is wrong with it."""
    shown = repr(name[:200])
    if not name.isprintable() or not 0 < len(name) <= 200:
        return f"{shown}: expected a printable tensor name of at most 200 characters"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        return f"{shown}: expected dtype, shape and data_offsets"
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"{shown}: expected one of the dtypes of safetensors, found {repr(dtype)[:40]}"
    if not _are_sizes(shape) or len(shape) > _MAX_RANK:
        return f"{shown}: expected a shape of at most {_MAX_RANK} sizes, found {repr(shape)[:80]}"
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_size:
        return f"{shown}: expected rising data_offsets within {data_size} bytes of data, found {repr(offsets)[:80]}"
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    nbytes = offsets[1] - offsets[0]
    if bits != 8 * nbytes:
        return f"{shown}: {dtype} of shape {shape} takes {bits // 8} bytes, but data_offsets {offsets} hold {nbytes}"
    return TensorEntry(file=path, name=name, dtype=dtype, shape=tuple(shape), offset=data_start + offsets[0], nbytes=nbytes)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_DIMENSION for value in values)


def _coverage_problems(entries: list[TensorEntry], data_start: int, size: int) -> list[str]:
    problems, end, previous = [], data_start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset < end:
            problems.append(f"{entry.name!r} overlaps {previous} by {end - entry.offset} bytes")
        elif entry.offset > end:
            problems.append(f"{entry.offset - end} bytes between {previous} and {entry.name!r} belong to no tensor")
        end, previous = max(end, entry.offset + entry.nbytes), repr(entry.name)
    if end < size:
        problems.append(f"{size - end} bytes after {previous} belong to no tensor")
    return problems
