"""Requests that cannot be served say why, before anything runs, and all at once."""

from __future__ import annotations

import numpy as np
import pytest

from domino_deploy.errors import OutOfRangeError, RequestError
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.sampling import SamplingParams
from tests.support.doubles import RandomDrafter, ToyTarget

VOCAB = 8


def start(prompt, *, drafter=None, count=0, **params):
    return generate(ToyTarget(VOCAB), drafter, prompt, GenerationParams(**params), num_speculative_tokens=count)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -3),
        ("stop_strings", ("",)),
        ("stop_strings", "end"),
        ("stop_token_ids", (-1,)),
        ("num_speculative_tokens", -1),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", "5"),
        ("max_new_tokens", True),
        ("stop_strings", None),
        ("stop_strings", (b"end",)),
        ("stop_token_ids", 5),
        ("stop_token_ids", ("end",)),
        ("stop_token_ids", (1.5,)),
        ("num_speculative_tokens", 1.5),
        ("sampling", None),
        ("min_new_tokens", -1),
        ("min_new_tokens", 1.5),
        ("min_new_tokens", 257),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", 2.0),
        ("constraint", "json"),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(OutOfRangeError, match=f"found 1 out of it:\n  - {name} must be .*\n.* send the request again"):
        GenerationParams(**{name: value})


def test_all_bad_values_are_named_at_once():
    with pytest.raises(RequestError) as caught:
        GenerationParams(max_new_tokens=-1, stop_strings=("",), stop_token_ids=(-1,), num_speculative_tokens=-1)
    assert all(name in str(caught.value) for name in ("max_new_tokens", "stop_strings", "stop_token_ids", "num_speculative_tokens"))


def test_an_empty_prompt_is_refused_when_called_not_when_iterated():
    with pytest.raises(RequestError, match="at least one token, found none"):
        start([])


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_prompt_token_outside_the_vocabulary_is_named(token):
    with pytest.raises(OutOfRangeError, match=rf"prompt_ids must be token ids in \[0, 8\), found {token}"):
        start([1, token, 2])


def test_many_foreign_tokens_are_counted_not_listed():
    with pytest.raises(RequestError, match=r"found 8, 9, 10, 11, 12 and 95 more"):
        start(list(range(8, 108)))


def test_a_stop_token_outside_the_vocabulary_is_named():
    with pytest.raises(RequestError, match=r"stop_token_ids must be token ids in \[0, 8\), found 8"):
        start([1], stop_token_ids=(8,))


def test_a_bias_for_a_token_outside_the_vocabulary_is_named():
    with pytest.raises(RequestError, match=r"logit_bias must be token ids in \[0, 8\), found 8, 9"):
        start([1], sampling=SamplingParams(logit_bias={9: 1.0, 8: 1.0, 7: 1.0}))


def test_logprobs_of_a_prompt_from_a_backend_without_them_are_refused():
    class DeviceTarget(ToyTarget):
        """Keeps the logits of a prompt to itself."""

        def paired_with(self, drafter, *, needs_logits):
            raise AssertionError("refused before it is asked")

    with pytest.raises(RequestError, match="Leave prompt_logprobs out, or use the backend ort"):
        generate(DeviceTarget(VOCAB), None, [1], GenerationParams(prompt_logprobs=0), num_speculative_tokens=0)


def test_more_speculation_than_the_drafter_offers_is_refused():
    with pytest.raises(RequestError, match=r"num_speculative_tokens must lie in \[0, 6\].*found 7"):
        start([1], drafter=RandomDrafter(VOCAB), count=7)


def test_speculation_without_a_drafter_is_refused():
    with pytest.raises(RequestError, match="num_speculative_tokens must be 0, or left out, without a drafter, found 1"):
        start([1], count=1)


def test_all_faults_of_a_request_are_named_at_once():
    with pytest.raises(RequestError, match=r"(?s)found 3 out of it.*prompt_ids.*stop_token_ids.*num_speculative_tokens"):
        start([99], stop_token_ids=(99,), count=3)


@pytest.mark.parametrize("prompt", ["text", [1.0, 2.0], [None]])
def test_a_prompt_that_is_no_token_ids_says_how_to_make_them(prompt):
    with pytest.raises(RequestError, match=r"must be token ids, as Session\.prompt_ids makes them, found"):
        start(prompt)


def test_numpy_token_ids_are_token_ids():
    ids = np.array([1, 2, 3])
    assert [step.token_ids for step in start(ids, max_new_tokens=3)] == [step.token_ids for step in start(ids.tolist(), max_new_tokens=3)]
