"""From a bundle to its engines: private copies of the graphs, one worker process per engine, one folder that is whole or absent."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from safetensors.torch import load_file

from domino_deploy import __version__
from domino_deploy.aside import written_aside
from domino_deploy.bundle import CHAT_TEMPLATE, DRAFT_VOCAB, DRAFTER_FOLDER, GRAPHS, TARGET_FOLDER, TOKENIZER, Bundle, file_entry
from domino_deploy.engine_signatures import engine_signatures
from domino_deploy.engines import (
    FILES,
    FORMAT_VERSION,
    MANIFEST,
    Calibration,
    EngineGraph,
    EngineManifest,
    EngineSet,
    PluginForm,
    Profile,
    bundle_sha256,
    open_engine_set,
    write_engine_manifest,
)
from domino_deploy.errors import EngineError, ExportError, listed
from domino_deploy.exporters.engine_graph import write_engine_graph
from domino_deploy.exporters.engine_options import LIBRARY_ENDINGS, EngineOptions, EngineSettings, engine_settings
from domino_deploy.exporters.engine_plan import plan_engines
from domino_deploy.exporters.engine_profiles import engine_profiles
from domino_deploy.exporters.engine_worker import run_job
from domino_deploy.exporters.export import export_bundle
from domino_deploy.exporters.fp8_calibration import built_in_text, calibrate
from domino_deploy.exporters.options import ExportOptions
from domino_deploy.exporters.trt_api import BuildJob, BuiltEngine, BuiltTensor
from domino_deploy.model.draft_vocab import TOKEN_IDS
from domino_deploy.precision import Precision
from domino_deploy.runtime.text import bundle_tokenizer
from domino_deploy.signature import GraphSignature, TensorSpec

Progress = Callable[[str], None]

_WORK = ".work"
# The smallest first, whose plugin may be a library that TensorRT refuses.
_ORDER = ("head", "backbone", "target")
_TENSORRT_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bf16"}


def build_engines(
    bundle: Bundle,
    options: EngineOptions | None = None,
    output: Path | None = None,
    *,
    overwrite: bool = False,
    progress: Progress = lambda step: None,
) -> EngineSet:
    """Build the engines of a bundle.

    Args:
        bundle: to build from; it is not changed, but for the engines' folder below it.
        options: of the build.
        output: folder of the engines; None for one below the bundle.
        overwrite: replace engines that are there, once the new ones are complete.
        progress: told each step.

    Raises:
        RequestError, MissingDependencyError: see `engine_settings`.
        EngineError: the folder exists and may not be replaced, or cannot be written to.
        ExportError: too little room, or TensorRT refuses a graph.
    """
    options = options or EngineOptions()
    settings = engine_settings(bundle, options, output)
    _refuse_existing(settings.output, overwrite)
    plan = plan_engines(bundle, settings)
    plan.check()
    started = time.perf_counter()
    try:
        with written_aside(settings.output) as folder:
            work = folder / _WORK
            work.mkdir()
            source = _converted(bundle, settings, work, progress) if settings.is_converted else bundle
            calibration = None
            if settings.is_float8:
                calibration = calibrate(source, options.calibration_text or built_in_text(bundle_tokenizer(bundle)), progress=progress)
            graphs, version = _build_all(source, settings, calibration, folder, progress)
            if settings.is_stripped:
                for file in GRAPHS.values():  # their weights' names are relative to the bundle
                    (work / file).rename(folder / file)
            shutil.rmtree(work)
            if settings.plugin_library is not None:  # engines with a plugin cannot be opened without it
                shutil.copyfile(settings.plugin_library, folder / settings.plugin_library.name)
            manifest = _manifest(bundle, settings, calibration, graphs, version, time.perf_counter() - started)
            write_engine_manifest(folder, manifest)
            _refuse_existing(settings.output, overwrite)  # once more: building takes its time
    except BrokenPipeError:  # of whoever listens to the progress
        raise
    except OSError as error:
        raise EngineError(
            f"{settings.output}: expected a folder that engines can be written to, found: {error}. Free disk space or choose another (-o)."
        ) from error
    return open_engine_set(settings.output, bundle)


def _refuse_existing(output: Path, overwrite: bool) -> None:
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise EngineError(f"{output}: expected no such folder yet, found one. Choose another (-o), or replace it (--force).")
    if output.is_symlink() or not _are_engines(output):
        raise EngineError(f"{output}: expected engines to replace, found something else. Remove it, or choose another folder (-o).")


def _are_engines(folder: Path) -> bool:
    """Of any format version, whether complete or not, and nothing else: a bundle or notes beside them would be lost."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found = {item.name for item in folder.iterdir() if item.suffix not in LIBRARY_ENDINGS}
    except (OSError, ValueError, RecursionError):
        return False
    is_ours = isinstance(content, dict) and {"format_version", "flavour", "graphs"} <= content.keys()
    return is_ours and found <= {MANIFEST, *FILES.values(), *GRAPHS.values()}


def _converted(bundle: Bundle, settings: EngineSettings, work: Path, progress: Progress) -> Bundle:
    """The same pair exported in the engines' type: the folders of a bundle that is not quantised are checkpoints."""
    checkpoints = work / "checkpoints"
    text = [bundle.path / name for name in (TOKENIZER, CHAT_TEMPLATE) if (bundle.path / name).is_file()]
    for folder, more in ((TARGET_FOLDER, text), (DRAFTER_FOLDER, [])):
        (checkpoints / folder).mkdir(parents=True)
        for file in [*(bundle.path / folder).iterdir(), *more]:
            if file.name != DRAFT_VOCAB:  # made again from its token ids
                _link_or_copy(file, checkpoints / folder / file.name)
    options = ExportOptions(
        precision=Precision.of(settings.dtype),
        num_speculative_tokens=bundle.manifest.num_speculative_tokens,
        candidate_pool=bundle.form.candidate_pool,
        certified_pool=bundle.manifest.certified_pool,
        draft_vocab=_draft_vocab(bundle),
    )
    return export_bundle(
        checkpoints / DRAFTER_FOLDER,
        checkpoints / TARGET_FOLDER,
        work / "bundle",
        options,
        verify=False,
        progress=lambda step: progress(f"Converting to {settings.dtype}: {step}"),
    )


def _link_or_copy(source: Path, destination: Path) -> None:
    try:
        destination.hardlink_to(source)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, destination)


def _draft_vocab(bundle: Bundle) -> tuple[int, ...] | None:
    if bundle.form.draft_vocab_size is None:
        return None
    rows = load_file(bundle.path / DRAFTER_FOLDER / DRAFT_VOCAB)
    return tuple(rows[TOKEN_IDS].tolist())


def _build_all(
    source: Bundle, settings: EngineSettings, calibration: Calibration | None, folder: Path, progress: Progress
) -> tuple[dict[str, EngineGraph], str]:
    """Build every engine into `folder`; what became of each, and TensorRT's version."""
    work = folder / _WORK
    signatures = engine_signatures(
        source.target,
        source.drafter,
        source.form,
        max_model_len=settings.max_model_len,
        num_speculative_tokens=settings.num_speculative_tokens,
    )
    profiles = engine_profiles(
        signatures,
        max_batch_size=settings.max_batch_size,
        num_speculative_tokens=settings.num_speculative_tokens,
        prefill_rows=settings.prefill_rows,
        block_size=source.drafter.block_size,
    )
    for weights in (TARGET_FOLDER, DRAFTER_FOLDER):  # found by relative names beside the private copies
        (work / weights).symlink_to(source.path.absolute() / weights, target_is_directory=True)
    graphs, version = {}, settings.flavour_version
    for name in _ORDER:
        file = GRAPHS[name]
        write_engine_graph(name, source.path / file, work / file, signatures[name], settings.plugin.form, calibration)
        job = BuildJob(
            flavour=settings.flavour,
            graph=name,
            onnx_file=str(work / file),
            engine_file=str(folder / FILES[name]),
            profiles=profiles[name],
            compute_capabilities=settings.compute_capabilities,
            workspace=settings.workspace,
            opt_level=settings.opt_level,
            plugin=settings.plugin.form if name == "head" else PluginForm.NONE,
            plugin_library=None if settings.plugin_library is None else str(settings.plugin_library),
            is_stripped=settings.is_stripped,
            timing_cache=None if settings.timing_cache is None else str(settings.timing_cache.absolute()),
        )
        built = run_job(job, work, progress)
        check_built(name, built, signatures[name])
        graphs[name] = _engine_graph(folder / FILES[name], built, signatures[name], profiles[name])
        version = built.flavour_version
    return graphs, version


def check_built(graph: str, built: BuiltEngine, signature: GraphSignature) -> None:
    """Check that TensorRT sees the inputs and outputs that the signature has.

    Raises:
        ExportError: others, all of them by name.
    """
    expected = [_expected(spec) for spec in (*signature.inputs, *signature.outputs)]
    found = [*built.inputs, *built.outputs]
    problems = [f"expected {want}, found {have}" for want, have in zip(expected, found, strict=False) if want != have]
    if len(expected) != len(found):
        problems.append(f"expected {len(expected)} inputs and outputs, found {len(found)}")
    if problems:
        raise ExportError(listed(f"{graph}: the engine does not have its graph's signature:", problems, "Please report it."))


def _expected(spec: TensorSpec) -> BuiltTensor:
    shape = tuple(size if isinstance(size, int) else -1 for size in spec.shape)
    return BuiltTensor(name=spec.name, dtype=_TENSORRT_TYPES.get(spec.dtype, spec.dtype), shape=shape)


def _engine_graph(file: Path, built: BuiltEngine, signature: GraphSignature, profiles: tuple[Profile, ...]) -> EngineGraph:
    entry = file_entry(file)
    return EngineGraph(
        file=file.name,
        bytes=entry.bytes,
        sha256=entry.sha256,
        num_layers=built.num_layers,
        inputs=signature.inputs,
        outputs=signature.outputs,
        profiles=profiles,
    )


def _manifest(
    bundle: Bundle,
    settings: EngineSettings,
    calibration: Calibration | None,
    graphs: Mapping[str, EngineGraph],
    version: str,
    seconds: float,
) -> EngineManifest:
    return EngineManifest(
        format_version=FORMAT_VERSION,
        created_by=f"domino-deploy {__version__}",
        flavour=settings.flavour,
        flavour_version=version,
        compute_capabilities=settings.compute_capabilities,
        dtype=str(settings.dtype),
        weights=settings.weights,
        calibration=calibration,
        plugin=settings.plugin,
        bundle_sha256=bundle_sha256(bundle),
        max_batch_size=settings.max_batch_size,
        max_model_len=settings.max_model_len,
        num_speculative_tokens=settings.num_speculative_tokens,
        prefill_rows=settings.prefill_rows,
        workspace=settings.workspace,
        opt_level=settings.opt_level,
        refittable=settings.is_stripped,
        has_weights=not settings.is_stripped,
        graphs=graphs,
        built=datetime.now(UTC).isoformat(timespec="seconds"),
        build_seconds=round(seconds, 1),
    )
