"""Bundles that are damaged, hostile or none at all, and places where none can be made: a clear refusal, nothing changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from domino_deploy.bundle import MANIFEST, REQUIRED_FILES, create_bundle, open_bundle
from domino_deploy.errors import BundleError
from tests.support.bundles import change_manifest, contents, fill


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    fill(folder)
    open_bundle(folder, check_hashes=True)
    return folder


def refusal(folder: Path, *, check_hashes: bool = False) -> str:
    """The message of a refusal that changed nothing and says what to do."""
    before = contents(folder.parent)
    with pytest.raises(BundleError) as caught:
        open_bundle(folder, check_hashes=check_hashes)
    assert contents(folder.parent) == before
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert str(folder) in message
    assert "xport" in message, "what to do next is missing"
    return message


@pytest.mark.parametrize("name", REQUIRED_FILES)
def test_a_missing_file_is_named(name: str, bundle: Path) -> None:
    (bundle / name).unlink()
    assert f"{name}: missing" in refusal(bundle)


def test_all_damaged_files_are_named_at_once(bundle: Path) -> None:
    (bundle / "head.onnx").unlink()
    (bundle / "target/model.safetensors").write_text("short")
    (bundle / "tokenizer.json").unlink()
    (bundle / "tokenizer.json").mkdir()
    message = refusal(bundle)
    assert "3 problem(s)" in message
    assert "head.onnx: missing" in message
    assert "target/model.safetensors: altered: expected 35 bytes, found 5" in message
    assert "tokenizer.json: missing" in message


def test_bytes_altered_without_a_change_of_size_show_in_the_hash(bundle: Path) -> None:
    weights = bundle / "drafter/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[7] ^= 1
    weights.write_bytes(content)
    open_bundle(bundle)  # sizes alone do not tell
    message = refusal(bundle, check_hashes=True)
    assert "drafter/model.safetensors: altered: expected sha256" in message
    assert "target/model.safetensors" not in message


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        *path, last = keys
        for key in path:
            manifest = manifest[key]
        del manifest[last]

    return change


def having(value: Any, *keys: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        *path, last = keys
        for key in path:
            manifest = manifest[key]
        manifest[last] = value

    return change


FILE = {"bytes": 5, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        pytest.param(having(3, "format_version"), "expected format_version 2, found 3", id="newer format"),
        pytest.param(having("2", "format_version"), "expected format_version 2, found '2'", id="format as text"),
        pytest.param(without("format_version"), "expected format_version 2, found None", id="no format"),
        pytest.param(
            having("float16", "form", "dtype"), "form.dtype: expected float32, the precision's, found 'float16'", id="other dtype"
        ),
        pytest.param(without("graphs"), "graphs: missing", id="no graphs"),
        pytest.param(without("graphs", "head"), "graphs.head: expected head.onnx", id="no head"),
        pytest.param(having("other.onnx", "graphs", "head", "file"), "graphs.head: expected head.onnx", id="head elsewhere"),
        pytest.param(without("files", "head.onnx"), "head.onnx: not listed", id="file not listed"),
        pytest.param(having(1, "surprise"), "surprise: unknown key", id="unknown key"),
        pytest.param(having(1, "target", "surprise"), "target.surprise: unknown key", id="unknown key inside"),
        pytest.param(having([], "files"), "files: expected", id="files as a list"),
        pytest.param(having(0, "target", "head_dim"), "head_dim must be at least 1, found 0", id="config out of range"),
        pytest.param(having("llama9", "target", "family"), "target.family: expected one of llama, qwen2, qwen3", id="unknown family"),
        pytest.param(having(0, "num_speculative_tokens"), "num_speculative_tokens: expected 1 to 6", id="no speculation"),
        pytest.param(having(7, "num_speculative_tokens"), "num_speculative_tokens: expected 1 to 6", id="too much speculation"),
        pytest.param(having(FILE, "files", "../outside.txt"), "../outside.txt: expected a relative name inside", id="parent"),
        pytest.param(having(FILE, "files", "target/../../outside.txt"), "expected a relative name inside", id="hidden parent"),
        pytest.param(having(FILE, "files", "/etc/passwd"), "/etc/passwd: expected a relative name inside", id="absolute"),
        pytest.param(having(FILE, "files", "C:\\outside.txt"), "expected a relative name inside", id="Windows drive"),
        pytest.param(having(FILE, "files", "..\\outside.txt"), "expected a relative name inside", id="Windows parent"),
        pytest.param(having(FILE, "files", "target//x"), "expected a relative name inside", id="name with another spelling"),
        pytest.param(having(FILE, "files", "nul\0byte"), "expected a relative name inside", id="nul byte"),
        pytest.param(having(FILE, "files", ""), "expected a relative name inside", id="empty name"),
        pytest.param(having(FILE, "files", MANIFEST), "expected a relative name inside", id="the manifest itself"),
    ],
)
def test_a_manifest_that_is_wrong(change: Callable[[dict[str, Any]], None], fragment: str, bundle: Path) -> None:
    (bundle.parent / "outside.txt").write_text("12345")
    change_manifest(bundle, change)
    assert fragment in refusal(bundle)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"format_version": 1, "graphs": {', id="truncated"),
        pytest.param("", id="empty"),
        pytest.param("[1]", id="a list"),
        pytest.param("\x00\xff", id="binary"),
        pytest.param("[" * 100_000, id="nested too deeply"),
    ],
)
def test_a_manifest_that_is_no_json_object(text: str, bundle: Path) -> None:
    (bundle / MANIFEST).write_bytes(text.encode("latin-1"))
    assert MANIFEST in refusal(bundle)


def test_a_manifest_of_absurd_size_is_not_read(bundle: Path) -> None:
    with (bundle / MANIFEST).open("r+b") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(BundleError, match="expected at most"):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["head.onnx", "target"])
def test_a_link_out_of_the_bundle_is_refused(name: str, bundle: Path) -> None:
    outside = bundle.parent / "outside"
    (bundle / name).rename(outside)
    (bundle / name).symlink_to(outside)
    assert "expected a file inside the bundle, found a link out of it" in refusal(bundle)


def test_a_link_that_stays_inside_is_fine(bundle: Path) -> None:
    (bundle / "head.onnx").rename(bundle / "kept.onnx")
    (bundle / "head.onnx").symlink_to("kept.onnx")
    open_bundle(bundle, check_hashes=True)


def test_a_link_to_a_bundle_is_a_bundle(bundle: Path) -> None:
    (bundle.parent / "link").symlink_to(bundle)
    open_bundle(bundle.parent / "link", check_hashes=True)


@pytest.mark.parametrize(("name", "found"), [("nowhere", "no such folder"), ("file", "a file"), ("empty", f"a folder without {MANIFEST}")])
def test_what_is_no_bundle(name: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert f"expected a bundle (a folder with {MANIFEST}), found {found}" in refusal(tmp_path / name)


class TestCreating:
    def refusal(self, path: Path, *, overwrite: bool = False) -> str:
        before = contents(path.parent)
        with pytest.raises(BundleError) as caught, create_bundle(path, overwrite=overwrite):
            pytest.fail("entered")
        assert contents(path.parent) == before
        return str(caught.value)

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_over_a_folder_of_other_things(self, overwrite: bool, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years of work")
        expected = "expected a bundle to replace, found something else" if overwrite else "expected no such folder yet"
        assert expected in self.refusal(tmp_path / "out", overwrite=overwrite)

    def test_over_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        assert "expected no such folder yet" in self.refusal(tmp_path / "out")

    @pytest.mark.parametrize("text", ["{}", "[]", "not json"])
    def test_over_a_folder_with_a_strange_manifest(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / MANIFEST).write_text(text)
        assert "expected a bundle to replace" in self.refusal(tmp_path / "out", overwrite=True)

    def test_over_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("mine")
        assert "expected a bundle to replace" in self.refusal(tmp_path / "out", overwrite=True)

    def test_over_a_link(self, bundle: Path) -> None:
        (bundle.parent / "link").symlink_to(bundle)
        assert "expected a bundle to replace" in self.refusal(bundle.parent / "link", overwrite=True)

    def test_over_a_link_that_leads_nowhere(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        assert "expected no such folder yet" in self.refusal(tmp_path / "link")

    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "deep" / "out"
        with pytest.raises(BundleError, match="expected a folder that can be written to"), create_bundle(path):
            pytest.fail("entered")
        assert contents(tmp_path) == {"file": b""}

    def test_in_a_folder_without_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Path, *arguments: object, **options: object) -> None:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "mkdir", refuse)  # tests may run as root, whom no mode keeps out
        assert "expected a folder that can be written to, found: [Errno 13] Permission denied" in self.refusal(tmp_path / "out")

    def test_where_something_appears_meanwhile(self, tmp_path: Path) -> None:
        def write() -> None:
            with create_bundle(tmp_path / "out") as folder:
                fill(folder)
                (tmp_path / "out").mkdir()
                (tmp_path / "out" / "theirs.txt").write_text("keep")

        with pytest.raises(BundleError, match="expected no such folder yet"):
            write()
        assert contents(tmp_path) == {"out": None, "out/theirs.txt": b"keep"}

    def test_a_manifest_never_holds_what_json_does_not_have(self, bundle: Path) -> None:
        assert json.loads((bundle / MANIFEST).read_text(), parse_constant=pytest.fail)
