"""The command `serve` in this process."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner

from domino_deploy.cli import main


def invoke(*arguments: object, **environment: str) -> Any:
    return CliRunner().invoke(main, ["serve", *map(str, arguments)], env=environment)
