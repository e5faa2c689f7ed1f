"""What an export will do, from the opened checkpoints' headers alone: files, bytes, room, memory, time.

Files and bytes are exact but for the graphs; memory and time are estimates from figures measured on one machine (below).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from domino_deploy.bundle import DRAFT_VOCAB, DRAFTER_FOLDER, TARGET_FOLDER
from domino_deploy.checkpoint import Checkpoint
from domino_deploy.checkpoint_text import check_tokenizer, tokenizer_file
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import BundleError
from domino_deploy.exporters.placement import FilePlan, Placement, file_plans
from domino_deploy.exporters.stored import PIECE_VALUES
from domino_deploy.memory_plan import draft_vocabulary_bytes
from domino_deploy.pairing import check_pairing
from domino_deploy.precision import Dtype, Precision
from domino_deploy.resources import are_on_one_filesystem, existing, free_disk, free_memory

# Measured on an AMD EPYC with 2 cores (AVX-512), random pairs in the shape of Qwen3-4B with bf16 weights, by
#     scripts/bench_export --shape qwen3-4b --dtype bfloat16 (float32, int4; --layers 4, 12)
# and, for seconds of the processor per weight, `write_weights` on the drafter's 0.59e9 weights.
_SECONDS_PER_WEIGHT = {Dtype.FLOAT32: 12e-9, Dtype.FLOAT16: 5.5e-9, Dtype.BFLOAT16: 5.5e-9, Dtype.INT8: 10.5e-9, Dtype.INT4: 11.5e-9}
_WRITTEN_PER_SECOND = 400e6
_HASHED_PER_SECOND = 600e6
_GRAPH_SECONDS, _GRAPH_SECONDS_PER_LAYER = 4.0, 0.65
_GRAPH_BYTES_PER_LAYER = 12_000  # all three graphs, configurations and manifest, over 36 + 5 layers
_PROCESS_BYTES = 520e6  # libraries and graphs
_BYTES_PER_PIECE_VALUE = 15  # a piece as it is read, as float32 and as it is written


class Way(StrEnum):
    """How a file comes into the bundle."""

    LINK = "link"
    COPY = "copy"
    CONVERT = "convert"
    NEW = "new"


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """One weight file: its name in the bundle, and bytes before and after (headers included but for converted ones)."""

    name: str
    way: Way
    source_bytes: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """What an export will do.

    other_bytes: tokenizer, graphs and manifest (estimate); free_...: None where the system does not say; peak_bytes: of the export
    without verification; verification_bytes: peak of the verification, 0 if there is none; seconds: of the export without it.
    """

    output: str
    precision: str
    pairing: dict[str, object]
    files: tuple[PlannedFile, ...]
    other_bytes: int
    free_disk_bytes: int | None
    free_memory_bytes: int | None
    peak_bytes: int
    verification_bytes: int
    seconds: float
    warnings: tuple[str, ...]

    def bytes_by(self, way: Way) -> int:
        """Bytes of weights that come into the bundle in one way."""
        return sum(file.bytes for file in self.files if file.way is way)

    @property
    def written_bytes(self) -> int:
        """Bytes that the export writes: all but what is linked."""
        return sum(file.bytes for file in self.files if file.way is not Way.LINK) + self.other_bytes

    @property
    def fits(self) -> bool:
        """Whether the disk has room, as far as is known."""
        return self.free_disk_bytes is None or self.written_bytes <= self.free_disk_bytes

    def to_dict(self) -> dict[str, Any]:
        """For JSON, sums included."""
        sums = {f"{way}_bytes": self.bytes_by(way) for way in Way}
        return {**asdict(self), **sums, "written_bytes": self.written_bytes, "fits": self.fits}

    def lines(self) -> Iterator[str]:
        """For a reader."""
        yield f"bundle    {self.output}, {self.precision}"
        for way, words in (
            (Way.LINK, "linked to the checkpoints' files, nothing is written"),
            (Way.COPY, "copied as they are"),
            (Way.CONVERT, "converted"),
            (Way.NEW, "new"),
        ):
            files = [file for file in self.files if file.way is way]
            if files:
                names = ", ".join(file.name for file in files)
                yield f"weights   {_gigabytes(self.bytes_by(way))} in {len(files)} file(s) {words}: {names}"
        room = "" if self.free_disk_bytes is None else f", {_gigabytes(self.free_disk_bytes)} free"
        yield f"written   about {_gigabytes(self.written_bytes)}{room}{'' if self.fits else ': TOO LITTLE'}"
        yield f"memory    about {_gigabytes(self.peak_bytes)} at the peak"
        if self.verification_bytes:
            yield f"          about {_gigabytes(self.verification_bytes)} for the comparison with PyTorch"
        yield f"time      about {_duration(self.seconds)}{', and the comparison with PyTorch' if self.verification_bytes else ''}"
        for warning in self.warnings:
            yield f"warning   {warning}"


def plan_export(
    drafter: Checkpoint[DrafterConfig],
    target: Checkpoint[TargetConfig],
    output: str | Path,
    precision: Precision,
    placement: Placement = Placement.LINK,
    *,
    draft_vocab_size: int | None = None,
    verify: bool = True,
    verified_layers: int | None = None,
) -> ExportPlan:
    """Plan an export; nothing is written.

    Args:
        drafter, target: opened checkpoints.
        output: the bundle's folder to be.
        precision, placement: of the export.
        draft_vocab_size: tokens of the draft vocabulary; None without one.
        verify: whether the graphs will be compared with PyTorch.
        verified_layers: of the target, for the comparison; None for all.

    Raises:
        PairingError: the two do not belong together.
        RequestError: matrices that do not divide into blocks.
        CheckpointError: the target has no tokenizer, or another model's.
        BundleError: no folder can be at `output`.
    """
    output = Path(output)
    pairing = check_pairing(target.config, drafter.config)
    check_tokenizer(target.folder, target.config.vocab_size)
    _check_place(output)
    files: list[PlannedFile] = []
    seconds = 0.0
    for folder, checkpoint in ((TARGET_FOLDER, target), (DRAFTER_FOLDER, drafter)):
        for file in file_plans(checkpoint, precision):
            files.append(_planned(folder, file, precision, placement, output))
            if not file.is_unchanged:
                seconds += sum(math.prod(entry.shape) * _SECONDS_PER_WEIGHT[dtype] for entry, dtype in file.tensors.values())
    if draft_vocab_size is not None:
        size = draft_vocabulary_bytes(draft_vocab_size, drafter.config, precision)
        files.append(PlannedFile(name=f"{DRAFTER_FOLDER}/{DRAFT_VOCAB}", way=Way.NEW, source_bytes=0, bytes=size))
    layers = target.config.num_layers + drafter.config.num_layers
    other = tokenizer_file(target.folder).stat().st_size + layers * _GRAPH_BYTES_PER_LAYER
    written = sum(file.bytes for file in files if file.way is not Way.LINK)
    seconds += _GRAPH_SECONDS + layers * _GRAPH_SECONDS_PER_LAYER
    seconds += written / _WRITTEN_PER_SECOND + sum(file.bytes for file in files) / _HASHED_PER_SECOND
    converts = any(file.way is Way.CONVERT for file in files)
    peak = int(_PROCESS_BYTES) + (_BYTES_PER_PIECE_VALUE * PIECE_VALUES if converts else 0)
    plan = ExportPlan(
        output=str(output),
        precision=precision.name,
        pairing=pairing,
        files=tuple(files),
        other_bytes=other,
        free_disk_bytes=free_disk(output),
        free_memory_bytes=free_memory(),
        peak_bytes=peak,
        verification_bytes=_verification_bytes(target, drafter, files, verified_layers) if verify else 0,
        seconds=seconds,
        warnings=(),
    )
    return replace(plan, warnings=tuple(_warnings(plan, placement, verified_layers)))


def _check_place(output: Path) -> None:
    above = existing(output.parent)
    if not above.is_dir():
        raise BundleError(f"{output}: expected a folder to make it in, found the file {above}. Choose another output folder.")
    if not os.access(above, os.W_OK):
        raise BundleError(f"{output}: expected a folder that can be written to, found {above}, which cannot. Choose another output folder.")


def _planned(folder: str, file: FilePlan, precision: Precision, placement: Placement, output: Path) -> PlannedFile:
    name, size = f"{folder}/{file.source.name}", file.source.stat().st_size
    if not file.is_unchanged:
        return PlannedFile(name=name, way=Way.CONVERT, source_bytes=size, bytes=file.converted_bytes(precision))
    can_link = placement is Placement.LINK and are_on_one_filesystem(file.source, output)
    return PlannedFile(name=name, way=Way.LINK if can_link else Way.COPY, source_bytes=size, bytes=size)


def _verification_bytes(
    target: Checkpoint[TargetConfig], drafter: Checkpoint[DrafterConfig], files: list[PlannedFile], layers: int | None
) -> int:
    """Both models in float32 PyTorch, and what the bundle stores of them once more in ONNX Runtime; of a cut target its share."""
    weights = {
        owner: {name: math.prod(entry.shape) for name, entry in checkpoint.tensors.items()}
        for owner, checkpoint in ((TARGET_FOLDER, target), (DRAFTER_FOLDER, drafter))
    }
    count = sum(sum(sizes.values()) for sizes in weights.values())
    left_out = 0
    if layers is not None:
        kept = tuple(f"model.layers.{layer}." for layer in range(layers))
        left_out = sum(
            size for name, size in weights[TARGET_FOLDER].items() if name.startswith("model.layers.") and not name.startswith(kept)
        )
    share = (count - left_out) / count
    return int(_PROCESS_BYTES) + 4 * (count - left_out) + int(share * sum(file.bytes for file in files))


def _warnings(plan: ExportPlan, placement: Placement, verified_layers: int | None) -> Iterator[str]:
    if placement is Placement.LINK and plan.bytes_by(Way.COPY):
        yield "the checkpoints lie on another file system than the bundle: files are copied where they could have been linked"
    if not plan.fits:
        free = _gigabytes(plan.free_disk_bytes or 0)
        yield f"the disk has room for {free} of {_gigabytes(plan.written_bytes)}: free some, or choose another folder"
    if os.path.exists(plan.output):
        yield f"{plan.output} exists: only --force replaces it, and until then both need room"
    if plan.free_memory_bytes is None:
        return
    if plan.peak_bytes > plan.free_memory_bytes:
        yield f"the export needs about {_gigabytes(plan.peak_bytes)} of memory, {_gigabytes(plan.free_memory_bytes)} are free"
    if plan.verification_bytes > plan.free_memory_bytes:
        fewer = "fewer layers" if verified_layers is not None else "some layers only (--num-layers)"
        yield (
            f"the comparison with PyTorch needs about {_gigabytes(plan.verification_bytes)} of memory, "
            f"{_gigabytes(plan.free_memory_bytes)} are free: compare {fewer}, or none (--skip-verification)"
        )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
