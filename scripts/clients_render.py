"""docs/serving_clients.md out of docs/clients.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {
    "openai": "openai-python",
    "langchain": "LangChain",
    "lm_eval": "lm-eval",
    "aiperf": "AIPerf",
    "prometheus": "Prometheus",
    "vllm": "vllm bench serve",
}


def page(report: Mapping[str, Any]) -> str:
    """The page: how it was made, a table of clients, then each one's checks and what was seen."""
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        "# Real clients against the server",
        "",
        "Written by `scripts/clients`; the same as data: [clients.json](clients.json). Every client is the package as it is installed, run",
        f"against a server process. Machine: {report['machine']}. Server: {packages}.",
        "What counts is the verdict: speeds were taken while the machine did other things too, and are no benchmark.",
        "",
        "| client | version | checks | passed |",
        "|---|---|---:|---:|",
    ]
    for name, record in report["clients"].items():
        passed = sum(check["passed"] for check in record["checks"])
        versions = ", ".join(f"{package} {version}" for package, version in record["packages"].items())
        lines.append(f"| {NAMES[name]} | {versions} | {len(record['checks'])} | {passed} |")
    for name, record in report["clients"].items():
        lines += [
            "",
            f"## {NAMES[name]}",
            "",
            "```text",
            record["command"],
            "```",
            "",
            "| what was done | verdict | seen |",
            "|---|---|---|",
        ]
        figures = []
        for check in record["checks"]:
            found = check["found"]
            if isinstance(found, dict):
                figures.append((check["done"], found))
                found = "below"
            lines.append(f"| {_cell(check['done'])} | {'passed' if check['passed'] else '**failed**'} | {_cell(found)} |")
        for done, found in figures:
            lines += ["", f"{done}:", "", *_table(found)]
    return "\n".join(lines) + "\n"


def _table(figures: Mapping[str, Any]) -> list[str]:
    """Figures as rows; scores of several systems, {system: {task: {metric: value}}}, as columns."""
    systems = {name: value for name, value in figures.items() if isinstance(value, dict)}
    lines = []
    if systems:
        lines += [f"| task | metric | {' | '.join(systems)} |", f"|---|---|{'---:|' * len(systems)}"]
        first = next(iter(systems.values()))
        for task, metrics in first.items():
            for metric in metrics:
                values = " | ".join(f"{system[task][metric]:.6g}" for system in systems.values())
                lines.append(f"| {task} | {metric.partition(',')[0]} | {values} |")
    plain = {name: value for name, value in figures.items() if name not in systems}
    if plain:
        lines += ["", "| | |", "|---|---:|"] if systems else ["| | |", "|---|---:|"]
        lines += [f"| {name.replace('_', ' ')} | {_number(value)} |" for name, value in plain.items()]
    return lines


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) and not value.is_integer() else _cell(value)


def _cell(value: object) -> str:
    """One line without what ends a cell."""
    return " ".join(str(value).split()).replace("|", "\\|")
