"""Open a target's or a drafter's checkpoint: config.json and safetensors, checked against each other before any use.

Opening reads config.json, the index and the headers of the weight files, no weights.  What is not exactly a checkpoint of a
supported model - a tensor too many, a setting that is not honoured, a header that contradicts its file - is refused with one
`CheckpointError` that names all of it.  Hub ids and folders: `checkpoint_source.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from domino_deploy import checkpoint_tensors
from domino_deploy.checkpoint_config import target_config
from domino_deploy.checkpoint_drafter import drafter_config
from domino_deploy.checkpoint_source import file_in, resolve
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.config_fields import shown_key
from domino_deploy.errors import CheckpointError, listed, shortened
from domino_deploy.safetensors_header import TensorEntry, read_header
from domino_deploy.strict_json import JsonObject, read_object

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"

_OTHER_FORMATS = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_COMPARED_BYTES = 2**20

ConfigT = TypeVar("ConfigT", TargetConfig, DrafterConfig)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Generic[ConfigT]):
    """A checkpoint whose tensors are exactly those its config calls for.

    `source` is what the user named, `revision` the commit it stands for on the hub.  `tensors` maps the names of `model/`'s
    state dicts to places in the files of `folder`.
    """

    source: str
    folder: Path
    revision: str | None
    config: ConfigT
    raw_config: JsonObject
    tensors: Mapping[str, TensorEntry]


def open_target(source: str | Path, *, revision: str | None = None) -> Checkpoint[TargetConfig]:
    """Open a Llama, Qwen2 or Qwen3 target.

    Args:
        source: a folder or a hub id.
        revision: for hub ids only.

    Raises:
        CheckpointError: anything that keeps it from being used, all at once where it can be.
    """
    folder, commit = resolve(source, revision)
    raw, where = _read_config(folder)
    generation = read_object(file_in(folder, GENERATION_CONFIG)) if os.path.lexists(folder / GENERATION_CONFIG) else None
    config = target_config(raw, where, generation)
    entries = checkpoint_tensors.without_derived(_weights(folder))
    # A tied checkpoint may store the LM head too, provided it is the embedding once more.
    head = entries.pop(checkpoint_tensors.LM_HEAD, None) if config.tie_word_embeddings else None
    problems = checkpoint_tensors.tensor_problems(entries, checkpoint_tensors.expected_target_tensors(config), config)
    # Last: it reads both, which are of the size that config.json says only if there was no problem so far.
    if head is not None and not problems and not _same_bytes(head, entries[checkpoint_tensors.EMBEDDING]):
        problems.append(f"tie_word_embeddings is true, but {checkpoint_tensors.LM_HEAD} differs from {checkpoint_tensors.EMBEDDING}")
    _refuse(folder, problems)
    return Checkpoint(source=str(source), folder=folder, revision=commit, config=config, raw_config=raw, tensors=entries)


def open_drafter(source: str | Path, *, revision: str | None = None) -> Checkpoint[DrafterConfig]:
    """Open a Domino or plain DFlash drafter; arguments and errors as `open_target`."""
    folder, commit = resolve(source, revision)
    raw, where = _read_config(folder)
    config = drafter_config(raw, where)
    problems: list[str] = []
    entries = checkpoint_tensors.canonical_drafter_names(_weights(folder), problems)
    problems += checkpoint_tensors.tensor_problems(entries, checkpoint_tensors.expected_drafter_tensors(config), config)
    _refuse(folder, problems)
    return Checkpoint(source=str(source), folder=folder, revision=commit, config=config, raw_config=raw, tensors=entries)


def load_tensors(checkpoint: Checkpoint[ConfigT], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in `dtype` under its canonical name, one at a time, file by file."""
    from safetensors import safe_open

    for path in sorted({entry.file for entry in checkpoint.tensors.values()}):
        with safe_open(path, framework="pt") as file:
            for name, entry in checkpoint.tensors.items():
                if entry.file == path:
                    yield name, file.get_tensor(entry.name).to(dtype)


def _read_config(folder: Path) -> tuple[JsonObject, str]:
    if not os.path.lexists(folder / CONFIG):
        raise CheckpointError(f"{folder}: expected a {CONFIG}, found {_contents(folder)}. Name a folder in the layout of transformers.")
    path = file_in(folder, CONFIG)
    return read_object(path), str(path)


def _weights(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder by its name there: of the single file, or of all shards, checked against the index."""
    has_index, has_single = os.path.lexists(folder / INDEX), os.path.lexists(folder / WEIGHTS)
    if not has_index and not has_single:
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", *_OTHER_FORMATS))
        raise CheckpointError(
            f"{folder}: expected {WEIGHTS}, or {INDEX} with its shards; found {', '.join(found[:20]) or 'no weights'}. "
            "Only safetensors are read: pickle files can run code, other formats need converting. Convert the weights first."
        )
    if not has_index:
        return read_header(file_in(folder, WEIGHTS))
    index = read_object(file_in(folder, INDEX))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX}: expected a weight_map from tensor to file name, found none. Fetch the checkpoint again.")
    if has_single and WEIGHTS not in weight_map.values():
        raise CheckpointError(f"{folder}: expected {WEIGHTS} or {INDEX}, found both, and the index does not name {WEIGHTS}. Remove one.")
    return _sharded(folder, weight_map)


def _sharded(folder: Path, weight_map: Mapping[str, str]) -> dict[str, TensorEntry]:
    files = sorted(set(weight_map.values()))
    foreign = [repr(file)[:80] for file in files if not file.endswith(".safetensors")]
    if foreign:
        shown = shortened(foreign, most=20)
        raise CheckpointError(listed(f"{folder / INDEX}: expected names of .safetensors files, found", shown, "Convert the weights first."))
    shards = {file: read_header(file_in(folder, file)) for file in files}
    problems = [
        f"{shown_key(name)} is not in {file}, where the index has it" for name, file in weight_map.items() if name not in shards[file]
    ]
    for file, entries in shards.items():
        for name in entries:
            if name not in weight_map:
                problems.append(f"{name} is in {file}, but not in the index")
            elif weight_map[name] != file:
                problems.append(f"{name} is in {file}, but the index has it in {weight_map[name]}")
    if problems:
        shown = shortened(problems, most=100)
        raise CheckpointError(listed(f"{folder / INDEX}: index and shards disagree", shown, "Fetch the checkpoint again."))
    return {name: shards[file][name] for name, file in weight_map.items()}


def _same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        left = one.nbytes
        while left:
            count = min(left, _COMPARED_BYTES)
            if first.read(count) != second.read(count):
                return False
            left -= count
    return True


def _refuse(folder: Path, problems: list[str]) -> None:
    if problems:
        advice = "Use a complete checkpoint whose config.json belongs to its weights."
        raise CheckpointError(listed(f"{folder}: {len(problems)} problem(s) with the tensors", problems, advice))


def _contents(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") or "an empty folder"
