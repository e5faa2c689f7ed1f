"""Two arrays, one line: errors, cosine, values that are not finite, tokens that differ.  numpy only, computed in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from domino_deploy.exporters.verify_cases import Array, Case
from domino_deploy.exporters.verify_records import Disagreement, NotFinite, VerificationLine
from domino_deploy.exporters.verify_tolerances import Tolerance
from domino_deploy.signature import BASE_LOGITS, DRAFT_IDS, LOGITS, UNCERTIFIED

ToleranceOf = Callable[[str], Tolerance]


def case_lines(case: Case, found: dict[str, Array], tolerance_of: ToleranceOf) -> Iterator[VerificationLine]:
    """The lines of one case, caches of all layers in one line each, tokens after the logits they are chosen by.

    Args:
        case: inputs and PyTorch's outputs.
        found: the graph's outputs.
        tolerance_of: by output, a cache by its name without the layer.
    """
    groups: dict[str, list[VerificationLine]] = {}
    for name, expected in case.expected.items():
        if name == DRAFT_IDS:
            assert case.logits is not None, "every case of the head has them"
            bound = tolerance_of(BASE_LOGITS).bound(_scale(case.inputs[BASE_LOGITS]))
            yield token_line(case, name, found[name], expected, case.logits, bound)
        elif name == UNCERTIFIED:
            yield _count_line(case, name, found[name], expected)
        else:
            group = name.partition(".")[0]
            groups.setdefault(group, []).append(value_line(case, name, found[name], expected, tolerance_of(group)))
            if name in (LOGITS, BASE_LOGITS):
                bound = tolerance_of(name).bound(_scale(expected))
                yield token_line(case, f"{name} top-1", found[name].argmax(-1), expected.argmax(-1), expected, bound)
    for name, lines in groups.items():
        yield _joined(name, lines)


def value_line(case: Case, name: str, found: Array, expected: Array, tolerance: Tolerance) -> VerificationLine:
    """An output of numbers."""
    scale = _scale(expected)
    common: dict[str, Any] = {"graph": case.graph, "name": name, "case": case.name, "bound": tolerance.bound(scale), "scale": scale}
    if found.shape != expected.shape:
        return VerificationLine(max_abs_error=np.inf, mean_abs_error=np.inf, **common)
    one, other = found.astype(np.float64), expected.astype(np.float64)
    not_finite = _not_finite(one, other)
    if not_finite is not None:
        return VerificationLine(max_abs_error=np.inf, mean_abs_error=np.inf, not_finite=not_finite, **common)
    error = np.abs(one - other)
    largest, mean = (float(error.max()), float(error.mean())) if error.size else (0.0, 0.0)
    return VerificationLine(
        max_abs_error=largest, mean_abs_error=mean, cosine=_cosine(one, other), min_cosine=tolerance.min_cosine, **common
    )


def token_line(case: Case, name: str, found: Array, expected: Array, logits: Array, bound: float) -> VerificationLine:
    """An output of tokens.

    Args:
        case: of the head: behind the first token that differs a rollout continues another sentence, which is not compared.
        name: of the line.
        found: int64 [...], the graph's.
        expected: int64 [...], PyTorch's.
        logits: [..., V], PyTorch's, by which it chose.
        bound: largest gap that makes two tokens a near tie.
    """
    differs = found != expected
    compared = np.ones_like(differs)
    if case.graph == "head":
        compared = np.cumsum(np.cumsum(differs, axis=-1), axis=-1) <= 1
        differs &= compared
    disagreements = tuple(_disagreement(index, found, expected, logits, case.token_ids) for index in zip(*np.nonzero(differs), strict=True))
    gaps = [one.gap for one in disagreements]
    count = int(compared.sum())
    return VerificationLine(
        graph=case.graph,
        name=name,
        case=case.name,
        max_abs_error=max(gaps, default=0.0),
        mean_abs_error=sum(gaps) / count if count else 0.0,
        bound=bound,
        compared=count,
        disagreements=disagreements,
    )


def gap_and_margin(logits_V: Array, expected: int, found: int) -> tuple[float, float]:
    """By how much a row's logit of `expected` beats that of `found`, and its best beats its second; a token outside the row, or a
    row that is not finite, is infinitely far away."""
    best_two = np.partition(logits_V.astype(np.float64), -2)[-2:]
    margin = float(best_two[1] - best_two[0])
    gap = float(logits_V[expected]) - float(logits_V[found]) if 0 <= found < len(logits_V) else np.inf
    return (gap if np.isfinite(gap) else np.inf), (margin if np.isfinite(margin) else np.inf)


def _disagreement(index: tuple[np.intp, ...], found: Array, expected: Array, logits: Array, token_ids: Array | None) -> Disagreement:
    tokens = int(expected[index]), int(found[index])
    columns = tokens if token_ids is None else tuple(_column(token_ids, token) for token in tokens)
    gap, margin = gap_and_margin(logits[index], *columns)
    place = tuple(int(axis) for axis in index)
    return Disagreement(index=place, expected=tokens[0], found=tokens[1], margin=margin, gap=gap)


def _column(token_ids: Array, token: int) -> int:
    """Where a token stands in a draft vocabulary; -1 for nowhere."""
    places = np.flatnonzero(token_ids == token)
    return int(places[0]) if len(places) else -1


def _count_line(case: Case, name: str, found: Array, expected: Array) -> VerificationLine:
    """Counts of the candidate pool: a certificate lost or won on a rounding shows as one, so one per row is allowed."""
    error = np.abs(found.astype(np.float64) - expected)
    return VerificationLine(
        graph=case.graph, name=name, case=case.name, max_abs_error=float(error.max()), mean_abs_error=float(error.mean()), bound=1.0
    )


def _joined(name: str, lines: list[VerificationLine]) -> VerificationLine:
    """Of all layers' caches, the one nearest to its bound, a failed one first."""
    worst = max(lines, key=lambda line: (not line.passed, line.nearness))
    failed = [line for line in lines if not line.passed]
    if len(lines) == 1 or not failed:
        return replace(worst, name=name)
    return replace(worst, name=name, first_layer=int(failed[0].name.rpartition(".")[2]))


def _scale(expected: Array) -> float:
    finite = expected[np.isfinite(expected)] if expected.size else expected
    return float(np.abs(finite).max()) if finite.size else 0.0


def _cosine(one: Array, other: Array) -> float | None:
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(np.vdot(one, other)) / lengths if lengths else None


def _not_finite(found: Array, expected: Array) -> NotFinite | None:
    if np.isfinite(found).all() and np.isfinite(expected).all():
        return None
    scanned = found if not np.isfinite(found).all() else expected
    first = np.unravel_index(int(np.argmin(np.isfinite(scanned))), scanned.shape)
    return NotFinite(
        nan=int(np.isnan(scanned).sum()),
        inf=int(np.isinf(scanned).sum()),
        size=scanned.size,
        first=tuple(int(axis) for axis in first),
        in_pytorch=not bool(np.isfinite(expected).all()),
    )
