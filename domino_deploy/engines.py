"""Engines: what `build-engine` makes of a bundle's graphs for one TensorRT flavour and one kind of GPU.

    BUNDLE/engines/tensorrt-sm90-float16/
      engines.json            what they were built from, with and for
      target.engine  backbone.engine  head.engine

No TensorRT here: whether engines fit is decided from engines.json alone, before a library is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath, PureWindowsPath

from domino_deploy import bundle as bundles
from domino_deploy.bundle import Bundle
from domino_deploy.config_json import from_json, to_json
from domino_deploy.engine_checks import problems_with_manifest
from domino_deploy.errors import EngineError, listed
from domino_deploy.signature import GraphForm, TensorSpec

FORMAT_VERSION = 1

ENGINES_FOLDER = "engines"
MANIFEST = "engines.json"
FILES = {name: f"{name}.engine" for name in bundles.GRAPHS}

# Optimisation profiles, by their place in the engine.
VERIFY_PROFILE, PREFILL_PROFILE = 0, 1
DRAFT_PROFILE, FIRST_DRAFT_PROFILE = 0, 1

# Of what runs as code, a folder holds the files themselves.
_A_LINK = "expected a file, found a link"
_MAX_MANIFEST_BYTES = 8 * 2**20
BUILD_AGAIN = "Build the engines again: domino-deploy build-engine."


class Flavour(StrEnum):
    """TensorRT for data centres, or TensorRT for RTX: two products, whose engines the other cannot read."""

    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


class PluginForm(StrEnum):
    """What computes the logit correction: the graph's own operators; a Triton kernel inside the engine, compiled ahead of time; a plugin
    in Python, needed at run time; a compiled library, needed at run time."""

    NONE = "none"
    AOT = "aot"
    V3 = "v3"
    CPP = "cpp"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """The plugin that engines were built with.

    Args:
        form: which kind.
        name: the operator that it computes; None for no plugin.
        version: the plugin's, as TensorRT's registry knows it; None for no plugin.
        library: the compiled library's file name, for `PluginForm.CPP`.
        sha256: of that library.
    """

    form: PluginForm
    name: str | None = None
    version: str | None = None
    library: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class ShapeRange:
    """Shapes of one input in a profile; TensorRT tunes for `opt`."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One optimisation profile: a range of shapes per input that has no fixed one."""

    name: str
    shapes: Mapping[str, ShapeRange]


@dataclass(frozen=True, kw_only=True)
class EngineGraph:
    """One engine: its file, inputs and outputs with what is fixed, and its profiles in TensorRT's order."""

    file: str
    bytes: int
    sha256: str
    num_layers: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]


@dataclass(frozen=True, kw_only=True)
class ProductRange:
    """Largest magnitudes of one product of a layer: of what is multiplied, over the calibration text, and of the matrix."""

    input: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What float8 engines take their scales from.

    Args:
        source: "built-in", or the name of a file.
        sha256: of the token ids, little-endian int64, sequence after sequence.
        tokens: how many.
        products: by the matrix, as the bundle's graphs name it.
    """

    source: str
    sha256: str
    tokens: int
    products: Mapping[str, ProductRange]


@dataclass(frozen=True, kw_only=True)
class EngineManifest:
    """engines.json.

    Args:
        flavour_version: of the TensorRT that built them; engines are read by this one alone.
        compute_capabilities: "8.9"; empty for all that TensorRT-RTX supports.
        dtype: of caches, features and hidden states; the manifest of a converted bundle has another one.
        weights: type of the matrices: `dtype`, or "float8_e4m3fn".
        calibration: of float8 engines.
        bundle_sha256: of the bundle's manifest.json, which holds the hashes of all its files.
        max_model_len: tokens of the longest sequence, prompt and answer.
        prefill_rows: tokens of a prefill pass at most.
        workspace: bytes that a layer may use while it runs.
        has_weights: False when the weights were stripped: before it runs, an engine is refitted (`EngineSet.weights_graph`).
        built: date, UTC.
        build_seconds: for all engines together.
    """

    format_version: int
    created_by: str
    flavour: Flavour
    flavour_version: str
    compute_capabilities: tuple[str, ...]
    dtype: str
    weights: str
    calibration: Calibration | None = None
    plugin: Plugin
    bundle_sha256: str
    max_batch_size: int
    max_model_len: int
    num_speculative_tokens: int
    prefill_rows: int
    workspace: int
    opt_level: int
    refittable: bool
    has_weights: bool
    graphs: Mapping[str, EngineGraph]
    built: str
    build_seconds: float


@dataclass(frozen=True, kw_only=True)
class EngineSet:
    """An opened folder of engines."""

    path: Path
    manifest: EngineManifest

    def file(self, graph: str) -> Path:
        """The engine of "target", "backbone" or "head"."""
        return self.path / self.manifest.graphs[graph].file

    def weights_graph(self, graph: str) -> Path | None:
        """What a stripped engine is refitted from, its weights by names relative to the bundle; None for one with weights."""
        return None if self.manifest.has_weights else self.path / bundles.GRAPHS[graph]

    def form(self, bundle: Bundle) -> GraphForm:
        """The bundle's, with the type that the engines compute in."""
        return dataclasses.replace(bundle.form, dtype=self.manifest.dtype)


def bundle_sha256(bundle: Bundle) -> str:
    """What engines are recognised by as this bundle's."""
    return file_sha256(bundle.path / bundles.MANIFEST)


def write_engine_manifest(folder: Path, manifest: EngineManifest) -> None:
    """Write engines.json."""
    (folder / MANIFEST).write_text(json.dumps(to_json(manifest), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def open_engine_set(folder: Path, bundle: Bundle, *, check_hashes: bool = False) -> EngineSet:
    """Read engines.json and check that it fits the bundle, and that the engines are there and complete.

    Args:
        folder: holds engines.json.
        bundle: that the engines are for.
        check_hashes: also compare every engine's sha256.

    Raises:
        EngineError: no engine folder, another format version, built from another state of the bundle, values that engines for the bundle
            cannot have, or files missing, altered, or outside of the folder.
    """
    manifest = _read_manifest(folder)
    problems = [f"graphs.{name}: missing" for name in FILES if name not in manifest.graphs]
    if manifest.bundle_sha256 != bundle_sha256(bundle):  # whose sizes may be others
        problems.append("stale: built from another state of the bundle")
    else:
        problems.extend(problems_with_manifest(manifest, bundle))
    for name, graph in manifest.graphs.items():
        if graph.file != FILES.get(name):
            problems.append(f"graphs.{name}: expected {FILES.get(name, 'no such graph')}, found {graph.file!r:.80}")
        elif problem := _problem_with_engine(folder / graph.file, graph, check_hashes):
            problems.append(f"{graph.file}: {problem}")
    if problem := _problem_with_library(folder, manifest.plugin):
        problems.append(f"plugin.library: {problem}")
    if not manifest.has_weights:
        absent = [name for name in bundles.GRAPHS.values() if not (folder / name).is_file()]
        problems.extend(f"{name}: missing, and needed to refit stripped engines" for name in absent)
    if problems:
        raise EngineError(listed(f"{folder}: {len(problems)} problem(s) with the engines", problems, BUILD_AGAIN))
    return EngineSet(path=folder, manifest=manifest)


def _problem_with_engine(file: Path, graph: EngineGraph, check_hash: bool) -> str | None:
    if file.is_symlink():
        return _A_LINK
    if not file.is_file():
        return "missing"
    size = file.stat().st_size
    if size != graph.bytes:
        return f"altered: expected {graph.bytes} bytes, found {size}"
    if check_hash and (found := file_sha256(file)) != graph.sha256:
        return f"altered: expected sha256 {graph.sha256}, found {found}"
    return None


def _problem_with_library(folder: Path, plugin: Plugin) -> str | None:
    """Whether it is there at all is a question of the machine (`engine_choice`)."""
    name = plugin.library
    if (plugin.form is PluginForm.CPP) != (name is not None):
        return f"expected for the form {PluginForm.CPP} and for no other, found {name!r:.80} for {plugin.form}"
    if name is None:
        return None
    # On any system: "a\\b" is in another folder on Windows alone.
    is_bare = name.isprintable() and name not in ("", "..") and PurePosixPath(name).name == PureWindowsPath(name).name == name
    if not is_bare:
        return f"expected the name of a file beside the engines, found {name!r:.80}"
    return _A_LINK if (folder / name).is_symlink() else None


def _read_manifest(folder: Path) -> EngineManifest:
    file = folder / MANIFEST
    try:
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise EngineError(f"{file}: expected at most {_MAX_MANIFEST_BYTES} bytes, found {file.stat().st_size}. {BUILD_AGAIN}")
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EngineError(f"{folder}: expected an engine folder (with {MANIFEST}), found none. {BUILD_AGAIN}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{file}: expected a JSON object, found: {error or type(error).__name__}. {BUILD_AGAIN}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(content, dict) and version != FORMAT_VERSION:
        raise EngineError(f"{file}: expected format_version {FORMAT_VERSION}, found {version!r:.40}. {BUILD_AGAIN}")
    return from_json(EngineManifest, content, str(file), error=EngineError, advice=BUILD_AGAIN)


def file_sha256(file: Path) -> str:
    """Of a file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
