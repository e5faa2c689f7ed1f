"""The speculation controller against fixed widths: simulated costs and acceptance chances, as they may come."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from domino_deploy.runtime.controller import AcceptanceHistory, Reason, SpeculationController
from domino_deploy.runtime.cycle_costs import CycleCosts, calibrate
from domino_deploy.runtime.protocols import Step, TermsMs
from domino_deploy.runtime.requests import CycleRecord
from tests.support.speculation_simulation import MAX_WIDTH, Chances, calibrated, cpu_cost, demo_pair_cost, fixed_rate, gpu_cost, simulate

CYCLES = 1500
COSTS = {"cpu": cpu_cost, "gpu": gpu_cost}


def always(chance: float) -> Chances:
    return lambda sequence, cycle: chance


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


def test_a_drafter_far_behind_is_not_caught_up_for_a_small_gain() -> None:
    def cost(batch: int, width: int) -> float:
        return [10.0, 13.0, *[100.0] * MAX_WIDTH][width]

    controller = calibrated(cost)
    assert controller.width([AcceptanceHistory()], waiting_rows=1000) == 1, "what it costs is not known yet"
    for _ in range(3):
        controller.observe(drafted_once(width=1, waiting_rows=1002, milliseconds=cost(1, 1) + 100.0))
        controller.observe(CycleRecord(batch=1, width=0, tokens=1, terms_ms=TermsMs(verify=cost(1, 0))))
    assert controller.width([AcceptanceHistory()], waiting_rows=1000) == 0
    assert controller.width([AcceptanceHistory()], waiting_rows=2) == 1


def with_newcomers(controller: SpeculationController, *, every: int, cycles: int, prompt_ms: float = 8.0) -> list[int]:
    """Widths; drafting one token gains a fifth, but for a prompt of 100 rows that comes in with every so many-th cycle."""
    widths = []
    for cycle in range(cycles):
        rows = 102 if cycle % every == 0 else 2
        widths.append(controller.width([AcceptanceHistory()], waiting_rows=rows))
        if widths[-1]:
            record = drafted_once(width=1, waiting_rows=rows, milliseconds=one_draft_cost(1, 1) + (prompt_ms if rows > 2 else 0.0))
            accepted = cycle % 5 < 3
            controller.observe(replace(record, accepted=accepted, accepted_per_position=(accepted,), tokens=1 + accepted))
        else:
            controller.observe(CycleRecord(batch=1, width=0, tokens=1, terms_ms=TermsMs(verify=one_draft_cost(1, 0))))
    return widths


def one_draft_cost(batch: int, width: int) -> float:
    return [10.0, 16.0 / 1.2, *[100.0] * MAX_WIDTH][width]


@pytest.mark.parametrize(("every", "least", "most"), [(4, 0.0, 0.3), (40, 0.9, 1.0)])
def test_prompts_that_keep_coming_in_count_as_a_cost_of_drafting(every: int, least: float, most: float) -> None:
    widths = with_newcomers(calibrated(one_draft_cost), every=every, cycles=1000)
    assert least <= np.mean(np.array(widths[300:]) > 0) <= most, "behind the cycles that it takes to find out"


@pytest.mark.parametrize("prompt_ms", [8.0, 1000.0], ids=["prompts", "stalls"])
def test_drafting_comes_back_when_prompts_no_longer_come(prompt_ms: float) -> None:
    controller = calibrated(one_draft_cost)
    with_newcomers(controller, every=3, cycles=300, prompt_ms=prompt_ms)
    widths = with_newcomers(controller, every=10**6, cycles=2500)
    assert np.mean(np.array(widths[-500:]) > 0) > 0.9, "all but the probes of plain decoding"


def test_a_cycle_that_caught_up_says_nothing_of_the_cost_of_others() -> None:
    def after(waiting_rows: int) -> int:
        controller = calibrated(gpu_cost, max_width=1)
        for _ in range(10):
            controller.observe(CycleRecord(batch=1, width=0, tokens=1, terms_ms=TermsMs(verify=gpu_cost(1, 0))))
            controller.observe(drafted_once(width=1, waiting_rows=waiting_rows, milliseconds=300.0))
        return controller.width([AcceptanceHistory()])

    assert after(waiting_rows=900) == 1
    assert after(waiting_rows=1) == 0


def drafted_once(*, width: int, waiting_rows: int, milliseconds: float) -> CycleRecord:
    """One sequence, all of whose proposals were accepted."""
    return CycleRecord(
        batch=1,
        width=width,
        drafts=1,
        proposed=width,
        accepted=width,
        reached_per_position=(1,) * width,
        accepted_per_position=(1,) * width,
        tokens=width + 1,
        waiting_rows=waiting_rows,
        terms_ms=TermsMs(verify=milliseconds),
    )


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


def test_a_stall_while_a_cost_is_measured_for_the_first_time_does_not_shut_that_width_out() -> None:
    costs = calibrate(lambda batch, width: TermsMs(verify=gpu_cost(batch, width)), (1, 4), MAX_WIDTH)
    costs.add(2, 5, 100 * gpu_cost(2, 5))
    assert costs.ms(2, 5) / costs.ms(2, 0) == pytest.approx(gpu_cost(2, 5) / gpu_cost(2, 0), rel=0.2)
    for _ in range(10):
        costs.add(2, 5, gpu_cost(2, 5))
    assert costs.ms(2, 5) == pytest.approx(gpu_cost(2, 5), rel=0.1)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_machine_whose_speed_changed_since_calibration_is_learnt(factor: float) -> None:
    def now(batch: int, width: int) -> float:
        return factor * cpu_cost(batch, width)

    run = simulate(calibrated(cpu_cost), cost=now, chances=always(0.8), batch=1, cycles=CYCLES)
    best = max(fixed_rate(width, cost=now, chances=always(0.8), batch=1, cycles=CYCLES) for width in range(MAX_WIDTH + 1))
    assert run.rate >= 0.95 * best


def test_until_it_is_calibrated_it_gives_as_many_as_are_wanted() -> None:
    controller = SpeculationController(MAX_WIDTH)
    assert set(simulate(controller, cost=cpu_cost, chances=always(0.2), batch=8, cycles=20).widths) == {MAX_WIDTH}
    assert controller.last_reason == Reason.FIXED


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


def test_no_width_is_above_the_drafters_or_above_what_the_sequences_can_use() -> None:
    def free(batch: int, width: int) -> float:
        return 10.0

    assert max(simulate(calibrated(free, max_width=3), cost=free, chances=always(0.95), batch=2, cycles=100).widths) == 3
    controller = calibrated(free)
    assert controller.width([AcceptanceHistory(limit=2), AcceptanceHistory(limit=1)]) == 2
    assert controller.width([AcceptanceHistory(limit=20)]) == MAX_WIDTH


def test_sequences_that_cannot_draft_get_plain_decoding() -> None:
    for controller in (calibrated(gpu_cost, max_width=4), SpeculationController(4, adaptive=False)):
        assert controller.width([]) == 0
        assert controller.width([AcceptanceHistory(limit=0)], plain_sequences=3) == 0
        assert controller.last_reason == Reason.NOT_WANTED
    assert SpeculationController(0).width([AcceptanceHistory()]) == 0


def test_not_adaptive_is_as_many_as_are_wanted_whatever_comes() -> None:
    controller = SpeculationController(6, adaptive=False)
    controller.calibrate(lambda batch, width: pytest.fail("a fixed width needs no costs"), (1, 2))
    assert set(simulate(controller, cost=cpu_cost, chances=always(0.0), batch=4, cycles=50).widths) == {6}
    assert controller.last_reason == Reason.FIXED
    assert controller.width([AcceptanceHistory(limit=2)]) == 2


def test_sequences_that_do_not_speculate_count_in_the_cost_and_gain_nothing() -> None:
    """One good sequence alone is worth drafting for; among fifteen plain ones every cycle would wait for it."""
    history = AcceptanceHistory()
    for _ in range(50):
        history.record(8, 8)
    assert calibrated(cpu_cost).width([history]) >= 8
    assert calibrated(cpu_cost).width([history], plain_sequences=15) == 0


def test_a_cycle_is_kept_short_while_many_others_wait_to_join() -> None:
    """Alone, drafting pays; with fifteen prompts waiting between the cycles, the time is worth more than one sequence's drafts."""
    history = AcceptanceHistory()
    for accepted in (3, 1, 0, 4, 2) * 10:
        history.record(4, accepted)
    controller = calibrated(cpu_cost)
    assert controller.width([history]) > 0
    assert controller.width([history], joining=15) == 0
    assert controller.last_reason == Reason.OTHERS_JOIN
    assert controller.width([history]) > 0


def test_reasons_say_whether_acceptance_or_cost_forbids_drafting() -> None:
    def hopeless(batch: int, width: int) -> float:
        return 10.0 * (2 * width + 1)

    assert set(simulate(calibrated(hopeless, max_width=4), cost=hopeless, chances=always(0.9), batch=1, cycles=10).reasons) == {
        Reason.COSTLY_BATCH
    }
    reasons = simulate(calibrated(cpu_cost), cost=cpu_cost, chances=always(0.05), batch=2, cycles=CYCLES).reasons
    assert set(reasons) == {Reason.PAYS, Reason.LOW_ACCEPTANCE, Reason.SPECULATION_PROBE}
    reasons = simulate(calibrated(gpu_cost), cost=gpu_cost, chances=always(0.9), batch=2, cycles=CYCLES).reasons
    assert set(reasons) == {Reason.PAYS, Reason.PLAIN_PROBE}
    assert all(reason == reason.lower() and reason.replace("_", "").isalpha() for reason in Reason)


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


def test_expected_tokens_are_the_chances_multiplied_up() -> None:
    history = AcceptanceHistory(limit=3)
    for accepted in (3, 3, 2, 0, 3, 1) * 40:
        history.record(3, accepted)
    # Reached and accepted: 5 of 6, 4 of 5, 3 of 4; the expectation of nothing pulls them down by 4 proposals in some 20.
    tokens = history.expected_tokens([5 / 6, 4 / 5, 3 / 4, 0.7], 4)
    assert tokens == pytest.approx([1, 1 + 5 / 6, 1 + 9 / 6, 1 + 12 / 6, 1 + 12 / 6], abs=0.08)


def test_plain_cycles_leave_what_is_known_of_a_sequence_as_it_is() -> None:
    common, history = (0.5,), AcceptanceHistory()
    history.record(1, 1)
    expected = history.expected_tokens(common, 1)
    history.record(0, 0)
    assert history.expected_tokens(common, 1) == expected != AcceptanceHistory().expected_tokens(common, 1)


def test_what_is_expected_follows_everything_that_it_depends_on() -> None:
    common, better = (0.6, 0.5), (0.9, 0.8)
    history = AcceptanceHistory(limit=2)
    assert history.expected_tokens(common, 2) == pytest.approx([1, 1.6, 1.9])
    assert history.expected_tokens(better, 2) == pytest.approx([1, 1.9, 2.62])
    history.limit = 1
    assert history.expected_tokens(better, 2) == pytest.approx([1, 1.9, 1.9])
    for _ in range(400):
        history.record(1, 0)
    assert history.expected_tokens(better, 1)[1] < 1.3


@pytest.mark.parametrize(("chance", "pays"), [(0.02, False), (0.95, True)])
def test_a_new_sequence_is_expected_to_be_like_the_others(chance: float, pays: bool) -> None:
    controller = calibrated(gpu_cost)
    controller.width([AcceptanceHistory()])
    assert controller.last_reason == Reason.PAYS  # of nobody anything is known: it is tried
    simulate(controller, cost=gpu_cost, chances=always(chance), batch=4, cycles=100)
    controller.width([AcceptanceHistory() for _ in range(4)])
    assert (controller.last_reason == Reason.PAYS) is pays


def test_only_positions_that_were_decided_on_say_something_of_the_acceptance() -> None:
    """Sequences at their end are cut to one draft, behind which nothing was refused."""

    def width_after(*, reached: tuple[int, ...]) -> int:
        controller = calibrated(cpu_cost)
        record = CycleRecord(
            batch=2,
            width=4,
            drafts=2,
            proposed=2,
            accepted=2,
            reached_per_position=reached,
            accepted_per_position=(2, *[0] * (len(reached) - 1)),
            tokens=4,
            terms_ms=TermsMs(verify=cpu_cost(2, 4)),
        )
        for _ in range(20):
            controller.observe(record)
        return controller.width([AcceptanceHistory(), AcceptanceHistory()])

    assert width_after(reached=(2,)) > 1
    assert width_after(reached=(2, 2, 0, 0)) == 1


def test_a_record_counts_a_proposal_as_reached_where_the_target_decided_on_it() -> None:
    refused = Step(token_ids=(5, 6), proposed=3, accepted=1)
    all_accepted = Step(token_ids=(5, 6, 7, 8), proposed=3, accepted=3)
    ended_inside = Step(token_ids=(5, 6), proposed=3, accepted=2, finish_reason="stop")
    plain = Step(token_ids=(5,))
    record = CycleRecord.of([refused, all_accepted, ended_inside, plain], batch=5, width=3, waiting_rows=4, terms_ms=TermsMs(verify=1.0))
    assert record.reached_per_position == (3, 3, 1)
    assert record.accepted_per_position == (3, 2, 1)
    assert (record.drafts, record.proposed, record.accepted, record.tokens, record.waiting_rows) == (3, 9, 6, 9, 4)


def test_a_cycle_that_drafted_nothing_counts_as_plain() -> None:
    """Asked for drafts, but no sequence had room for one: the cost is a plain cycle's, and nothing was accepted or refused."""
    controller = calibrated(gpu_cost, max_width=4)
    before = controller.width([AcceptanceHistory()])
    record = CycleRecord(batch=1, width=4, drafts=0, tokens=1, terms_ms=TermsMs(verify=1000.0))
    for _ in range(5):
        controller.observe(record)
    assert controller.width([AcceptanceHistory()]) == before == 4
