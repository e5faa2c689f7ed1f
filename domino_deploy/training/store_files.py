"""Small dealings with the files of a work folder: notes, locks, writes that end whole or not at all, errors in our own words."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from domino_deploy.errors import CheckpointError, TrainingError
from domino_deploy.strict_json import JsonObject, read_object


def read_note(path: Path) -> JsonObject:
    """The JSON object in `path`.

    Raises:
        TrainingError: it is none.
    """
    try:
        return read_object(path)
    except CheckpointError as error:
        raise TrainingError(f"{error} Or name another work folder.") from error


def write_note(path: Path, value: Mapping[str, object]) -> None:
    """`value` as JSON in `path`, whole or not at all."""
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(value) + "\n", encoding="utf-8")
    aside.rename(path)


def write_all(file: FileIO, content: bytes) -> int:
    """Write all of `content`, and say how much that was.

    A file without a buffer may take less at a time; one with a buffer would write what it holds after an error, on closing.
    """
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
    return len(content)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """While no other process is in such a block for the same folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def as_training_error(folder: Path) -> Iterator[None]:
    """Errors of the file system as what they mean for a work folder.

    Raises:
        TrainingError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{folder}: expected a work folder that can be written to, found: {error}. Free some space or mend it and run the same "
            "command again: finished samples are kept."
        ) from error
