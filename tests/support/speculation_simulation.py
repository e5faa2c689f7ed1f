"""A simulated engine for the controller: costs and acceptance chances are given, what comes of a choice is drawn and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from domino_deploy.runtime.controller import AcceptanceHistory, SpeculationController
from domino_deploy.runtime.protocols import TermsMs
from domino_deploy.runtime.requests import CycleRecord

Cost = Callable[[int, int], float]  # (batch, width) -> milliseconds
Chances = Callable[[int, int], float]  # (sequence, cycle) -> chance of every proposal

MAX_WIDTH = 15
_PASS_MS = 6.0  # of a drafter, beside its rows


def cpu_cost(batch: int, width: int) -> float:
    """Milliseconds: beside the weights, read once, every row costs its products."""
    return 20.0 + 2.5 * batch * (width + 1) + (6.0 + 1.0 * batch if width else 0.0)


def gpu_cost(batch: int, width: int) -> float:
    """Milliseconds: hardly anything but the weights."""
    return 10.0 + 0.01 * batch * (width + 1) + (2.5 if width else 0.0)


def demo_pair_cost(batch: int, width: int) -> float:
    """Milliseconds: about those of the demo pair on two cores, where eight sequences are the most that drafting may pay for."""
    return max(25.0, 20.0 + 1.55 * batch * (width + 1)) + (6.5 + 0.9 * batch + 0.12 * batch * width if width else 0.0)


def always(chance: float) -> Chances:
    """The same chance for every sequence in every cycle."""
    return lambda sequence, cycle: chance


@dataclass
class Run:
    """What came of a simulation."""

    tokens: int = 0
    milliseconds: float = 0.0
    widths: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.milliseconds


def simulate(
    controller: SpeculationController,
    *,
    cost: Cost,
    chances: Chances,
    batch: int,
    cycles: int,
    noise: float = 0.1,
    stalls: Sequence[int] = (),
    bursts: float = 1.0,
    waiting_row_ms: float = 0.0,
    prompt_tokens: int = 0,
    answer_tokens: int = 200,
    seed: int = 0,
) -> Run:
    """Run cycles with a controller.

    Args:
        controller: chooses the widths.
        cost: mean milliseconds by batch and width.
        chances: of a proposal's acceptance, by sequence and cycle.
        batch: sequences in flight.
        cycles: length of the run.
        noise: relative standard deviation of a cycle's time.
        stalls: cycles that take a hundred times as long.
        bursts: how many times as long cycles take in some stretches, a fifth of all.
        waiting_row_ms: cost of a row that the drafter has to take in; more than a block of one sequence are a pass of their own.
        prompt_tokens: rows that wait for the drafter when a sequence comes.
        answer_tokens: when a sequence has so many, another request takes its place.
    """
    luck = _Luck(batch, cycles, chances, noise, seed, bursts)
    histories = [AcceptanceHistory() for _ in range(batch)]
    written, waiting = [0] * batch, [prompt_tokens] * batch
    run = Run()
    for cycle in range(cycles):
        for sequence in range(batch):
            if written[sequence] >= answer_tokens:
                histories[sequence], written[sequence], waiting[sequence] = AcceptanceHistory(), 0, prompt_tokens
        waited = sum(waiting)
        width = controller.width(histories, waiting_rows=waited)
        accepted = [min(int(count), width) for count in luck.acceptable[cycle]]
        own_pass_ms = _PASS_MS if waiting_row_ms and max(waiting) > MAX_WIDTH + 1 else 0.0
        catch_up_ms = waiting_row_ms * waited + own_pass_ms if width else 0.0
        milliseconds = (cost(batch, width) + catch_up_ms) * float(luck.slowness[cycle]) * (100.0 if cycle in stalls else 1.0)
        for sequence, count in enumerate(accepted):
            if width:
                histories[sequence].record(width, count)
            written[sequence] += count + 1
            waiting[sequence] = count + 1 + (0 if width else waiting[sequence])
        tokens = sum(accepted) + batch
        run.reasons.append(controller.last_reason)
        controller.observe(
            CycleRecord(
                batch=batch,
                width=width,
                drafts=batch if width else 0,
                proposed=batch * width,
                accepted=sum(accepted),
                reached_per_position=tuple(sum(count >= position for count in accepted) for position in range(width)),
                accepted_per_position=tuple(sum(count > position for count in accepted) for position in range(width)),
                tokens=tokens,
                waiting_rows=waited if width else 0,
                terms_ms=TermsMs(verify=milliseconds),
            )
        )
        run.tokens += tokens
        run.milliseconds += milliseconds
        run.widths.append(width)
    return run


def fixed_rate(
    width: int, *, cost: Cost, chances: Chances, batch: int, cycles: int, noise: float = 0.1, bursts: float = 1.0, seed: int = 0
) -> float:
    """Tokens per millisecond of one width all the time, with the luck that `simulate` has with the same seed."""
    luck = _Luck(batch, cycles, chances, noise, seed, bursts)
    tokens = int(np.minimum(luck.acceptable, width).sum()) + batch * cycles
    return tokens / (cost(batch, width) * float(luck.slowness.sum()))


class _Luck:
    """Everything random of a run, drawn before it, so that it is the same whatever is chosen.

    acceptable: [cycles, batch], proposals that would be accepted one after the other; slowness: [cycles], factors of the cost.
    """

    def __init__(self, batch: int, cycles: int, chances: Chances, noise: float, seed: int, bursts: float) -> None:
        draws = np.random.default_rng(seed)
        by_cycle = np.array([[chances(sequence, cycle) for sequence in range(batch)] for cycle in range(cycles)])
        self.slowness = np.exp(noise * draws.standard_normal(cycles))
        self.acceptable = np.cumprod(draws.random((cycles, batch, MAX_WIDTH)) < by_cycle[:, :, None], axis=2).sum(axis=2)
        # Stretches of 30 cycles on the average.
        changes = np.cumsum(draws.random(cycles) < 1 / 30)
        self.slowness *= np.where(draws.random(cycles)[changes] < 0.2, bursts, 1.0)


def calibrated(cost: Cost, *, batches: Sequence[int] = (1, 2, 4, 8, 16), max_width: int = MAX_WIDTH) -> SpeculationController:
    """A controller that knows these costs."""
    controller = SpeculationController(max_width)
    controller.calibrate(lambda batch, width: TermsMs(verify=cost(batch, width)), batches)
    return controller
