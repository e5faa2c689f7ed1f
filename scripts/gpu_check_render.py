"""Reports of `scripts/gpu_check` as the tables of docs/gpu.md; figures that a run has not are left out, and said to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check_report import ReportError, merged, read_report, write_json

BEGIN, END = "<!-- scripts/gpu_check --render: begin -->", "<!-- scripts/gpu_check --render: end -->"
NOT_RUN = (
    "**Not yet run.** No figure of this page has been measured on a GPU; nothing about GPU speed or GPU results is claimed "
    "anywhere in this project."
)

Values = Mapping[str, Any]


def render(paths: Sequence[Path], page: Path, kept: Path) -> None:
    """Put the reports together, keep them as `kept`, and write their tables between the markers of `page`.

    Raises:
        ReportError: no reports, or a page without markers.
    """
    report = merged([read_report(path) for path in paths])
    text = replaced(page.read_text(encoding="utf-8"), markdown(report), page)
    write_json(kept, report)
    page.write_text(text, encoding="utf-8")


def replaced(text: str, tables: str, page: Path) -> str:
    """`text` with `tables` between its markers."""
    before, found, rest = text.partition(BEGIN)
    _, closed, behind = rest.partition(END)
    if not (found and closed):
        raise ReportError(f"{page}: expected the lines {BEGIN} and {END}, found {'no end' if found else 'no begin'}. Put them back.")
    return f"{before}{BEGIN}\n{tables}\n{END}{behind}"


def markdown(report: Values) -> str:
    """All tables of a report."""
    stages = report["stages"]
    parts = [_heading(report)]
    for title, name, tables in _SECTIONS:
        stage = stages.get(name)
        if stage is None:
            parts.append(f"### {title}\n\nNot part of this run.")
            continue
        body = [part for part in tables(stage["result"]) if part]
        if "left_out" in stage["result"]:
            body.append(f"Left out, as the time was over: {stage['result']['left_out']}.")
        if stage["status"] != "done":
            reason = (stage["error"] or "").strip().splitlines()[-1:] or ["no reason given"]
            body.insert(0, f"**{stage['status']}** after {stage['seconds']:.0f} s: `{reason[0][:300]}`")
        parts.append("\n\n".join([f"### {title}", *(body or ["Nothing was noted."])]))
    return "\n\n".join(parts)


def _heading(report: Values) -> str:
    rows = [(name, stage["status"], f"{stage['seconds']:.0f} s") for name, stage in report["stages"].items()]
    return f"Run of {report['started']}, device {report['device']}, sizes {report['sizes']}, {report['minutes']:g} minutes.\n\n" + table(
        ("stage", "outcome", "time"), rows
    )


def _machine(result: Values) -> Iterable[str]:
    facts = {**result.get("machine", {}), **result.get("versions", {}), "sources, sha256": result.get("sources_sha256", "")[:16]}
    facts |= {f"{name} (idle)": value for name, value in result.get("clocks_idle", {}).items() if name.startswith(("clocks", "driver"))}
    facts |= {f"{name} (after load)": value for name, value in result.get("clocks_under_load", {}).items() if name.startswith("clocks.")}
    yield table(("machine", ""), facts.items())
    yield _bandwidth(result)


def _bandwidth(result: Values) -> str:
    measured = result.get("bandwidth")
    if measured is None:
        return ""
    return f"Memory: copy {measured['copy_gb_per_s']:,} GB/s (read and written), sum {measured['read_gb_per_s']:,} GB/s (read)."


def _compile(result: Values) -> Iterable[str]:
    if "cases" in result:
        yield f"{result['compiled']} of {result['cases']} cases compiled; not: {', '.join(result['failed']) or 'none'}."


def _kernel_numbers(result: Values) -> Iterable[str]:
    rows = []
    for dtype, form in dict.fromkeys((row["dtype"], row["form"]) for row in result.get("corrections", [])):
        own = [row for row in result["corrections"] if (row["dtype"], row["form"]) == (dtype, form)]
        worst = [f"{max(row[name] for row in own):.2g}" for name in ("error", "error_of_allowed", "lost_of_allowed")]
        special = result.get(f"special_{dtype}", {}).get(form, {})
        right = f"{sum(special.values())} of {len(special)}" if special else ""
        rows.append((dtype, form, len(own), *worst, sum(row["ids_that_differ"] for row in own), right))
    columns = ("codebook", "form", "cases", "worst error of a logit", "of what rounding allows", "logit lost, of what rounding allows")
    yield table((*columns, "ids unlike fp32 PyTorch", "ties, NaN, rows apart"), rows)


def _kernel_times(result: Values) -> Iterable[str]:
    yield _bandwidth(result)
    for row in result.get("corrections", []):
        yield f"{row['dtype']}, batch {row['batch']}: {row['bytes'] / 1e6:.1f} MB, {row['limit_us']:.1f} us at the copy's bandwidth."
        rows = [
            (name, _microsecond(time), f"{row['of_limit'][name]:.2f}", f"{row['faster_than_pytorch'][name]:.2f}")
            for name, time in row["times"].items()
        ]
        yield table(("form", "time", "of limit", "faster than PyTorch"), rows)


def _rollout(result: Values) -> Iterable[str]:
    yield _bandwidth(result)
    columns = ("rollout", "time", "launches", "MB", "rows rescored", "bytes / bandwidth", "of limit", "faster than the plain graph")
    for case in result.get("cases", []):
        yield f"{case['dtype']}, batch {case['batch']}, {case['logits']} logits:"
        rows = [(name, _microsecond(found["time"]), *_limit(found), *_checks(found)) for name, found in case["rollouts"].items()]
        yield table((*columns, "logit lost", "replay = eager"), rows)
    rows = [
        (row["dtype"], row["batch"], name, _microsecond(time), f"{row['times']['plain graph']['median_us'] / time['median_us']:.2f}")
        for row in result.get("compiled", [])
        for name, time in row["times"].items()
    ]
    yield table(("weights", "batch", "rollout, in the same rounds", "time", "faster than the plain graph"), rows)


def _checks(found: Values) -> tuple[str, str]:
    lost, equal = found.get("logit_lost"), found.get("replay_equals_eager")
    return "" if lost is None else f"{lost:.2g}", "" if equal is None else _yes(equal)


def _limit(found: Values) -> tuple[str, ...]:
    if "bytes" not in found:
        return ("",) * 6
    counts = (str(found["launches"]), f"{found['bytes'] / 1e6:.0f}", str(found["contenders"]))
    return (*counts, f"{found['limit_us']:.1f} us", f"{found['of_limit']:.2f}", f"{found['faster_than_plain']:.2f}")


def _driver(result: Values) -> Iterable[str]:
    rows = [
        (
            row["dtype"],
            row["batch"],
            row["tactic"],
            _yes(row["tokens_equal"]),
            _yes(row["bits_equal"]),
            _microsecond(row["times"]["tiles"]),
        )
        for row in result.get("launches", [])
    ]
    yield table(("codebook", "batch", "tactic", "tokens = Triton's", "bits = Triton's", "tiles"), rows)


def _speculation(result: Values) -> Iterable[str]:
    terms = result.get("terms")
    if terms:
        rows = [("T_plain", f"{terms['plain_us'] / 1e3:.3f} ms"), ("T_draft", f"{terms['draft_us'] / 1e3:.3f} ms")]
        rows += [(f"T_head, {name}", f"{value / 1e3:.3f} ms") for name, value in terms["head_us"].items()]
        rows += [(f"T_verify, {width} rows", f"{value / 1e3:.3f} ms") for width, value in terms["verify_us"].items()]
        yield table(("term", "time"), rows)
    if "cycle_us" in result:
        yield (
            f"The loop's own cycle with the head `{result['head']}`: {result['cycle_us'] / 1e3:.3f} ms, of which the terms are "
            f"{result['terms_of_cycle']:.0%}; plain decoding: {result['plain_token_us'] / 1e3:.3f} ms a token. "
            f"A cycle pays when it commits more than {result['break_even_tau']:.2f} tokens. {_agreement(result)}"
        )


def _agreement(result: Values) -> str:
    same, compared = result["same_tokens"], result["compared_tokens"]
    return f"Its text is plain decoding's for {'all ' if same == compared else 'the first ' + str(same) + ' of '}{compared} tokens."


def _tensorrt_rtx(result: Values) -> Iterable[str]:
    yield table(("TensorRT-RTX", ""), result.items())


_SECTIONS = (
    ("Machine", "machine", _machine),
    ("Compiling", "compile", _compile),
    ("Kernels: numbers", "kernel_numbers", _kernel_numbers),
    ("Kernels: times", "kernel_times", _kernel_times),
    ("Rollout of a block", "rollout", _rollout),
    ("The plugin's PTX through the driver", "driver", _driver),
    ("A speculative step in PyTorch", "speculation", _speculation),
    ("TensorRT-RTX", "tensorrt_rtx", _tensorrt_rtx),
)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown; empty without rows."""
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|", *lines]) if lines else ""


def _microsecond(time: Values) -> str:
    return f"{time['median_us']:.1f} us ({time['p10_us']:.1f}-{time['p90_us']:.1f})"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
