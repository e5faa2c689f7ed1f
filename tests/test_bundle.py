"""The bundle folder: its manifest survives the trip through JSON, and it appears whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from domino_deploy.bundle import MANIFEST, SourceEntry, create_bundle, open_bundle
from domino_deploy.config import DrafterConfig, DrafterKind, Family, RopeConfig, RopeType, TargetConfig
from domino_deploy.config_json import from_json, to_json
from domino_deploy.errors import BundleError, ExportError
from tests.support.bundles import DRAFTER, TARGET, contents, fill, manifest_of

TARGETS = [dataclasses.replace(TARGET, family=family, tie_word_embeddings=tied) for family in Family for tied in (True, False)]
TARGETS += [
    dataclasses.replace(TARGET, bos_token_id=0, eos_token_ids=(), has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True),
    dataclasses.replace(TARGET, rope=RopeConfig(theta=1e4, type=RopeType.LINEAR, factor=2.0)),
    dataclasses.replace(TARGET, rope=RopeConfig(theta=5e5, type=RopeType.LLAMA3, factor=8.0, original_max_position_embeddings=8192)),
    dataclasses.replace(
        TARGET, rope=RopeConfig(theta=1e6, type=RopeType.YARN, factor=1.5, attention_factor=1.07, original_max_position_embeddings=7)
    ),
]
DRAFTERS = [
    DRAFTER,
    dataclasses.replace(DRAFTER, sliding_window=None, sliding_layers=(), shift_label=False, pure_draft_prefix_len=0),
    dataclasses.replace(DRAFTER, kind=DrafterKind.DFLASH, emb_dim=0, gru_hidden_dim=0, pure_draft_prefix_len=0),
]


@pytest.mark.parametrize("config", [*TARGETS, *DRAFTERS], ids=lambda config: type(config).__name__)
def test_configs_survive_json(config: TargetConfig | DrafterConfig) -> None:
    text = json.dumps(to_json(config), allow_nan=False)
    restored = from_json(type(config), json.loads(text), "manifest.json")
    assert restored == config
    # == takes 1 for True and 1.0 for 1; repr does not.
    assert repr(restored) == repr(config)


def test_every_wrong_key_and_value_is_named_at_once() -> None:
    value = to_json(DRAFTER)
    value |= {"surprise": 1, "block_size": "6", "shift_label": 1, "target_layer_ids": [0, "2"], "kind": "eagle"}
    del value["emb_dim"]
    value["rope"]["theta"] = None
    with pytest.raises(BundleError) as caught:
        from_json(DrafterConfig, value, "here/manifest.json")
    message = str(caught.value)
    assert "here/manifest.json: 7 problem(s)" in message
    for fragment in (
        "surprise: unknown key",
        "emb_dim: missing",
        "block_size: expected int, found '6'",
        "shift_label: expected bool, found 1",
        "target_layer_ids[1]: expected int, found '2'",
        "kind: expected one of dflash, domino, found 'eagle'",
        "rope.theta: expected float, found None",
    ):
        assert fragment in message


def test_values_that_a_config_refuses_are_a_bundle_error() -> None:
    with pytest.raises(BundleError, match=r"(?s)manifest\.json: DrafterConfig.*mask_token_id must lie in \[0, 300\), found 300"):
        from_json(DrafterConfig, to_json(DRAFTER) | {"mask_token_id": 300}, "manifest.json")


@pytest.mark.parametrize(
    ("source", "revision", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "0123abc", "HuggingFaceTB/SmolLM2-135M"),
        ("/home/me/models/target/", None, "target"),
        ("models\\target", None, "target"),
        ("target", None, "target"),
    ],
)
def test_a_source_is_named_without_the_path_to_it(source: str, revision: str | None, name: str) -> None:
    assert SourceEntry(source=source, revision=revision).name == name


def test_a_bundle_opens_as_it_was_written(tmp_path: Path) -> None:
    with create_bundle(tmp_path / "out") as folder:
        fill(folder)
        written = manifest_of(folder)
    bundle = open_bundle(tmp_path / "out", check_hashes=True)
    assert bundle.path == tmp_path / "out"
    assert bundle.manifest == written
    assert (bundle.target, bundle.drafter) == (TARGET, DRAFTER)
    assert {entry.name for entry in bundle.manifest.graphs["head"].inputs} == {"anchor_ids", "hidden", "base_logits"}


def test_a_bundle_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    with create_bundle(tmp_path / "out") as folder:
        fill(folder)
        assert folder.parent == tmp_path
        assert folder.name.startswith(".")
        assert not (tmp_path / "out").exists()
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~current_umask(), "others may not be shut out of a bundle"


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing_behind(error: type[BaseException], tmp_path: Path) -> None:
    def fail() -> None:
        with create_bundle(tmp_path / "new" / "parents" / "out") as folder:
            fill(folder)
            raise error

    with pytest.raises(error):
        fail()
    assert contents(tmp_path) == {}


def test_a_failure_spares_parents_that_were_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(RuntimeError), create_bundle(tmp_path / "mine" / "out"):
        raise RuntimeError
    assert contents(tmp_path) == {"mine": None}


def test_an_interrupted_process_leaves_nothing_behind(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from domino_deploy.bundle import create_bundle\n"
        # A job in the background inherits a SIGINT that is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with create_bundle(sys.argv[1]) as folder:\n"
        "    (folder / 'target.onnx').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in done.stderr
    assert contents(tmp_path) == {}


def test_a_full_disk_is_an_error_that_names_the_bundle(tmp_path: Path) -> None:
    def write() -> None:
        with create_bundle(tmp_path / "out") as folder:
            fill(folder)
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ExportError, match=r"out: expected to write the bundle there, found: .*No space left.*Free disk space"):
        write()
    assert contents(tmp_path) == {}


class TestOverwrite:
    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        with create_bundle(tmp_path / "out") as folder:
            fill(folder, "old")
        return tmp_path / "out"

    def test_is_refused_unless_asked_for(self, old: Path) -> None:
        before = contents(old.parent)
        with pytest.raises(BundleError, match="expected no such folder yet"), create_bundle(old):
            pytest.fail("entered")
        assert contents(old.parent) == before

    def test_replaces_the_whole_bundle(self, old: Path) -> None:
        (old / "stray.txt").write_text("of the old one")
        with create_bundle(old, overwrite=True) as folder:
            fill(folder, "new")
            assert (old / "target.onnx").read_text() == "old of target.onnx", "the old one stays until the new one is complete"
        assert [item.name for item in old.parent.iterdir()] == ["out"]
        assert (old / "target.onnx").read_text() == "new of target.onnx"
        assert not (old / "stray.txt").exists()
        open_bundle(old, check_hashes=True)

    def test_keeps_the_old_bundle_on_failure(self, old: Path) -> None:
        def write() -> None:
            with create_bundle(old, overwrite=True) as folder:
                fill(folder, "new")
                raise KeyboardInterrupt

        before = contents(old.parent)
        with pytest.raises(KeyboardInterrupt):
            write()
        assert contents(old.parent) == before

    def test_keeps_the_old_bundle_when_the_move_fails(self, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before, rename, calls = contents(old.parent), Path.rename, []

        def failing_second(self: Path, target: Path) -> Path:
            calls.append(self)
            if len(calls) == 2:
                raise OSError("no space left on device")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", failing_second)
        with pytest.raises(ExportError, match="no space left"), create_bundle(old, overwrite=True) as folder:
            fill(folder, "new")
        assert contents(old.parent) == before

    def test_says_so_when_another_export_was_faster(self, old: Path) -> None:
        def taken_away(self: Path, target: Path) -> Path:
            raise FileNotFoundError(2, "No such file or directory", str(self))

        before = contents(old.parent)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "rename", taken_away)
            with pytest.raises(ExportError, match="one export at a time"), create_bundle(old, overwrite=True) as folder:
                fill(folder, "new")
        assert contents(old.parent) == before

    def test_replaces_a_bundle_of_another_version(self, old: Path) -> None:
        (old / MANIFEST).write_text('{"format_version": 99}')
        with create_bundle(old, overwrite=True) as folder:
            fill(folder, "new")
        open_bundle(old)
