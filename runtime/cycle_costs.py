"""What a batched cycle costs, by sequences in it and drafts for each: calibrated at the start, kept up to date by the cycles that run.

A cycle of B sequences and w drafts takes C(B, w) exp(level + drafting + cell) milliseconds: C was calibrated; the level is the machine's
speed and the sequences' lengths now; the others are what the calibration got wrong, of all cycles that draft and of those near B and w.
A Kalman filter over the logarithms (R. E. Kalman 1960) says how much of a surprise each of them is to take: one way of decoding alone says
little of the other, but a change of speed learnt with one is believed of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from statistics import median

import numpy as np

from domino_deploy.runtime.protocols import TermsMs

# Standard deviations of logarithms.  A cycle of a busy machine varies by a seventh; its speed drifts by a third in some hundred cycles.
_NOISE = 0.15
_LEVEL_DRIFT = 0.03
_FIRST_LEVEL = 0.3
# What a calibration of a few cycles may be wrong by, as a whole and for one batch and width; long sequences change it slowly.
_FIRST_ERROR = 0.1
_ERROR_DRIFT = 0.003
# A stalled cycle is no more of a surprise than so many standard deviations.
_MOST_SURPRISE = 2.5
_CALIBRATION_ROUNDS = 3
# Plain cycles whose rows a drafter has to take in when it is measured what that costs.
_CATCH_UP_CYCLES = 8
_LEVEL, _DRAFTING, _FIRST_CELL = 0, 1, 2


class CycleCosts:
    """Milliseconds of a cycle for any batch and width.

    Args:
        grid: calibrated milliseconds by batch and width, one at least.
        waiting_row_ms: calibrated cost of a row that the drafter has to take in beside drafting.
    """

    def __init__(self, grid: Mapping[int, Mapping[int, float]], *, waiting_row_ms: float = 0.0) -> None:
        self._grid = grid
        self._interpolated: dict[tuple[int, int], float] = {}
        self._cells: dict[tuple[int, int], int] = {}  # nearest calibrated batch, and width -> place in the state
        self._state = np.zeros(_FIRST_CELL)
        self._covariance = np.diag([_FIRST_LEVEL**2, _FIRST_ERROR**2])
        self._waiting_row_ms = waiting_row_ms

    def ms(self, batch: int, width: int) -> float:
        """The expected cost of one cycle that finds the drafter in step."""
        places = self._places(batch, width)
        return self._calibrated(batch, width) * exp(float(self._state[places].sum()))

    def catch_up_ms(self, waiting: int, sequences: int, width: int) -> float:
        """The expected cost of rows that wait for a drafter, beyond those that a cycle of `sequences` leaves to the next one."""
        return max(0, waiting - sequences * (width + 1)) * self._waiting_row_ms * exp(float(self._state[_LEVEL]))

    def add(self, batch: int, width: int, measured_ms: float) -> None:
        """Take in one cycle that found the drafter in step."""
        if measured_ms <= 0:
            return  # a clock too coarse for this cycle
        places, covariance = self._places(batch, width), self._covariance
        drift = np.full(len(self._state), _ERROR_DRIFT**2)
        drift[_LEVEL] = _LEVEL_DRIFT**2
        covariance[np.diag_indices_from(covariance)] += drift
        shared = covariance[:, places].sum(axis=1)
        variance = float(shared[places].sum()) + _NOISE**2
        most = _MOST_SURPRISE * variance**0.5
        surprise = log(measured_ms / self.ms(batch, width))
        self._state += shared / variance * min(max(surprise, -most), most)
        covariance -= np.outer(shared, shared) / variance

    def _places(self, batch: int, width: int) -> list[int]:
        """Where the state holds what makes up this cost."""
        cell = min(self._grid, key=lambda size: abs(log(size / batch))), width
        if cell not in self._cells:
            self._cells[cell] = len(self._state)
            self._state = np.append(self._state, 0.0)
            grown = np.zeros((len(self._state),) * 2)
            grown[:-1, :-1], grown[-1, -1] = self._covariance, _FIRST_ERROR**2
            self._covariance = grown
        return [_LEVEL, _DRAFTING, self._cells[cell]] if width else [_LEVEL, self._cells[cell]]

    def _calibrated(self, batch: int, width: int) -> float:
        if (batch, width) not in self._interpolated:
            at_width = {size: _interpolate(costs, width) for size, costs in self._grid.items()}
            self._interpolated[batch, width] = _interpolate(at_width, batch)
        return self._interpolated[batch, width]


def calibrate(run: Callable[[int, int], TermsMs], batches: Sequence[int], max_width: int) -> CycleCosts:
    """Measure plain cycles and some widths for each batch size, and what it costs when a drafter has fallen behind.

    Args:
        run: one cycle of so many sequences at that width, each of which commits one token.
        batches: sizes to measure, at least one; those between them are interpolated.
        max_width: the widest cycle there is.
    """
    samples: dict[tuple[int, int], list[float]] = {}
    # Rounds, not one cost after the other: a machine that is slow for a second spoils one sample of many, not all of one.
    for _ in range(_CALIBRATION_ROUNDS):
        for batch in batches:
            run(batch, min(1, max_width))  # the first one moves caches about
            plain_ms = 0.0
            for width in _grid_widths(max_width):
                measured = samples.setdefault((batch, width), [])
                measured.append(run(batch, width).total)
                plain_ms = plain_ms or median(measured)
                if median(measured) > (width + 1) * plain_ms:
                    break  # slower than plain were every draft accepted: a wider one is not worth the time to measure it
    grid: dict[int, dict[int, float]] = {}
    for (batch, width), measured in samples.items():
        grid.setdefault(batch, {})[width] = median(measured)
    return CycleCosts(grid, waiting_row_ms=_waiting_row_ms(run, grid) if max_width else 0.0)


def _waiting_row_ms(run: Callable[[int, int], TermsMs], grid: Mapping[int, Mapping[int, float]]) -> float:
    """What a waiting row adds to the draft that takes it in, with as many sequences as there are."""
    batch = max(grid)
    run(batch, 1)
    for _ in range(_CATCH_UP_CYCLES):
        run(batch, 0)
    return max(0.0, run(batch, 1).total - grid[batch][1]) / (batch * _CATCH_UP_CYCLES)


def _grid_widths(max_width: int) -> list[int]:
    """0, then powers of two, then the widest."""
    powers = [1 << exponent for exponent in range(max_width.bit_length())]
    return sorted({0, *powers, max_width})


def _interpolate(points: Mapping[int, float], at: int) -> float:
    """Linear between points; outside of them along the nearest two, but never falling to the right nor below the first."""
    places = sorted(points)
    if len(places) == 1:
        return points[places[0]]
    right = next((index for index, place in enumerate(places) if place >= at and index), len(places) - 1)
    left, right = places[right - 1], places[right]
    slope = (points[right] - points[left]) / (right - left)
    if at > right:
        return points[right] + max(slope, 0.0) * (at - right)
    if at < left:
        return points[left]
    return points[left] + slope * (at - left)
