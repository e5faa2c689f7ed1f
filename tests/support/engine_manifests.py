"""Engine folders whose engines are text: what `domino_deploy.engines` and `engine_choice` look at, and nothing more."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from domino_deploy.bundle import Bundle
from domino_deploy.engine_signatures import engine_signatures
from domino_deploy.engines import (
    ENGINES_FOLDER,
    FILES,
    FORMAT_VERSION,
    MANIFEST,
    EngineGraph,
    EngineManifest,
    Flavour,
    Plugin,
    PluginForm,
    bundle_sha256,
    write_engine_manifest,
)
from domino_deploy.exporters.engine_profiles import engine_profiles


def write_engines(bundle: Bundle, name: str, **changes: Any) -> Path:
    """Engines of TensorRT 11.4.0 for compute capability 9.0, up to `changes` of the manifest."""
    folder = bundle.path / ENGINES_FOLDER / name
    folder.mkdir(parents=True)
    sizes = {"max_batch_size": 2, "max_model_len": 160, "num_speculative_tokens": 4, "prefill_rows": 128}
    sizes |= {key: value for key, value in changes.items() if key in sizes}
    form = dataclasses.replace(bundle.form, dtype=changes.get("dtype", "float32"))
    signatures = engine_signatures(
        bundle.target,
        bundle.drafter,
        form,
        max_model_len=sizes["max_model_len"],
        num_speculative_tokens=sizes["num_speculative_tokens"],
    )
    profiles = engine_profiles(
        signatures,
        max_batch_size=sizes["max_batch_size"],
        num_speculative_tokens=sizes["num_speculative_tokens"],
        prefill_rows=sizes["prefill_rows"],
        block_size=bundle.drafter.block_size,
    )
    graphs = {}
    for graph, file in FILES.items():
        content = f"engine of {graph} in {name}".encode()
        (folder / file).write_bytes(content)
        graphs[graph] = EngineGraph(
            file=file,
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            num_layers=3,
            inputs=signatures[graph].inputs,
            outputs=signatures[graph].outputs,
            profiles=profiles[graph],
        )
    values: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "created_by": "domino-deploy test",
        "flavour": Flavour.TENSORRT,
        "flavour_version": "11.4.0",
        "compute_capabilities": ("9.0",),
        "dtype": form.dtype,
        "weights": form.dtype,
        "plugin": Plugin(form=PluginForm.NONE),
        "bundle_sha256": bundle_sha256(bundle),
        **sizes,
        "workspace": 2**30,
        "opt_level": 3,
        "refittable": False,
        "has_weights": True,
        "graphs": graphs,
        "built": "2026-11-30T12:00:00+00:00",
        "build_seconds": 12.5,
    }
    write_engine_manifest(folder, EngineManifest(**(values | changes)))
    return folder


def change_engines(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` work on the parsed engines.json."""
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))
