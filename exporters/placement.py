"""Which files of a checkpoint a bundle takes as they are, and which it converts; reads headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from domino_deploy.bundle import DRAFT_VOCAB
from domino_deploy.checkpoint import Checkpoint
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import CheckpointError
from domino_deploy.precision import Dtype, Precision
from domino_deploy.safetensors_header import TensorEntry
from domino_deploy.stored_weights import DTYPES, check_whole_blocks, stored_bytes, wanted_dtype

AnyCheckpoint = Checkpoint[TargetConfig] | Checkpoint[DrafterConfig]


class Placement(StrEnum):
    """How files whose tensors all stay as they are come into a bundle.

    LINK: hard links, no byte is written; a copy where the file system refuses.  Whoever writes into such a file of the source
    afterwards writes into the bundle as well (its hash tells), and onnx's own loader refuses linked files.  COPY: copies.
    """

    LINK = "link"
    COPY = "copy"


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """One weight file of a source and the tensors in it, canonical name -> entry and type in the bundle."""

    source: Path
    tensors: Mapping[str, tuple[TensorEntry, Dtype]]

    @property
    def is_unchanged(self) -> bool:
        return all(DTYPES.get(entry.dtype) is dtype for entry, dtype in self.tensors.values())

    def converted_bytes(self, precision: Precision) -> int:
        """Size of the tensors once converted, without the header."""
        return sum(stored_bytes(entry.shape, dtype, precision) for entry, dtype in self.tensors.values())


def file_plans(checkpoint: AnyCheckpoint, precision: Precision) -> list[FilePlan]:
    """The weight files of a checkpoint, in order of their names.

    Raises:
        RequestError: a matrix that is to be quantised has an input axis that is no whole number of blocks.
        CheckpointError: a file has a name that a bundle gives to another.
    """
    files = sorted({entry.file for entry in checkpoint.tensors.values()})
    if any(file.name == DRAFT_VOCAB for file in files):
        raise CheckpointError(
            f"{checkpoint.folder}: expected weight files by other names than {DRAFT_VOCAB}, which bundles use themselves, found one. "
            "Rename it, in the index too."
        )
    wanted = wanted_dtypes(checkpoint, precision)
    quantised = {name: checkpoint.tensors[name].shape[1] for name, dtype in wanted.items() if dtype.is_quantised}
    check_whole_blocks(quantised, precision.block_size)
    return [
        FilePlan(source=file, tensors={name: (entry, wanted[name]) for name, entry in checkpoint.tensors.items() if entry.file == file})
        for file in files
    ]


def wanted_dtypes(checkpoint: AnyCheckpoint, precision: Precision) -> dict[str, Dtype]:
    """The type in which a bundle stores each tensor."""
    return {name: wanted_dtype(name, DTYPES[entry.dtype], checkpoint.config, precision) for name, entry in checkpoint.tensors.items()}
