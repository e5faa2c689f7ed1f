"""The files that a build reads, apart from the checkout: building writes into its source."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE_FOLDERS = ("domino_deploy", "exporters", "plugins", "runtime")


def copy_source(folder: Path) -> Path:
    """Copy what setuptools needs into `folder`, which exists."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in PACKAGE_FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
