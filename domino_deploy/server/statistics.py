"""What an answer tells of its tokens and of its speculation: OpenAI's usage, vLLM's statistics, our own details."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from domino_deploy.runtime.protocols import Step, TermsMs
from domino_deploy.runtime.requests import Output, OutputToken, RequestStatistics
from domino_deploy.server.settings import StatisticsLevel


def usage(finished: Iterable[RequestStatistics]) -> dict[str, Any]:
    """Token counts of all choices together."""
    found = list(finished)
    prompt, generated = sum(one.prompt_tokens for one in found), sum(one.generated_tokens for one in found)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in found)},
    }


def speculation_metrics(finished: Sequence[RequestStatistics], level: StatisticsLevel, max_drafts: int) -> dict[str, Any]:
    """The response's `metrics`, in the shape of vLLM's "Per-Request Acceptance Metrics"; {} with statistics switched off.

    Args:
        finished: one per choice; of several choices there are no statistics.
        level: how much to tell.
        max_drafts: tokens to draft per cycle at most, 0 without a drafter.
    """
    if level is StatisticsLevel.NONE:
        return {}
    is_told = len(finished) == 1 and max_drafts > 0
    return {"metrics": {"speculative_decoding": _acceptance(finished[0].steps, level, max_drafts) if is_told else None}}


def _acceptance(steps: Sequence[tuple[int, int]], level: StatisticsLevel, max_drafts: int) -> dict[str, Any]:
    histogram = [0] * (max_drafts + 1)
    by_length: dict[int, list[int]] = {}
    for proposed, accepted in steps:
        histogram[accepted] += 1
        by_length.setdefault(proposed, [0] * (proposed + 1))[accepted] += 1
    all_proposed, all_accepted = sum(proposed for proposed, _ in steps), sum(accepted for _, accepted in steps)
    found = {
        "mean_acceptance_length": 1 + all_accepted / len(steps) if steps else 1.0,
        "draft_acceptance_rate": all_accepted / all_proposed if all_proposed else 0.0,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {str(length): by_length[length] for length in sorted(by_length)},
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": all_accepted,
        "num_draft_tokens": all_proposed,
        "num_spec_tokens": max_drafts,
    }
    if level is StatisticsLevel.DETAILED:
        found["per_step_accepted"] = [accepted for _, accepted in steps]
        found["per_step_drafted"] = [proposed for proposed, _ in steps]
    return found


class SpeculationDetails:
    """Tokens and cycles since they were told of last: for `speculation_details`."""

    def __init__(self) -> None:
        self._tokens: list[OutputToken] = []
        self._steps: list[Step] = []
        self._batch = 0

    def add(self, output: Output) -> None:
        """What an output brought: its tokens, and its cycle if it tells of one."""
        self._tokens += output.tokens
        if output.step is not None:
            self._steps.append(output.step)
            self._batch = max(self._batch, output.batch)

    def take(self) -> dict[str, Any]:
        """What there is to tell; from then on it has been told."""
        tokens, steps, batch = self._tokens, self._steps, self._batch
        self._tokens, self._steps, self._batch = [], [], 0
        return {
            "tokens": [{"id": token.token_id, "text": token.text, "drafted": token.drafted} for token in tokens],
            "cycles": len(steps),
            "batch": batch,
            "drafts": sum(step.proposed > 0 for step in steps),
            "proposed": sum(step.proposed for step in steps),
            "accepted": sum(step.accepted for step in steps),
            "terms_ms": {term.name: sum(getattr(step.terms_ms, term.name) for step in steps) for term in fields(TermsMs)},
        }
