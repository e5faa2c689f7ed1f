"""What cycles cost: calibrated, interpolated, learnt from what they took, not led astray by stalls."""

from __future__ import annotations

import itertools

import pytest

from domino_deploy.runtime.cycle_costs import CycleCosts, calibrate
from domino_deploy.runtime.protocols import TermsMs
from tests.support.speculation_simulation import MAX_WIDTH, cpu_cost, gpu_cost

COSTS = {"cpu": cpu_cost, "gpu": gpu_cost}


def test_a_stall_while_a_cost_is_measured_for_the_first_time_does_not_shut_that_width_out() -> None:
    costs = calibrate(lambda batch, width: TermsMs(verify=gpu_cost(batch, width)), (1, 4), MAX_WIDTH)
    costs.add(2, 5, 100 * gpu_cost(2, 5))
    assert costs.ms(2, 5) / costs.ms(2, 0) == pytest.approx(gpu_cost(2, 5) / gpu_cost(2, 0), rel=0.2)
    for _ in range(10):
        costs.add(2, 5, gpu_cost(2, 5))
    assert costs.ms(2, 5) == pytest.approx(gpu_cost(2, 5), rel=0.1)


@pytest.mark.parametrize("cost", COSTS)
def test_costs_of_batches_and_widths_never_measured_are_interpolated(cost: str) -> None:
    costs = calibrate(lambda batch, width: TermsMs(draft=1.0, verify=COSTS[cost](batch, width) - 1.0), (1, 8), MAX_WIDTH)
    for batch, width in itertools.product((1, 2, 3, 5, 8, 11), (0, 1, 3, 7)):
        assert costs.ms(batch, width) == pytest.approx(COSTS[cost](batch, width), rel=0.1), (batch, width)


def test_calibration_leaves_out_widths_that_could_never_pay() -> None:
    asked = []

    def run(batch: int, width: int) -> TermsMs:
        asked.append((batch, width))
        return TermsMs(verify=10.0 * 4.0**width)

    calibrate(run, (1, 2), MAX_WIDTH)
    assert set(asked) == {(1, 0), (1, 1), (2, 0), (2, 1)}


def test_a_change_of_speed_learnt_with_one_way_of_decoding_is_believed_of_the_other() -> None:
    costs = CycleCosts({1: {0: 10.0, 4: 12.0}})
    for _ in range(20):
        costs.add(1, 4, 24.0)
    assert costs.ms(1, 4) == pytest.approx(24.0, rel=0.01)
    assert costs.ms(1, 0) == pytest.approx(20.0, rel=0.15)


def test_a_calibration_that_was_wrong_of_drafting_is_put_right_by_turns_of_both_ways() -> None:
    costs = CycleCosts({1: {0: 10.0, 4: 12.0}, 8: {0: 20.0, 4: 30.0}})
    for _ in range(10):
        for width, measured in ((0, 10.0), (4, 18.0)) * 3:
            costs.add(1, width, measured)
    assert (costs.ms(1, 0), costs.ms(1, 4)) == pytest.approx((10.0, 18.0), rel=0.05)
    # Half again as dear with one sequence: where nothing was measured yet, the best guess is somewhat dearer as well.
    assert 33.0 < costs.ms(8, 4) < 45.0
    assert costs.ms(8, 0) == pytest.approx(20.0, rel=0.15)


def test_what_a_waiting_row_costs_is_learnt_from_cycles_that_had_many_to_take_in() -> None:
    costs = CycleCosts({4: {0: 10.0, 1: 12.0}})
    assert costs.catch_up_ms(100, 4, 1) == 0.0
    # One in five is stalled; of 8 rows, each of the four sequences leaves two to every next cycle.
    for measured in (62.0, 62.0, 1200.0, 62.0, 62.0):
        assert costs.add(4, 1, measured, waiting_rows=108, sequences=4) == pytest.approx(12.0)
    assert costs.catch_up_ms(108, 4, 1) == pytest.approx(50.0)
    assert costs.catch_up_ms(8, 4, 1) == 0.0, "what a cycle leaves to the next is part of its cost"
    assert costs.ms(4, 1) == pytest.approx(12.0)


def test_a_stall_after_hours_of_plain_decoding_does_not_shut_drafting_out() -> None:
    costs = CycleCosts({1: {0: 10.0, 4: 12.0}})
    for _ in range(20_000):
        costs.add(1, 0, 10.0)
    for measured in (1200.0, 12.0, 12.0):  # a probe
        costs.add(1, 4, measured)
    assert costs.ms(1, 4) < 1.2 * 12.0
    assert costs.ms(1, 0) == pytest.approx(10.0, rel=0.15)


def test_a_cycle_of_no_time_teaches_nothing() -> None:
    costs = CycleCosts({1: {0: 10.0}})
    costs.add(1, 0, 0.0)
    assert costs.ms(1, 0) == 10.0
