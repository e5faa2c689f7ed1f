"""Prompt lookup: which earlier occurrence is copied, and how much of it."""

from __future__ import annotations

import numpy as np
import pytest

from domino_deploy.runtime.prompt_lookup import PromptLookupDrafter

NO_FEATURES = np.zeros((0, 0), dtype=np.float32)


@pytest.mark.parametrize(
    ("context", "count", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),  # three tokens match
        ([9, 2, 3, 4, 1, 2, 3], 3, [4, 1, 2]),  # two match
        ([9, 3, 4, 1, 3], 2, [4, 1]),  # one matches
        ([1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3], 1, [7]),  # the longer match wins over the later one
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # the later of two matches
        ([1, 2, 7, 1, 2, 8, 1, 2], 4, [7, 1, 2, 8]),  # the later one has only three tokens behind it
        ([1, 2, 7, 1, 2], 9, [7, 1, 2]),  # none has nine
        ([1, 2, 3], 4, []),  # nothing repeats
        ([5], 4, []),
        ([5, 5], 4, [5]),
        ([5, 5, 5, 5, 5, 5], 2, [5, 5]),
    ],
)
def test_continuation_of_an_earlier_occurrence(context, count, expected):
    assert PromptLookupDrafter().propose(context, NO_FEATURES, count).token_ids.tolist() == expected


def test_it_never_proposes_more_than_asked():
    drafter = PromptLookupDrafter()
    context = [1, 2, 3, 4] * 10
    for count in range(1, drafter.max_proposals + 1):
        assert drafter.propose(context, NO_FEATURES, count).token_ids.size == count
