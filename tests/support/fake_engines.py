"""Engine folders of a bundle that `fake_tensorrt.py` runs: the product's graph passes, profiles and manifest, and no TensorRT."""

from __future__ import annotations

import shutil
from pathlib import Path

from domino_deploy.bundle import DRAFTER_FOLDER, GRAPHS, TARGET_FOLDER, Bundle, open_bundle
from domino_deploy.config_json import to_json
from domino_deploy.engine_signatures import engine_signatures
from domino_deploy.engines import (
    ENGINES_FOLDER,
    FILES,
    FORMAT_VERSION,
    EngineGraph,
    EngineManifest,
    Flavour,
    Plugin,
    PluginForm,
    bundle_sha256,
    write_engine_manifest,
)
from domino_deploy.exporters.engine_graph import write_engine_graph
from domino_deploy.exporters.engine_profiles import engine_profiles
from tests.support.fake_tensorrt import write_fake_engine


def with_engines(
    bundle: Path,
    folder: Path,
    *,
    max_model_len: int = 400,
    num_speculative_tokens: int | None = None,
    prefill_rows: int = 128,
    version: str = "11.4.0",
    compute_capability: str = "9.0",
    is_stripped: bool = False,
) -> Bundle:
    """A copy of a bundle in `folder` with engines for one GPU; stripped ones have their graphs beside them."""
    opened = open_bundle(shutil.copytree(bundle, folder))
    count = opened.manifest.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
    signatures = engine_signatures(opened.target, opened.drafter, opened.form, max_model_len=max_model_len, num_speculative_tokens=count)
    profiles = engine_profiles(
        signatures, max_batch_size=1, num_speculative_tokens=count, prefill_rows=prefill_rows, block_size=opened.drafter.block_size
    )
    engines = folder / ENGINES_FOLDER / "tensorrt-sm90-float32"
    engines.mkdir(parents=True)
    graphs = {}
    private = folder.with_name(f"{folder.name}-graphs")
    private.mkdir()
    for weights in (TARGET_FOLDER, DRAFTER_FOLDER):
        shutil.copytree(folder / weights, private / weights)
    for name, signature in signatures.items():
        write_engine_graph(name, folder / GRAPHS[name], private / GRAPHS[name], signature, PluginForm.NONE)
        file = engines / FILES[name]
        write_fake_engine(
            file, private / GRAPHS[name], [to_json(profile.shapes) for profile in profiles[name]], has_weights=not is_stripped
        )
        graphs[name] = EngineGraph(
            file=file.name,
            bytes=file.stat().st_size,
            sha256="0" * 64,
            num_layers=1,
            inputs=signature.inputs,
            outputs=signature.outputs,
            profiles=profiles[name],
        )
    if is_stripped:
        for graph in GRAPHS.values():
            shutil.copyfile(private / graph, engines / graph)
    write_engine_manifest(
        engines,
        EngineManifest(
            format_version=FORMAT_VERSION,
            created_by="domino-deploy test",
            flavour=Flavour.TENSORRT,
            flavour_version=version,
            compute_capabilities=(compute_capability,),
            dtype=opened.form.dtype,
            weights=opened.form.dtype,
            plugin=Plugin(form=PluginForm.NONE),
            bundle_sha256=bundle_sha256(opened),
            max_batch_size=1,
            max_model_len=max_model_len,
            num_speculative_tokens=count,
            prefill_rows=prefill_rows,
            workspace=0,
            opt_level=3,
            refittable=is_stripped,
            has_weights=not is_stripped,
            graphs=graphs,
            built="2026-11-29",
            build_seconds=1.0,
        ),
    )
    return opened
