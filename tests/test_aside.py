"""Folders written aside: whole or absent, and what a killed process left is cleared up by the next one, never a living one's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from domino_deploy import aside
from domino_deploy.aside import mend, try_place, written_aside

# A process that writes aside to argv[1] and is told by argv[2] what to do there.
_WRITER = """
import os, shutil, signal, sys, time
from pathlib import Path
from domino_deploy import aside

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

path, how = Path(sys.argv[1]), sys.argv[2]
rename = Path.rename
if how == "between":  # the renames: the old folder is away, the new one not yet in
    Path.rename = lambda self, other: die() if other == path else rename(self, other)
if how == "last":  # the new folder is in, the old one not yet removed
    aside.shutil.rmtree = die
with aside.written_aside(path) as folder:
    (folder / "which").write_text("new")
    (folder / path.name).mkdir()  # as a bundle called `target` holds a folder `target`
    print("writing", flush=True)
    if how == "while":
        time.sleep(600)
"""


@contextmanager
def writer(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """The process, once it has begun to write; killed at the end."""
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(path), how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        try:
            yield process
        finally:
            process.kill()


def kill_one(path: Path, how: str) -> None:
    with writer(path, how) as process:
        if how == "while":
            process.kill()
        assert process.wait(60) == -signal.SIGKILL


def place(tmp_path: Path, which: str | None = None) -> Path:
    """A path to write to, whose name needs escaping in a pattern; `which` makes a folder there."""
    path = tmp_path / "the [target]"
    if which:
        path.mkdir()
        (path / "which").write_text(which)
    return path


def write(path: Path, which: str = "next") -> None:
    with written_aside(path) as folder:
        (folder / "which").write_text(which)


class TestAfterAKill:
    @pytest.mark.parametrize("clear", [mend, try_place], ids=["mend", "try_place"])
    def test_what_was_being_written_is_cleared_up(self, tmp_path: Path, clear: Callable[[Path], None]) -> None:
        kill_one(place(tmp_path), "while")
        assert len(os.listdir(tmp_path)) == 1
        clear(place(tmp_path))
        assert os.listdir(tmp_path) == []

    def test_the_next_one_clears_up_and_takes_its_place(self, tmp_path: Path) -> None:
        path = place(tmp_path)
        for _ in range(2):
            kill_one(path, "while")
        write(path)
        assert os.listdir(tmp_path) == [path.name]
        assert (path / "which").read_text() == "next"

    def test_a_folder_that_had_been_moved_away_comes_back(self, tmp_path: Path) -> None:
        path = place(tmp_path, "old")
        kill_one(path, "between")
        assert not path.exists()
        mend(path)
        assert os.listdir(tmp_path) == [path.name]
        assert (path / "which").read_text() == "old"

    def test_a_folder_that_had_been_replaced_goes(self, tmp_path: Path) -> None:
        path = place(tmp_path, "old")
        kill_one(path, "last")
        assert len(os.listdir(tmp_path)) == 2
        mend(path)
        assert os.listdir(tmp_path) == [path.name]
        assert (path / "which").read_text() == "new"

    def test_what_stands_there_now_is_not_replaced_by_what_was_moved_away(self, tmp_path: Path) -> None:
        path = place(tmp_path, "old")
        kill_one(path, "between")
        path.symlink_to("nowhere")  # the user's, meanwhile; a dangling link is something too
        mend(path)
        assert os.listdir(tmp_path) == [path.name]
        assert path.is_symlink()


class TestALivingOne:
    def test_keeps_its_folder(self, tmp_path: Path) -> None:
        path = place(tmp_path)
        with writer(path, "while"):
            mend(path)
            write(path)
            hidden = [name for name in os.listdir(tmp_path) if name != path.name]
            assert len(hidden) == 1
            assert (tmp_path / hidden[0] / "which").read_text() == "new"
        mend(path)
        assert os.listdir(tmp_path) == [path.name]

    def test_keeps_its_folder_from_another_thread_of_its_process(self, tmp_path: Path) -> None:
        path = place(tmp_path)
        with written_aside(path) as folder:
            (folder / "which").write_text("mine")
            thread = threading.Thread(target=mend, args=[path])
            thread.start()
            thread.join()
        assert (path / "which").read_text() == "mine"

    def test_keeps_what_it_moved_away(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, rename, seen = place(tmp_path, "old"), Path.rename, []

        def mending(self: Path, other: Path) -> Path:
            if other == path:
                mend(path)
                seen.append(path.exists())
            return rename(self, other)

        monkeypatch.setattr(Path, "rename", mending)
        write(path)
        assert seen == [False]
        assert (path / "which").read_text() == "next"
        assert os.listdir(tmp_path) == [path.name]

    def test_takes_another_name_when_its_folder_is_cleared_up_before_it_is_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, mkdir = place(tmp_path), Path.mkdir
        cleared: list[Path] = []

        def cleared_at_once(self: Path, *args: object, **options: object) -> None:
            mkdir(self, *args, **options)  # type: ignore[arg-type]
            if self != tmp_path and not cleared:
                cleared.append(self)
                mend(path)

        monkeypatch.setattr(Path, "mkdir", cleared_at_once)
        write(path)
        assert not cleared[0].exists()
        assert (path / "which").read_text() == "next"
        assert os.listdir(tmp_path) == [path.name]

    def test_leaves_no_lock_behind(self, tmp_path: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        write(place(tmp_path, "old"))
        assert len(os.listdir("/proc/self/fd")) == before


class TestOthersFolders:
    def test_of_similar_names_are_left_alone(self, tmp_path: Path) -> None:
        others = [".the [target]-x", ".the [target]-0badf00", ".the [target]-0badf00d-0badf00d", ".the t-0badf00d", ".other-0badf00d"]
        for name in others:
            (tmp_path / name).mkdir()
        (tmp_path / ".the [target]-00000000").write_text("a file")
        (tmp_path / ".the [target]-00000001").symlink_to(tmp_path / others[0])
        mend(place(tmp_path))
        assert sorted(os.listdir(tmp_path)) == sorted([*others, ".the [target]-00000000", ".the [target]-00000001"])


def test_without_locks_nothing_is_cleared_up_and_folders_are_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place(tmp_path, "old")
    kill_one(path, "while")
    monkeypatch.setattr(aside, "fcntl", None)
    write(path)
    assert (path / "which").read_text() == "next"
    assert len(os.listdir(tmp_path)) == 2


def test_a_failure_leaves_what_was_there_and_no_new_parents(tmp_path: Path) -> None:
    path = place(tmp_path, "old")
    for there in (path, tmp_path / "new" / "parents" / "folder"):
        with pytest.raises(ZeroDivisionError), written_aside(there):
            raise ZeroDivisionError
    assert os.listdir(tmp_path) == [path.name]
    assert (path / "which").read_text() == "old"
