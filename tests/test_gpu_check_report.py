"""The prepared check on a GPU: its report, the page made of it, and what is packed for the machine."""

from __future__ import annotations

import json
import os
import re
import zipfile

import pytest

from tests.support.source_copy import ROOT

pytestmark = pytest.mark.usefixtures("gpu_check_scripts")
PAGE = ROOT / "docs" / "gpu.md"


def a_report(**stages):
    whole = {
        name: {"status": "done", "seconds": 1.0, "limit_s": 2.0, "error": None, "result": {}} | stage for name, stage in stages.items()
    }
    return {
        "format_version": 1,
        "created_by": "scripts/gpu_check",
        "started": "2026-11-30T08:00:00+00:00",
        "minutes": 8.0,
        "device": "cuda",
        "sizes": "qwen3-4b",
        "stages": whole,
    }


def test_what_keeps_a_file_from_being_a_report_is_named(tmp_path):
    from gpu_check_report import ReportError, read_report

    wrong = a_report(machine={"status": "well", "seconds": "1"}) | {"format_version": 2, "extra": 0}
    del wrong["device"]
    path = tmp_path / "gpu_check.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(ReportError) as raised:
        read_report(path)
    for named in ("format_version 2", "extra: unknown", "device: missing", "stages.machine.status: 'well'", "stages.machine.seconds: str"):
        assert named in str(raised.value)
    path.write_text("{")
    with pytest.raises(ReportError, match=r"Give the gpu_check\.json of a run"):
        read_report(path)


def test_reports_of_several_calls_are_put_together():
    from gpu_check_report import merged

    first = a_report(machine={"seconds": 1.0}, driver={"status": "failed"}, rollout={})
    second = a_report(machine={"seconds": 2.0}, driver={}, rollout={"status": "late"}, tensorrt_rtx={"status": "failed"})
    found = merged([first, second])["stages"]
    assert {name: (stage["status"], stage["seconds"]) for name, stage in found.items()} == {
        "machine": ("done", 2.0),
        "driver": ("done", 1.0),
        "rollout": ("done", 1.0),
        "tensorrt_rtx": ("failed", 1.0),
    }
    assert first["stages"]["driver"]["status"] == "failed"


def test_the_page_says_what_was_measured_and_nothing_else():
    import gpu_check_render as rendering
    from gpu_check_report import read_report

    text = PAGE.read_text(encoding="utf-8")
    kept = PAGE.with_suffix(".json")
    tables = rendering.markdown(read_report(kept)) if kept.exists() else rendering.NOT_RUN
    assert rendering.replaced(text, tables, PAGE) == text


def test_every_field_of_a_report_is_documented():
    from gpu_check_plan import STAGES
    from gpu_check_report import Status

    text = PAGE.read_text(encoding="utf-8")
    names = [*a_report(), *a_report(machine={})["stages"]["machine"], *Status, *(stage.name for stage in STAGES)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_rendering_keeps_the_reports_and_replaces_what_stood_between_the_markers(tmp_path):
    import gpu_check_render as rendering

    page, report = tmp_path / "gpu.md", tmp_path / "gpu_check.json"
    page.write_text(f"before\n{rendering.BEGIN}\nold\n{rendering.END}\nbehind\n")
    failed = {"status": "failed", "error": "Traceback\nValueError: a | b", "result": {"machine": {"gpu": "H | 200"}}}
    report.write_text(json.dumps(a_report(machine=failed)))
    rendering.render([report], page, tmp_path / "gpu.json")
    text = page.read_text()
    assert text.startswith(f"before\n{rendering.BEGIN}\n")
    assert text.endswith(f"{rendering.END}\nbehind\n")
    assert "old" not in text
    assert "| gpu | H \\| 200 |" in text
    assert "**failed** after 1 s: `ValueError: a | b`" in text
    assert "Not part of this run." in text
    assert json.loads((tmp_path / "gpu.json").read_text()) == a_report(machine=failed)


def test_a_page_without_markers_is_refused(tmp_path):
    import gpu_check_render as rendering
    from gpu_check_report import ReportError

    with pytest.raises(ReportError, match="found no begin"):
        rendering.replaced("text", "tables", tmp_path)


def a_wheel(path, files):
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


def test_wheels_are_packed_into_pieces_and_unpacked_whole(tmp_path, monkeypatch):
    import gpu_check_pack as packing
    import gpu_train_demo_pieces as pieces

    # The real dictionary of 256 MiB takes 2.7 GB of memory to pack.
    monkeypatch.setattr(packing, "FILTERS", [packing.FILTERS[0], {"id": packing.FILTERS[1]["id"], "preset": 1}])
    noise = os.urandom(200_000)
    wheels = [
        a_wheel(tmp_path / "libs.whl", {"tensorrt_rtx_libs/lib.so.1": noise, "tensorrt_rtx_libs-1.dist-info/WHEEL": "x"}),
        a_wheel(tmp_path / "bindings.whl", {"tensorrt_rtx_bindings/__init__.py": "y = 2"}),
    ]
    folders = packing.pack_wheels(wheels, tmp_path / "packed", 150_000)
    assert [folder.name for folder in folders] == ["carry-0", "carry-1"]
    site = packing.unpack(tmp_path / "packed", tmp_path / "site")
    found = sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file())
    assert found == ["tensorrt_rtx_bindings/__init__.py", "tensorrt_rtx_libs/lib.so.1"]
    assert (site / "tensorrt_rtx_libs" / "lib.so.1").read_bytes() == noise
    (folders[1] / f"{packing.NAME}.1").unlink()
    with pytest.raises(pieces.PiecesError, match=r"tensorrt-rtx\.1"):
        packing.unpack(tmp_path / "packed", tmp_path / "again")


def test_the_calls_carry_every_piece_and_leave_the_last_stage_for_the_last():
    import gpu_check_pack as packing

    lines = packing.calls([ROOT / "build" / "gpu-rtx" / f"carry-{number}" for number in range(3)])
    assert all(f'carry ["build/gpu-rtx/carry-{number}"]' in line for number, line in enumerate(lines[:3]))
    commands = [re.search('command "([^"]*)"', line)[1] for line in lines[:3]]
    assert commands == [
        "bash scripts/gpu_check --carried build/gpu-rtx --out $OUT",
        "true",
        "bash scripts/gpu_check --carried build/gpu-rtx --out $OUT --stages machine,tensorrt_rtx --minutes 2",
    ]
