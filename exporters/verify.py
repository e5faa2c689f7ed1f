"""Does ONNX Runtime compute with a bundle's graphs what PyTorch computes?  One line per output and case.

Two comparisons: every output of every graph on the cases of `verify_cases.py`, and greedy speculative generation step by
step with both backends of the runtime, since errors that stay within bounds could still add up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

from domino_deploy.bundle import DRAFTER_FOLDER, GRAPHS, TARGET_FOLDER, TOKENIZER, open_bundle
from domino_deploy.checkpoint import Checkpoint, open_drafter, open_target
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import VerificationError, listed
from domino_deploy.exporters.verify_cases import SENTENCES, Array, Case, TokenRows, backbone_cases, head_cases, target_cases
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.loading import load_drafter, load_target
from domino_deploy.model.target import TargetModel
from domino_deploy.runtime.backends.eager import EagerDrafter, EagerTarget
from domino_deploy.runtime.backends.ort_graph import open_graph, run_graph
from domino_deploy.runtime.decode import GenerationParams, generate
from domino_deploy.runtime.protocols import Step
from domino_deploy.runtime.session import Session
from domino_deploy.runtime.text import Tokenizer
from domino_deploy.signature import (
    BASE_LOGITS,
    DRAFT_IDS,
    FEATURES,
    HIDDEN,
    LOGITS,
    backbone_signature,
    head_signature,
    target_signature,
)

# Largest error allowed, as a part of the largest magnitude of PyTorch's output in the same case.  Both compute in fp32, so
# what remains is the order of summation: 3e-6 at most, measured with SmolLM2-135M (30 layers) and the tests' tiny models.
# Ten times that leaves room for deeper models, and a wrong epsilon, angle or weight exceeds it (tests/test_verify.py).
_TOLERANCE = {LOGITS: 3e-5, FEATURES: 3e-5, HIDDEN: 3e-5, BASE_LOGITS: 3e-5, "updated_key_cache": 3e-5, "updated_value_cache": 3e-5}

_PROMPTS = SENTENCES[:3]
_NEW_TOKENS = 32

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class VerificationLine:
    """One output in one case.

    For tokens the error is the largest margin between PyTorch's two best logits among tokens that differ (0 if none
    does), for generation the number of steps that differ; infinite for an output that is not finite.
    """

    graph: str
    name: str
    case: str
    max_abs_error: float
    mean_abs_error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.max_abs_error <= self.bound


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """All lines; `generated` holds per prompt how many tokens came in how many steps, and how many drafts were accepted.

    It is empty if the graphs' outputs are out of bounds already.
    """

    lines: tuple[VerificationLine, ...]
    generated: tuple[dict[str, int], ...]

    @property
    def passed(self) -> bool:
        return all(line.passed for line in self.lines)

    def to_dict(self) -> dict[str, object]:
        """As JSON values; an infinite error becomes null."""
        lines = [
            {
                "graph": line.graph,
                "name": line.name,
                "case": line.case,
                "max_abs_error": _finite(line.max_abs_error),
                "mean_abs_error": _finite(line.mean_abs_error),
                "bound": line.bound,
                "passed": line.passed,
            }
            for line in self.lines
        ]
        return {"passed": self.passed, "lines": lines, "generated": list(self.generated)}

    def failure(self) -> str:
        """The message for a report that did not pass."""
        failed = [line for line in self.lines if not line.passed]
        problems = [f"{line.graph}: {line.name} ({line.case}): error {line.max_abs_error:.2e}, allowed {line.bound:.2e}" for line in failed]
        intro = f"{len(failed)} of {len(self.lines)} outputs of the graphs do not reproduce PyTorch:"
        return listed(
            intro, problems, "Do not use these graphs. Please report this with the versions of torch, onnxscript and onnxruntime."
        )


def verify_bundle(path: str | Path, *, progress: Progress = lambda step: None) -> VerificationReport:
    """Compare a bundle's graphs with PyTorch on the bundle's own weights, whose hashes are checked first.

    Raises:
        BundleError: not a bundle, or files that are not those of the export.
    """
    progress("Checking the bundle's files")
    bundle = open_bundle(path, check_hashes=True)
    return compare(bundle.path, open_target(bundle.path / TARGET_FOLDER), open_drafter(bundle.path / DRAFTER_FOLDER), progress=progress)


def compare(
    folder: Path,
    target_source: Checkpoint[TargetConfig],
    drafter_source: Checkpoint[DrafterConfig],
    *,
    progress: Progress = lambda step: None,
) -> VerificationReport:
    """Compare the graphs in `folder` with PyTorch on the weights of two checkpoints.

    Args:
        folder: a whole bundle.
        target_source: at export the checkpoint it was made from, so that a wrong conversion of weights is seen.
        drafter_source: likewise.
        progress: told what is being compared.
    """
    progress("Loading the PyTorch models")
    target = load_target(target_source, tapped_layers=drafter_source.config.target_layer_ids)
    drafter = load_drafter(drafter_source)
    tokenizer = Tokenizer(folder / TOKENIZER)
    tokens = TokenRows(_token_ids(tokenizer, target.config.vocab_size))
    config = drafter_source.config
    cases = {
        "target": (target_signature(target_source.config, config.feature_size), lambda: target_cases(target, tokens)),
        "backbone": (backbone_signature(config), lambda: backbone_cases(drafter, target, tokens)),
        "head": (head_signature(config), lambda: head_cases(drafter, target, tokens)),
    }
    lines: list[VerificationLine] = []
    for graph, (signature, made) in cases.items():
        progress(f"Comparing the {graph} graph")
        session = open_graph(folder / GRAPHS[graph], signature, _options())
        for case in made():
            lines += _lines(case, run_graph(session, folder / GRAPHS[graph], case.inputs))
    if not all(line.passed for line in lines):  # generation would only show the same once more
        return VerificationReport(lines=tuple(lines), generated=())
    progress("Comparing speculative generation")
    generated = tuple(_generations(folder, target, drafter))
    return VerificationReport(lines=(*lines, *(line for line, _ in generated)), generated=tuple(facts for _, facts in generated))


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: it warns of each cache that is not updated in place, which is as wanted here
    return options


def _lines(case: Case, found: dict[str, Array]) -> Iterator[VerificationLine]:
    groups: dict[str, list[VerificationLine]] = {}
    for name, expected in case.expected.items():
        if name == DRAFT_IDS:
            assert case.margins is not None, "every case of the head has them"
            yield _token_line(case, name, found[name], expected, case.margins, _scale_bound(BASE_LOGITS, case.inputs[BASE_LOGITS]))
            continue
        group = name.partition(".")[0]
        groups.setdefault(group, []).append(_value_line(case, name, found[name], expected, _scale_bound(group, expected)))
        if name in (LOGITS, BASE_LOGITS):
            best_two = np.partition(expected, -2, axis=-1)[..., -2:]
            margins, bound = best_two[..., 1] - best_two[..., 0], _scale_bound(name, expected)
            yield _token_line(case, f"{name} top-1", found[name].argmax(-1), expected.argmax(-1), margins, bound)
    for lines in groups.values():  # of all layers' caches, the one nearest to its bound
        yield max(lines, key=_nearness)


def _nearness(line: VerificationLine) -> float:
    return line.max_abs_error / line.bound if line.bound else line.max_abs_error


def _scale_bound(group: str, expected: Array) -> float:
    return _TOLERANCE[group] * float(np.abs(expected).max())


def _value_line(case: Case, name: str, found: Array, expected: Array, bound: float) -> VerificationLine:
    error = np.abs(found.astype(np.float64) - expected)
    is_finite = bool(np.isfinite(found).all()) and found.shape == expected.shape
    largest, mean = (float(error.max()), float(error.mean())) if is_finite else (math.inf, math.inf)
    return VerificationLine(graph=case.graph, name=name, case=case.name, max_abs_error=largest, mean_abs_error=mean, bound=bound)


def _token_line(case: Case, name: str, found: Array, expected: Array, margins: Array, bound: float) -> VerificationLine:
    differs = found != expected
    if case.graph == "head":
        # Behind the first token that differs the rollout continues another sentence.
        differs &= np.cumsum(differs, axis=-1) == 1
    errors = np.where(differs, margins, 0.0)
    return VerificationLine(
        graph=case.graph, name=name, case=case.name, max_abs_error=float(errors.max()), mean_abs_error=float(errors.mean()), bound=bound
    )


def _generations(folder: Path, target: TargetModel, drafter: DrafterModel) -> Iterator[tuple[VerificationLine, dict[str, int]]]:
    """Per prompt: does ONNX Runtime propose, accept and emit in every step what PyTorch does?"""
    with Session.open(folder) as session:
        capacity, count = session.target.capacity, session.default_num_speculative_tokens
        eager_target, eager_drafter = EagerTarget(target, capacity), EagerDrafter(drafter, target, capacity)
        for number, prompt in enumerate(_PROMPTS, start=1):
            prompt_ids = session.tokenizer.encode(prompt)
            params = GenerationParams(max_new_tokens=_NEW_TOKENS)
            expected = _steps(generate(eager_target, eager_drafter, prompt_ids, params, num_speculative_tokens=count))
            found = _steps(generate(session.target, session.drafter, prompt_ids, params, num_speculative_tokens=count))
            differing = sum(one != other for one, other in itertools.zip_longest(found, expected))
            line = VerificationLine(
                graph="generation",
                name="tokens, proposed, accepted",
                case=f"prompt {number}, {_NEW_TOKENS} tokens",
                max_abs_error=float(differing),
                mean_abs_error=differing / len(expected),
                bound=0.0,
            )
            yield line, {"tokens": sum(len(step[0]) for step in found), "steps": len(found), "accepted": sum(step[2] for step in found)}


def _steps(steps: Iterable[Step]) -> list[tuple[tuple[int, ...], int, int]]:
    return [(step.token_ids, step.proposed, step.accepted) for step in steps]


def _token_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    ids = tokenizer.encode(" ".join(SENTENCES))
    foreign = sorted({token for token in ids if token >= vocab_size})
    if foreign:
        raise VerificationError(
            f"{TOKENIZER}: expected token ids below the target's {vocab_size}, found {foreign[-1]}. Use the target's own tokenizer."
        )
    return ids


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
