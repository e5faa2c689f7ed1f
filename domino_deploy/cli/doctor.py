"""`domino-deploy doctor`: what this machine and environment can do, and what is known to go wrong here."""

from __future__ import annotations

from collections.abc import Iterable

import click

from domino_deploy.cli.command import Command
from domino_deploy.cli.console import as_bytes, echo_json, echo_table
from domino_deploy.doctor import Diagnosis, Run, diagnose
from domino_deploy.doctor_facts import Machine, collect
from domino_deploy.known_bad import Severity


@click.command(cls=Command)
@click.option("--json", is_flag=True, help="Everything as one JSON object.")
@click.pass_context
def doctor(ctx: click.Context, *, json: bool) -> None:
    """Tell what works here, and what is known to go wrong.

    The machine, the versions of all packages, the commands, backends and precisions that work, and known-bad combinations with
    their sources. Nothing is changed, and nothing but metadata is read. Exit code 1 when something bad is found.
    """
    diagnosis = diagnose(collect())
    if json:
        echo_json(diagnosis.to_dict())
    else:
        _show(diagnosis)
    ctx.exit(0 if diagnosis.is_healthy else 1)


def _show(diagnosis: Diagnosis) -> None:
    for line in _machine(diagnosis.facts.machine):
        click.echo(line)
    click.echo(f"python    {diagnosis.facts.python}")
    missing = [name for name, version in diagnosis.facts.packages.items() if version is None]
    click.echo()
    echo_table(("package", "version"), [(name, version) for name, version in diagnosis.facts.packages.items() if version is not None])
    if missing:
        click.echo(f"not installed: {', '.join(missing)}")
    click.echo()
    rows = [
        (command.name, "works" if command.works else f"lacks {', '.join(command.missing)}", command.install)
        for command in diagnosis.commands
    ]
    echo_table(("command", "", "install"), rows)
    click.echo()
    echo_table(("backend", "precision", ""), [(run.backend, run.precision, _verdict(run)) for run in diagnosis.runs])
    click.echo()
    if diagnosis.findings:
        columns = ("", "known", "found", "what to do", "source")
        echo_table(columns, [(f.severity, f.name, f.found, f.advice, f.source) for f in diagnosis.findings])
    bad = sum(finding.severity is Severity.BAD for finding in diagnosis.findings)
    click.echo(f"{bad} known-bad combination(s) found" if bad else "no known-bad combination found")


def _verdict(run: Run) -> str:
    return "runs" if run.works else run.reason


def _machine(machine: Machine) -> Iterable[str]:
    yield f"system    {machine.os}, {machine.architecture}"
    yield f"cpu       {machine.cpu}, {_number(machine.cores)} cores, {_number(machine.threads)} threads"
    yield f"          {', '.join(machine.cpu_flags) or 'no instruction sets that matter'}"
    yield f"memory    {_size(machine.memory_bytes)}, {_size(machine.free_memory_bytes)} free"
    yield f"disk      {_size(machine.free_disk_bytes)} free in the current folder"
    for gpu in machine.gpus:
        yield f"gpu       {gpu.name}, {_size(gpu.memory_bytes)}, driver {gpu.driver}, compute capability {gpu.compute_capability}"
    if not machine.gpus:
        yield "gpu       none that nvidia-smi shows"


def _number(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def _size(count: int | None) -> str:
    return "unknown" if count is None else as_bytes(count)
