"""What a target answered, kept in a work folder: lines of token ids and, beside them, the target's tapped features.

    made-for.json                          what the folder was made for; another target or other settings are refused
    responses-0.jsonl, features-0.f16      of part 0; several processes write a part each, and read all of them
    features.json                          tapped layers and width of a row; absent without features

Features are fp16 rows [tokens, width], sample after sample in the order of the part's lines, and written before the lines: whatever
interrupts a run leaves surplus rows and at most one torn line, which the next run cuts off. Lines: `sample_lines.py`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from domino_deploy.errors import TrainingError, listed
from domino_deploy.template_variables import TRAINED_WITH
from domino_deploy.training.sample_lines import line_of, read_lines
from domino_deploy.training.samples import Sample
from domino_deploy.training.store_files import as_training_error, locked, read_note, write_all, write_note

CLAIM, FEATURES = "made-for.json", "features.json"
_PART = re.compile(r"responses-(0|[1-9]\d{0,5})\.jsonl")
_FP16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class StoredSamples:
    """The samples of all parts, each prompt once.

    features: one memory-mapped file per part, fp16 [rows, width]; places: part (an index into `features`) and first row of each sample.
    """

    samples: list[Sample]
    tapped_layers: tuple[int, ...]
    features: tuple[np.ndarray, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def has_features(self) -> bool:
        return bool(self.tapped_layers)

    def rows(self, index: int) -> np.ndarray:
        """Features fp16 [L, width] of one sample, prompt and response; the last row is never meaningful."""
        part, first = self.places[index]
        return self.features[part][first : first + len(self.samples[index].token_ids)]


class SampleStore:
    """The samples of a work folder; use `SampleStore.open`.

    Args:
        folder: the work folder.
        tapped_layers: whose features are kept, () for none.
        width: of a feature row.
        part: which files `append` writes.
    """

    def __init__(self, folder: Path, tapped_layers: tuple[int, ...], width: int, part: int) -> None:
        self.folder, self.tapped_layers, self.width, self.part = folder, tapped_layers, width, part
        self._line_bytes = self._feature_bytes = 0  # of whole samples in the own part

    @classmethod
    def open(
        cls, folder: Path, *, claim: Mapping[str, object], tapped_layers: Sequence[int] = (), width: int = 0, part: int = 0
    ) -> SampleStore:
        """Open or make a work folder, and cut off what an interrupted run of this part left unfinished.

        Args:
            folder: made if needed.
            claim: what the samples depend on, as JSON values.
            tapped_layers: layers whose features are kept; () for none.
            width: of a feature row: tapped layers x width of the target.
            part: number of this process's own files.

        Raises:
            TrainingError: a folder made for something else or with other features, a damaged file, or one that cannot be written.
        """
        store = cls(folder, tuple(tapped_layers), width, part)
        with as_training_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder):
                _check_claim(folder, claim)
                store._check_features()
            store._repair()
        return store

    def answered(self) -> set[tuple[int, ...]]:
        """Prompts that any part has answered."""
        return {sample.prompt_ids for path in self._parts() for sample in read_lines(path).samples}

    def append(self, samples: Sequence[Sample], features: Sequence[np.ndarray] | None) -> None:
        """Add finished samples to the own part, all of them or, when an error is raised, none.

        Args:
            samples: what the target answered.
            features: fp16 [tokens, width] of each; None exactly if the store keeps none.

        Raises:
            TrainingError: a full disk or another error of the file system; another process writes the same part.
            ValueError: features of another number or shape.
        """
        self._check_shapes(samples, features)
        lines = b"".join(line_of(sample) for sample in samples)
        with as_training_error(self.folder), self._responses.open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._refuse_another_writer(file)
            try:
                added = self._append_features(features or ())
                write_all(file, lines)
            except BaseException:  # an interrupt too: half a batch must not stay
                file.truncate(self._line_bytes)
                if self.tapped_layers:
                    os.truncate(self._features, self._feature_bytes)
                raise
        self._line_bytes += len(lines)
        self._feature_bytes += added

    def read(self) -> StoredSamples:
        """The samples of all parts; a prompt that two parts answered counts once.

        Raises:
            TrainingError: a damaged line, or fewer feature rows than the lines speak of.
        """
        samples: list[Sample] = []
        features: list[np.ndarray] = []
        places: list[tuple[int, int]] = []
        seen: set[tuple[int, ...]] = set()
        for path in self._parts():
            found, row = read_lines(path).samples, 0
            for sample in found:
                if sample.prompt_ids not in seen:
                    samples.append(sample)
                    places.append((len(features), row))
                    seen.add(sample.prompt_ids)
                row += len(sample.token_ids)
            if self.tapped_layers and row:
                _check_rows(_features_of(path), row * self.width * _FP16_BYTES)
                features.append(np.memmap(_features_of(path), dtype=np.float16, mode="r", shape=(row, self.width)))
        return StoredSamples(samples=samples, tapped_layers=self.tapped_layers, features=tuple(features), places=tuple(places))

    def size_bytes(self) -> int:
        """What all parts take on the disk."""
        paths = [file for path in self._parts() for file in (path, _features_of(path))]
        return sum(path.stat().st_size for path in paths if path.exists())

    @property
    def _responses(self) -> Path:
        return self.folder / f"responses-{self.part}.jsonl"

    @property
    def _features(self) -> Path:
        return _features_of(self._responses)

    def _parts(self) -> list[Path]:
        found = {int(match[1]): path for path in self.folder.iterdir() if (match := _PART.fullmatch(path.name))}
        return [found[part] for part in sorted(found)]

    def _check_features(self) -> None:
        wanted, found = (self.tapped_layers, self.width), _noted_features(self.folder)
        if found == wanted:
            return
        if any(part.stat().st_size for part in self._parts()):
            raise TrainingError(
                f"{self.folder}: expected {_described(*wanted)}, found responses with {_described(*found)}. Name another folder, "
                f"ask for the same features, or remove {FEATURES} and features-*.f16 and go on without (regenerate --no-features, "
                "train --features live)."
            )
        if self.tapped_layers:
            write_note(self.folder / FEATURES, {"tapped_layers": list(self.tapped_layers), "width": self.width})
        else:
            (self.folder / FEATURES).unlink()

    def _repair(self) -> None:
        if not self._responses.exists():
            self._features.unlink(missing_ok=True)
            return
        with self._responses.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # not while another process is in the middle of adding to it
            found = read_lines(self._responses)
            if self.tapped_layers:
                self._feature_bytes = sum(len(sample.token_ids) for sample in found.samples) * self.width * _FP16_BYTES
                _check_rows(self._features, self._feature_bytes)
                if self._features.exists():
                    os.truncate(self._features, self._feature_bytes)
            file.truncate(found.whole_bytes)
            if found.lacks_newline:
                file.seek(0, os.SEEK_END)
                write_all(file, b"\n")
            self._line_bytes = found.whole_bytes + found.lacks_newline

    def _check_shapes(self, samples: Sequence[Sample], features: Sequence[np.ndarray] | None) -> None:
        expected = [(len(sample.token_ids), self.width) for sample in samples] if self.tapped_layers else None
        found = None if features is None else [rows.shape for rows in features]
        if found != expected:
            raise ValueError(f"expected features of shapes {expected}, found {found}")

    def _refuse_another_writer(self, file: FileIO) -> None:
        sizes = (file.seek(0, os.SEEK_END), self._features.stat().st_size if self._features.exists() else 0)
        if sizes[0] != self._line_bytes or (self.tapped_layers and sizes[1] != self._feature_bytes):
            raise TrainingError(
                f"{self._responses}: expected {self._line_bytes} bytes as this run left them, found {sizes[0]}. "
                "Another process writes the same part: stop one of them, or give each its own part."
            )

    def _append_features(self, features: Sequence[np.ndarray]) -> int:
        if not features:
            return 0
        with self._features.open("ab", buffering=0) as file:
            return sum(write_all(file, np.ascontiguousarray(rows, dtype=np.float16).tobytes()) for rows in features)


def read_stored(folder: Path) -> StoredSamples:
    """The samples of a work folder with the features it has, whatever it was made for.

    Raises:
        TrainingError: no such folder, no responses in it, or damaged files.
    """
    stored = None
    if folder.is_dir():
        with as_training_error(folder):
            stored = SampleStore(folder, *_noted_features(folder), part=0).read()
    if stored is None or not stored.samples:
        raise TrainingError(f"{folder}: expected responses of a target, found none. Make some with domino-deploy regenerate.")
    return stored


def _features_of(responses: Path) -> Path:
    return responses.with_name(responses.name.replace("responses", "features")).with_suffix(".f16")


def _check_claim(folder: Path, claim: Mapping[str, object]) -> None:
    path, wanted = folder / CLAIM, json.loads(json.dumps(claim))
    if not path.exists():
        write_note(path, wanted)
        return
    found = read_note(path)
    is_older = TRAINED_WITH in wanted and TRAINED_WITH not in found  # a note of an earlier version
    if is_older:
        found[TRAINED_WITH] = wanted[TRAINED_WITH]
    names = [name for name in (wanted | found) if wanted.get(name) != found.get(name)]
    if names:
        problems = [f"{name}: expected {json.dumps(wanted.get(name))}, found {json.dumps(found.get(name))}" for name in names]
        raise TrainingError(listed(f"{folder}: made for something else ({CLAIM})", problems, "Name another folder, or use its settings."))
    if is_older:
        write_note(path, found)


def _check_rows(path: Path, expected: int) -> None:
    found = path.stat().st_size if path.exists() else 0
    if found < expected:
        raise TrainingError(
            f"{path}: expected at least {expected} bytes, a row for each token of the responses, found {found}. The file was cut or "
            f"removed: remove {FEATURES} and features-*.f16 and go on without (regenerate --no-features, train --features live); the "
            "responses are kept."
        )


def _noted_features(folder: Path) -> tuple[tuple[int, ...], int]:
    """Tapped layers and row width that the folder's note states."""
    path = folder / FEATURES
    if not path.exists():
        return (), 0
    note = read_note(path)
    layers, width = note.get("tapped_layers"), note.get("width")
    if (
        isinstance(layers, list)
        and layers
        and all(type(number) is int and number >= 0 for number in (*layers, width))
        and layers == sorted(set(layers))
        and isinstance(width, int)
        and width > 0
    ):
        return tuple(layers), width
    raise TrainingError(f"{path}: expected tapped_layers and width, found {json.dumps(note)[:80]}. Remove it and features-*.f16.")


def _described(tapped_layers: tuple[int, ...], width: int) -> str:
    return f"features of layers {list(tapped_layers)} ({width} numbers a token)" if tapped_layers else "no features"
