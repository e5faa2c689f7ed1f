"""What a verification finds, as records: one line per output and case, one record per generated prompt, and the report of both."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from domino_deploy.errors import listed, shortened

_ADVICE = "Do not use these graphs. Please report this with the versions of torch, onnxscript and onnxruntime."


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """Values that are NaN or infinite: how many NaN and infinities, among how many, and the index of the first.

    in_pytorch: PyTorch's output has some as well, so that the weights rather than the graph are at fault.
    """

    nan: int
    inf: int
    size: int
    first: tuple[int, ...]
    in_pytorch: bool

    def __str__(self) -> str:
        where = f"{self.nan} NaN and {self.inf} infinite of {self.size} values, the first at {list(self.first)}"
        return f"{where}, in PyTorch too" if self.in_pytorch else where


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A token that the graph chose otherwise.

    index: place in the output; margin: by how much PyTorch's best logit beats its second; gap: by how much it beats the logit of
    the token found, which is what the bound is for (the same, unless the token found is not even the second).
    """

    index: tuple[int, ...]
    expected: int
    found: int
    margin: float
    gap: float


@dataclass(frozen=True, kw_only=True)
class VerificationLine:
    """One output in one case.

    For tokens the errors are the gaps of the disagreements (0 where tokens agree), for generation see `Generation`; an output that
    is not finite has infinite ones.

    scale: largest magnitude of PyTorch's output; cosine: similarity with it, None for tokens and for zeros; compared and
    disagreements: tokens compared, and those that differ; first_layer: of caches, the first layer out of bounds.
    """

    graph: str
    name: str
    case: str
    max_abs_error: float
    mean_abs_error: float
    bound: float
    scale: float | None = None
    cosine: float | None = None
    min_cosine: float | None = None
    not_finite: NotFinite | None = None
    compared: int = 0
    disagreements: tuple[Disagreement, ...] = ()
    first_layer: int | None = None

    @property
    def passed(self) -> bool:
        # Written so that a NaN anywhere fails.
        in_direction = self.cosine is None or self.min_cosine is None or self.cosine >= self.min_cosine
        return self.max_abs_error <= self.bound and in_direction and self.not_finite is None

    @property
    def max_rel_error(self) -> float | None:
        """The largest error as a part of the scale."""
        return self.max_abs_error / self.scale if self.scale else None

    @property
    def nearness(self) -> float:
        """The largest error as a part of its bound."""
        return self.max_abs_error / self.bound if self.bound else self.max_abs_error

    def problem(self) -> str:
        """What is wrong with a line that did not pass."""
        text = f"{self.graph}: {self.name} ({self.case}): error {self.max_abs_error:.2e}, allowed {self.bound:.2e}"
        if self.cosine is not None and self.min_cosine is not None and not self.cosine >= self.min_cosine:
            text += f"; cosine {self.cosine:.6f}, at least {self.min_cosine} expected"
        if self.not_finite is not None:
            text += f"; {self.not_finite}"
        if self.first_layer is not None:
            text += f"; from layer {self.first_layer} on"
        if self.disagreements:
            worst = max(self.disagreements, key=lambda one: one.gap)
            text += f"; token {worst.found} for {worst.expected} at {list(worst.index)}, whose logits lie {worst.gap:.2e} apart"
        return text

    def to_dict(self) -> dict[str, object]:
        """As JSON values; what is not finite becomes null."""
        values = _plain(dataclasses.asdict(self)) | {"max_rel_error": _finite(self.max_rel_error), "passed": self.passed}
        return {name: value for name, value in values.items() if value not in (None, []) or name.endswith("abs_error")}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token of a generation that differs: its position behind the prompt, both tokens, and how far apart PyTorch's logits
    of the two lie; the generation may go on differently from there if that is no more than `bound`.
    """

    position: int
    expected: int
    found: int
    gap: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One prompt, continued by both sides on their own.

    accepted, expected_accepted: accepted drafts per cycle, of the graphs and of PyTorch.
    """

    prompt: int
    tokens: int
    accepted: tuple[int, ...]
    expected_accepted: tuple[int, ...]
    difference: Difference | None

    def to_dict(self) -> dict[str, object]:
        """As JSON values, with the sums that earlier manifests had."""
        return _plain(dataclasses.asdict(self)) | {"steps": len(self.accepted) + 1, "total_accepted": sum(self.accepted)}


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """All lines and generations.

    generated: empty if the graphs' outputs are out of bounds already, or generation was left out (`notes` say why).
    precision: its name; num_layers: of a truncated verification, how many of the target's layers took part.
    notes: what was left out, and what explains a failure.
    """

    lines: tuple[VerificationLine, ...]
    generated: tuple[Generation, ...]
    precision: str = "float32"
    num_layers: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(line.passed for line in self.lines)

    def to_dict(self) -> dict[str, object]:
        """As JSON values; what is not finite becomes null."""
        return {
            "passed": self.passed,
            "precision": self.precision,
            "num_layers": self.num_layers,
            "notes": list(self.notes),
            "lines": [line.to_dict() for line in self.lines],
            "generated": [generation.to_dict() for generation in self.generated],
        }

    def summary(self) -> dict[str, object]:
        """`to_dict` without single disagreements: for the manifest."""
        full = self.to_dict()
        lines = [line.to_dict() | {"disagreements": len(line.disagreements)} for line in self.lines]
        return full | {"lines": lines}

    def failure(self) -> str:
        """The message for a report that did not pass."""
        problems = [line.problem() for line in self.lines if not line.passed]
        intro = f"{len(problems)} of {len(self.lines)} outputs of the graphs do not reproduce PyTorch:"
        return listed(intro, [*shortened(problems, most=60), *self.notes], _ADVICE)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
