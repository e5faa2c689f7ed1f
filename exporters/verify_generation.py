"""Both sides generate greedily on their own: errors that stay within bounds for one pass could still add up.

In float32 every step must be the same.  In narrower precisions a token, or a proposal, may differ where PyTorch's logits of the two
candidates are a near tie (`near_tie`); what follows a token that differs is another text and is not compared.

Shape legend: N proposals, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from domino_deploy.bundle import Bundle
from domino_deploy.exporters.verify_cases import SENTENCES, Array
from domino_deploy.exporters.verify_metrics import gap_and_margin
from domino_deploy.exporters.verify_records import Difference, Disagreement, Generation, VerificationLine
from domino_deploy.exporters.verify_reference import Reference
from domino_deploy.exporters.verify_tolerances import Tolerance, Tolerances
from domino_deploy.precision import Dtype
from domino_deploy.runtime.backends.eager import EagerDrafter, EagerTarget
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.protocols import Drafter, FloatArray, Proposal, Step
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.session import Session
from domino_deploy.signature import BASE_LOGITS, LOGITS

PROMPTS = SENTENCES[:3]
NEW_TOKENS = 32
# Of a generation whose proposals are compared one by one, the cycles that are: each costs PyTorch a pass of the drafter.
_COMPARED_CYCLES = 12

Proposals = list[tuple[int, list[int]]]


class _Recorded:
    """A drafter that remembers what it proposed: (number of tokens before, proposals)."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.proposals: Proposals = []

    @property
    def max_proposals(self) -> int:
        return self._drafter.max_proposals

    def reset(self) -> None:
        self._drafter.reset()
        self.proposals.clear()

    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        proposal = self._drafter.propose(token_ids, features, count)
        self.proposals.append((len(token_ids), proposal.token_ids.tolist()))
        return proposal


class _Uncached:
    """Drafts in the reference's form, which the eager backend does not know; a whole pass for each proposal."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._features: list[FloatArray] = []

    @property
    def max_proposals(self) -> int:
        return self._reference.drafter.config.num_proposals

    def reset(self) -> None:
        self._features.clear()

    @torch.inference_mode()
    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        self._features.append(features.copy())
        drafted, _ = _propose(self._reference, token_ids[-1], torch.from_numpy(np.concatenate(self._features))[None], count)
        return Proposal(token_ids=np.array(drafted))


def compare_generation(
    bundle: Bundle, reference: Reference, tolerances: Tolerances, graph_lines: Sequence[VerificationLine]
) -> Iterator[tuple[list[VerificationLine], Generation]]:
    """Per prompt: do the graphs propose, accept and emit what PyTorch does?

    Args:
        bundle: whose graphs generate.
        reference: the PyTorch models.
        tolerances: bounds of the graphs' outputs.
        graph_lines: what the comparison of the graphs found.
    """
    is_strict = reference.is_plain and bundle.precision.activations is Dtype.FLOAT32 and not bundle.precision.is_quantised
    emitted = near_tie(tolerances.of(LOGITS, "target", bundle.precision), graph_lines, LOGITS)
    # The error of the features that proposals are made of is the target's.
    drafted = near_tie(tolerances.of(BASE_LOGITS, "backbone", bundle.precision), graph_lines, LOGITS, BASE_LOGITS)
    params = GenerationParams(max_new_tokens=NEW_TOKENS)
    with Session.open(bundle.path) as session:
        assert session.drafter is not None, "sessions open with the bundle's drafter"
        capacity, count = session.target.capacity, session.default_num_speculative_tokens
        eager_target = EagerTarget(reference.target, capacity)
        eager_drafter = EagerDrafter(reference.drafter, reference.target, capacity) if reference.is_plain else _Uncached(reference)
        for number, prompt in enumerate(PROMPTS, start=1):
            prompt_ids = session.tokenizer.encode(prompt)
            recorded = _Recorded(session.drafter)
            expected = list(generate(eager_target, eager_drafter, prompt_ids, params, num_speculative_tokens=count))
            found = list(generate(session.target, recorded, prompt_ids, params, num_speculative_tokens=count))
            difference = _difference(reference, prompt_ids, expected, found, emitted)
            case = f"prompt {number}, {NEW_TOKENS} tokens"
            lines = [_steps_line(case, expected, found)]
            if not is_strict:
                lines = [
                    _tokens_line(case, difference, len(_tokens(found))),
                    _proposals_line(case, reference, prompt_ids, found, recorded.proposals, drafted),
                ]
            record = Generation(
                prompt=number,
                tokens=len(_tokens(found)),
                accepted=tuple(step.accepted for step in found[1:]),
                expected_accepted=tuple(step.accepted for step in expected[1:]),
                difference=difference,
            )
            yield lines, record


def near_tie(tolerance: Tolerance, graph_lines: Sequence[VerificationLine], *outputs: str) -> Tolerance:
    """How far apart two candidates may lie: no further than their logits' bound, and no further than twice the errors, since both may
    be off, that the comparison of the graphs has just found.

    Args:
        tolerance: of the logits that the candidates are chosen by.
        graph_lines: what the comparison found.
        outputs: whose errors, the largest of each, add up in these logits.
    """
    errors = [max(line.max_abs_error for line in graph_lines if line.name == output) for output in outputs]
    return dataclasses.replace(tolerance, most=2 * sum(errors))


def _tokens(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def _steps_line(case: str, expected: Sequence[Step], found: Sequence[Step]) -> VerificationLine:
    """The error is the number of steps that differ."""
    both = itertools.zip_longest(*([(step.token_ids, step.proposed, step.accepted) for step in steps] for steps in (found, expected)))
    differing = sum(one != other for one, other in both)
    return VerificationLine(
        graph="generation",
        name="tokens, proposed, accepted",
        case=case,
        max_abs_error=float(differing),
        mean_abs_error=differing / len(expected),
        bound=0.0,
    )


def _tokens_line(case: str, difference: Difference | None, tokens: int) -> VerificationLine:
    """The error is the gap of the first token that differs."""
    gap, bound = (0.0, 0.0) if difference is None else (difference.gap, difference.bound)
    compared = tokens if difference is None else difference.position + 1
    return VerificationLine(
        graph="generation", name="tokens", case=case, max_abs_error=gap, mean_abs_error=gap / compared, bound=bound, compared=compared
    )


@torch.inference_mode()
def _difference(
    reference: Reference, prompt_ids: list[int], expected: Sequence[Step], found: Sequence[Step], tolerance: Tolerance
) -> Difference | None:
    one, other = _tokens(expected), _tokens(found)
    place = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return None
    before = torch.tensor([[*prompt_ids, *one[:place]]])
    logits_V: Array = reference.target.lm_head(reference.target.hidden_states(before)[0][:, -1])[0].numpy()
    gap, _ = gap_and_margin(logits_V, one[place], other[place])
    bound = tolerance.bound(float(np.abs(logits_V).max()))
    return Difference(position=place, expected=one[place], found=other[place], gap=gap, bound=bound)


@torch.inference_mode()
def _proposals_line(
    case: str,
    reference: Reference,
    prompt_ids: list[int],
    found: Sequence[Step],
    proposals: Proposals,
    tolerance: Tolerance,
) -> VerificationLine:
    """The graphs' proposals against those that PyTorch makes from the same tokens, without a cache."""
    tokens = [*prompt_ids, *_tokens(found)]
    features = reference.features(torch.tensor([tokens]))
    compared, bound, disagreements = 0, 0.0, []
    for cycle, (length, drafted) in enumerate(proposals[:_COMPARED_CYCLES]):
        expected, logits_NV = _propose(reference, tokens[length - 1], features[:, : length - 1], len(drafted))
        place = next((index for index, pair in enumerate(zip(expected, drafted, strict=True)) if pair[0] != pair[1]), None)
        compared += len(drafted) if place is None else place + 1
        if place is None:
            continue
        columns = [_column(reference, token) for token in (expected[place], drafted[place])]
        gap, margin = gap_and_margin(logits_NV[place], *columns)
        bound = max(bound, tolerance.bound(float(np.abs(logits_NV[place][np.isfinite(logits_NV[place])]).max())))
        disagreements.append(Disagreement(index=(cycle, place), expected=expected[place], found=drafted[place], margin=margin, gap=gap))
    gaps = [one.gap for one in disagreements]
    return VerificationLine(
        graph="generation",
        name="proposals",
        case=case,
        max_abs_error=max(gaps, default=0.0),
        mean_abs_error=sum(gaps) / compared if compared else 0.0,
        bound=bound,
        compared=compared,
        disagreements=tuple(disagreements),
    )


def _propose(reference: Reference, anchor: int, features: torch.Tensor, count: int) -> tuple[list[int], Array]:
    """Proposals and the logits [N, V] that they are chosen by, from the features of all tokens before the anchor."""
    drafter, context, anchor_1 = reference.drafter, features.shape[1], torch.tensor([anchor])
    block = drafter.config.block_size
    slots, rows = torch.arange(context + block), torch.arange(context, context + block)[:, None]
    window = drafter.config.sliding_window
    # As in model/spec_generate.py: a sliding layer's row at position p sees the context above p - window, and the whole block.
    sliding = None if window is None else (slots >= context) | (slots > rows - window)
    everything = torch.ones(block, len(slots), dtype=torch.bool)
    embedded = reference.target.model.embed_tokens(drafter.block_ids(anchor_1))
    hidden = drafter.proposal_rows(drafter(embedded, features, slots[None], everything, sliding))[:, :count]
    base = reference.base_logits(hidden)
    drafted = reference.draft(anchor_1, hidden, base).token_ids
    return drafted[0].tolist(), reference.draft_logits(anchor_1, hidden, base, drafted)[0].numpy()


def _column(reference: Reference, token: int) -> int:
    if reference.vocab is None:
        return token
    places = torch.nonzero(reference.vocab.token_ids == token)
    return int(places[0]) if len(places) else -1
