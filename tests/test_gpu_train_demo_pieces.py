"""scripts/gpu_train_demo_pieces.py: archives are unpacked inside of their folder, with filters and without."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.scripts import loaded_script


@pytest.fixture
def script() -> ModuleType:
    return loaded_script("gpu_train_demo_pieces")


@pytest.fixture(params=["filters", "none"])
def filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the filters of Python 3.11.4 and without, as before."""
    if request.param == "none":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python has none")


def archive(*members: tuple[str, bytes]) -> tarfile.TarFile:
    """Of files by name and kind."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd" if kind == tarfile.SYMTYPE else ""
            tar.addfile(member)
    content.seek(0)
    return tarfile.open(fileobj=content)


@pytest.mark.usefixtures("filters")
def test_files_and_folders_are_unpacked(script: ModuleType, tmp_path: Path) -> None:
    with archive(("a", tarfile.DIRTYPE), ("a/b", tarfile.REGTYPE)) as tar:
        script.extract(tar, tmp_path)
    assert (tmp_path / "a" / "b").is_file()


@pytest.mark.usefixtures("filters")
@pytest.mark.parametrize(("name", "kind"), [("../out", tarfile.REGTYPE), ("a/../../out", tarfile.REGTYPE), ("link", tarfile.SYMTYPE)])
def test_what_would_leave_the_folder_is_refused(script: ModuleType, tmp_path: Path, name: str, kind: bytes) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    with archive((name, kind)) as tar, pytest.raises(script.PiecesError, match="expected files and folders inside"):
        script.extract(tar, folder)
    assert not (tmp_path / "out").exists()
    assert not list(folder.iterdir())
