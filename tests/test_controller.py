"""What width the speculation controller gives and why: limits, reasons, prompts to catch up on, what a record says of acceptance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from domino_deploy.runtime.controller import AcceptanceHistory, Reason, SpeculationController
from domino_deploy.runtime.protocols import Step, TermsMs
from domino_deploy.runtime.requests import CycleRecord
from tests.support.speculation_simulation import MAX_WIDTH, always, calibrated, cpu_cost, gpu_cost, simulate

CYCLES = 1500


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


def test_until_it_is_calibrated_it_gives_as_many_as_are_wanted() -> None:
    controller = SpeculationController(MAX_WIDTH)
    assert set(simulate(controller, cost=cpu_cost, chances=always(0.2), batch=8, cycles=20).widths) == {MAX_WIDTH}
    assert controller.last_reason == Reason.FIXED


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
