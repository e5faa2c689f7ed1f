"""What an installation contains: the package-dir map puts three folders of the checkout inside `domino_deploy`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import domino_deploy
from tests.support.source_copy import PACKAGE_FOLDERS, ROOT, copy_source

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
BESIDE = PACKAGE_FOLDERS[1:]


def pip(python: Path | str, *arguments: str | Path) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module", params=["regular", "editable"])
def python(request: pytest.FixtureRequest, source: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment that holds this package alone, installed one way or the other."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, with_pip=False)
    # pip of the running environment installs into the new one: making a second pip would take most of the time.
    what = ["--editable", source] if request.param == "editable" else [wheel]
    pip(sys.executable, "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps", *what)
    return folder / "bin" / "python"


def run(python: Path, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), "-c", code], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", BESIDE)
def test_folders_beside_the_package_import_as_parts_of_it(python: Path, name: str, tmp_path: Path) -> None:
    done = run(python, f"import domino_deploy.{name} as module; print(module.__name__)", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"domino_deploy.{name}\n"), done.stderr


@pytest.mark.parametrize("name", BESIDE)
def test_folders_beside_the_package_do_not_import_by_their_bare_names(python: Path, name: str, tmp_path: Path) -> None:
    done = run(python, f"import {name}", tmp_path)
    assert done.returncode == 1
    assert f"No module named '{name}'" in done.stderr


def test_the_wheel_has_one_top_level_beside_its_metadata(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"domino_deploy", f"domino_deploy-{domino_deploy.__version__}.dist-info"}


def test_the_wheel_holds_every_module_of_the_checkout(wheel: Path) -> None:
    expected = {f"domino_deploy/{path.relative_to(ROOT / 'domino_deploy')}" for path in (ROOT / "domino_deploy").rglob("*.py")}
    expected |= {f"domino_deploy/{path.relative_to(ROOT)}" for name in BESIDE for path in (ROOT / name).rglob("*.py")}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert found == expected
    assert "domino_deploy/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_the_shipped_recipes(wheel: Path) -> None:
    expected = {f"domino_deploy/training/recipes/{path.name}" for path in (ROOT / "domino_deploy" / "training" / "recipes").iterdir()}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".json")}
    assert found == expected
    assert expected, "no recipe is shipped"


def test_the_wheel_holds_the_page(wheel: Path) -> None:
    expected = {f"domino_deploy/server/static/{path.name}" for path in (ROOT / "domino_deploy" / "server" / "static").iterdir()}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("domino_deploy/server/static/")}
    assert found == expected
    assert "domino_deploy/server/static/index.html" in found


def test_an_installation_finds_its_recipes(python: Path, tmp_path: Path) -> None:
    code = "from domino_deploy.training import recipe; print([recipe.read_recipe(name).epochs for name in recipe.shipped_recipes()])"
    done = run(python, code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "[3, 3]\n"), done.stderr


def test_every_package_is_listed_by_name() -> None:
    expected = set()
    for package, folder in (("domino_deploy", "domino_deploy"), *((f"domino_deploy.{name}", name) for name in BESIDE)):
        for path in (ROOT / folder).rglob("__init__.py"):
            expected.add(".".join((package, *path.parent.relative_to(ROOT / folder).parts)))
    data = {package for package in SETUPTOOLS["package-data"] if package not in expected}
    assert data == {"domino_deploy.server.static", "domino_deploy.training.recipes"}
    assert set(SETUPTOOLS["packages"]) == expected | data
    assert SETUPTOOLS["packages"] == sorted(SETUPTOOLS["packages"])


def test_core_dependencies_leave_out_what_only_exporting_needs() -> None:
    names = {requirement.partition(">")[0] for requirement in PYPROJECT["project"]["dependencies"]}
    assert names == {"click", "jinja2", "numpy", "onnxruntime", "rich", "tokenizers"}


def test_constraints_pin_every_direct_dependency() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    assert len(pinned) == len(lines)
    project = PYPROJECT["project"]
    extras = ("export", "train", "dev")
    needed = {
        line.partition(">")[0]
        for line in (*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra]))
    }
    assert {name for name in needed if not name.startswith("domino-deploy")} <= pinned
