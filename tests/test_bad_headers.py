"""Every safetensors header that lies is refused with one CheckpointError that names the tensor, within bounded memory."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from domino_deploy.checkpoint import open_target
from tests.support.checkpoints import write_target
from tests.support.refusals import WEIGHTS, named, refusal
from tests.support.safetensors_files import edit_header, write_raw


def _tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _raw(header: Any, **options: Any) -> Callable[[Path], None]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda path: write_raw(path, text, **options)


HEADERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "an empty file": (lambda p: p.write_bytes(b""), ("only 0 bytes",)),
    "five bytes": (lambda p: p.write_bytes(b"\x05\0\0\0\0"), ("only 5 bytes",)),
    "half the data": (lambda p: os.truncate(p, p.stat().st_size // 2), ("data_offsets", "bytes of data")),
    "the last byte gone": (lambda p: os.truncate(p, p.stat().st_size - 1), ("data_offsets",)),
    "data after the last tensor": (lambda p: os.truncate(p, p.stat().st_size + 9), ("9 bytes after", "no tensor")),
    "a header longer than the file": (_raw({}, length=1000), ("header of 1000 bytes", "only 2 bytes")),
    "a header of exabytes": (_raw({}, length=2**63), (str(2**63),)),
    "a huge header": (_raw(b"{}", data_bytes=2**35, length=2**34), ("at most 16777216 bytes", str(2**34))),
    "an html page": (lambda p: p.write_bytes(b"<!DOCTYPE html><html>Sign in</html>"), ("expected a header of",)),
    "a header that is no JSON": (_raw(b"not json"), ("(header)", "begins with '{'")),
    "a header that is a list": (_raw([1]), ("(header)", "found b'[1]'")),
    "a tensor named twice": (_raw(b'{"a": {}, "a": {}}'), ("duplicate key(s) 'a'",)),
    "an entry that is no object": (_raw({"a": 3}), ("'a': expected dtype, shape and data_offsets",)),
    "an entry with a field too many": (
        _raw({"a": {**_tensor([1], 0, 4), "extra": 1}}, data_bytes=4),
        ("'a': expected dtype, shape and data_offsets",),
    ),
    "an unknown dtype": (_raw({"a": _tensor([1], 0, 4, "F31")}, data_bytes=4), ("'a'", "dtypes of safetensors", "'F31'")),
    "a negative size": (_raw({"a": _tensor([-1], 0, 4)}, data_bytes=4), ("'a'", "[-1]")),
    "a bool for a size": (_raw({"a": _tensor([True], 0, 4)}, data_bytes=4), ("'a'", "[True]")),
    "sizes whose product overflows": (_raw({"a": _tensor([2**62, 2**62], 0, 4)}, data_bytes=4), ("'a'", "hold 4")),
    "too many dimensions": (_raw({"a": _tensor([1] * 9, 0, 4)}, data_bytes=4), ("'a'", "at most 8 sizes")),
    "offsets beyond the file": (_raw({"a": _tensor([2], 0, 8)}, data_bytes=4), ("'a'", "within 4 bytes")),
    "offsets that fall": (_raw({"a": _tensor([1], 4, 0)}, data_bytes=4), ("'a'", "rising data_offsets")),
    "three offsets": (_raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, data_bytes=8), ("'a'", "[0, 4, 8]")),
    "a shape that takes more than its bytes": (_raw({"a": _tensor([2], 0, 4)}, data_bytes=4), ("takes 8 bytes", "hold 4")),
    "tensors that overlap": (_raw({"a": _tensor([2], 0, 8), "b": _tensor([2], 4, 12)}, data_bytes=12), ("'b' overlaps 'a' by 4 bytes",)),
    "a hole between tensors": (_raw({"a": _tensor([1], 0, 4), "b": _tensor([1], 8, 12)}, data_bytes=12), ("4 bytes between 'a' and 'b'",)),
    "a name with control characters": (_raw({"a\u001b[2J": _tensor([1], 0, 4)}, data_bytes=4), ("printable", "\\x1b")),
    "several lies": (
        _raw({"a": _tensor([2], 0, 4), "b": _tensor([1], 9, 4), "c": 1}, data_bytes=4),
        ("'a'", "'b'", "'c'"),
    ),
    "a wrong shape of the right size": (
        lambda p: edit_header(p, shape=[math.prod(load_file(p)[next(iter(load_file(p)))].shape)]),
        ("misshapen",),
    ),
}


@pytest.mark.parametrize(("damage", "items"), HEADERS.values(), ids=HEADERS)
def test_a_lying_header_is_refused_within_bounded_memory(tmp_path: Path, damage: Callable[[Path], object], items: tuple[str, ...]) -> None:
    write_target(tmp_path)
    damage(tmp_path / WEIGHTS)
    tracemalloc.start()
    message = refusal(open_target, tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert named(message, WEIGHTS if "misshapen" not in items else "", *items)
    assert peak_bytes < 2e6
