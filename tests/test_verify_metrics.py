"""Errors, cosines, scans and near ties of two arrays, against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from domino_deploy.errors import RequestError
from domino_deploy.exporters.verify_cases import Case
from domino_deploy.exporters.verify_metrics import case_lines, gap_and_margin, token_line, value_line
from domino_deploy.exporters.verify_records import VerificationLine, VerificationReport
from domino_deploy.exporters.verify_tolerances import TOLERANCES, Tolerance, Tolerances
from domino_deploy.precision import Dtype, Precision

CASE = Case(graph="target", name="1 row", inputs={}, expected={})
HEAD = Case(graph="head", name="1 row", inputs={}, expected={})


def line_of(found: list[float], expected: list[float], **tolerance: float) -> VerificationLine:
    return value_line(CASE, "logits", np.array(found), np.array(expected), Tolerance(**({"rtol": 0.1} | tolerance)))


def test_errors_are_absolute_and_the_bound_follows_the_scale() -> None:
    line = line_of([1.0, -3.5, 8.0], [1.0, -4.0, 8.25], atol=0.05)
    assert (line.max_abs_error, line.mean_abs_error) == (0.5, 0.25)
    assert line.scale == 8.25
    assert line.max_rel_error == pytest.approx(0.5 / 8.25)
    assert line.bound == pytest.approx(0.05 + 0.825)
    assert line.cosine == pytest.approx((1 + 14 + 66) / math.sqrt((1 + 3.5**2 + 64) * (1 + 16 + 8.25**2)))
    assert line.passed


def test_an_output_within_its_bound_may_still_point_elsewhere() -> None:
    line = line_of([0.09, 0.1, 1.0], [0.0, 0.0, 1.0], min_cosine=0.999)
    assert line.max_abs_error <= line.bound
    assert not line.passed
    assert "cosine 0.991071, at least 0.999 expected" in line.problem()


def test_half_precision_is_compared_in_double() -> None:
    line = value_line(CASE, "logits", np.array([60000, 1], np.float16), np.array([60032.0, 1.0], np.float32), Tolerance(rtol=1e-3))
    assert line.max_abs_error == 32.0  # as float16 the difference of the rounded values would be 0


@pytest.mark.parametrize(
    ("found", "expected", "nan", "inf", "first", "in_pytorch"),
    [
        ([1.0, math.nan, math.inf], [1.0, 2.0, 3.0], 1, 1, (1,), False),
        ([1.0, 2.0, -math.inf], [1.0, 2.0, 3.0], 0, 1, (2,), False),
        ([1.0, 2.0, 3.0], [math.nan, 2.0, 3.0], 1, 0, (0,), True),
        ([math.nan, 2.0, 3.0], [math.nan, 2.0, 3.0], 1, 0, (0,), True),
    ],
)
def test_what_is_not_finite_is_counted_placed_and_fails(
    found: list[float], expected: list[float], nan: int, inf: int, first: tuple[int], in_pytorch: bool
) -> None:
    line = line_of(found, expected)
    scan = line.not_finite
    assert scan is not None
    assert (scan.nan, scan.inf, scan.size, scan.first, scan.in_pytorch) == (nan, inf, 3, first, in_pytorch)
    assert line.max_abs_error == math.inf
    assert not line.passed


def test_an_output_of_another_shape_fails() -> None:
    assert not value_line(CASE, "logits", np.zeros((1, 3)), np.zeros((1, 4)), Tolerance(rtol=1.0, atol=1.0)).passed


LOGITS = np.array([[1.0, 3.0, 2.99, 0.0], [5.0, 1.0, 2.0, 0.0]])


@pytest.mark.parametrize(
    ("found", "bound", "passes"), [([1, 0], 0.0, True), ([2, 0], 0.02, True), ([2, 0], 0.005, False), ([0, 0], 0.02, False)]
)
def test_a_token_may_differ_at_a_near_tie_alone(found: list[int], bound: float, passes: bool) -> None:
    line = token_line(CASE, "logits top-1", np.array(found), np.array([1, 0]), LOGITS, bound)
    assert line.passed is passes
    assert line.compared == 2
    assert [(one.index, one.expected, one.found) for one in line.disagreements] == ([] if found[0] == 1 else [((0,), 1, found[0])])


def test_the_gap_is_to_the_token_found_and_the_margin_to_the_second() -> None:
    line = token_line(CASE, "logits top-1", np.array([0, 0]), np.array([1, 0]), LOGITS, 0.02)
    (one,) = line.disagreements
    assert (one.gap, one.margin) == (2.0, pytest.approx(0.01))
    assert "token 0 for 1 at [0], whose logits lie 2.00e+00 apart" in line.problem()


def test_a_rollout_is_not_compared_behind_its_first_difference() -> None:
    logits = np.zeros((1, 4, 8))
    logits[..., 5], logits[..., 6], logits[..., 7] = 1.0, 0.9, 0.5
    line = token_line(HEAD, "draft_ids", np.array([[5, 6, 5, 7]]), np.array([[5, 5, 5, 5]]), logits, 0.2)
    assert line.compared == 2
    assert len(line.disagreements) == 1
    assert line.passed


def test_tokens_outside_the_vocabulary_and_outside_the_pool_are_infinitely_far() -> None:
    row = np.array([1.0, -math.inf, 0.5])
    assert gap_and_margin(row, 0, 7) == (math.inf, 0.5)
    assert gap_and_margin(row, 0, -1) == (math.inf, 0.5)
    assert gap_and_margin(row, 0, 1) == (math.inf, 0.5)


def test_of_all_layers_the_worst_is_shown_and_the_first_that_fails_is_named() -> None:
    ones = np.ones((1, 2))
    expected = {f"updated_key_cache.{layer}": ones for layer in range(4)}
    found = {name: ones + error for (name, _), error in zip(expected.items(), (0.0, 0.05, 0.2, 0.5), strict=True)}
    case = Case(graph="target", name="1 row", inputs={}, expected=expected)
    (line,) = case_lines(case, found, lambda output: Tolerance(rtol=0.1))
    assert (line.name, line.max_abs_error, line.first_layer) == ("updated_key_cache", 0.5, 2)
    assert "from layer 2 on" in line.problem()


class TestTolerances:
    def test_an_output_gets_the_looser_of_the_parts_that_make_it(self) -> None:
        mixed = Precision.of(Dtype.FLOAT32, lm_head=Dtype.INT8)
        tolerances = Tolerances()
        assert tolerances.of("features", "target", mixed) == TOLERANCES[Dtype.FLOAT32]
        assert tolerances.of("logits", "target", mixed) == TOLERANCES[Dtype.INT8]
        assert tolerances.of("base_logits", "backbone", mixed) == TOLERANCES[Dtype.INT8]
        assert tolerances.of("base_logits", "head", mixed) == TOLERANCES[Dtype.FLOAT32], "the head is never quantised"

    def test_values_for_all_outputs_and_for_one_are_read(self) -> None:
        tolerances = Tolerances.parse(atol=["1e-3"], rtol=["0.5", "logits:0.25", "logits:0.125"])
        assert tolerances.of("logits", "target", Precision()) == Tolerance(rtol=0.125, atol=1e-3)
        assert tolerances.of("hidden", "backbone", Precision()) == Tolerance(rtol=0.5, atol=1e-3)

    def test_one_output_leaves_the_others_as_they_are(self) -> None:
        tolerances = Tolerances.parse(atol=["logits:1"])
        assert tolerances.of("hidden", "backbone", Precision()) == TOLERANCES[Dtype.FLOAT32]
        assert tolerances.of("logits", "target", Precision()).rtol == TOLERANCES[Dtype.FLOAT32].rtol

    def test_everything_that_is_wrong_is_named_at_once(self) -> None:
        with pytest.raises(RequestError) as error:
            Tolerances.parse(atol=["x", "hidden:-1"], rtol=["bogus:1", "logits:nan", "features:"])
        for part in ("atol 'x'", "atol -1.0", "'bogus'", "rtol nan", "rtol 'features:'", "NAME:VALUE", "updated_key_cache"):
            assert part in str(error.value)


def test_a_summary_keeps_counts_and_drops_single_disagreements() -> None:
    line = token_line(CASE, "logits top-1", np.array([2, 0]), np.array([1, 0]), LOGITS, 0.02)
    report = VerificationReport(lines=(line,), generated=())
    assert report.summary()["lines"][0]["disagreements"] == 1  # type: ignore[index]
    assert report.to_dict()["lines"][0]["disagreements"][0]["found"] == 2  # type: ignore[index]
