"""Types of numeric options whose limits are fixed: a value outside is refused by the option's own name, before anything is opened."""

from __future__ import annotations

import math
from typing import Any

import click

from domino_deploy.runtime.sampling import MAX_SEED


class FiniteRange(click.FloatRange):
    """A range without NaN, which click's comparisons let through, and without infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r:.40} is not a finite number.", param, ctx)


AT_LEAST_0 = click.IntRange(min=0)
AT_LEAST_1 = click.IntRange(min=1)
POSITIVE = FiniteRange(min=0, min_open=True)
# Of sampling, as `SamplingParams` has them.
TEMPERATURE = FiniteRange(min=0)
TOP_P = FiniteRange(min=0, max=1, min_open=True)
MIN_P = FiniteRange(min=0, max=1)
SEED = click.IntRange(0, MAX_SEED)
