"""Which of a bundle's engines run here: those of this GPU, TensorRT version, plugin and bundle, and large enough for the request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from domino_deploy.bundle import Bundle
from domino_deploy.engines import (
    BUILD_AGAIN,
    ENGINES_FOLDER,
    MANIFEST,
    EngineManifest,
    EngineSet,
    Flavour,
    PluginForm,
    file_sha256,
    open_engine_set,
)
from domino_deploy.errors import EngineError, listed
from domino_deploy.plugins import op

# Folders of builds that run, or were killed, have hidden names.
_FINISHED = "[!.]*"


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a machine can run.

    Args:
        flavours: versions of the installed ones.
        compute_capability: of its GPU.
    """

    flavours: Mapping[Flavour, str]
    compute_capability: str


def open_engines(
    bundle: Bundle,
    host: Host,
    *,
    batch: int = 1,
    max_model_len: int | None = None,
    num_speculative_tokens: int | None = None,
    folder: Path | None = None,
    check_hashes: bool = False,
) -> EngineSet:
    """The engines of a bundle that fit this machine and request; of several, those with the shortest sufficient caches.

    Args:
        bundle: whose engines.
        host: the machine.
        batch: sequences at once.
        max_model_len: tokens of the longest sequence; None for what the engines have.
        num_speculative_tokens: tokens drafted per cycle; None for what the engines have.
        folder: look at this engine folder alone; None for all below the bundle.
        check_hashes: also compare the sha256 of the engines chosen.

    Raises:
        EngineError: none fits; the message says for each why.
    """
    root = bundle.path / ENGINES_FOLDER
    candidates = [folder] if folder is not None else sorted(item.parent for item in root.glob(f"{_FINISHED}/{MANIFEST}"))
    wanted = {"batch": batch, "max_model_len": max_model_len, "num_speculative_tokens": num_speculative_tokens}
    fitting, problems = [], []
    for candidate in candidates:
        try:
            found = open_engine_set(candidate, bundle)
        except EngineError as error:
            problems.append(f"{candidate.name}: {error}")
            continue
        reasons = [*_foreign(found, host), *_too_small(found.manifest, wanted)]
        if reasons:
            problems.append(f"{candidate.name}: {'; '.join(reasons)}")
        else:
            fitting.append(found)
    if fitting:
        best = min(fitting, key=lambda found: (found.manifest.max_batch_size, found.manifest.max_model_len, found.path.name))
        return open_engine_set(best.path, bundle, check_hashes=check_hashes)
    if not problems:
        raise EngineError(f"{bundle.path}: expected engines below {ENGINES_FOLDER}/, found none. Build some: domino-deploy build-engine.")
    raise EngineError(listed(f"{bundle.path}: expected engines that fit this machine and request, found", problems, BUILD_AGAIN))


def _foreign(engines: EngineSet, host: Host) -> Iterable[str]:
    """Why engines cannot run here."""
    manifest = engines.manifest
    version = host.flavours.get(manifest.flavour)
    if version != manifest.flavour_version:
        here = "which is not installed" if version is None else f"here is {version}"
        yield f"built by {manifest.flavour} {manifest.flavour_version}, {here}"
    if manifest.compute_capabilities and host.compute_capability not in manifest.compute_capabilities:
        yield f"built for compute capability {', '.join(manifest.compute_capabilities)}, this GPU has {host.compute_capability}"
    plugin = manifest.plugin
    if plugin.form is not PluginForm.NONE and plugin.version != op.VERSION:
        yield f"built with version {plugin.version} of the plugin, this is version {op.VERSION}"
    if plugin.form is PluginForm.CPP and plugin.library is not None:
        library = engines.path / plugin.library
        if not library.is_file():
            yield f"built with the plugin library {plugin.library} (sha256 {plugin.sha256}), found none beside the engines"
        elif (found := file_sha256(library)) != plugin.sha256:
            yield f"built with the plugin library {plugin.library} (sha256 {plugin.sha256}), found another one (sha256 {found})"


def _too_small(manifest: EngineManifest, wanted: Mapping[str, int | None]) -> Iterable[str]:
    offered = {
        "batch": manifest.max_batch_size,
        "max_model_len": manifest.max_model_len,
        "num_speculative_tokens": manifest.num_speculative_tokens,
    }
    for name, most in offered.items():
        asked = wanted[name]
        if asked is not None and asked > most:
            yield f"built for {name} up to {most}, asked for {asked}"
