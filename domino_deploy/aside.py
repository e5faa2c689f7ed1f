"""Folders that are whole or absent: written under a hidden name beside their place, and renamed into it at the end.

    .NAME-xxxxxxxx        what is being written
    .NAME-xxxxxxxx-old    holds what stood at NAME while the new folder takes its place

Both carry a lock for as long as the process that made them lives, so that the next one can tell a dead one's from a living one's.
Where there are no such locks (Windows, some network file systems), what a killed process left stays there.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_TOKEN_BYTES = 4
_OLD = "-old"


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A hidden folder beside `path` to write into; it becomes `path` at the end, or disappears if the block fails.

    What stands at `path` until then is replaced, whatever it is: callers decide before whether it may be.  What a killed process
    left is cleared up first, as `mend` does.

    Raises:
        OSError: the parent folders cannot be made or written to, or the rename fails; nothing has changed then.
    """
    made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mend(path)
        with _hidden_sibling(path) as aside:
            try:
                yield aside
                _swap(aside, path)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
    except BaseException:
        _remove_empty(made)
        raise


def mend(path: Path) -> None:
    """Clear up after processes that were killed in `written_aside(path)`; those that live are left alone.

    What stood at `path` comes back if such a process was between moving it away and moving the new folder in.

    Raises:
        OSError: it cannot be moved back.
    """
    token = "[0-9a-f]" * 2 * _TOKEN_BYTES
    for suffix in (_OLD, ""):
        for hidden in path.parent.glob(f".{glob.escape(path.name)}-{token}{suffix}"):
            try:
                lock = _lock(hidden)
            except OSError:  # held by a living process, gone meanwhile, or no folder at all
                continue
            if lock is None:
                continue
            try:
                if suffix == _OLD and os.path.lexists(hidden / path.name) and not os.path.lexists(path):
                    (hidden / path.name).rename(path)
                shutil.rmtree(hidden, ignore_errors=True)
            finally:
                os.close(lock)


def try_place(path: Path) -> None:
    """Find out now what `written_aside(path)` would find out when it begins; nothing stays behind.

    Raises:
        OSError: the parent folders cannot be made or written to.
    """
    with suppress(_OnlyTried), written_aside(path):
        raise _OnlyTried


class _OnlyTried(Exception):
    pass


def _swap(aside: Path, path: Path) -> None:
    """Put `aside` in the place of `path`; what was there is removed last, and comes back if the move fails."""
    if not path.exists():
        aside.rename(path)
        return
    with _hidden_sibling(path, _OLD) as old:
        try:
            path.rename(old / path.name)
            aside.rename(path)
        except BaseException:
            if (old / path.name).exists() and not path.exists():  # another run may have put its own folder there meanwhile
                (old / path.name).rename(path)
            shutil.rmtree(old, ignore_errors=True)
            raise
        try:
            shutil.rmtree(old)
        except BaseException:  # interrupted half way: the new folder is in place, so finish
            shutil.rmtree(old, ignore_errors=True)
            raise


@contextmanager
def _hidden_sibling(path: Path, suffix: str = "") -> Iterator[Path]:
    """A new hidden folder, locked while the block lasts."""
    folder, lock = _made_and_locked(path, suffix)
    try:
        yield folder
    finally:
        if lock is not None:
            os.close(lock)


def _made_and_locked(path: Path, suffix: str) -> tuple[Path, int | None]:
    while True:
        # Not tempfile's: its folders are private to the user, and this one will be seen.
        folder = path.parent / f".{path.name}-{secrets.token_hex(_TOKEN_BYTES)}{suffix}"
        folder.mkdir()
        try:
            return folder, _lock(folder)
        except (BlockingIOError, FileNotFoundError):  # `mend` of another process came between: to it, this was a dead one's
            continue
        except OSError:  # a file system without locks; `mend` cannot lock it either
            return folder, None


def _lock(folder: Path) -> int | None:
    """An open descriptor of `folder` that holds its lock until it is closed or the process dies; None on systems without.

    Raises:
        BlockingIOError: another holds it.
        FileNotFoundError: the folder was removed meanwhile.
        OSError: no folder, or one that cannot be locked.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # flock, not lockf: it belongs to this descriptor, so two threads of one process are two as well.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_empty(folders: list[Path]) -> None:
    """Undo `mkdir(parents=True)`, innermost folder first."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
