"""How the minutes of a run are shared out, and what it says about itself."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from domino_deploy.training.recipe import Recipe

REGENERATE_SHARE = 0.35  # of the whole time, at most; what is left over goes to training
WRITE_SHARE = 0.03  # of the whole time, kept for writing at the end
SAFETY = 0.92  # of the time for training is planned for: the rest is checkpoints, and steps that take longer than those measured
CHECKPOINT_SHARE = 0.15  # of the whole time between two drafters that are written out


class Budget:
    """How much of `seconds` is spent, by `clock`, since it said `started` (None: now)."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic, started: float | None = None) -> None:
        self.seconds, self._clock = seconds, clock
        self._started = clock() if started is None else started

    @property
    def spent(self) -> float:
        return self._clock() - self._started

    @property
    def until_write(self) -> float:
        """Seconds left until the end is to be written."""
        return self.seconds * (1 - WRITE_SHARE) - self.spent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of a step, and of a measurement on all held-out samples."""

    step_s: float
    measure_s: float


def timing_of(told: Sequence[tuple[str, int, float]], measured_on: int, held_out: int) -> Timing:
    """From what the trainer told: (phase, steps done, seconds).  The first stretch of steps, with its warming up, does not count."""
    steps = [(done, seconds) for phase, done, seconds in told if phase == "training"]
    (first, begin), (last, end) = steps[-2] if len(steps) > 1 else (0, 0.0), steps[-1]
    measured = [seconds for phase, _, seconds in told if phase == "held-out"]
    measure_s = (measured[-1] - end) * math.ceil(held_out / max(1, measured_on)) if measured else 0.0
    return Timing(step_s=max((end - begin) / (last - first), 1e-6), measure_s=measure_s)


def recipe_that_fits(recipe: Recipe, timing: Timing, budget: Budget) -> Recipe:
    """`recipe` with as many steps as the time allows, two measurements, and a checkpoint every now and then."""
    seconds = budget.until_write * SAFETY - 2 * timing.measure_s
    steps = max(1, int(seconds / timing.step_s))
    every = max(1, int(budget.seconds * CHECKPOINT_SHARE / timing.step_s))
    return dataclasses.replace(recipe, steps=steps, epochs=None, evaluate_every=math.ceil(steps / 2), checkpoint_every=every)


class Report:
    """report.json in the output folder, and lines on the screen; both after every phase."""

    def __init__(self, out: Path, budget: Budget) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._path, self._budget = out / "report.json", budget
        self.values: dict[str, Any] = {"phases": {}}

    def say(self, text: str) -> None:
        print(f"[{self._budget.spent:6.1f} s] {text}", flush=True)

    def note(self, **values: Any) -> None:
        """Put figures into report.json and on the screen."""
        self.values |= values
        self._path.write_text(json.dumps(self.values, indent=2) + "\n", encoding="utf-8")
        for name, value in values.items():
            self.say(f"{name}: {value}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self._budget.spent
        self.say(f"== {name}")
        try:
            yield
        finally:
            self.values["phases"][name] = round(self._budget.spent - started, 1)
            self.note()
            self.say(f"== {name}: {self.values['phases'][name]} s")
