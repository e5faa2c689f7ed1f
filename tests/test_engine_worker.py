"""The process that builds an engine: what it is told and answers, and that its death is one clear error."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from domino_deploy.bundle import GRAPHS
from domino_deploy.engines import Flavour, PluginForm
from domino_deploy.errors import EngineError, ExportError, MissingDependencyError
from domino_deploy.exporters import engine_worker
from domino_deploy.exporters.engine_worker import run_job
from domino_deploy.exporters.trt_api import RTX_LINK, BuildJob
from tests.support.correction_engines import ENGINE, build, needs_rtx, save_node


def job(file: Path, graph: str = "head", **changes: Any) -> BuildJob:
    """Parses `file` with TensorRT-RTX."""
    values: dict[str, Any] = {
        "flavour": Flavour.TENSORRT_RTX,
        "graph": graph,
        "onnx_file": str(file),
        "engine_file": None,
        "profiles": (),
        "workspace": 2**24,
        "opt_level": 0,
    }
    return BuildJob(**(values | changes))


def silent(step: str) -> None:
    pass


@needs_rtx
def test_the_product_alone_gives_the_library_the_name_that_the_parser_asks_for(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    built = build(tmp_path, PluginForm.V3)
    assert built.layer_types.get("PLUGIN_V3") == 1


@needs_rtx
def test_a_worker_that_aborts_is_one_clear_error_with_its_last_words(tmp_path, monkeypatch) -> None:
    # Without the link, NVIDIA's parser throws a C++ exception that nobody catches.
    monkeypatch.setattr(engine_worker, "_environment", lambda flavour, folder: dict(os.environ, LD_LIBRARY_PATH=""))
    with pytest.raises(ExportError) as error:
        build(tmp_path, PluginForm.V3)
    message = str(error.value)
    assert message.startswith("head: expected tensorrt-rtx to parse the graph and build its engine, found that the process was ended by")
    assert "SIGABRT" in message
    assert "Its last words: " in message
    assert "Try --plugin none" in message


def test_the_link_comes_before_the_users_own_library_path(tmp_path, monkeypatch) -> None:
    library = tmp_path / "libtensorrt_rtx.so.1"
    library.touch()
    monkeypatch.setattr(engine_worker.tensorrt_libraries, "rtx_library", lambda: library)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/own")
    environment = engine_worker._environment(Flavour.TENSORRT_RTX, tmp_path)
    assert environment["LD_LIBRARY_PATH"] == f"{tmp_path}:/opt/own"
    assert (tmp_path / RTX_LINK).resolve() == library
    assert engine_worker._environment(Flavour.TENSORRT, tmp_path)["LD_LIBRARY_PATH"] == "/opt/own"


@needs_rtx
def test_triton_compiles_in_a_worker_whatever_its_users_environment_says(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/no-such-folder")
    assert build(tmp_path, PluginForm.V3).layer_types.get("PLUGIN_V3") == 1


@needs_rtx
def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path) -> None:
    (tmp_path / ENGINE).mkdir()
    with pytest.raises(EngineError, match=rf"head: expected files that the build can read and write, found: .*{ENGINE}.*Free disk space"):
        build(tmp_path, PluginForm.V3)


def test_what_a_compiled_plugin_says_on_stderr_belongs_to_the_error(tmp_path, monkeypatch) -> None:
    """TensorRT-RTX gives a plugin library no logger."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, sys\n"
        "print('[TRT] noise', file=sys.stderr)\n"
        "print('domino::FusedLogitCorrection: expected a codebook [V, R], found [3]. Export again.', file=sys.stderr)\n"
        "print(json.dumps({'error': 'head: expected an engine, found none. Try again.', 'kind': 'ExportError'}))\n"
    )
    started = subprocess.Popen
    monkeypatch.setattr(engine_worker.subprocess, "Popen", lambda command, **options: started([command[0], str(worker)], **options))
    with pytest.raises(ExportError) as error:
        run_job(job(tmp_path / "head.onnx"), tmp_path, silent)
    assert str(error.value).splitlines() == [
        "head: expected an engine, found none. Try again.",
        "domino::FusedLogitCorrection: expected a codebook [V, R], found [3]. Export again.",
    ]


@needs_rtx
def test_what_the_parser_refuses_is_told_with_the_nodes_names(tiny_bundle, tmp_path) -> None:
    # The bundle's own graph, whose caches may have any length.
    with pytest.raises(ExportError) as error:
        run_job(job(tiny_bundle / GRAPHS["target"], "target"), tmp_path, silent)
    message = str(error.value)
    assert message.startswith("target: expected a graph that tensorrt-rtx ")
    assert "node_cache_update (TensorScatter): " in message
    assert "must have a static sequence length" in message


@needs_rtx
@pytest.mark.parametrize(("content", "words"), [(None, "parses, found"), (b"no graph", "parses, found")])
def test_a_file_that_is_no_graph_is_refused(tmp_path, content: bytes | None, words: str) -> None:
    file = tmp_path / "head.onnx"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ExportError, match=words):
        run_job(job(file), tmp_path, silent)


@needs_rtx
def test_a_gpu_that_the_product_does_not_build_for_is_refused_with_those_it_does(tmp_path) -> None:
    with pytest.raises(ExportError) as error:
        build(tmp_path, PluginForm.NONE, capabilities=("9.0",), has_body=True)
    assert "found 9.0" in str(error.value)
    assert "8.9, 12.0" in str(error.value)


@needs_rtx
def test_the_steps_are_told_as_they_are_made(tmp_path) -> None:
    save_node(tmp_path / "head.onnx", has_body=True)
    steps: list[str] = []
    run_job(job(tmp_path / "head.onnx"), tmp_path, steps.append)
    assert steps == ["Parsing the head graph"]


def test_a_product_that_is_not_installed_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(_without_tensorrt(tmp_path)), os.environ.get("PYTHONPATH")])))
    with pytest.raises(MissingDependencyError, match=r"pip install 'domino-deploy\[tensorrt\]'"):
        run_job(job(tmp_path / "head.onnx", flavour=Flavour.TENSORRT), tmp_path, silent)


def _without_tensorrt(folder: Path) -> Path:
    """A folder whose `sitecustomize` hides TensorRT from the process."""
    (folder / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'tensorrt' else find(name, package)\n"
    )
    return folder


@needs_rtx
def test_an_interrupted_build_leaves_no_worker_behind(tmp_path, monkeypatch) -> None:
    workers: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def kept(*arguments: Any, **keywords: Any) -> subprocess.Popen[str]:
        workers.append(popen(*arguments, **keywords))
        return workers[-1]

    def interrupted(step: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_worker.subprocess, "Popen", kept)
    save_node(tmp_path / "head.onnx", has_body=True)
    with pytest.raises(KeyboardInterrupt):
        run_job(job(tmp_path / "head.onnx"), tmp_path, interrupted)
    assert [worker.returncode is not None for worker in workers] == [True]
