"""`domino-deploy build-engine` with bad input: refused before a worker starts, with nothing written and nothing of the user's lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from domino_deploy import tensorrt_libraries as libraries
from domino_deploy.bundle import open_bundle
from domino_deploy.cli import main
from domino_deploy.engines import Flavour
from domino_deploy.errors import RequestError
from domino_deploy.exporters import engine_from_onnx
from domino_deploy.exporters.engine_options import RTX_CAPABILITIES, EngineOptions, engine_settings
from domino_deploy.tensorrt_libraries import Driver, Gpu
from tests.support.bundles import contents
from tests.support.correction_engines import needs_rtx


class Reached(Exception):
    """A worker would have started."""


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> None:
    """One with TensorRT-RTX and without a driver, where no worker starts."""

    def run(*arguments: object) -> Any:
        raise Reached

    monkeypatch.setattr(libraries, "_version", lambda flavour: "1.7.1.116" if flavour is Flavour.TENSORRT_RTX else None)
    monkeypatch.setattr(libraries, "driver", lambda: None)
    monkeypatch.setattr(engine_from_onnx, "run_job", run)


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Path:
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


def command(bundle: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["build-engine", str(bundle), *arguments])


# What is asked for.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--compute-capability", "7.5"), "builds for (8.0, 8.6, 8.9, 12.0, 12.1), found 7.5. Choose one of these"),
        (
            ("--compute-capability", "8.9", "--compute-capability", "9.0"),
            "found 9.0. Choose one of these, or build with --backend tensorrt",
        ),
        (("--compute-capability", "8.90"), "Expected compute capabilities like 8.9, found '8.90'"),
        (("--compute-capability", "\u0668.\u0669"), "Expected compute capabilities like 8.9, found '\u0668.\u0669'"),
        (("--max-batch-size", "65536"), "max_batch_size: expected 1 to 65535, found 65536"),
        (("--workspace", "8589934592GiB"), "workspace: expected 1 to 9223372036854775807, found 9223372036854775808"),
        (("--plugin", "/"), "or the path of a compiled plugin, found a folder"),
        (("--timing-cache", "timings"), "expected it with tensorrt, which measures while it builds, found tensorrt-rtx. Leave it out."),
    ],
)
def test_values_that_cannot_be_built_are_refused_by_dry_runs_already(bundle, arguments: tuple[str, ...], words: str) -> None:
    done = command(bundle, "--dry-run", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


@needs_rtx
def test_the_gpus_of_tensorrt_rtx_are_those_that_it_names() -> None:
    names = [name[2:] for name in libraries.load(Flavour.TENSORRT_RTX).ComputeCapability.__members__ if name.startswith("SM")]
    assert {f"{name[:-1]}.{name[-1]}" for name in names} == {*RTX_CAPABILITIES, "7.5"}


def test_a_folder_is_no_timing_cache(bundle, monkeypatch, tmp_path) -> None:
    gpu = Gpu(name="NVIDIA H200", compute_capability="9.0", memory_bytes=141 * 10**9)
    monkeypatch.setattr(libraries, "_version", lambda flavour: "11.4.0")
    monkeypatch.setattr(libraries, "driver", lambda: Driver(cuda_version="13.0", gpus=(gpu,)))
    with pytest.raises(RequestError, match="--timing-cache: expected a file, or the name of a new one, found the folder"):
        engine_settings(open_bundle(bundle), EngineOptions(timing_cache=tmp_path))


# What it is built from.


@pytest.mark.parametrize("file", ["target.onnx", "head.onnx", "target/model.safetensors"])
def test_a_bundle_whose_bytes_were_altered_is_not_built_from(bundle, file: str) -> None:
    (bundle / file).write_bytes(bytes((bundle / file).stat().st_size))
    done = command(bundle)
    assert done.exit_code == 4
    assert f"{file}: altered: expected sha256" in done.stderr


def test_a_dry_run_names_a_file_that_is_no_graph(bundle) -> None:
    (bundle / "target.onnx").write_bytes(bytes((bundle / "target.onnx").stat().st_size))
    done = command(bundle, "--dry-run")
    assert done.exit_code == 4
    assert "target.onnx: expected an ONNX graph, found: " in done.stderr


# Where it goes.


def _notes(folder: Path) -> None:
    (folder / "engines.json").write_text("{}")
    (folder / "notes.txt").touch()


def _notes_beside_engines(folder: Path) -> None:
    (folder / "engines.json").write_text(json.dumps({"format_version": 1, "flavour": "tensorrt", "graphs": {}}))
    (folder / "target.engine").touch()
    (folder / "notes.txt").touch()


def _another_tools_manifest(folder: Path) -> None:
    (folder / "engines.json").write_text('{"format_version": 1}')


@pytest.mark.parametrize("fill", [_notes, _notes_beside_engines, _another_tools_manifest])
def test_a_folder_with_anything_else_in_it_is_never_replaced(bundle, tmp_path, fill) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    fill(folder)
    before = contents(folder)
    done = command(bundle, "--force", "-o", str(folder))
    assert done.exit_code == 4
    assert "expected engines to replace, found something else" in done.stderr
    assert contents(folder) == before


def test_a_link_is_something_that_is_there(bundle, tmp_path) -> None:
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    assert "expected no such folder yet, found one" in command(bundle, "-o", str(link)).stderr
    assert "expected engines to replace, found something else" in command(bundle, "--force", "-o", str(link)).stderr
    assert os.readlink(link) == "nowhere"


def test_a_name_that_the_file_system_refuses_is_told(bundle, tmp_path) -> None:
    done = command(bundle, "-o", str(tmp_path / ("x" * 300)))
    assert done.exit_code == 4
    assert "expected a folder that engines can be written to, found: " in done.stderr


def test_damaged_engines_can_be_replaced(bundle, tmp_path) -> None:
    folder = tmp_path / "engines"
    folder.mkdir()
    _notes_beside_engines(folder)
    (folder / "notes.txt").rename(folder / "libdomino.so")
    assert isinstance(command(bundle, "--force", "-o", str(folder)).exception, Reached)
    assert (folder / "target.engine").is_file()
