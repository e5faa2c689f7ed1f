"""What `doctor` says of collected facts: which commands, backends and precisions work here, and which known-bad combinations are found.

Every function is pure: facts in, answer out.  The table of known-bad combinations: `known_bad.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from domino_deploy.backends import BACKENDS, Backend
from domino_deploy.doctor_facts import Facts
from domino_deploy.known_bad import KNOWN_BAD, Severity
from domino_deploy.precision import Dtype

CORE = ""  # what a plain `pip install domino-deploy` brings


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A known-bad combination that these facts show."""

    name: str
    severity: Severity
    found: str
    advice: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Command:
    """Whether a command works here; `missing` packages come with `install`."""

    name: str
    missing: tuple[str, ...]
    install: str

    @property
    def works(self) -> bool:
        return not self.missing


@dataclass(frozen=True, kw_only=True)
class Run:
    """Whether bundles of a precision run on a backend here, and why not."""

    backend: str
    precision: str
    reason: str

    @property
    def works(self) -> bool:
        return not self.reason


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that `doctor` tells."""

    facts: Facts
    commands: tuple[Command, ...]
    runs: tuple[Run, ...]
    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether no finding is bad; notes are not."""
        return all(finding.severity is not Severity.BAD for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": dataclasses.asdict(self.facts.machine),
            "python": self.facts.python,
            "packages": dict(self.facts.packages),
            "commands": [{**dataclasses.asdict(command), "works": command.works} for command in self.commands],
            "runs": [{**dataclasses.asdict(run), "works": run.works} for run in self.runs],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "healthy": self.is_healthy,
        }


_TENSORRT = "tensorrt or tensorrt-rtx"  # either will do: alternatives are told, and taken apart, at " or "
# Command -> the extra that brings what it needs, and those packages; a test holds this against pyproject.toml.
_EXPORTING = ("torch", "onnx", "onnx-ir", "onnxscript", "safetensors")
COMMAND_NEEDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "export": ("export", _EXPORTING),
    "verify": ("export", _EXPORTING),
    "build-engine": ("tensorrt-rtx", (*_EXPORTING, _TENSORRT)),  # of the two, the one that builds without a GPU
    "generate": (CORE, ()),
    "serve": ("serve", ("llguidance", "prometheus-client", "pydantic", "starlette", "uvicorn")),
    "bench": (CORE, ()),
    "inspect": (CORE, ()),
    "regenerate": ("train", ("torch", "safetensors")),
    "train": ("train", ("torch", "safetensors", "matplotlib")),
    "doctor": (CORE, ()),
}
_SERVING = ("numpy", "onnxruntime", "tokenizers", "jinja2")
_CORE_NEEDS: Mapping[str, tuple[str, ...]] = {"doctor": (), "inspect": ("numpy",), "train": ("tokenizers",), "regenerate": ("tokenizers",)}


def diagnose(facts: Facts) -> Diagnosis:
    """The whole answer."""
    return Diagnosis(facts=facts, commands=tuple(commands(facts)), runs=tuple(runs(facts)), findings=tuple(findings(facts)))


def commands(facts: Facts) -> Iterable[Command]:
    """Each command, and the packages that it lacks here."""
    for name, (extra, packages) in COMMAND_NEEDS.items():
        missing = tuple(package for package in (*_CORE_NEEDS.get(name, _SERVING), *packages) if not _has(facts, package))
        yield Command(name=name, missing=missing, install=_install(extra) if missing else "")


def runs(facts: Facts) -> Iterable[Run]:
    """Each backend with each precision."""
    for backend, needs in BACKENDS.items():
        lack = _lack(facts, backend)
        for dtype in Dtype:
            reason = lack if dtype in needs.precisions else f"{backend} does not compute it"
            yield Run(backend=backend, precision=str(dtype), reason=reason)


def findings(facts: Facts) -> Iterable[Finding]:
    """Every known-bad combination that the facts show, bad ones first."""
    found = [
        Finding(name=entry.name, severity=entry.severity, found=words, advice=entry.advice, source=entry.source)
        for entry in KNOWN_BAD
        for words in entry.finds(facts)
    ]
    return sorted(found, key=lambda finding: finding.severity is not Severity.BAD)


def _lack(facts: Facts, backend: Backend) -> str:
    """What a backend lacks here; empty for nothing."""
    needs = BACKENDS[backend]
    for package in (needs.package, _TENSORRT) if backend is Backend.TENSORRT else (needs.package,):
        if not _has(facts, package):
            return f"{package} is not installed: pip install '{needs.install}'"
    if backend is Backend.TENSORRT and not facts.machine.gpus:
        return "no GPU that nvidia-smi shows"
    return ""


def _has(facts: Facts, package: str) -> bool:
    return any(facts.installed(name) is not None for name in package.split(" or "))


def _install(extra: str) -> str:
    return "pip install domino-deploy" if extra == CORE else f"pip install 'domino-deploy[{extra}]'"
