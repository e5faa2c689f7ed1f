"""What the documentation names exists: links, anchors, commands, options, scripts, files."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from domino_deploy.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages() -> list[pytest.param]:
    return [pytest.param(path.read_text(encoding="utf-8"), path, id=path.name) for path in PAGES]


def anchors(text: str) -> set[str]:
    """GitHub's anchor of every heading."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_sections_that_the_code_points_to_exist() -> None:
    titles = set(re.findall(r"^#+ (.+)$", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE))
    folders = ("domino_deploy", "exporters", "plugins", "runtime", "tests")
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {title for source in sources for title in re.findall(r'docs/architecture\.md, "([^"]+)"', source)}
    assert named, "no module names a section"
    assert named - titles == set()


def blocks(language: str) -> list[str]:
    return [body for path in PAGES for found, body in FENCE.findall(path.read_text(encoding="utf-8")) if found == language]


def command_lines() -> list[list[str]]:
    """Every `domino-deploy` line of the shell blocks, split as a shell would."""
    lines = [shlex.split(line, comments=True) for body in blocks("sh") for line in body.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line[:1] == ["domino-deploy"]]


@pytest.mark.parametrize(("text", "path"), pages())
def test_links_inside_the_project_resolve(text: str, path: Path) -> None:
    broken = []
    for link in LINK.findall(text):
        file, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        goal = path.parent / file if file else path
        if not goal.exists() or (anchor and anchor not in anchors(goal.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize(("text", "path"), pages())
def test_named_files_exist(text: str, path: Path) -> None:
    # `exporters/onnx_from_{target,backbone}.py` stands for both files; a module's path may leave out `domino_deploy/`.
    names = [name for name in re.findall(r"`([\w./{},-]+)`", text) if re.search(r"\.(py|sh|toml|txt)$|^(scripts|\.ci)/", name)]
    missing = []
    for name in names:
        found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
        for each in [f"{found[1]}{part}{found[3]}" for part in found[2].split(",")] if found else [name]:
            if not any((root / each).exists() for root in (ROOT, ROOT / "domino_deploy", ROOT / "plugins")):
                missing.append(each)
    assert missing == []


def test_the_documentation_shows_command_lines() -> None:
    assert {line[1] for line in command_lines()} >= {"export", "generate"}


@pytest.mark.parametrize("line", [pytest.param(line, id=" ".join(line)[:60]) for line in command_lines()])
def test_command_lines_parse(line: list[str]) -> None:
    name, arguments = line[1], line[2:]
    command = main.get_command(click.Context(main), name)
    assert command is not None, f"there is no command {name}"
    # With the settings of the whole: a command keeps the help option of its first context.
    command.make_context(name, list(arguments), parent=click.Context(main, **main.context_settings))


def test_every_command_is_documented() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"`domino-deploy {name}`" not in readme] == []
    named = set(re.findall(r"domino-deploy ([a-z][a-z-]+)", readme))
    assert named - COMMANDS.keys() == set()


def test_exit_codes_are_those_of_the_error_tree() -> None:
    from domino_deploy import errors

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", readme, re.MULTILINE)}
    raised = {value.exit_code for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.DominoDeployError)}
    assert documented == raised | {0, 2, 130, 143}
    assert all(f"{code} " in CliRunner().invoke(main, ["--help"]).output for code in documented - {130, 143})


@pytest.mark.parametrize("body", blocks("python"))
def test_python_examples_use_what_exists(body: str) -> None:
    tree = ast.parse(body)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        module = importlib.import_module(str(node.module))
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_the_error_trees_drawing_names_every_class() -> None:
    from domino_deploy import errors

    drawn = set(re.findall(r"\w+Error", errors.__doc__ or ""))
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.DominoDeployError)}
    assert drawn == defined
