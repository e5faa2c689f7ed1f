"""The bundle: one folder that holds everything a pair of target and drafter needs to be served.

    BUNDLE/
      manifest.json           what it is, where it came from, sizes and hashes of all other files
      target.onnx  backbone.onnx  head.onnx     graphs; their weights are ranges of the files below
      target_trunk.onnx  backbone_trunk.onnx  lm_head.onnx    the first two once more, cut before the LM head that they share: for a runtime
                              that keeps weights in memory per graph (ONNX Runtime); absent with a draft vocabulary
      target/{config.json, *.safetensors}       a checkpoint in its own right unless quantised; holds embedding and LM head of the pair
      drafter/{config.json, *.safetensors}      likewise; draft_vocab.safetensors if the drafter has a vocabulary of its own
      tokenizer.json  chat_template.jinja
      verification.html       the export's comparison with PyTorch, to read

No torch, onnx or safetensors here: serving opens bundles too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from domino_deploy import checkpoint, checkpoint_text
from domino_deploy.aside import mend, written_aside
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.config_json import from_json, to_json
from domino_deploy.errors import BundleError, ExportError, listed
from domino_deploy.precision import Precision
from domino_deploy.signature import GraphForm, TensorSpec

FORMAT_VERSION = 2

MANIFEST = "manifest.json"
TARGET_GRAPH, BACKBONE_GRAPH, HEAD_GRAPH = "target.onnx", "backbone.onnx", "head.onnx"
TARGET_TRUNK_GRAPH, BACKBONE_TRUNK_GRAPH, LM_HEAD_GRAPH = "target_trunk.onnx", "backbone_trunk.onnx", "lm_head.onnx"
TARGET_FOLDER, DRAFTER_FOLDER = "target", "drafter"
CONFIG, WEIGHTS = checkpoint.CONFIG, checkpoint.WEIGHTS
DRAFT_VOCAB = "draft_vocab.safetensors"
REPORT = "verification.html"
TOKENIZER, CHAT_TEMPLATE = checkpoint_text.TOKENIZER, checkpoint_text.CHAT_TEMPLATE

REQUIRED_FILES = (
    TARGET_GRAPH,
    BACKBONE_GRAPH,
    HEAD_GRAPH,
    TOKENIZER,
    *(f"{folder}/{CONFIG}" for folder in (TARGET_FOLDER, DRAFTER_FOLDER)),
)
GRAPHS = {"target": TARGET_GRAPH, "backbone": BACKBONE_GRAPH, "head": HEAD_GRAPH}
# All or none.
APART_GRAPHS = {"target_trunk": TARGET_TRUNK_GRAPH, "backbone_trunk": BACKBONE_TRUNK_GRAPH, "lm_head": LM_HEAD_GRAPH}

# A manifest of a 100-layer pair has some 100 kB.
_MAX_MANIFEST_BYTES = 8 * 2**20
_HASHING_THREADS = 4
_EXPORT_AGAIN = "Export the bundle again."


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """What the user named, and the commit it stood for if it was a hub id."""

    source: str
    revision: str | None

    @property
    def name(self) -> str:
        """The hub id, or the name of the folder without the path to it, which is the exporting machine's."""
        return self.source if self.revision is not None else PureWindowsPath(self.source).name


@dataclass(frozen=True, kw_only=True)
class GraphEntry:
    """One graph: its file, and its inputs and outputs as `signature.py` had them."""

    file: str
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and hash of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json.

    precision: how weights are stored; form: what the graphs' inputs and outputs are like; certified_pool: whether the head falls back
    to the full vocabulary where the candidate pool's answer is not certain;
    num_speculative_tokens: what a request that does not say gets, 1 up to the drafter's proposals; special_tokens: the
    chat template's; verification: None when the export was not verified.
    """

    format_version: int
    created_by: str
    libraries: Mapping[str, str]
    precision: Precision
    form: GraphForm
    certified_pool: bool
    sources: Mapping[str, SourceEntry]
    target: TargetConfig
    drafter: DrafterConfig
    pairing: Mapping[str, object]
    num_speculative_tokens: int
    special_tokens: Mapping[str, str | None]
    graphs: Mapping[str, GraphEntry]
    files: Mapping[str, FileEntry]
    verification: Mapping[str, object] | None

    def to_dict(self) -> dict[str, object]:
        """As JSON values."""
        return to_json(self)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle."""

    path: Path
    manifest: Manifest

    @property
    def target(self) -> TargetConfig:
        return self.manifest.target

    @property
    def drafter(self) -> DrafterConfig:
        return self.manifest.drafter

    @property
    def form(self) -> GraphForm:
        return self.manifest.form

    @property
    def precision(self) -> Precision:
        return self.manifest.precision

    @property
    def has_lm_head_apart(self) -> bool:
        """Whether `APART_GRAPHS` are there."""
        return "lm_head" in self.manifest.graphs


def open_bundle(path: str | Path, *, check_hashes: bool = False) -> Bundle:
    """Read a bundle's manifest and check that its files are there, complete and inside the folder.

    Args:
        path: the bundle's folder.
        check_hashes: also compare every file's sha256 with the manifest (reads all weights).

    Raises:
        BundleError: not a bundle, another format version, or files missing, altered or outside the folder.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    problems = [f"{name}: not listed in {MANIFEST}" for name in REQUIRED_FILES if name not in manifest.files]
    problems += [
        f"{folder}/*.safetensors: none listed in {MANIFEST}"
        for folder in (TARGET_FOLDER, DRAFTER_FOLDER)
        if not any(name.startswith(f"{folder}/") and name.endswith(".safetensors") for name in manifest.files)
    ]
    files = {name: graph.file for name, graph in manifest.graphs.items()}
    expected = GRAPHS | (APART_GRAPHS if any(name in files for name in APART_GRAPHS) else {})
    problems += [f"graphs.{name}: expected {file}, found {files.get(name)}" for name, file in expected.items() if files.get(name) != file]
    problems += [f"graphs.{name}: unknown graph" for name in files if name not in expected]
    problems += [
        f"{name}: not listed in {MANIFEST}" for name in files.values() if name not in manifest.files and name not in REQUIRED_FILES
    ]
    if manifest.form.dtype != manifest.precision.activations:
        problems.append(f"form.dtype: expected {manifest.precision.activations}, the precision's, found {manifest.form.dtype!r:.40}")
    count, most = manifest.num_speculative_tokens, manifest.drafter.num_proposals
    if not 1 <= count <= most:
        problems.append(f"num_speculative_tokens: expected 1 to {most}, the drafter's proposals, found {count}")
    for name, entry in manifest.files.items():
        problem = _problem_with_file(path, name, entry, check_hashes)
        if problem:
            problems.append(f"{name}: {problem}")
    if problems:
        raise BundleError(listed(f"{path}: {len(problems)} problem(s) with the bundle's files", problems, _EXPORT_AGAIN))
    return Bundle(path=path, manifest=manifest)


@contextmanager
def create_bundle(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden folder beside `path` to write a bundle into; it becomes `path` at the end, or disappears.

    Args:
        path: must not exist, or be a bundle with `overwrite`.
        overwrite: replace an existing bundle, once the new one is complete.

    Raises:
        BundleError: `path` exists and may not be replaced, or its parent cannot be written to.
        ExportError: writing failed half way, or another export was faster.
    """
    path = Path(path).absolute()
    with _writing(path):
        mend(path)  # a bundle that a killed export had moved away exists
    _refuse_existing(path, overwrite)
    with _writing(path), ExitStack() as stack:
        try:
            aside = stack.enter_context(written_aside(path))
        except OSError as error:
            raise BundleError(f"{path}: expected a folder that can be written to, found: {error}. Choose another output folder.") from error
        yield aside
        _refuse_existing(path, overwrite)  # once more: exporting takes its time


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Makes a full disk, or another export into the same place, an error that names the bundle."""
    try:
        yield
    except BrokenPipeError:  # of whoever listens to the progress
        raise
    except OSError as error:
        raise ExportError(
            f"{path}: expected to write the bundle there, found: {error}. Nothing was changed. "
            "Free disk space or choose another output folder, and let one export at a time write there."
        ) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json into the folder of a bundle."""
    (folder / MANIFEST).write_text(json.dumps(manifest.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file below `folder` but the manifest, by its relative name."""
    files = sorted(item for item in folder.rglob("*") if item.is_file() and item != folder / MANIFEST)
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:  # hashlib lets go of the interpreter lock
        entries = list(threads.map(file_entry, files))
    return {item.relative_to(folder).as_posix(): entry for item, entry in zip(files, entries, strict=True)}


def file_entry(file: Path) -> FileEntry:
    """Size and hash of one file."""
    return FileEntry(bytes=file.stat().st_size, sha256=_sha256(file))


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    if not path.is_dir() or not file.is_file():
        found = "no such folder" if not path.exists() else "a file" if not path.is_dir() else f"a folder without {MANIFEST}"
        raise BundleError(f"{path}: expected a bundle (a folder with {MANIFEST}), found {found}. Make one with: domino-deploy export")
    try:
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise BundleError(f"{file}: expected at most {_MAX_MANIFEST_BYTES} bytes, found {file.stat().st_size}. {_EXPORT_AGAIN}")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: bad JSON as well as bad UTF-8
        raise BundleError(f"{file}: expected a JSON object, found: {error or type(error).__name__}. {_EXPORT_AGAIN}") from error
    # The version decides before the keys do: another version has other keys.
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(content, dict) and version != FORMAT_VERSION:
        raise BundleError(
            f"{file}: expected format_version {FORMAT_VERSION}, found {version!r:.40}. Export it with this version of domino-deploy."
        )
    return from_json(Manifest, content, str(file))


def _problem_with_file(folder: Path, name: str, entry: FileEntry, check_hash: bool) -> str | None:
    if not _is_plain_relative(name):
        return "expected a relative name inside the bundle"
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        return "expected a file inside the bundle, found a link out of it"
    if not file.is_file():
        return "missing"
    size = file.stat().st_size
    if size != entry.bytes:
        return f"altered: expected {entry.bytes} bytes, found {size}"
    if check_hash and (found := _sha256(file)) != entry.sha256:
        return f"altered: expected sha256 {entry.sha256}, found {found}"
    return None


def _is_plain_relative(name: str) -> bool:
    """Whether a name stays inside the folder on any system, and is spelt in the one way that `file_entries` spells it."""
    windows = PureWindowsPath(name)
    stays_inside = not (windows.drive or windows.root or ".." in windows.parts)
    return stays_inside and name.isprintable() and str(PurePosixPath(name)) == name and name not in (".", MANIFEST)


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise BundleError(f"{path}: expected no such folder yet, found one. Choose another output folder, or replace it (--force).")
    if path.is_symlink() or not _is_bundle(path):
        raise BundleError(f"{path}: expected a bundle to replace, found something else. Remove it, or choose another output folder.")


def _is_bundle(path: Path) -> bool:
    """Of any format version, and whether complete or not."""
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "format_version" in content


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
