"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole, verified bundle of a random Llama target and a random Domino drafter; not to be written to."""
    from domino_deploy.exporters.export import export_bundle
    from tests.support.checkpoints import write_drafter, write_target

    folder = tmp_path_factory.mktemp("tiny")
    target = write_target(folder / "target")
    drafter = write_drafter(folder / "drafter", target)
    return export_bundle(drafter, target, folder / "bundle", progress=lambda step: None).path
