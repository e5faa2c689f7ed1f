"""What every check of a client has in common: where the server is, what counts as kept, and the record that is made of it.

Imported by scripts/clients_*.py, which run in the clients' own environment: nothing of domino_deploy is there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Server:
    """url: without a path; model: its name; api_key: the key that it asks for; target: its checkpoint folder; folder: for files."""

    url: str
    model: str
    api_key: str
    target: str
    folder: Path

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


class Unexpected(Exception):
    """A client saw something else than the API promises."""


def expect(holds: bool, wanted: str, found: object) -> None:
    """Raises Unexpected unless `holds`."""
    if not holds:
        raise Unexpected(f"expected {wanted}, found {found!r}")


@dataclass(frozen=True, kw_only=True)
class Check:
    """A function of the server that returns what was seen, in a few words or as figures; its docstring says what is done."""

    run: Callable[[Server], Any]

    @property
    def done(self) -> str:
        return (self.run.__doc__ or self.run.__name__).strip().splitlines()[0]


def report(packages: Sequence[str], checks: Sequence[Callable[[Server], Any]]) -> None:
    """Run every check, one after the other, and write the record: `python scripts/clients_X.py SERVER.json OUT.json`.

    The record has the packages' versions and, for every check, `done`, `passed`, `found` and `seconds`.  A check that fails in any
    way is a line of the record; the others still run.
    """
    server_file, record_file = map(Path, sys.argv[1:])
    asked = json.loads(server_file.read_text(encoding="utf-8"))
    server = Server(**{**asked, "folder": Path(asked["folder"])})
    lines = []
    for check in (Check(run=run) for run in checks):
        started = time.monotonic()
        try:
            found, passed = check.run(server), True
        except Exception as error:  # whatever a client raises is the finding
            found, passed = f"{type(error).__name__}: {error}"[:2000], False
        seconds = time.monotonic() - started
        print(f"{'ok  ' if passed else 'FAIL'} {check.done} ({seconds:.1f} s): {found}", file=sys.stderr, flush=True)
        lines.append({"done": check.done, "passed": passed, "found": found, "seconds": round(seconds, 1)})
    record = {"packages": {package: metadata.version(package) for package in packages}, "checks": lines}
    record_file.write_text(json.dumps(record), encoding="utf-8")
