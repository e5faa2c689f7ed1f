"""The folders of a training run: refused before anything is computed, and kept from other runs while it lasts."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from domino_deploy.aside import mend, try_place
from domino_deploy.checkpoint import open_drafter
from domino_deploy.errors import CheckpointError, TrainingError
from domino_deploy.training.store_files import as_training_error

CHECKPOINT, METRICS = "checkpoint", "metrics.jsonl"  # in the work folder: the state of the run, and its measurements
_LOCK = "training.lock"


def refuse_output(output: Path, *, work: Path, overwrite: bool) -> None:
    """Stop a run that would write its drafter over something else.

    Args:
        output: where the drafter is to stand.
        work: responses, features and state of the run; replacing the output must leave them alone.
        overwrite: whether a drafter may stand there now.

    Raises:
        TrainingError: there is something, and it is no drafter or may not be replaced; the work folder lies within, or is written to
            by the run itself.
    """
    place, own = output.resolve(), work.resolve()
    if place in (own, *own.parents, own / CHECKPOINT, own / METRICS):
        raise TrainingError(
            f"{output}: expected a folder for the drafter that does not hold the work folder {work} or the run's own files, found one that "
            "does. Name another one."
        )
    if os.path.lexists(output):
        _refuse_unless_drafter(output, overwrite)


def try_output(output: Path) -> None:
    """Stop a run whose drafter could not be written in the end.

    Raises:
        TrainingError: the folder cannot be made.
    """
    try:
        try_place(output.absolute())
    except OSError as error:
        raise TrainingError(f"{output}: expected a folder that can be made for the drafter, found: {error}. Name another one.") from error


@contextmanager
def alone_in(work: Path) -> Iterator[None]:
    """While no other run trains in the work folder, which is made if needed; what a killed one left of a state is put right.

    Raises:
        TrainingError: another run does, or the folder cannot be written to.
    """
    with as_training_error(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / _LOCK).open("ab")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainingError(
                f"{work}: expected no other run that trains in this folder, found one. Wait for it or stop it, or name another folder."
            ) from error
        with as_training_error(work):
            mend(work.absolute() / CHECKPOINT)
        yield


def _refuse_unless_drafter(output: Path, overwrite: bool) -> None:
    if not overwrite:
        raise TrainingError(f"Expected a new folder for the drafter, found {output}. Name another one, or pass --force.")
    try:
        if output.is_symlink():
            raise TrainingError(f"{output}: expected a drafter to replace, found a link. Remove it, or name another folder.")
        open_drafter(output)
    except CheckpointError as error:
        raise TrainingError(f"{output}: expected a drafter to replace, found: {error} Remove it, or name another folder.") from error
