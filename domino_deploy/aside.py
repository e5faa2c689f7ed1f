"""Folders that are whole or absent: written under a hidden name beside their place, and renamed into it at the end."""

from __future__ import annotations

import glob
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TOKEN_BYTES = 4


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A hidden folder beside `path` to write into; it becomes `path` at the end, or disappears if the block fails.

    What stands at `path` until then is replaced, whatever it is: callers decide before whether it may be.

    Raises:
        OSError: the parent folders cannot be made or written to, or the rename fails; nothing has changed then.
    """
    made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = _hidden_sibling(path)
    except OSError:
        _remove_empty(made)
        raise
    try:
        yield aside
        _swap(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        _remove_empty(made)
        raise


def mend(path: Path) -> None:
    """Clear up after a process that was killed in `written_aside(path)`; no other may be in it now.

    What stood at `path` comes back if the process was between moving it away and moving the new folder in.
    """
    for hidden in path.parent.glob(f".{glob.escape(path.name)}-{'[0-9a-f]' * 2 * _TOKEN_BYTES}"):
        if (hidden / path.name).exists() and not path.exists():
            (hidden / path.name).rename(path)
        shutil.rmtree(hidden, ignore_errors=True)


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
    old = _hidden_sibling(path)
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


def _hidden_sibling(path: Path) -> Path:
    # Not tempfile's: its folders are private to the user, and this one will be seen.
    folder = path.parent / f".{path.name}-{secrets.token_hex(_TOKEN_BYTES)}"
    folder.mkdir()
    return folder


def _remove_empty(folders: list[Path]) -> None:
    """Undo `mkdir(parents=True)`, innermost folder first."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
