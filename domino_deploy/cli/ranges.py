"""Types of numeric options whose limits are fixed: a value outside is refused by the option's own name, before anything is opened."""

from __future__ import annotations

import math
from typing import Any

import click

from domino_deploy.runtime.sampling import MAX_SEED, MIN_P_RANGE, MIN_TEMPERATURE, TOP_P_RANGE

_UNITS = {"k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}


class FiniteRange(click.FloatRange):
    """A range without NaN, which click's comparisons let through, and without infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r:.40} is not a finite number.", param, ctx)


class TokenCount(click.IntRange):
    """A number of tokens that may end as vLLM's: k and m stand for thousands and millions, K and M for powers of 1024."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        unit = _UNITS.get(value[-1:]) if isinstance(value, str) and value[:-1].isdecimal() else None
        return super().convert(value if unit is None else int(value[:-1]) * unit, param, ctx)


AT_LEAST_0 = click.IntRange(min=0)
AT_LEAST_1 = click.IntRange(min=1)
TEMPERATURE = FiniteRange(min=MIN_TEMPERATURE)
TOP_P = FiniteRange(*TOP_P_RANGE, min_open=True)
MIN_P = FiniteRange(*MIN_P_RANGE)
SEED = click.IntRange(0, MAX_SEED)
