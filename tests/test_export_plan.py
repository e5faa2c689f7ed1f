"""`domino_deploy.exporters.plan`: the plan against what an export of the same pair writes, and its warnings."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from domino_deploy.checkpoint import Checkpoint, open_drafter, open_target
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import PairingError, RequestError
from domino_deploy.exporters import plan as planning
from domino_deploy.exporters.placement import Placement
from domino_deploy.exporters.plan import ExportPlan, Way, plan_export
from domino_deploy.exporters.weights import write_weights
from domino_deploy.precision import Dtype, Precision
from tests.support.checkpoints import write_drafter, write_target

BF16 = Precision.of(Dtype.BFLOAT16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded bf16 target and a bf16 drafter."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", family="qwen3", tied=False, dtype="bfloat16", shards=3)
    write_drafter(folder / "drafter", target, dtype="bfloat16", intermediate_size=64)
    return folder


@pytest.fixture
def target(folder: Path) -> Checkpoint[TargetConfig]:
    return open_target(folder / "target")


@pytest.fixture
def drafter(folder: Path) -> Checkpoint[DrafterConfig]:
    return open_drafter(folder / "drafter")


Checkpoints = tuple[Checkpoint[DrafterConfig], Checkpoint[TargetConfig]]


@pytest.fixture
def pair(drafter: Checkpoint[DrafterConfig], target: Checkpoint[TargetConfig]) -> Checkpoints:
    return drafter, target


@pytest.mark.parametrize(
    ("precision", "placement"),
    [
        (BF16, Placement.LINK),
        (BF16, Placement.COPY),
        (Precision.of(Dtype.FLOAT16), Placement.LINK),
        (Precision.of(Dtype.INT8), Placement.LINK),
        (Precision.of(Dtype.INT4, symmetric=False), Placement.COPY),
    ],
    ids=lambda value: value.name if isinstance(value, Precision) else str(value),
)
def test_the_plan_is_what_the_export_does(pair: Checkpoints, precision: Precision, placement: Placement, tmp_path: Path) -> None:
    plan = plan_export(*pair, tmp_path / "bundle", precision, placement)
    for name, checkpoint in zip(("drafter", "target"), pair, strict=True):
        inside = tmp_path / "bundle" / name
        inside.mkdir(parents=True)
        write_weights(checkpoint, inside, precision, placement)
    written = {file.relative_to(tmp_path / "bundle").as_posix(): file for file in (tmp_path / "bundle").rglob("*.safetensors")}
    assert {file.name for file in plan.files} == written.keys()
    for file in plan.files:
        stat = written[file.name].stat()
        assert (file.way is Way.LINK) == (stat.st_nlink > 1), file
        header = stat.st_size - file.bytes  # of converted files it is not planned
        assert header == 0 if file.way is not Way.CONVERT else 0 < header < 64_000, file


def test_integers_convert_only_files_with_something_to_quantise(drafter: Checkpoint[DrafterConfig], folder: Path, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", family="qwen3", tied=False, dtype="bfloat16", shards=47)  # a tensor to a file
    plan = plan_export(drafter, open_target(target), tmp_path / "bundle", Precision.of(Dtype.INT8))
    ways = {file.name: file.way for file in plan.files if file.name.startswith("target/")}
    tensors = {f"target/{entry.file.name}": name for name, entry in open_target(target).tensors.items()}
    assert len(ways) == len(tensors) == 47
    for name, way in ways.items():
        is_matrix = tensors[name].endswith("_proj.weight") or tensors[name] == "lm_head.weight"
        assert way is (Way.CONVERT if is_matrix else Way.LINK), tensors[name]


def test_nothing_is_written_of_what_is_linked(pair: Checkpoints, tmp_path: Path) -> None:
    linked, copied = (plan_export(*pair, tmp_path / "bundle", BF16, placement) for placement in Placement)
    assert linked.bytes_by(Way.LINK) == copied.bytes_by(Way.COPY) > 0
    assert copied.written_bytes - linked.written_bytes == linked.bytes_by(Way.LINK)
    assert linked.written_bytes == linked.other_bytes
    assert linked.seconds < copied.seconds
    assert list(tmp_path.iterdir()) == []


def test_converting_takes_longer_and_more_memory_than_linking(pair: Checkpoints, tmp_path: Path) -> None:
    linked, converted = (plan_export(*pair, tmp_path / "b", Precision.of(dtype)) for dtype in (Dtype.BFLOAT16, Dtype.INT4))
    assert linked.seconds < converted.seconds
    assert linked.peak_bytes < converted.peak_bytes


def test_a_draft_vocabulary_is_a_new_file(pair: Checkpoints, tmp_path: Path) -> None:
    plan = plan_export(*pair, tmp_path / "bundle", BF16, draft_vocab_size=100)
    assert [file.name for file in plan.files if file.way is Way.NEW] == ["drafter/draft_vocab.safetensors"]
    assert plan.bytes_by(Way.NEW) == 100 * (8 + 2 * (32 + 8))


def test_verification_is_planned_for_the_layers_that_it_compares(pair: Checkpoints, tmp_path: Path) -> None:
    whole, cut, none = (
        plan_export(*pair, tmp_path / "b", BF16, **flags).verification_bytes  # type: ignore[arg-type]  # keywords of two types
        for flags in ({}, {"verified_layers": 1}, {"verify": False})
    )
    assert none == 0 < cut < whole


def test_a_pair_that_does_not_belong_together_is_refused(folder: Path, target: Checkpoint[TargetConfig], tmp_path: Path) -> None:
    write_drafter(tmp_path / "other", folder / "target", num_target_layers=9, target_layer_ids=[0, 2])
    with pytest.raises(PairingError, match="num_target_layers"):
        plan_export(open_drafter(tmp_path / "other"), target, tmp_path / "b", BF16)


def test_matrices_that_are_no_whole_number_of_blocks_are_refused(pair: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="block size 128"):
        plan_export(*pair, tmp_path / "b", Precision.of(Dtype.INT4, block_size=128))


class TestWarnings:
    def test_another_file_system_means_copies(self, pair: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(planning, "are_on_one_filesystem", lambda one, other: False)
        plan = plan_export(*pair, tmp_path / "bundle", BF16)
        assert {file.way for file in plan.files} == {Way.COPY}
        assert any("another file system" in warning for warning in plan.warnings)
        assert not plan_export(*pair, tmp_path / "bundle", BF16, Placement.COPY).warnings

    def test_a_full_disk_is_told(self, pair: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(planning, "free_disk", lambda path: 1000)
        plan = plan_export(*pair, tmp_path / "bundle", BF16)
        assert not plan.fits
        assert any("the disk has room for 0.00 MB" in warning for warning in plan.warnings)
        assert any(line.endswith(": TOO LITTLE") for line in plan.lines())

    def test_too_little_memory_for_the_comparison_is_told_with_the_way_out(
        self, pair: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = plan_export(*pair, tmp_path / "bundle", BF16)
        monkeypatch.setattr(planning, "free_memory", lambda: whole.verification_bytes - 1)
        (warning,) = plan_export(*pair, tmp_path / "bundle", BF16).warnings
        assert "--num-layers" in warning
        assert not plan_export(*pair, tmp_path / "bundle", BF16, verify=False).warnings

    def test_an_output_that_exists_is_told(self, pair: Checkpoints, tmp_path: Path) -> None:
        assert any("--force" in warning for warning in plan_export(*pair, tmp_path, BF16).warnings)

    def test_a_system_that_says_nothing_raises_no_alarm(self, pair: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(planning, "free_memory", lambda: None)
        monkeypatch.setattr(planning, "free_disk", lambda path: None)
        plan = plan_export(*pair, tmp_path / "bundle", BF16)
        assert (plan.fits, plan.warnings) == (True, ())


class TestTelling:
    @pytest.fixture
    def plan(self, pair: Checkpoints, tmp_path: Path) -> ExportPlan:
        plan = plan_export(*pair, tmp_path / "bundle", BF16)
        return dataclasses.replace(plan, free_disk_bytes=50 * 10**9, seconds=41.4, peak_bytes=520 * 10**6, verification_bytes=2 * 10**9)

    def test_as_json(self, plan: ExportPlan) -> None:
        told = json.loads(json.dumps(plan.to_dict()))
        assert told["written_bytes"] == plan.written_bytes
        assert told["link_bytes"] == sum(file["bytes"] for file in told["files"])
        assert told["pairing"]["target_layer_ids"] == plan.pairing["target_layer_ids"]

    def test_as_text(self, plan: ExportPlan) -> None:
        lines = list(plan.lines())
        assert lines[0] == f"bundle    {plan.output}, bfloat16"
        assert lines[1].startswith("weights   ")
        assert "4 file(s) linked to the checkpoints' files, nothing is written: target/model-00001-of-00003.safetensors" in lines[1]
        assert "time      about 41 s, and the comparison with PyTorch" in lines
        assert "memory    about 0.52 GB at the peak" in lines
        assert lines[2].startswith("written   about ")
        assert lines[2].endswith(" MB, 50.00 GB free")


def test_the_nearest_folder_decides_where_a_bundle_to_be_lies(tmp_path: Path) -> None:
    from domino_deploy.resources import are_on_one_filesystem, existing, free_disk, free_memory

    assert existing(tmp_path / "no" / "such") == tmp_path.resolve()
    (tmp_path / "link").symlink_to(tmp_path)
    assert are_on_one_filesystem(tmp_path / "link" / "x", tmp_path)
    if os.path.isdir("/proc/self"):
        assert not are_on_one_filesystem(Path("/proc/self/x"), tmp_path)
    assert (free_disk(tmp_path / "x") or 0) > 0
    (tmp_path / "meminfo").write_text("MemTotal:  10 kB\nMemAvailable:     7 kB\n")
    assert free_memory(tmp_path / "meminfo") == 7 * 1024
    assert free_memory(tmp_path / "none") is None
