"""Files that travel in pieces: a tar archive cut at a size, checked by hash when it is put together; token ids packed small."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

_BUFFER = 2**20


class PiecesError(Exception):
    """Pieces that are missing, damaged or of different archives."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Prompts and their responses as token ids, one kind each; responses are empty before regeneration."""

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    kinds: Sequence[str]


def cut(files: Mapping[str, Path], folder: Path, name: str, piece_bytes: int) -> list[Path]:
    """Write `folder`/NAME.0, NAME.1, ... and NAME.json, which states each piece's size and sha256.

    They are copied aside (.part) and renamed together, so that an earlier archive of the same name is whole until then.

    Args:
        files: name in the archive -> file or folder (byte code is left out).
        folder: made if it does not exist.
        name: of the archive.
        piece_bytes: largest piece.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Not in `folder`: a run that is stopped here must not leave half a file among those that are brought back.
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "archive.tar"
        with tarfile.open(archive, "w") as tar:
            for inner, path in files.items():
                tar.add(path, arcname=inner, filter=lambda member: None if "__pycache__" in member.name else member)
        size = archive.stat().st_size
        count = -(-size // piece_bytes)
        names = [f"{name}.{number}" for number in range(count)]
        with archive.open("rb") as source:
            pieces = [{"file": piece, **_copy(source, Path(scratch) / piece, -(-size // count))} for piece in names]
        manifest = json.dumps({"bytes": size, "pieces": pieces}, indent=2) + "\n"
        (Path(scratch) / f"{name}.json").write_text(manifest, encoding="utf-8")
        files_made = [*names, f"{name}.json"]
        for file in files_made:
            shutil.copyfile(Path(scratch) / file, folder / f"{file}.part")
    for old in set(_pieces_in(folder, name)) - set(names):
        (folder / old).unlink()
    for file in files_made:
        os.replace(folder / f"{file}.part", folder / file)
    return [folder / piece for piece in names]


def spread(made: Sequence[Path], manifest: Path) -> list[Path]:
    """Move the pieces of `cut`, each with the manifest, into folders carry-0, carry-1, ... beside them; returns these."""
    folders = [manifest.with_name(f"carry-{number}") for number in range(len(made))]
    for piece, carried in zip(made, folders, strict=True):
        carried.mkdir()
        shutil.copyfile(manifest, carried / manifest.name)
        piece.rename(carried / piece.name)
    manifest.unlink()
    return folders


def missing(folder: Path, name: str) -> list[str]:
    """Pieces of the archive that are not anywhere under `folder` yet.

    Raises:
        PiecesError: no manifest, or pieces that are not what it states.
    """
    manifest = _manifest(folder, name)
    wrong = []
    absent = []
    for piece in manifest["pieces"]:
        path = _find(folder, piece["file"])
        if path is None:
            absent.append(piece["file"])
        elif (found := path.stat().st_size) != piece["bytes"]:
            wrong.append(f"{path}: expected {piece['bytes']} bytes, found {found}")
        else:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != piece["sha256"]:
                wrong.append(f"{path}: expected sha256 {piece['sha256']}, found {digest}")
    if wrong:
        raise PiecesError("\n".join([f"{name}: {len(wrong)} damaged piece(s). Carry them again.", *wrong]))
    return absent


def join(folder: Path, name: str, output: Path) -> Path:
    """Unpack the archive whose pieces lie anywhere under `folder` into `output`; returns it.

    Raises:
        PiecesError: pieces are missing or damaged.
    """
    absent = missing(folder, name)
    if absent:
        raise PiecesError(f"{name}: expected all pieces under {folder}, found none of these: {', '.join(absent)}. Carry them first.")
    output.mkdir(parents=True, exist_ok=True)
    archive = output / f"{name}.tar.part"
    with archive.open("wb") as target:
        for piece in _manifest(folder, name)["pieces"]:
            path = _find(folder, piece["file"])
            assert path is not None
            with path.open("rb") as source:
                shutil.copyfileobj(source, target, _BUFFER)
    with tarfile.open(archive) as tar:
        extract(tar, output)
    archive.unlink()
    return output


def extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Unpack files and folders, none of which may leave `folder`.

    Raises:
        PiecesError: others are in the archive.
    """
    if hasattr(tarfile, "data_filter"):
        try:
            tar.extractall(folder, filter="data")
        except tarfile.FilterError as error:
            raise PiecesError(f"expected files and folders inside of the archive's own, found another: {error}") from error
        return
    # Python before 3.11.4, as Debian 12 has it, knows no filters.
    for member in tar.getmembers():
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise PiecesError(f"expected files and folders inside of the archive's own, found another: {member.name!r}")
    tar.extractall(folder)


def pack_texts(texts: Texts, path: Path) -> None:
    """Token ids as one compressed array: some 1.3 bytes a token."""
    ids = [token for pair in zip(texts.prompts, texts.responses, strict=True) for row in pair for token in row]
    narrow = np.uint16 if max(ids, default=0) < 2**16 else np.uint32
    with path.open("wb") as file:  # given a path, numpy would add an ending
        np.savez_compressed(
            file,
            token_ids=np.array(ids, dtype=narrow),
            prompt_lengths=np.array([len(row) for row in texts.prompts], dtype=np.uint32),
            response_lengths=np.array([len(row) for row in texts.responses], dtype=np.uint32),
            kinds=np.array(texts.kinds, dtype=np.str_),
        )


def unpack_texts(path: Path) -> Texts:
    """What `pack_texts` wrote."""
    with np.load(path) as arrays:
        ids = arrays["token_ids"].tolist()
        lengths = np.stack([arrays["prompt_lengths"], arrays["response_lengths"]], axis=1).flatten()
        kinds = arrays["kinds"].tolist()
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    rows = [tuple(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return Texts(prompts=rows[0::2], responses=rows[1::2], kinds=kinds)


def _copy(source: IO[bytes], target: Path, size: int) -> dict[str, object]:
    """At most `size` bytes of `source`, from where it stands."""
    digest, left = hashlib.sha256(), size
    with target.open("wb") as file:
        while left and (block := source.read(min(_BUFFER, left))):
            digest.update(block)
            file.write(block)
            left -= len(block)
    return {"bytes": size - left, "sha256": digest.hexdigest()}


def _manifest(folder: Path, name: str) -> dict[str, Any]:
    path = _find(folder, f"{name}.json")
    if path is None:
        raise PiecesError(f"{name}: expected {name}.json under {folder}, found none. Carry a piece with its manifest, or name the folder.")
    return json.loads(path.read_text(encoding="utf-8"))


def _find(folder: Path, file: str) -> Path | None:
    return next(iter(sorted(folder.rglob(file))), None)


def _pieces_in(folder: Path, name: str) -> list[str]:
    return [path.name for path in folder.glob(f"{name}.*") if path.suffix[1:].isdigit()]
