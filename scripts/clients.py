"""Starts a server, runs every client of scripts/clients_*.py against it in the clients' own environment, and records what came out.

See scripts/clients, which makes that environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from clients_render import page
from serving_process import ServerProcess, flag_line, serving

from domino_deploy.bench.machine import this_machine, versions
from domino_deploy.demo import demo_target

DOCS = Path(__file__).parents[1] / "docs"
API_KEY = "clients-key"
# Each with the key of its server; vllm's bench reads /metrics without one.
CLIENTS = {"openai": API_KEY, "langchain": API_KEY, "lm_eval": API_KEY, "aiperf": API_KEY, "prometheus": API_KEY, "vllm": ""}
# Few places in the queue, so that one client can fill it.
FLAGS = ("--max-queue", "16", "--per-request-spec-decode-metrics", "summary")


def run_client(name: str, server: ServerProcess, clients_python: Path, folder: Path) -> dict[str, Any]:
    """The record of one client; one that made none counts as failed."""
    asked = {
        "url": server.url,
        "model": server.model,
        "api_key": server.api_key,
        "target": str(demo_target()),
        "folder": str(folder / name),
    }
    server_file, record_file = folder / f"{name}-server.json", folder / f"{name}.json"
    server_file.write_text(json.dumps(asked), encoding="utf-8")
    script = Path(__file__).with_name(f"clients_{name}.py")
    # The clients are on loopback: a proxy of the environment would only be in the way.
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    code = subprocess.run([clients_python, script, server_file, record_file], env=environment, check=False).returncode
    if not record_file.is_file():
        return {"packages": {}, "checks": [{"done": "run", "passed": False, "found": f"exit code {code}, no record", "seconds": 0}]}
    return dict(json.loads(record_file.read_text(encoding="utf-8")))


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--clients-python", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--client", "chosen", type=click.Choice(list(CLIENTS)), multiple=True, help="Only these; the others' records stay.")
def main(bundle: Path, clients_python: Path, chosen: tuple[str, ...]) -> None:
    """Run the clients against BUNDLE."""
    names = chosen or tuple(CLIENTS)
    records: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="clients-") as made:
        for api_key in dict.fromkeys(CLIENTS[name] for name in names):
            with serving(bundle, Path(made) / "server.log", *FLAGS, api_key=api_key) as server:
                for name in names:
                    if CLIENTS[name] == api_key:
                        command = {"command": flag_line(server.command, api_key)}
                        records[name] = command | run_client(name, server, clients_python, Path(made))
                        _write(records)
    failed = [f"{name}: {check['done']}" for name, record in records.items() for check in record["checks"] if not check["passed"]]
    for line in failed:
        click.echo(f"failed: {line}", err=True)
    sys.exit(1 if failed else 0)


def _write(records: dict[str, Any]) -> None:
    """Put the records among those that there are, and render the page."""
    file = DOCS / "clients.json"
    before = json.loads(file.read_text(encoding="utf-8"))["clients"] if file.is_file() else {}
    merged = {name: {**before, **records}[name] for name in CLIENTS if name in {**before, **records}}
    report = {"machine": str(this_machine()), "versions": versions(), "clients": merged}
    file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    DOCS.joinpath("serving_clients.md").write_text(page(report), encoding="utf-8")


if __name__ == "__main__":
    main()
