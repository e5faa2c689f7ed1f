"""What a batched cycle costs, by sequences in it and drafts for each: calibrated at the start, kept up to date by the cycles that run.

A cycle of B sequences and w drafts takes C(B, w) exp(level + drafting + cell) milliseconds: C was calibrated; the level is the machine's
speed and the sequences' lengths now; the others are what the calibration got wrong, of all cycles that draft and of those near B and w.
A Kalman filter over the logarithms (R. E. Kalman 1960) says how much of a surprise each of them is to take: one way of decoding alone says
little of the other, but a change of speed learnt with one is believed of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from statistics import median

import numpy as np

from domino_deploy.runtime.protocols import TermsMs

# Standard deviations of logarithms.  A cycle of a busy machine varies by a seventh; its speed drifts by a third in some hundred cycles.
_NOISE = 0.15
_LEVEL_DRIFT = 0.03
_FIRST_LEVEL = 0.3
# What a calibration of a few cycles may be wrong by, as a whole and for one batch and width; it is forgotten within some 2000 cycles
# that say nothing of it, as sequences of other lengths come.
_ERROR = 0.1
_ERROR_KEPT = 0.9995
# A stalled cycle is no more of a surprise than so many standard deviations.
_MOST_SURPRISE = 2.5
_CALIBRATION_ROUNDS = 3
# Cycles that had much to catch up on, behind the cost of a row that waits.
_CATCH_UP_SAMPLES = 9
# What newcomers' prompts cost is an average over some 100 cycles that draft, and is forgotten within some 500 that do not; it begins with
# so many tokens without any prompt.
_NEWCOMERS_KEPT = 0.99
_NEWCOMERS_KEPT_IN_PLAIN = 0.998
_NEWCOMERS_PRIOR_TOKENS = 50.0
_LEVEL, _DRAFTING, _FIRST_CELL = 0, 1, 2


class CycleCosts:
    """Milliseconds of a cycle for any batch and width.

    Args:
        grid: calibrated milliseconds by batch and width, one at least.
    """

    def __init__(self, grid: Mapping[int, Mapping[int, float]]) -> None:
        self._grid = grid
        self._widths = sorted({width for costs in grid.values() for width in costs if width})
        self._looked_up: dict[tuple[int, int], tuple[float, list[int]]] = {}
        cells = [(batch, width) for batch in grid for width in (0, *self._widths)]
        self._cells = {cell: _FIRST_CELL + index for index, cell in enumerate(cells)}  # places in the state
        size = _FIRST_CELL + len(cells)
        self._state = np.zeros(size)
        self._covariance = np.diag([_FIRST_LEVEL**2, *[_ERROR**2] * (size - 1)])
        # Of a step from one cycle to the next: what is kept of each part, and the variance that comes to it.
        self._kept = np.array([1.0, *[_ERROR_KEPT] * (size - 1)])
        self._drift = np.array([_LEVEL_DRIFT**2, *[_ERROR**2 * (1 - _ERROR_KEPT**2)] * (size - 1)])
        # Nothing until some cycles say otherwise: the first one may be a stalled one.
        self._waiting_row_ms = deque([0.0, 0.0], maxlen=_CATCH_UP_SAMPLES)
        self._newcomers_ms, self._newcomers_tokens = 0.0, _NEWCOMERS_PRIOR_TOKENS
        self._drafted_last = False

    def ms(self, batch: int, width: int) -> float:
        """The expected cost of one cycle that finds the drafter in step."""
        calibrated_ms, parts = self._look_up(batch, width)
        return calibrated_ms * exp(sum(self._state[part] for part in parts))

    def catch_up_ms(self, waiting_rows: int, sequences: int, width: int) -> float:
        """The expected cost of rows that wait for the drafter of so many sequences; 0 until it was seen some times."""
        return _behind(waiting_rows, sequences, width) * max(0.0, median(self._waiting_row_ms))

    def newcomers_ms(self, tokens: float) -> float:
        """What drafting costs besides, for so many tokens: sequences that end make room for others, whose prompts the drafter reads."""
        return tokens * max(0.0, self._newcomers_ms) / self._newcomers_tokens

    def add(self, batch: int, width: int, measured_ms: float, *, waiting_rows: int = 0, sequences: int = 0, tokens: int = 0) -> float:
        """Take in one cycle.

        Args:
            waiting_rows, sequences: as for `catch_up_ms`.
            tokens: committed in it.

        Returns:
            What it would have taken with the drafter in step: a cycle that caught up says nothing of the next ones.
        """
        if measured_ms <= 0:
            return self.ms(batch, width)  # a clock too coarse for this cycle
        behind = _behind(waiting_rows, sequences, width) if width else 0
        expected_ms = self.ms(batch, width)
        first_ms = measured_ms - expected_ms if behind else 0.0
        kept = _NEWCOMERS_KEPT if width else _NEWCOMERS_KEPT_IN_PLAIN
        self._newcomers_ms *= kept
        self._newcomers_tokens = kept * self._newcomers_tokens + (1 - kept) * _NEWCOMERS_PRIOR_TOKENS
        if width and self._drafted_last:  # else most of it had waited since the last cycle that drafted
            # More than that is a stall.
            self._newcomers_ms += min(first_ms, expected_ms + 2 * self.catch_up_ms(waiting_rows, sequences, width))
            self._newcomers_tokens += tokens
        self._drafted_last = width > 0
        if not behind:
            self._filter(batch, width, log(measured_ms / expected_ms))
            return measured_ms
        if behind >= sequences * (width + 1):  # of fewer, the cycle's own variation would say more than they do
            self._waiting_row_ms.append(first_ms / behind)
        return min(measured_ms, expected_ms)

    def _filter(self, batch: int, width: int, surprise: float) -> None:
        """The Kalman filter's step: the state drifts, then the cycle corrects it.

        surprise: logarithm of its time over what was expected.
        """
        self._state *= self._kept
        covariance = self._covariance * np.outer(self._kept, self._kept) + np.diag(self._drift)
        _, parts = self._look_up(batch, width)
        shared = covariance[:, parts].sum(axis=1)
        variance = float(shared[parts].sum()) + _NOISE**2
        most = _MOST_SURPRISE * variance**0.5
        self._state += shared / variance * min(max(surprise, -most), most)
        self._covariance = covariance - np.outer(shared, shared) / variance

    def _look_up(self, batch: int, width: int) -> tuple[float, list[int]]:
        """The calibrated cost, and places in the state of what it is multiplied by; remembered, as every cycle asks for all widths."""
        found = self._looked_up.get((batch, width))
        if found is None:
            found = self._looked_up[batch, width] = self._calibrated(batch, width), self._parts(batch, width)
        return found

    def _parts(self, batch: int, width: int) -> list[int]:
        """Places in the state of what makes up this cost: that of the nearest calibrated batch and width stands for it."""
        size = min(self._grid, key=lambda size: abs(log(size / batch)))
        if not width:
            return [_LEVEL, self._cells[size, 0]]
        if not self._widths:
            return [_LEVEL, _DRAFTING]
        return [_LEVEL, _DRAFTING, self._cells[size, min(self._widths, key=lambda calibrated: abs(calibrated - width))]]

    def _calibrated(self, batch: int, width: int) -> float:
        return _interpolate({size: _interpolate(costs, width) for size, costs in self._grid.items()}, batch)


def _behind(waiting_rows: int, sequences: int, width: int) -> int:
    """Rows that wait beyond those that a cycle of that width leaves to the next one, whose cost is part of every cycle's."""
    return max(0, waiting_rows - sequences * (width + 1))


def calibrate(run: Callable[[int, int], TermsMs], batches: Sequence[int], max_width: int) -> CycleCosts:
    """Measure plain cycles and some widths for each batch size.

    Args:
        run: one cycle of so many sequences at that width.
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
    return CycleCosts(grid)


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
