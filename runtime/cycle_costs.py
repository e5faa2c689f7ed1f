"""What a batched cycle costs, by sequences in it and drafts for each: calibrated at the start, kept up to date by the cycles that run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from domino_deploy.runtime.protocols import TermsMs

# Samples behind a measured cost. On a busy machine cycles vary by a quarter: with a median of five, luck chose widths that cost 4 % of
# the throughput, with fifteen 2 % (tests/support/speculation_simulation.py with a demo pair's costs); a change is followed within eight.
_SAMPLES = 15
_FEWEST_SAMPLES = 3
# Cycles behind the level: the machine's speed and the sequences' lengths change over seconds, a cycle is some tens of milliseconds.
_LEVEL_SAMPLES = 31
# After so many cycles without a new sample, half of what is said of a cost is its calibration, at the level of now.
_HALF_LIFE_CYCLES = 512
# Samples older than this say little of now: new ones displace them.
_STALE_CYCLES = 128
_CALIBRATION_RUNS = 3


class CycleCosts:
    """Milliseconds of a cycle for any batch and width.

    The estimate is the median of recent cycles of that very batch and width.  Where there are few or old ones it leans on the
    calibration, interpolated, times the level: what cycles take now, relative to the calibration.
    """

    def __init__(self, grid: Mapping[int, Mapping[int, float]]) -> None:
        """`grid`: calibrated milliseconds by batch and width, one at least."""
        self._grid = grid
        self._interpolated: dict[tuple[int, int], float] = {}
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._last_cycle: dict[tuple[int, int], int] = {}
        # The calibration has its say until it is outvoted: the first cycle may be a stalled one.
        self._levels = deque([1.0] * _FEWEST_SAMPLES, maxlen=_LEVEL_SAMPLES)
        self._level = 1.0
        self._cycle = 0

    def ms(self, batch: int, width: int) -> float:
        """The expected cost of one cycle."""
        cell = batch, width
        prior = self._calibrated(cell) * self._level
        samples = self._samples.get(cell)
        if not samples:
            return prior
        recent = median([*samples, *[prior] * (_FEWEST_SAMPLES - len(samples))])
        trust: float = 0.5 ** ((self._cycle - self._last_cycle[cell]) / _HALF_LIFE_CYCLES)
        return recent**trust * prior ** (1 - trust)

    def add(self, batch: int, width: int, measured_ms: float) -> None:
        """Take in one cycle."""
        if measured_ms <= 0:
            return  # a clock too coarse for this cycle
        cell = batch, width
        self._cycle += 1
        samples = self._samples.setdefault(cell, deque(maxlen=_SAMPLES))
        if self._cycle - self._last_cycle.get(cell, self._cycle) > _STALE_CYCLES:
            samples.clear()
        samples.append(measured_ms)
        self._last_cycle[cell] = self._cycle
        self._levels.append(measured_ms / self._calibrated(cell))
        self._level = median(self._levels)

    def _calibrated(self, cell: tuple[int, int]) -> float:
        if cell not in self._interpolated:
            batch, width = cell
            at_width = {size: _interpolate(costs, width) for size, costs in self._grid.items()}
            self._interpolated[cell] = _interpolate(at_width, batch)
        return self._interpolated[cell]


def calibrate(run: Callable[[int, int], TermsMs], batches: Sequence[int], max_width: int) -> CycleCosts:
    """Measure plain cycles and some widths for each batch size.

    Args:
        run: one cycle of so many sequences at that width.
        batches: sizes to measure, at least one; those between them are interpolated.
        max_width: the widest cycle there is.
    """
    grid: dict[int, dict[int, float]] = {}
    for batch in batches:
        costs = grid.setdefault(batch, {})
        for width in _grid_widths(max_width):
            costs[width] = median(run(batch, width).total for _ in range(_CALIBRATION_RUNS))
            if costs[width] > (width + 1) * costs[0]:
                break  # slower than plain were every draft accepted: a wider one is not worth the time to measure it
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
