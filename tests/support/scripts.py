"""Modules of `scripts/`, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.support.source_copy import ROOT

SCRIPTS = ROOT / "scripts"


def loaded_script(name: str) -> ModuleType:
    """`scripts/NAME.py` as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
