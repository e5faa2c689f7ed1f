"""The HTML page: what it shows, and that it neither loads nor runs anything."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from domino_deploy.exporters.verify_records import Difference, Disagreement, Generation, NotFinite, VerificationLine, VerificationReport
from domino_deploy.exporters.verify_report import html_from_report


def line(**changes: object) -> VerificationLine:
    values = {
        "graph": "target",
        "name": "logits",
        "case": "1 row",
        "max_abs_error": 1e-4,
        "mean_abs_error": 1e-5,
        "bound": 1e-3,
        "scale": 2.0,
    }
    return VerificationLine(**(values | changes))  # type: ignore[arg-type]


SCAN = NotFinite(nan=3, inf=1, size=40, first=(0, 7), in_pytorch=False)
TOKENS = tuple(Disagreement(index=(0, place), expected=5, found=9, margin=0.01 * place, gap=0.02 * place) for place in range(1, 4))
REPORT = VerificationReport(
    lines=(
        line(),
        line(case="5 rows", max_abs_error=9e-4),
        line(name="features", max_abs_error=math.inf, mean_abs_error=math.inf, not_finite=SCAN),
        line(name="logits top-1", max_abs_error=0.0, bound=0.5, compared=30, disagreements=TOKENS),
    ),
    generated=(
        Generation(
            prompt=1,
            tokens=8,
            accepted=(2, 0, 3),
            expected_accepted=(2, 1, 2),
            difference=Difference(position=4, expected=17, found=23, gap=0.03, bound=0.05),
        ),
    ),
    precision="int4 (LM head int8)",
    notes=("<script>alert(1)</script> & more",),
)


def test_the_page_shows_verdict_plots_and_every_line() -> None:
    page = html_from_report(REPORT, title="my <bundle>")
    assert "<h1>Verification of my &lt;bundle&gt;</h1>" in page
    assert "Failed: 1 of 4 outputs" in page
    assert "3 NaN and 1 infinite of 40 values, the first at [0, 7]" in page
    assert "Tokens that differ: 3 of 30" in page
    assert "Top-1 agreement 90.00%" in page
    assert "the texts part at token 4, 23 for 17, whose logits lie 3.00e-02 apart (allowed: 5.00e-02)" in page
    assert "cycle 3, graphs: 3 accepted" in page
    assert "precision int4 (LM head int8)" in page
    assert page.count("<tr>") == 1 + len(REPORT.lines)


def test_the_error_plot_takes_the_case_nearest_to_its_bound() -> None:
    page = html_from_report(REPORT, title="b")
    assert "5 rows: error 9.00e-04, bound 1.00e-03" in page
    assert "1 row: error 1.00e-04" not in page


def test_nothing_is_loaded_or_run_and_text_is_escaped() -> None:
    page = html_from_report(REPORT, title="b")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert re.search(r"(src|href|url\(|@import|https?:)", page) is None


def test_every_plot_is_well_formed_and_inside_its_frame() -> None:
    plots = re.findall(r"<svg.*?</svg>", html_from_report(REPORT, title="b"))
    assert len(plots) == 3
    for plot in plots:
        root = ElementTree.fromstring(plot)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for shape in root.iter():
            for name in ("x", "x1", "x2", "cx"):
                assert 0 <= float(shape.get(name, 0)) <= width
            for name in ("y", "y1", "y2", "cy"):
                assert 0 <= float(shape.get(name, 0)) <= height


def test_a_report_without_differences_or_generation_is_a_page_too() -> None:
    page = html_from_report(VerificationReport(lines=(line(max_abs_error=0.0, bound=0.0),), generated=()), title="b")
    assert "No output differs at all." in page
    assert "Accepted drafts" not in page
