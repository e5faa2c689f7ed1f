"""Fixtures that several test files share."""

from __future__ import annotations

import fcntl
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import write_drafter, write_target
from tests.support.source_copy import ROOT


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A whole, verified bundle of a random Llama target and a random Domino drafter; not to be written to.

    The checkpoints lie beside it, as `target` and `drafter`.
    """

    def checkpoints(folder: Path) -> None:
        write_drafter(folder / "drafter", write_target(folder / "target"))

    return _shared_bundle("tiny", tmp_path_factory, worker_id, checkpoints)


@pytest.fixture(scope="session")
def tiny_dflash_bundle(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The other layout of everything: an untied, sharded bf16 Qwen3 target; an fp16 DFlash drafter with a sliding layer."""

    def checkpoints(folder: Path) -> None:
        target = write_target(folder / "target", family="qwen3", tied=False, dtype="bfloat16", shards=2)
        sliding = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
        write_drafter(folder / "drafter", target, kind="dflash", dtype="float16", **sliding)

    return _shared_bundle("tiny-dflash", tmp_path_factory, worker_id, checkpoints)


@pytest.fixture(scope="session")
def tiny_float16_bundle(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The pair of `tiny_bundle` in float16, unverified: what engines are built from."""
    from domino_deploy.exporters.options import ExportOptions
    from domino_deploy.precision import Dtype, Precision

    def checkpoints(folder: Path) -> None:
        write_drafter(folder / "drafter", write_target(folder / "target"))

    options = ExportOptions(precision=Precision.of(Dtype.FLOAT16))
    return _shared_bundle("tiny-float16", tmp_path_factory, worker_id, checkpoints, options=options, verify=False)


@pytest.fixture(scope="session")
def tiny_server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A `domino-deploy serve` process over `tiny_bundle` (`ServerProcess` of scripts/serving_process.py), as docs/serving.md starts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        serving = importlib.import_module("serving_process").serving
    flags = ("--served-model-name", "demo-bundle", "--per-request-spec-decode-metrics", "summary", "--threads", "1")
    with serving(tiny_bundle, tmp_path_factory.mktemp("server") / "log", *flags, api_key="KEY") as server:
        yield server


@pytest.fixture
def gpu_check_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of `scripts/gpu_check`, importable as they are there."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def _shared_bundle(
    name: str, tmp_path_factory: pytest.TempPathFactory, worker_id: str, write_checkpoints: Callable[[Path], None], **choices: Any
) -> Path:
    """One export for all workers: it is the dearest thing that tests do."""
    from domino_deploy.exporters.export import export_bundle

    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = base / name
        if not (folder / "bundle").exists():
            write_checkpoints(folder)
            export_bundle(folder / "drafter", folder / "target", folder / "bundle", progress=lambda step: None, **choices)
        return folder / "bundle"
