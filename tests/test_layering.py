"""Who may import whom, read from the syntax tree of every module (docs/architecture.md, "Layers")."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE_DIR: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]

# Unit (first name below domino_deploy) -> the units it may import. A unit that is missing here fails: give it a layer.
BASE = {"errors", "config", "precision", "signature", "__version__"}
CHECKPOINT = {"checkpoint", "checkpoint_config", "checkpoint_drafter", "checkpoint_source", "checkpoint_tensors", "checkpoint_text"}
READERS = {"config_fields", "safetensors_header", "strict_json"}
FILES = BASE | CHECKPOINT | READERS | {"aside", "bundle", "config_json", "pairing", "stored_weights", "template_variables"}
ENGINES = {"engine_checks", "engine_choice", "engine_signatures", "engines", "tensorrt_libraries"}
MAY_IMPORT: dict[str, set[str]] = {
    "__version__": set(),
    "__main__": {"cli"},
    "errors": set(),
    "api_keys": set(),
    "aside": set(),
    "config": {"errors"},
    "precision": {"errors"},
    "backends": {"errors", "precision"},
    "signature": {"config"},
    "pairing": BASE,
    **dict.fromkeys(READERS, BASE | READERS),
    **dict.fromkeys(CHECKPOINT, BASE | READERS | CHECKPOINT),
    "config_json": BASE,
    "bundle": BASE | READERS | CHECKPOINT | {"aside", "config_json"},
    "template_variables": {"bundle", "config_fields", "errors", "strict_json"},
    "plugins": {"errors"},
    "model": FILES | {"plugins"},
    "engine_signatures": {"config", "signature"},
    "engine_choice": FILES | {"engines", "plugins"},
    "engine_checks": FILES | {"backends", "engine_signatures"},
    "engines": FILES | {"engine_checks"},
    "tensorrt_libraries": {"engines", "errors"},
    "exporters": FILES | ENGINES | {"plugins", "model", "runtime", "memory_plan", "resources"},
    "runtime": FILES | ENGINES | {"backends", "plugins", "model"},
    "training": FILES | {"plugins", "model", "runtime"},
    "bench": FILES | {"api_keys", "runtime", "training"},
    "server": FILES | {"api_keys", "backends", "memory_plan", "resources", "runtime"},
    "stored_weights": FILES,
    "memory_plan": FILES | {"runtime", "stored_weights"},
    "requirements": set(),
    "resources": set(),
    "doctor_facts": {"bench", "resources"},
    "known_bad": {"doctor_facts", "requirements"},
    "doctor": {"backends", "doctor_facts", "known_bad", "precision"},
    "gguf_target": {"aside", "checkpoint", "checkpoint_tensors", "errors"},
    "demo": {"errors", "gguf_target"},
}
HEAVY = {
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "transformers",
    "tokenizers",
    "jinja2",
    "llguidance",
    "safetensors",
    "huggingface_hub",
}
NUMPY_ONLY = (
    *("protocols", "requests", "acceptance", "sampling", "logprobs", "constraints", "choosing", "output", "decode", "kv_cache", "text"),
    *(
        "prompt_lookup",
        "opening",
        "session",
        "controller",
        "cycle_costs",
        "prefix_cache",
        "scheduled_request",
        "scheduler",
        "warm_up",
        "single_slot",
    ),
    *("engine", "engine_settings"),
)


@dataclass(frozen=True)
class Import:
    """One imported module of one source module; `is_deferred` when it stands inside a function."""

    importer: str
    imported: str
    is_deferred: bool

    @property
    def top(self) -> str:
        return self.imported.partition(".")[0]


def unit(module: str) -> str:
    """`domino_deploy.runtime.decode` -> `runtime`; the package itself holds the version alone."""
    return (*module.split("."), "__version__")[1]


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package and its file, by the package-dir map."""
    for package, folder in PACKAGE_DIR.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            yield (package if path.stem == "__init__" else f"{package}.{path.stem}"), path
        for inner in sorted(path for path in (ROOT / folder).iterdir() if (path / "__init__.py").is_file()):
            if f"{package}.{inner.name}" not in PACKAGE_DIR:
                for path in sorted(inner.glob("*.py")):
                    yield f"{package}.{inner.name}.{path.stem}", path


def imports_of(importer: str, tree: ast.AST, is_deferred: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(importer, alias.name, is_deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from domino_deploy.plugins import op` imports the module domino_deploy.plugins.op.
            yield from (Import(importer, f"{node.module}.{alias.name}", is_deferred) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        else:
            yield from imports_of(importer, node, is_deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def all_imports() -> list[Import]:
    return [found for name, path in modules() for found in imports_of(name, ast.parse(path.read_text(encoding="utf-8")))]


IMPORTS = all_imports()
OWN = [found for found in IMPORTS if found.top == "domino_deploy"]


def described(offenders: list[Import]) -> list[str]:
    return sorted(f"{found.importer} imports {found.imported}" for found in offenders)


def test_every_unit_has_a_layer() -> None:
    units = {unit(name) for name, _ in modules()}
    assert units - {"cli"} - MAY_IMPORT.keys() == set()
    assert len(IMPORTS) > 100, "the walk found too few imports to mean anything"


def test_units_import_only_what_lies_below_them() -> None:
    offenders = [
        found
        for found in OWN
        if unit(found.importer) != "cli"
        and unit(found.imported) not in MAY_IMPORT.get(unit(found.importer), set()) | {unit(found.importer)}
    ]
    assert described(offenders) == []


def test_only_verification_opens_runtime_backends_from_the_exporters() -> None:
    offenders = [
        found
        for found in OWN
        if unit(found.importer) == "exporters"
        and unit(found.imported) == "runtime"
        and not found.importer.startswith("domino_deploy.exporters.verify")
        and not found.imported.startswith("domino_deploy.runtime.text")  # tokens, which runs nothing
    ]
    assert described(offenders) == []


def test_the_runtime_touches_the_pytorch_model_only_in_the_eager_backend() -> None:
    # The TensorRT backend registers the plugin that engines may call.
    offenders = [
        found
        for found in IMPORTS
        if unit(found.importer) == "runtime"
        and (found.top == "torch" or (found.top == "domino_deploy" and unit(found.imported) in ("model", "plugins")))
        and found.importer != "domino_deploy.runtime.backends.eager"
        and (found.importer, found.imported) != ("domino_deploy.runtime.backends.trt", "domino_deploy.plugins.trt_plugin_v3")
    ]
    assert described(offenders) == []


@pytest.mark.parametrize("name", NUMPY_ONLY)
def test_decode_time_logic_imports_numpy_alone(name: str) -> None:
    importer = f"domino_deploy.runtime.{name}"
    found = [item for item in IMPORTS if item.importer == importer and not item.is_deferred]
    assert found, f"{importer} has no imports or does not exist"
    foreign = {item.top for item in found} - sys.stdlib_module_names - {"domino_deploy", "numpy"}
    assert foreign == set()


def test_heavy_packages_are_imported_at_the_top_only_where_they_are_the_subject() -> None:
    subjects = (
        "domino_deploy.model",
        "domino_deploy.plugins",
        "domino_deploy.exporters",
        "domino_deploy.training",
        "domino_deploy.runtime.backends",
    )
    offenders = [found for found in IMPORTS if found.top in HEAVY and not found.is_deferred and not found.importer.startswith(subjects)]
    assert described(offenders) == []


def test_backends_import_only_their_own_engine() -> None:
    offenders = [
        found
        for found in IMPORTS
        if (found.importer == "domino_deploy.runtime.backends.ort" and found.top in HEAVY - {"onnxruntime"})
        or (found.importer == "domino_deploy.runtime.backends.eager" and found.top in HEAVY - {"torch"})
    ]
    assert described(offenders) == []


def test_the_operator_is_named_in_one_place() -> None:
    from domino_deploy.plugins import op

    # The domain alone is an everyday word here; the operator's name is not.
    quoting = [name for name, path in modules() if f'"{op.NAME}"' in path.read_text(encoding="utf-8")]
    assert quoting == ["domino_deploy.plugins.op"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", [("torch", False)]),
        ("def f():\n    import torch", [("torch", True)]),
        ("from domino_deploy.plugins import op", [("domino_deploy.plugins.op", False)]),
        ("class A:\n    from torch import nn", [("torch.nn", False)]),
        ("try:\n    import onnx\nexcept ImportError:\n    pass", [("onnx", False)]),
        ("if TYPE_CHECKING:\n    import torch", []),
    ],
)
def test_the_reader_of_imports_sees_them(source: str, expected: list[tuple[str, bool]]) -> None:
    assert [(found.imported, found.is_deferred) for found in imports_of("m", ast.parse(source))] == expected
