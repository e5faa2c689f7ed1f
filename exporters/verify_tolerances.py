"""How far a graph's outputs may lie from PyTorch's: one table by precision, and what a user sets instead.

A bound is `atol + rtol * scale`, scale being the largest magnitude of PyTorch's output in the same case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from domino_deploy.errors import RequestError, listed
from domino_deploy.precision import Dtype, Precision
from domino_deploy.signature import BASE_LOGITS, FEATURES, HIDDEN, LOGITS

KEY_CACHES, VALUE_CACHES = "updated_key_cache", "updated_value_cache"
OUTPUTS = (LOGITS, FEATURES, HIDDEN, BASE_LOGITS, KEY_CACHES, VALUE_CACHES)
# The name under which an override stands for every output.
ALL = ""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What one output is allowed.

    rtol: largest error as a part of the output's scale; atol: added to it; most: of the two together, at any scale; min_cosine:
    smallest cosine similarity, which a few outliers do not hide, or None.
    """

    rtol: float
    atol: float = 0.0
    most: float = math.inf
    min_cosine: float | None = None

    def bound(self, scale: float) -> float:
        return min(self.most, self.atol + self.rtol * scale)


# float32: both sides compute in fp32, so what remains is the order of summation: 3e-6 at most, measured with SmolLM2-135M (30
# layers) and the tests' tiny models.  Ten times that leaves room for deeper models, and a wrong epsilon, angle or weight exceeds it.
# bfloat16: compared as a float32 copy of the graph, so the same.
# float16: 2.6e-3 at most with the demo pair, 5.6e-3 with tiny ones, so this is twice the worst; cosine 0.999994 and more, so 3 times.
# int8, int4: weights are the same on both sides, and with exact products (verify_exact.py) the error is at most 5.3e-6: float32's bound
# holds.  This one is for the graphs as they ship: activations rounded to 8 bits in every product add up over the layers to at most
# 6.8e-2 of the scale with blocks of 32, 1.4e-1 with 64 (demo pair), cosine 0.9951, so these are twice and three times the worst.
# Commands: docs/precision.md, "Verification".
TOLERANCES: Mapping[Dtype, Tolerance] = {
    Dtype.FLOAT32: Tolerance(rtol=3e-5, min_cosine=0.99999),
    Dtype.BFLOAT16: Tolerance(rtol=3e-5, min_cosine=0.99999),
    Dtype.FLOAT16: Tolerance(rtol=1e-2, min_cosine=0.99998),
    Dtype.INT8: Tolerance(rtol=3e-1, min_cosine=0.985),
    Dtype.INT4: Tolerance(rtol=3e-1, min_cosine=0.985),
}


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """The table with a user's overrides; each maps an output, or `ALL`, to a value.

    An output with an override is held to its bound alone, not to a cosine.

    Raises:
        RequestError: unknown outputs, or values that are not finite and at least 0.
    """

    atol: Mapping[str, float] = field(default_factory=dict)
    rtol: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse(_problems(atol=self.atol, rtol=self.rtol))

    @classmethod
    def parse(cls, *, atol: Iterable[str] = (), rtol: Iterable[str] = ()) -> Tolerances:
        """From `VALUE` (all outputs) and `NAME:VALUE`; the last of several for one name counts.

        Raises:
            RequestError: anything else, all of it at once.
        """
        problems: list[str] = []
        parsed = {kind: _parsed(kind, texts, problems) for kind, texts in (("atol", atol), ("rtol", rtol))}
        _refuse([*problems, *_problems(**parsed)])
        return cls(**parsed)

    def of(self, output: str, graph: str, precision: Precision) -> Tolerance:
        """For an output (a cache by its name without the layer) of a graph in a precision."""
        parts = [precision.activations if graph == "head" else precision.target if graph == "target" else precision.drafter]
        if output in (LOGITS, BASE_LOGITS):
            parts.append(precision.lm_head if graph != "head" else precision.activations)
        default = max((TOLERANCES[part] for part in parts), key=lambda tolerance: tolerance.rtol)
        is_default = not any(name in values for name in (ALL, output) for values in (self.atol, self.rtol))
        return Tolerance(
            rtol=self.rtol.get(output, self.rtol.get(ALL, default.rtol)),
            atol=self.atol.get(output, self.atol.get(ALL, default.atol)),
            min_cosine=default.min_cosine if is_default else None,
        )


def _parsed(kind: str, texts: Iterable[str], problems: list[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition(":")
        try:
            values[name] = float(number)
        except ValueError:
            problems.append(f"{kind} {text!r:.60}: no number")
    return values


def _problems(**kinds: Mapping[str, float]) -> list[str]:
    problems = []
    for kind, values in kinds.items():
        problems += [f"{kind} of {name!r:.60}: no such output" for name in values if name not in (ALL, *OUTPUTS)]
        problems += [f"{kind} {value}: not a number of at least 0" for value in values.values() if not 0 <= value < math.inf]
    return problems


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        advice = f"Write VALUE or NAME:VALUE with a name among {', '.join(OUTPUTS)}."
        raise RequestError(listed("Tolerances: expected numbers for outputs of the graphs, found", problems, advice))
