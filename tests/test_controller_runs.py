"""Whole runs of the speculation controller against plain decoding and fixed widths: simulated costs and acceptance, as they may come."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from tests.support.speculation_simulation import (
    MAX_WIDTH,
    Chances,
    always,
    calibrated,
    cpu_cost,
    demo_pair_cost,
    fixed_rate,
    gpu_cost,
    simulate,
)

CYCLES = 1500
COSTS = {"cpu": cpu_cost, "gpu": gpu_cost}


def every_other_good(sequence: int, cycle: int) -> float:
    return (0.9, 0.2)[sequence % 2]


def getting_better(sequence: int, cycle: int) -> float:
    return 0.1 if cycle < CYCLES // 2 else 0.9


def getting_worse(sequence: int, cycle: int) -> float:
    return 0.9 if cycle < CYCLES // 2 else 0.1


CHANCES: dict[str, Chances] = {
    **{f"always {chance}": always(chance) for chance in (0.05, 0.3, 0.6, 0.8, 0.95)},
    "every other good": every_other_good,
    "getting better": getting_better,
    "getting worse": getting_worse,
}


@pytest.mark.parametrize(("cost", "batch"), list(itertools.product(COSTS, (1, 8))))
@pytest.mark.parametrize("chances", CHANCES)
def test_a_run_keeps_up_with_plain_decoding_and_with_the_best_fixed_width(cost: str, batch: int, chances: str) -> None:
    """0.98 and 0.95 leave room for what probes and estimates cost, 0.95 for gains that are too small to be taken, too."""
    given = {"cost": COSTS[cost], "chances": CHANCES[chances], "batch": batch, "cycles": CYCLES}
    rate = simulate(calibrated(COSTS[cost]), **given).rate  # type: ignore[arg-type]
    fixed = [fixed_rate(width, **given) for width in range(MAX_WIDTH + 1)]  # type: ignore[arg-type]
    assert rate >= 0.98 * fixed[0]
    assert rate >= 0.95 * max(fixed), fixed.index(max(fixed))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch", [4, 8, 16])
def test_a_run_is_not_slower_than_plain_decoding_where_drafting_hardly_pays_and_the_machine_is_restless(batch: int, seed: int) -> None:
    """Half again as slow in stretches, sequences that come with a prompt to catch up on and end soon: 0.985 is for the probes."""

    def mixed(sequence: int, cycle: int) -> float:
        return (0.85, 0.65, 0.6)[sequence % 3]

    given = {"cost": demo_pair_cost, "chances": mixed, "batch": batch, "cycles": 800, "noise": 0.12, "bursts": 1.5, "seed": seed}
    controller = calibrated(demo_pair_cost, max_width=6)
    run = simulate(controller, waiting_row_ms=0.09, prompt_tokens=48, answer_tokens=48, **given)  # type: ignore[arg-type]
    assert run.rate >= 0.985 * fixed_rate(0, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_long_run_of_nothing_but_acceptances_or_refusals_is_no_trouble(batch: int) -> None:
    for chance in (1.0, 0.0):
        run = simulate(calibrated(gpu_cost), cost=gpu_cost, chances=always(chance), batch=batch, cycles=1000)
        assert Counter(run.widths[-100:]).most_common(1)[0][0] == (MAX_WIDTH if chance else 0)


def test_batches_that_come_and_go_never_cost_more_than_plain_decoding() -> None:
    """Each phase's tokens are credited with the time that plain decoding takes for them at that batch."""
    controller = calibrated(cpu_cost, batches=(1, 4, 16))
    spent = credited = 0.0
    for phase in range(40):
        batch = 1 + (7 * phase) % 16
        given = {"cost": cpu_cost, "chances": always(0.6), "batch": batch, "cycles": 50, "seed": phase}
        run = simulate(controller, **given)  # type: ignore[arg-type]
        spent += run.milliseconds
        credited += run.tokens / fixed_rate(0, **given)  # type: ignore[arg-type]
    assert credited >= 0.97 * spent


@pytest.mark.parametrize(("gain", "expected"), [(1.02, 0), (1.2, 1)])
def test_a_gain_too_small_for_what_drafting_costs_besides_is_not_taken(gain: float, expected: int) -> None:
    def cost(batch: int, width: int) -> float:
        """One draft, taken with a chance of 0.6, gains so much; more are out of the question."""
        return [10.0, 16.0 / gain, *[100.0] * MAX_WIDTH][width]

    run = simulate(calibrated(cost), cost=cost, chances=always(0.6), batch=8, cycles=CYCLES)
    assert Counter(run.widths[300:])[expected] > 0.8 * (CYCLES - 300)


def test_speculation_comes_back_soon_after_the_acceptance_gets_better() -> None:
    run = simulate(calibrated(cpu_cost), cost=cpu_cost, chances=getting_better, batch=1, cycles=CYCLES)

    assert Counter(width > 0 for width in run.widths[200 : CYCLES // 2])[True] < 60
    back = next(cycle for cycle in range(CYCLES // 2, CYCLES) if all(run.widths[cycle : cycle + 50]))
    assert back - CYCLES // 2 < 400
    assert np.median(run.widths[-200:]) >= 6


def test_speculation_ends_within_some_cycles_when_the_acceptance_gets_worse() -> None:
    run = simulate(calibrated(cpu_cost), cost=cpu_cost, chances=getting_worse, batch=4, cycles=CYCLES)

    behind = run.widths[CYCLES // 2 + 60 : CYCLES // 2 + 260]
    assert Counter(behind).most_common(1)[0][0] == 0


@pytest.mark.parametrize("chance", [0.05, 0.8])
def test_stalls_of_a_hundred_times_a_cycle_change_nothing_for_long(chance: float) -> None:
    stalls = (100, 101, 400, 700, 701, 1100)
    arguments = {"cost": cpu_cost, "chances": always(chance), "batch": 2, "cycles": CYCLES}
    stalled = simulate(calibrated(cpu_cost), stalls=stalls, **arguments)  # type: ignore[arg-type]
    quiet = simulate(calibrated(cpu_cost), **arguments)  # type: ignore[arg-type]

    lost = sum(cpu_cost(2, stalled.widths[cycle]) * 100 for cycle in stalls)
    assert stalled.tokens / (stalled.milliseconds - lost) == pytest.approx(quiet.rate, rel=0.04)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_machine_whose_speed_changed_since_calibration_is_learnt(factor: float) -> None:
    def now(batch: int, width: int) -> float:
        return factor * cpu_cost(batch, width)

    run = simulate(calibrated(cpu_cost), cost=now, chances=always(0.8), batch=1, cycles=CYCLES)
    best = max(fixed_rate(width, cost=now, chances=always(0.8), batch=1, cycles=CYCLES) for width in range(MAX_WIDTH + 1))
    assert run.rate >= 0.95 * best


def test_probes_grow_rarer_while_they_find_nothing() -> None:
    run = simulate(calibrated(gpu_cost), cost=gpu_cost, chances=always(0.0), batch=1, cycles=3000, noise=0.0)
    probes = [cycle for cycle in range(1, 3000) if run.widths[cycle] and not run.widths[cycle - 1]]
    gaps = np.diff(probes)
    assert gaps[-1] >= 2 * gaps[0]
    assert len(probes) >= 5


def test_probes_are_rarer_where_little_could_be_gained() -> None:
    def probes(gain: float) -> int:
        """Nothing is accepted; were everything, a draft would gain so much."""

        def cost(batch: int, width: int) -> float:
            return [10.0, 20.0 / gain, *[1000.0] * MAX_WIDTH][width]

        widths = simulate(calibrated(cost), cost=cost, chances=always(0.0), batch=1, cycles=20000, noise=0.0).widths[500:]
        return sum(width > 0 for width in widths)

    assert 0 < 2 * probes(1.2) < probes(1.9)


def test_equal_inputs_give_equal_choices() -> None:
    first, second = (simulate(calibrated(cpu_cost), cost=cpu_cost, chances=every_other_good, batch=3, cycles=300, seed=7) for _ in range(2))
    assert first == second
