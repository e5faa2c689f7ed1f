"""From what the user names - a folder or a hub id - to a local folder, and from a folder to the files in it.

Pickle files are neither downloaded nor opened, and no code of a checkpoint is ever run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from domino_deploy.errors import CheckpointError, MissingDependencyError, one_line

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# tokenizer.json and chat_template.jinja belong to a target; nothing below the repository's root does.
_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja")
_NOT_DOWNLOADED = ("*/*",)
_MAX_NAME_BYTES = 255  # of every common file system


def resolve(source: str | Path, revision: str | None = None, *, only: Sequence[str] = _DOWNLOADED) -> tuple[Path, str | None]:
    """Local folder of a checkpoint, and its commit when it came from the hub.

    Args:
        source: an existing folder, or a hub id `org/name`.
        revision: branch, tag or commit; for hub ids only.
        only: files to fetch from the hub, as patterns.

    Raises:
        CheckpointError: neither a folder nor a hub id, a folder with a revision, or a failed download.
        MissingDependencyError: a hub id without huggingface_hub.
    """
    path = Path(source)
    # Path("") is the current folder, which nobody meant who passed an empty string.
    if source != "" and os.path.isdir(path):
        if revision is not None:
            raise CheckpointError(f"{source}: expected no revision for a local folder, found {revision!r}. Leave it out, or name a hub id.")
        return path, None
    if os.path.isfile(path):
        raise CheckpointError(f"{source}: expected a checkpoint folder, found a file. Name the folder it lies in.")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{str(source)!r}: expected an existing folder or a hub id like org/name, found neither. Check the spelling.")
    return _download(source, revision, only)


def file_in(folder: Path, name: str) -> Path:
    """The regular file `name` of a checkpoint folder.

    Raises:
        CheckpointError: not a plain file name, missing, not a regular file, or a link that leaves the checkpoint.
    """
    is_plain = name.isprintable() and name not in ("", ".", "..") and not any(mark in name for mark in "/\\:")
    if not is_plain or len(name.encode()) > _MAX_NAME_BYTES:
        raise CheckpointError(f"{folder}: expected a plain file name inside the folder, found {name[:200]!r}. Do not use this checkpoint.")
    path = folder / name
    if not path.is_file():
        found = "no such file" if not path.exists() else "something that is not a regular file"
        raise CheckpointError(f"{path}: expected a file, found {found}. Fetch the checkpoint again.")
    root = folder.resolve()
    if root.parent.name == "snapshots":  # the hub cache links snapshots/<commit>/<file> to blobs/<hash>
        root = root.parent.parent
    if not path.resolve().is_relative_to(root):
        raise CheckpointError(
            f"{path}: expected a file inside the folder, found a link to {path.resolve()}. Copy the file into the folder."
        )
    return path


def _download(hub_id: str, revision: str | None, patterns: Sequence[str]) -> tuple[Path, str]:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingDependencyError(
            f"{hub_id} is no local folder, and fetching it from the hub needs huggingface_hub, which is not installed. "
            "Run: pip install 'domino-deploy[export]'"
        ) from error
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=[*patterns], ignore_patterns=[*_NOT_DOWNLOADED]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        # "Not in the cache" is what came of a failed request, which is its cause.
        reason = (error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None) or error
        raise CheckpointError(
            f"{hub_id}: expected a folder here or a repository on the hub{at}, found no such folder, and a download that failed: "
            f'"{one_line(str(reason) or type(reason).__name__)}". Check the spelling, the revision and the network, or name a local folder.'
        ) from error
    return folder, folder.name  # the hub cache names a snapshot by its commit
