"""A verification as one HTML page: plots as inline SVG, nothing from outside, readable in light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from domino_deploy.exporters.verify_records import Generation, VerificationLine, VerificationReport

REPORT = "verification.html"

_STYLE = """
:root {
  color-scheme: light dark;
  --text: #1f2328; --soft: #667078; --line: #d5dade; --page: #ffffff;
  --good: #2f7d5b; --bad: #c2334d; --other: #5b7083;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e4e7ea; --soft: #98a2aa; --line: #3a4148; --page: #15181b;
    --good: #5fbf94; --bad: #f0728a; --other: #9fb2c4;
  }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); }
body { max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); } svg text.soft { fill: var(--soft); }
svg .good { fill: var(--good); } svg .bad { fill: var(--bad); } svg .other { fill: var(--other); }
svg .grid { stroke: var(--line); } svg .bound { stroke: var(--other); stroke-width: 3; }
"""
_WIDTH, _LEFT, _RIGHT = 940, 300, 20
_BINS, _LABEL_EVERY = 20, 4


def write_report(file: Path, report: VerificationReport, *, title: str) -> None:
    """Write the page, replacing what is there."""
    file.write_text(html_from_report(report, title=title), encoding="utf-8")


def html_from_report(report: VerificationReport, *, title: str) -> str:
    """The page as text.

    Args:
        report: of a comparison, passed or not.
        title: of the bundle.
    """
    name, failed = html.escape(title), [line for line in report.lines if not line.passed]
    verdict = (
        f'<p class="good">Passed: all {len(report.lines)} outputs lie within their bounds.</p>'
        if report.passed
        else f'<p class="bad">Failed: {len(failed)} of {len(report.lines)} outputs lie out of their bounds.</p>'
    )
    layers = "" if report.num_layers is None else f", the first {report.num_layers} layers of the target"
    body = [
        f"<h1>Verification of {name}</h1>{verdict}",
        f'<p class="soft">Graphs on ONNX Runtime against float32 PyTorch; precision {html.escape(report.precision)}{layers}.</p>',
        _list("Notes", report.notes),
        _list("Out of bounds", [line.problem() for line in failed]),
        _errors(report),
        _disagreements(report),
        _acceptance(report.generated),
        f"<h2>All comparisons</h2>{_table(report.lines)}",
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>Verification of {name}</title><style>{_STYLE}</style>"
    return "\n".join([f'<!doctype html>\n<html lang="en"><head>{head}</head><body>', *filter(None, body), "</body></html>\n"])


def _list(heading: str, items: Sequence[str]) -> str:
    entries = "".join(f"<li>{html.escape(item)}</li>" for item in items)
    return f"<h2>{heading}</h2><ul>{entries}</ul>" if items else ""


def _errors(report: VerificationReport) -> str:
    """Per output the case nearest to its bound: a dot for the error, a bar for the bound."""
    nearest: dict[tuple[str, str], VerificationLine] = {}
    for line in report.lines:
        known = nearest.setdefault((line.graph, line.name), line)
        if (not line.passed, line.nearness) > (not known.passed, known.nearness):
            nearest[line.graph, line.name] = line
    heading = "<h2>Largest error of each output</h2>"
    values = [value for line in nearest.values() for value in (line.max_abs_error, line.bound) if 0 < value < math.inf]
    if not values:
        return f'{heading}<p class="soft">No output differs at all.</p>'
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    bottom = 22 * len(nearest) + 8

    def at(value: float) -> float:
        exponent = high if value == math.inf else math.log10(value)
        return _LEFT + (exponent - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    shapes = []
    for power in range(low, high + 1):
        shapes.append(_upright(at(10.0**power), 0, bottom, "grid"))
        shapes.append(_text(at(10.0**power), bottom + 16, f"1e{power}", "soft", anchor="middle"))
    for index, ((graph, name), line) in enumerate(nearest.items()):
        y = 22 * index + 16
        shapes.append(_text(0, y + 4, f"{graph}: {name}"))
        if line.bound > 0:
            shapes.append(_upright(at(line.bound), y - 8, y + 8, "bound"))
        if line.max_abs_error > 0:
            tip = f"{line.case}: error {line.max_abs_error:.2e}, bound {line.bound:.2e}"
            shapes.append(_dot(at(line.max_abs_error), y, "good" if line.passed else "bad", tip))
        else:
            shapes.append(_text(_LEFT - 12, y + 4, "no difference", "soft", anchor="end"))
    caption = '<p class="soft">The case nearest to its bound, log scale; the thick bar is the bound.</p>'
    return heading + caption + _svg(shapes, bottom + 24)


def _disagreements(report: VerificationReport) -> str:
    """How near PyTorch's two best logits were wherever the graphs chose another token."""
    compared = sum(line.compared for line in report.lines)
    found = [one for line in report.lines for one in line.disagreements]
    margins = [one.margin for one in found if math.isfinite(one.margin)]
    agreement = f"Top-1 agreement {1 - len(found) / compared if compared else 1:.2%}."
    heading = f"<h2>Tokens that differ: {len(found)} of {compared}</h2>"
    if not margins:
        return f'{heading}<p class="soft">{agreement}</p>'
    top = max(margins) or 1.0
    counts = [0] * _BINS
    for margin in margins:
        counts[min(_BINS - 1, int(margin / top * _BINS))] += 1
    most, step, shapes = max(counts), (_WIDTH - 60) / _BINS, [*_axis(16, 122, max(counts))]
    for index, count in enumerate(counts):
        x, height, label = 40 + index * step, 110 * count / most, f"{top * index / _BINS:.2g}"
        shapes.append(_rect(x, 120 - height, step - 2, height, "other", f"from {label}: {count}"))
        if index % _LABEL_EVERY == 0:
            shapes.append(_text(x, 138, label, "soft"))
    caption = f'<p class="soft">{agreement} How far PyTorch\'s best logit lies above its second where they differ:</p>'
    return heading + caption + _svg(shapes, 144)


def _acceptance(generated: Sequence[Generation]) -> str:
    """Accepted drafts per cycle, one plot for each prompt."""
    parts = []
    for generation in generated:
        sides = ((0.12, generation.expected_accepted, "other", "PyTorch"), (0.5, generation.accepted, "good", "graphs"))
        most = max((*generation.accepted, *generation.expected_accepted, 1))
        step = (_WIDTH - 40) / max(len(generation.accepted), len(generation.expected_accepted), 1)
        shapes = [*_axis(16, 84, most)]
        for offset, accepted, kind, name in sides:
            for cycle, count in enumerate(accepted):
                height = max(1.0, 70 * count / most)
                tip = f"cycle {cycle + 1}, {name}: {count} accepted"
                shapes.append(_rect(30 + (cycle + offset) * step, 80 - height, 0.36 * step, height, kind, tip))
        text = f"Prompt {generation.prompt}: {generation.tokens} tokens, {sum(generation.accepted)} drafts accepted"
        text += f", {sum(generation.expected_accepted)} in PyTorch"
        if (one := generation.difference) is not None:
            text += f"; the texts part at token {one.position}, {one.found} for {one.expected}, "
            text += f"whose logits lie {one.gap:.2e} apart (allowed: {one.bound:.2e})"
        is_flat = not any((*generation.accepted, *generation.expected_accepted))
        parts.append(f"<p>{html.escape(text)}</p>{'' if is_flat else _svg(shapes, 90)}")
    caption = '<p class="soft">Two bars per cycle: <span class="soft">PyTorch</span> grey, <span class="good">the graphs green</span>.</p>'
    return f"<h2>Accepted drafts per cycle</h2>{caption}{''.join(parts)}" if parts else ""


def _table(lines: Iterable[VerificationLine]) -> str:
    columns = ("graph", "output", "case", "largest", "mean", "of scale", "cosine", "agree", "bound", "")
    head = "".join(f'<th class="number">{name}</th>' if index in range(3, 9) else f"<th>{name}</th>" for index, name in enumerate(columns))
    rows = []
    for line in lines:
        numbers = (
            f"{line.max_abs_error:.2e}",
            f"{line.mean_abs_error:.2e}",
            "" if line.max_rel_error is None else f"{line.max_rel_error:.1e}",
            "" if line.cosine is None else f"{line.cosine:.6f}",
            f"{line.compared - len(line.disagreements)}/{line.compared}" if line.compared else "",
            f"{line.bound:.2e}",
        )
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in (line.graph, line.name, line.case))
        cells += "".join(f'<td class="number">{text}</td>' for text in numbers)
        verdict = '<td class="good">ok</td>' if line.passed else '<td class="bad">failed</td>'
        rows.append(f"<tr>{cells}{verdict}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _svg(shapes: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">{"".join(shapes)}</svg>'


def _axis(top: int, bottom: int, most: int) -> tuple[str, str]:
    return _text(0, top, str(most), "soft"), _text(0, bottom, "0", "soft")


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _upright(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" class="{kind}"/>'


def _dot(x: float, y: float, kind: str, tip: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y}" r="5" class="{kind}"><title>{html.escape(tip)}</title></circle>'


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} class="{kind}"><title>{html.escape(tip)}</title></rect>'
