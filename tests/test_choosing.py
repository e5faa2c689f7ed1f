"""What changes a target's logits before a choice: each part against a dense reference, and transformers where it has the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from domino_deploy.errors import RequestError, VerificationError
from domino_deploy.runtime.choosing import Chooser
from domino_deploy.runtime.constraints import Constraint
from domino_deploy.runtime.logprobs import token_logprobs, top_ids
from domino_deploy.runtime.protocols import NOTHING_PROPOSED, FloatArray, Verified
from domino_deploy.runtime.requests import MAX_TOP_LOGPROBS, GenerationParams
from domino_deploy.runtime.sampling import SamplingParams, distribution, inverse_cdf, uniform

VOCAB = 12


class AllowedTokens:
    """A matcher with a list of allowed sets, one per token."""

    def __init__(self, allowed: Sequence[Sequence[int]]) -> None:
        self.allowed = list(allowed)
        self.taken: list[int] = []

    def mask(self, logits_V: FloatArray) -> None:
        keep = list(self.allowed[len(self.taken)])
        kept = logits_V[keep]
        logits_V[:] = -np.inf
        logits_V[keep] = kept

    def advance(self, token_id: int) -> None:
        self.taken.append(token_id)


def rows_of(seed: int, count: int, vocab: int = VOCAB) -> FloatArray:
    return (2 * np.random.default_rng(seed).standard_normal((count, vocab))).astype(np.float32)


def dense_reference(logits: FloatArray, params: GenerationParams, prompt: Sequence[int], generated: Sequence[int]) -> FloatArray:
    """The processed row from its definition, token by token."""
    sampling, row = params.sampling, logits.copy()
    for token in range(row.size):
        if token in prompt or token in generated:
            factor = np.float32(sampling.repetition_penalty)
            row[token] = row[token] * factor if row[token] < 0 else row[token] / factor
        count = np.float32(list(generated).count(token))
        if count:
            row[token] -= np.float32(sampling.frequency_penalty) * count + np.float32(sampling.presence_penalty)
        row[token] += np.float32(sampling.logit_bias.get(token, 0.0))
        if token in params.stop_token_ids and len(generated) < params.min_new_tokens:
            row[token] = -np.inf
    return row


def chosen_by(chooser: Chooser, rows: FloatArray, start: int) -> list[int]:
    return [chooser.choose(row, start + index) for index, row in enumerate(rows)]


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    seed=st.just(7),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 0.5, 100.0]), max_size=3),
)


@given(
    sampling=samplings,
    min_new_tokens=st.integers(0, 10),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=3),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    seed=st.integers(0, 50),
)
@settings(max_examples=200, deadline=None)
def test_every_choice_is_that_of_the_densely_processed_row(sampling, min_new_tokens, stops, prompt, seed):
    params = GenerationParams(sampling=sampling, min_new_tokens=min_new_tokens, max_new_tokens=20, stop_token_ids=tuple(stops))
    rows, generated = rows_of(seed, 20), []
    for position, row in enumerate(rows, len(prompt)):
        processed = dense_reference(row, params, prompt, generated)
        if sampling.is_greedy:
            generated.append(int(processed.argmax()))
        else:
            generated.append(inverse_cdf(distribution(processed, sampling), uniform(7, position)))
    before = rows.copy()
    assert chosen_by(Chooser(params, prompt), rows, len(prompt)) == generated
    np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    prompt, generated, processor = [3, 1, 4], [], RepetitionPenaltyLogitsProcessor(penalty)
    for row in rows_of(1, 30):
        scores = processor(torch.tensor([prompt + generated]), torch.from_numpy(row)[None])
        generated.append(int(scores.argmax()))
    params = GenerationParams(sampling=SamplingParams(repetition_penalty=penalty))
    assert chosen_by(Chooser(params, prompt), rows_of(1, 30), 3) == generated


def test_min_new_tokens_is_that_of_transformers():
    prompt, stop, generated = [3, 1, 4], 5, []
    rows = rows_of(2, 12)
    rows[:, stop] = 9.0  # would be chosen everywhere
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 7, [stop], device="cpu")
    for row in rows:
        scores = processor(torch.tensor([prompt + generated]), torch.from_numpy(row)[None])
        generated.append(int(scores.argmax()))
    params = GenerationParams(min_new_tokens=7, max_new_tokens=12, stop_token_ids=(stop,))
    assert chosen_by(Chooser(params, prompt), rows, 3) == generated
    assert generated.index(stop) == 7


def test_penalties_grow_past_the_first_array_and_stay_those_of_the_reference():
    params = GenerationParams(sampling=SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.2))
    rows, prompt, generated = rows_of(3, 300, vocab=400), list(range(0, 400, 3)), []
    for row in rows:
        generated.append(int(dense_reference(row, params, prompt, generated).argmax()))
    assert len(set(generated)) > 128
    assert chosen_by(Chooser(params, prompt), rows, len(prompt)) == generated


def test_a_constraint_masks_before_the_draw_and_follows_the_choices():
    matcher = AllowedTokens([[2, 7], [4], [0, 1, 2]])
    params = GenerationParams(constraint=Constraint(kind="json_object"))
    rows = rows_of(4, 3)
    chosen = chosen_by(Chooser(params, [1], matcher), rows, 1)
    assert chosen == [max([2, 7], key=lambda token: rows[0, token]), 4, int(rows[2, :3].argmax())]
    assert matcher.taken == chosen


def test_min_new_tokens_gives_way_to_a_constraint_that_leaves_only_the_end():
    params = GenerationParams(constraint=Constraint(kind="json_object"), min_new_tokens=5, max_new_tokens=9, stop_token_ids=(0,))
    rows = rows_of(5, 2)
    rows[:, 0] = 9.0
    assert chosen_by(Chooser(params, [1], AllowedTokens([[0, 3], [0]])), rows, 1) == [3, 0]


def test_min_new_tokens_gives_way_to_stop_tokens_that_are_all_there_is():
    params = GenerationParams(min_new_tokens=5, max_new_tokens=9, stop_token_ids=tuple(range(6)))
    rows = rows_of(5, 2)[:, :6]
    assert chosen_by(Chooser(params, [1]), rows, 1) == rows.argmax(axis=1).tolist()


def test_a_constraint_without_a_matcher_is_refused():
    with pytest.raises(RequestError, match=r"Expected a matcher.*ConstraintCompiler\.matcher"):
        Chooser(GenerationParams(constraint=Constraint(kind="json_object")), [1])


@pytest.mark.parametrize(
    ("params", "is_plain"),
    [
        ({}, True),
        ({"stop_strings": ("x",), "stop_token_ids": (3,)}, True),
        ({"min_new_tokens": 3}, True),  # without stop tokens there is nothing to mask
        ({"min_new_tokens": 3, "stop_token_ids": (3,)}, False),
        ({"logprobs": 0}, False),
        ({"prompt_logprobs": 0}, True),
        ({"sampling": SamplingParams(temperature=0.5)}, False),
        ({"sampling": SamplingParams(presence_penalty=0.5)}, False),
        ({"sampling": SamplingParams(repetition_penalty=0.5)}, False),
        ({"sampling": SamplingParams(logit_bias={1: 1.0})}, False),
    ],
)
def test_greedy_ids_suffice_only_where_nothing_else_is_wanted_of_the_logits(params, is_plain):
    assert Chooser(GenerationParams(**params), [1]).is_plain_greedy == is_plain


def test_greedy_ids_are_taken_as_they_are():
    verified = Verified(proposal=NOTHING_PROPOSED, greedy_ids=np.array([4, 2, -1]))
    choice = Chooser(GenerationParams(), [1]).choices(verified, 1, VOCAB)
    assert [choice(0), choice(1)] == [4, 2]
    with pytest.raises(VerificationError, match="position 3"):
        choice(2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{"logprobs": 1}, {"sampling": SamplingParams(logit_bias={3: -100.0})}], ids=["logprobs", "bias"])
def test_a_damaged_row_is_refused_also_where_a_mask_would_hide_it(params, value):
    row = rows_of(6, 1)[0]
    row[3] = value
    with pytest.raises(VerificationError, match="position 5"):
        Chooser(GenerationParams(**params), [1]).choose(row, 5)


class TestLogprobs:
    @given(seed=st.integers(0, 100), top=st.integers(0, MAX_TOP_LOGPROBS), scale=st.sampled_from([0.0, 1.0, 300.0]))
    @settings(max_examples=100, deadline=None)
    def test_they_are_the_log_softmax_of_the_row(self, seed, top, scale):
        logits = (scale * np.round(rows_of(seed, 1, vocab=50)[0], 1)).astype(np.float32)  # rounded: there are ties
        expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=0).numpy()
        found = token_logprobs(logits, 7, top)
        ranked = np.argsort(-logits, kind="stable")[:top].tolist()  # ties to the lowest id
        assert [token for token, _ in found.top] == ranked
        np.testing.assert_allclose([found.logprob, *(value for _, value in found.top)], expected[[7, *ranked]], rtol=1e-6, atol=1e-6)

    @given(
        seed=st.integers(0, 10**6), vocab=st.integers(1, 3000), top=st.integers(0, MAX_TOP_LOGPROBS), masked=st.sampled_from([0.0, 0.99])
    )
    @settings(max_examples=200, deadline=None)
    def test_the_highest_of_many_are_found_as_by_sorting(self, seed, vocab, top, masked):
        rng = np.random.default_rng(seed)
        logits = rng.integers(-9, 9, vocab).astype(np.float32)  # ties everywhere, also at the edge
        logits[rng.random(vocab) < masked] = -np.inf
        assert top_ids(logits, top).tolist() == np.argsort(-logits, kind="stable")[:top].tolist()

    def test_more_than_there_are_tokens_gives_all(self):
        assert top_ids(np.array([1.0, 3.0, 3.0], dtype=np.float32), 20).tolist() == [1, 2, 0]

    def test_they_are_of_the_target_not_of_what_was_made_of_its_logits(self):
        sampling = SamplingParams(temperature=0.3, top_k=2, seed=1, logit_bias={5: 100.0}, presence_penalty=2.0)
        chooser, rows = Chooser(GenerationParams(sampling=sampling, logprobs=3), [1]), rows_of(7, 4)
        chosen = chosen_by(chooser, rows, 1)
        assert chosen == [5] * 4
        assert chooser.logprobs == [token_logprobs(row, 5, 3) for row in rows]

    def test_none_are_kept_where_none_are_wanted(self):
        chooser = Chooser(GenerationParams(), [1])
        chosen_by(chooser, rows_of(8, 3), 1)
        assert chooser.logprobs == []

    @pytest.mark.parametrize("cuts", [[], [1], [2, 5], [1, 2, 3, 4, 5, 6]])
    def test_a_prompt_read_in_pieces_gives_each_token_the_row_before_it(self, cuts):
        prompt, rows = [3, 1, 4, 1, 5, 9, 2], rows_of(9, 7)
        chooser = Chooser(GenerationParams(prompt_logprobs=2), prompt)
        for piece in np.split(rows, cuts):
            chooser.read_prompt(piece)
        assert chooser.prompt_logprobs == [None, *(token_logprobs(rows[at - 1], prompt[at], 2) for at in range(1, 7))]
