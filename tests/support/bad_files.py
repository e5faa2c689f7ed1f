"""Bad files of a checkpoint: cut short, lying headers, types that are none of weights, hostile paths, huge declared sizes."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.bad_checkpoints import CONFIG, GENERATION, INDEX, WEIGHTS, Bad, rewritten
from tests.support.safetensors_files import write_raw

SHARD = "model-00002-of-00002.safetensors"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
_BITS = {"F64": 64, "I8": 8, "I16": 16, "I32": 32, "I64": 64, "U8": 8, "U16": 16, "U32": 32, "U64": 64, "BOOL": 8, "C64": 64}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F32": 32, "F16": 16, "BF16": 16, "F4": 4, "F6_E2M3": 6}

Header = dict[str, Any]


def _split(path: Path) -> tuple[bytes, bytes]:
    """The text of a file's header, and its data."""
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return content[8:end], content[end:]


def _header(edit: Callable[[Header], object], file: str = WEIGHTS) -> Callable[[Path], None]:
    """Edit the header of a file, its data untouched."""

    def mutate(folder: Path) -> None:
        text, data = _split(folder / file)
        header = json.loads(text)
        edit(header)
        _write(folder / file, json.dumps(header).encode(), data)

    return mutate


def _write(path: Path, text: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def _relaid(edit: Callable[[Header], object], file: str = WEIGHTS) -> Callable[[Path], None]:
    """Edit names, types and shapes; offsets follow, and the data are as long as they say (and holes)."""

    def mutate(folder: Path) -> None:
        header = json.loads(_split(folder / file)[0])
        edit(header)
        end = 0
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = end, end + math.prod(entry["shape"]) * _BITS[entry["dtype"]] // 8
                entry["data_offsets"] = [start, end]
        write_raw(folder / file, json.dumps(header).encode(), data_bytes=end)

    return mutate


def _field(field: str, value: Any, name: str = NORM) -> Callable[[Path], None]:
    return _header(lambda header: header[name].update({field: value}))


# Truncated files: where the cut is, from the bytes of the header's text and of the file.
_CUTS: dict[str, Callable[[int, int], int]] = {
    "to nothing": lambda header, size: 0,
    "within the length": lambda header, size: 7,
    "behind the length": lambda header, size: 8,
    "within the header": lambda header, size: 8 + header // 2,
    "by the header's last byte": lambda header, size: 7 + header,
    "behind the header": lambda header, size: 8 + header,
    "within the data": lambda header, size: (8 + header + size) // 2,
    "by the last byte": lambda header, size: size - 1,
}


def _truncated() -> Iterator[Bad]:
    def cut(file: str, where: Callable[[int, int], int]) -> Callable[[Path], None]:
        return lambda folder: os.truncate(folder / file, where(len(_split(folder / file)[0]), (folder / file).stat().st_size))

    for label, where in _CUTS.items():
        yield Bad(f"truncated/target {label}", "target", cut(WEIGHTS, where), (f"target/{WEIGHTS}", "bytes"))
        yield Bad(f"truncated/drafter {label}", "drafter", cut(WEIGHTS, where), (f"drafter/{WEIGHTS}", "bytes"))
        yield Bad(f"truncated/shard {label}", "target", cut(SHARD, where), (f"target/{SHARD}", "bytes"), base="sharded")
    for count in (1, 4096):
        longer = cut(WEIGHTS, lambda header, size, count=count: size + count)
        yield Bad(f"truncated/target longer by {count}", "target", longer, (f"{count} bytes after", "no tensor"))
    html, lfs = b"<!DOCTYPE html><title>Sign in</title>" * 99, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    for label, content in {"an html page": html, "a Git LFS pointer": lfs, "a zip of pickles": b"PK\3\4" + bytes(9000)}.items():
        mutate = _replaced(WEIGHTS, partial(Path.write_bytes, data=content))
        yield Bad(f"truncated/{label} for a file", "target", mutate, (WEIGHTS, "expected a header of", "Git LFS pointer"))


# Lying headers: what is done to the entry of one tensor of shape [32], or to the header; what the message must name.
_LIES: dict[str, tuple[Callable[[Header], object], tuple[str, ...]]] = {
    **{
        f"shape {shape}": (lambda header, shape=shape: header[NORM].update(shape=shape), (NORM, str(shape)[:20]))
        for shape in ([31], [33], [0], [32, 2], [-32], [32.0], ["32"], [None], [True], [2**31], [2**63], [2**64 + 32], [2**32, 2**32])
    },
    **{
        f"shape {shape}": (lambda header, shape=shape: header[NORM].update(shape=shape), (NORM, "expected a shape"))
        for shape in (32, "32", None, {}, [[32]], [2**62] * 9, [1] * 1000)
    },
    **{
        f"offsets {offsets}": (lambda header, offsets=offsets: header[NORM].update(data_offsets=offsets), (NORM, str(offsets)[:20]))
        for offsets in ([], [0], [0, 64, 128], [128, 0], [-128, 0], [0.0, 128.0], [0, 2**63], [2**64, 2**64 + 128], "0", None)
    },
    "offsets one further": (lambda h: _shift(h, 1), ("offset",)),
    "offsets of another": (lambda h: h[NORM].update(data_offsets=_second(h)["data_offsets"]), (NORM,)),
    "dtype in lower case": (lambda h: h[NORM].update(dtype="f32"), (NORM, "'f32'")),
    "dtype of torch": (lambda h: h[NORM].update(dtype="torch.float32"), (NORM, "'torch.float32'")),
    "dtype of half the size": (lambda h: h[NORM].update(dtype="BF16"), (NORM, "BF16", "takes 64 bytes", "hold 128")),
    "dtype null": (lambda h: h[NORM].update(dtype=None), (NORM, "None")),
    "dtype a list": (lambda h: h[NORM].update(dtype=["F32"]), (NORM, "['F32']")),
    **{f"no {field}": (lambda h, field=field: h[NORM].pop(field), (NORM, field)) for field in ("dtype", "shape", "data_offsets")},
    "a field too many": (lambda h: h[NORM].update(compressed=True), (NORM, "expected dtype, shape and data_offsets")),
    "an entry null": (lambda h: h.update({NORM: None}), (NORM, "expected dtype, shape and data_offsets")),
    "a name of control characters": (lambda h: h.update({"\x1b]0;x\x07": h.pop(NORM)}), ("printable", "\\x1b")),
    "a name that is a lone surrogate": (lambda h: h.update({"\ud800": h.pop(NORM)}), ("printable", "\\ud800")),
    "a name of nothing": (lambda h: h.update({"": h.pop(NORM)}), ("printable", "''")),
    "a name of a megabyte": (lambda h: h.update({"n" * 2**20: h.pop(NORM)}), ("at most 200 characters",)),
    "metadata a list": (lambda h: h.update(__metadata__=["pt"]), ("__metadata__",)),
    "metadata of numbers": (lambda h: h.update(__metadata__={"format": 1}), ("__metadata__", "format")),
    "metadata nested": (lambda h: h.update(__metadata__={"format": {"a": "pt"}}), ("__metadata__", "format")),
}


def _shift(header: Header, by: int) -> None:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


def _second(header: Header) -> Header:
    return header[next(name for name in header if name not in ("__metadata__", NORM))]


def _lying() -> Iterator[Bad]:
    for label, (edit, items) in _LIES.items():
        yield Bad(f"header/{label}", "target", _header(edit), (f"target/{WEIGHTS}", *items))
    for label, change, item in (
        ("begins with a space", lambda text: b" " + text, "JSON"),
        ("begins with a byte order mark", lambda text: b"\xef\xbb\xbf" + text, "JSON"),
        ("ends with zeros", lambda text: text + bytes(8), "valid JSON"),
        ("is UTF-16", lambda text: text.decode().encode("utf-16"), "JSON"),
        ("names a tensor twice", lambda text: text.rstrip()[:-1] + b', "norm.weight": {}, "norm.weight": {}}', "'norm.weight'"),
        ("names a field twice", lambda text: text.replace(b'"shape":', b'"dtype":"I8","shape":', 1), "'dtype'"),
        ("is an array", lambda text: b"[" + text + b"]", "JSON"),
        ("is empty", lambda text: b"", "JSON"),
    ):

        def mutate(folder: Path, change: Callable[[bytes], bytes] = change) -> None:
            text, data = _split(folder / WEIGHTS)
            _write(folder / WEIGHTS, change(text), data)

        yield Bad(f"header/{label}", "drafter", mutate, (f"drafter/{WEIGHTS}", "(header)", item))


def _mistyped() -> Iterator[Bad]:
    for dtype in [dtype for dtype in _BITS if dtype not in ("F32", "F16", "BF16", "F6_E2M3")]:
        edit = _relaid(lambda header, dtype=dtype: header[NORM].update(dtype=dtype))
        yield Bad(f"dtype/target {dtype}", "target", edit, (f"mistyped: {NORM}", f"found {dtype}", "F32, F16, BF16"), base="qwen3")
    for dtype in ("I8", "F64", "F8_E4M3", "U8"):
        edit = _relaid(lambda header, dtype=dtype: [entry.update(dtype=dtype) for name, entry in header.items() if name[0] != "_"])
        items = ("mistyped: fc.weight", f"found {dtype}", "mistyped: prefix_gru.weight_hh_l0", "mistyped: norm.weight")
        yield Bad(f"dtype/drafter all {dtype}", "drafter", edit, items)
    packed = _relaid(lambda header: header["fc.weight"].update(dtype="U8", shape=[32, 32]))
    yield Bad("dtype/drafter packed nibbles", "drafter", packed, ("misshapen: fc.weight", "mistyped: fc.weight", "found U8"))
    odd = _relaid(lambda header: header[NORM].update(dtype="F6_E2M3", shape=[33]))
    yield Bad("dtype/target of broken bytes", "target", odd, (WEIGHTS, NORM, "F6_E2M3"))


# Hostile names of shards; each is what the index says.
_NAMES = (
    *("/etc/passwd", "//etc/passwd", "../target2.safetensors", "..", ".", "", "a/b.safetensors", "./" + SHARD, "a\\b.safetensors"),
    *(
        "..\\..\\b.safetensors",
        "C:b.safetensors",
        "file:b",
        "n\0.safetensors",
        "n\n.safetensors",
        "\x1b[2J",
        "\ud800",
        "\u202ecod.safetensors",
    ),
)


def _named(name: str) -> Callable[[Path], None]:
    return rewritten(INDEX, lambda index: index["weight_map"].update({NORM: name}))


def _linked(file: str, to: Callable[[Path], Path | str]) -> Callable[[Path], None]:
    """The file replaced with a link; `to` may move the file away first."""

    def mutate(folder: Path) -> None:
        goal = to(folder / file)
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(goal)

    return mutate


def _moved(path: Path) -> Path:
    return path.rename(path.parent.parent / "outside")


def _replaced(file: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda folder: [(folder / file).unlink(missing_ok=True), make(folder / file)]


def _paths() -> Iterator[Bad]:
    foreign = (INDEX, "names of .safetensors files")
    for name in _NAMES:
        said = ("plain file name", repr(name)) if name.endswith(".safetensors") else (*foreign, repr(name)[:80])
        yield Bad(f"path/shard {name!a}", "target", _named(name), said, base="sharded")
    for name in ("n" * 256, "n" * 5000, "é" * 200):
        said = ("file name", name[:50])
        yield Bad(f"path/shard of {len(name)} letters {name[0]}", "target", _named(f"{name}.safetensors"), said, base="sharded")
    yield Bad("path/shard that is the config", "target", _named(CONFIG), (*foreign, CONFIG), base="sharded")
    yield Bad("path/shard that is the index", "drafter", rewritten(INDEX, _itself), foreign, base="sharded")
    for file, base in ((CONFIG, "plain"), (WEIGHTS, "plain"), (INDEX, "sharded"), (SHARD, "sharded")):
        link = (f"target/{file}", "found a link to")
        yield Bad(f"path/{file} a link outside", "target", _linked(file, _moved), link, base=base)
        relative = _linked(file, lambda path: Path("..") / _moved(path).name)
        yield Bad(f"path/{file} a link to ..", "drafter", relative, (f"drafter/{file}", "found a link to"), base=base)
        loop = _linked(file, lambda path: path.name)
        yield Bad(f"path/{file} a link to itself", "target", loop, (file,), base=base)
        yield Bad(f"path/{file} a folder", "target", _replaced(file, Path.mkdir), (f"target/{file}", "not a regular file"), base=base)
        yield Bad(f"path/{file} a pipe", "target", _replaced(file, os.mkfifo), (f"target/{file}", "not a regular file"), base=base)
        endless = _linked(file, lambda path: "/dev/zero")
        yield Bad(f"path/{file} endless", "target", endless, (f"target/{file}", "not a regular file"), base=base)
    generation = _linked(GENERATION, lambda path: "/etc/passwd")
    yield Bad(f"path/{GENERATION} a link outside", "target", generation, (GENERATION, "found a link to /etc/passwd"))
    for label, name in {"control characters": "\x1b[2J\x07", "a lone surrogate": "\udfff", "a megabyte": "n" * 2**20}.items():
        ghost = rewritten(INDEX, lambda index, name=name: index["weight_map"].update({name: SHARD}))
        yield Bad(f"path/tensor name of {label}", "target", ghost, (INDEX, ascii(name)[1:5], SHARD), base="sharded")


def _itself(index: dict[str, Any]) -> None:
    index["weight_map"] |= dict.fromkeys(list(index["weight_map"])[:1], INDEX)


def _sparse(header: Header, data_bytes: int) -> Callable[[Path], None]:
    return lambda folder: write_raw(folder / WEIGHTS, json.dumps(header).encode(), data_bytes=data_bytes)


def _declared(length: int, size: int = 0) -> Callable[[Path], None]:
    """A header said to be of `length` bytes, in a sparse file of `size`."""
    return lambda folder: write_raw(folder / WEIGHTS, b"{}", data_bytes=size, length=length)


def _text(file: str, begin: bytes, repeated: bytes | Callable[[int], bytes], count: int, end: bytes) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        middle = repeated * count if isinstance(repeated, bytes) else b",".join(map(repeated, range(count)))
        if file == WEIGHTS:
            _write(folder / file, begin + middle + end, b"")
        else:
            (folder / file).write_bytes(begin + middle + end)

    return mutate


def _of_100_gigabytes(path: Path) -> None:
    path.touch()
    os.truncate(path, 10**11)


def _huge() -> Iterator[Bad]:
    for length in (2**63, 2**64 - 1, 2**63 - 1, 2**32, 2**40):
        yield Bad(f"huge/header of {length}", "target", _declared(length), (WEIGHTS, str(length)))
    yield Bad("huge/header of 100 GB that are there", "drafter", _declared(10**11, 10**11), (WEIGHTS, "at most", str(10**11)))
    yield Bad("huge/header of 16 MB of holes", "target", _declared(2**24, 2**30), (WEIGHTS, "(header)"))
    many = 10**11 // 128
    grown = _relaid(lambda header: header[EMBEDDING].update(shape=[many, 32]))
    yield Bad("huge/embedding of 100 GB", "target", grown, (f"misshapen: {EMBEDDING}", str(many)))
    tied = _relaid(lambda header: header.update({name: {"dtype": "F32", "shape": [many, 32]} for name in (EMBEDDING, "lm_head.weight")}))
    yield Bad("huge/embedding and tied head of 100 GB", "target", tied, (f"misshapen: {EMBEDDING}", str(many)))
    lie = _sparse({NORM: {"dtype": "F32", "shape": [25 * 10**9], "data_offsets": [0, 10**11]}}, 64)
    yield Bad("huge/100 GB in 64 bytes", "target", lie, (NORM, "within 64 bytes"))
    for shape in ([2**63 - 1] * 8, [2**32] * 2, [2**61], [2**62, 4]):
        overflow = _sparse({NORM: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}, 0)
        yield Bad(f"huge/product of {shape[:2]}, {len(shape)}", "drafter", overflow, (NORM, str(shape[0]), "hold 0"))
    for file, base in ((CONFIG, "plain"), (GENERATION, "plain"), (INDEX, "sharded"), (WEIGHTS, "plain")):
        for depth in (10**5, 8 * 10**6):
            mutate = _text(file, b'{"a": ', b"[", depth, b"]" * depth + b"}")
            yield Bad(f"huge/{file} of depth {depth}", "target", mutate, (file, "nested too deeply"), base=base)
        objects = _text(file, b"{", b'"a":{', 10**6, b"")
        yield Bad(f"huge/{file} of nested objects", "target", objects, (file, "nested too deeply"), base=base)
        if file in (CONFIG, WEIGHTS):  # 70 MB each
            mutate = _text(file, b"{", b'"k":0,', 10**7, b'"l":0}')
            yield Bad(f"huge/{file} of 10 million keys", "target", mutate, (file, "at most", "bytes"), base=base)
        digits = _text(file, b'{"a": ', b"9", 10**6, b"}")
        yield Bad(f"huge/{file} with a million digits", "target", digits, (file, "valid JSON"), base=base)
        if file != WEIGHTS:
            holes = _replaced(file, _of_100_gigabytes)
            yield Bad(f"huge/{file} of 100 GB", "target", holes, (file, "at most", str(10**11)), base=base)
    million = 10**6
    header = _text(WEIGHTS, b"{", lambda number: b'"%d":{}' % number, million, b"}")
    yield Bad("huge/header of a million entries", "target", header, (WEIGHTS, "'0'", "more"))
    valid = _text(WEIGHTS, b"{", lambda number: b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number, 250_000, b"}")
    yield Bad("huge/header of 250000 empty tensors", "drafter", valid, ("missing: fc.weight", "surplus: 0 ", "more"))
    ghosts = _text(INDEX, b'{"weight_map":{', lambda number: b'"%d":"%s"' % (number, SHARD.encode()), 300_000, b"}}")
    yield Bad("huge/index of 300000 tensors", "target", ghosts, (INDEX, f"0 is not in {SHARD}", "more"), base="sharded")
    shards = _text(INDEX, b'{"weight_map":{', lambda number: b'"%d":"%d.safetensors"' % (number, number), 500_000, b"}}")
    yield Bad("huge/index of a million shards", "target", shards, ("target/0.safetensors", "no such file"), base="sharded")


FILES: tuple[Bad, ...] = (*_truncated(), *_lying(), *_mistyped(), *_paths(), *_huge())
