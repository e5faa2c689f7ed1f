"""A bundle is served where only the core dependencies are installed: no torch, transformers, onnx, safetensors, hub client."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.source_copy import ROOT, copy_source

EXPORT_ONLY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "huggingface_hub", "gguf")

# Finding such a package fails as it does where it is not installed.
BLOCKED = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXPORT_ONLY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from domino_deploy.cli import main
main(prog_name="domino-deploy")
"""


def blocked(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED, *map(str, arguments)], capture_output=True, text=True, check=False)


def plain(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "domino_deploy.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_a_bundle_generates_the_same_text_without_the_export_packages(tiny_bundle: Path) -> None:
    arguments = ("generate", tiny_bundle, "--prompt", "Count to ten", "--max-new-tokens", "12")
    done = blocked(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain(*arguments).stdout
    assert "tau" in done.stderr


def test_a_bundle_is_inspected_without_counting_its_operators(tiny_bundle: Path) -> None:
    done = blocked("inspect", tiny_bundle)
    assert done.returncode == 0, done.stderr
    assert "target: operators not counted, the package onnx is not installed" in done.stdout
    assert "input\tinput_ids\tint64\tbatch x rows" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "BUNDLE"),
        ("generate", "BUNDLE", "--prompt", "x", "--backend", "eager"),
        ("inspect", "BUNDLE/target.onnx"),
        ("export", "--ckpt", "BUNDLE/drafter", "--target", "BUNDLE/target", "-o", "OUT"),
        ("train", "--target", "BUNDLE/target", "--prompts", "P", "--work", "OUT", "-o", "OUT"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_needs_more_names_the_extra(arguments: tuple[str, ...], tiny_bundle: Path, tmp_path: Path) -> None:
    done = blocked(*(part.replace("BUNDLE", str(tiny_bundle)).replace("OUT", str(tmp_path / "out")) for part in arguments))
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("Error: ")
    assert f"domino-deploy[{'train' if arguments[0] == 'train' else 'export'}]" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_bundle_generates_in_an_environment_with_the_core_dependencies_alone(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = copy_source(tmp_path / "source")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(source)], check=True)
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "list"], capture_output=True, text=True, check=True
    ).stdout
    installed = {line.split()[0].replace("-", "_") for line in listed.splitlines()[2:]}
    assert installed & set(EXPORT_ONLY) <= {"huggingface_hub"}  # a dependency of tokenizers, which imports it on request only
    arguments = ("generate", tiny_bundle, "--prompt", "Count to ten", "--max-new-tokens", "12")
    done = subprocess.run([tmp_path / "venv" / "bin" / "domino-deploy", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain(*arguments).stdout
