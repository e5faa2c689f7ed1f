"""Sampling: the filtered distribution, the keyed uniform, and what bad values and bad logits give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from domino_deploy.errors import OutOfRangeError, VerificationError
from domino_deploy.runtime.sampling import MAX_SEED, Sampler, SamplingParams, distribution, inverse_cdf, uniform


def logits_of(seed: int, vocab: int = 50) -> np.ndarray:
    return 3 * np.random.default_rng(seed).standard_normal(vocab).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_distribution_is_that_of_transformers(temperature, top_k, top_p, min_p):
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    processors.append(TopPLogitsWarper(top_p))
    processors.append(MinPLogitsWarper(min_p))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for seed in range(5):
        logits = logits_of(seed)
        expected = processors(None, torch.from_numpy(logits)[None].double()).softmax(-1)[0].numpy()
        np.testing.assert_allclose(distribution(logits, params), expected, rtol=1e-6, atol=1e-12)


def test_top_p_over_a_large_flat_vocabulary_keeps_just_enough_tokens():
    logits = np.zeros(10_000, dtype=np.float32)
    probabilities = distribution(logits, SamplingParams(temperature=1.0, top_p=0.25))
    # Ties go to the lowest ids.
    np.testing.assert_allclose(probabilities[:2500], 1 / 2500)
    assert not probabilities[2500:].any()


def test_top_k_keeps_tokens_as_likely_as_the_last_one_kept():
    logits = np.array([1.0, 2.0, 2.0, 3.0], dtype=np.float32)
    assert np.count_nonzero(distribution(logits, SamplingParams(temperature=1.0, top_k=2))) == 3


def test_a_tiny_temperature_leaves_the_best_token_alone():
    probabilities = distribution(logits_of(0), SamplingParams(temperature=1e-320))
    assert probabilities[logits_of(0).argmax()] == 1.0
    assert np.count_nonzero(probabilities) == 1


def test_minus_infinity_is_a_token_that_cannot_be_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf], dtype=np.float32)
    np.testing.assert_array_equal(distribution(logits, SamplingParams(temperature=1.0, top_p=0.5)), [0.0, 1.0, 0.0])


@pytest.mark.parametrize("value", [0.0, 0.2, 0.25, 0.5, 0.75, 1 - 2**-53])
def test_inverse_cdf_never_gives_a_token_of_probability_zero(value):
    probabilities = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    token = inverse_cdf(probabilities, value)
    assert token == [1, 1, 3, 3, 4, 4][[0.0, 0.2, 0.25, 0.5, 0.75, 1 - 2**-53].index(value)]


def test_inverse_cdf_survives_a_product_that_rounds_up_to_the_total():
    probabilities = np.array([1.0, 0.0]) * np.nextafter(1, 0)
    assert inverse_cdf(probabilities, 1.0) == 0


def test_uniform_depends_on_seed_and_position_alone():
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(seed, position) for seed in (0, 1, MAX_SEED) for position in range(50)}) == 150


def test_uniforms_are_uniform_and_independent_along_positions_and_seeds():
    grid = np.array([[uniform(seed, position) for position in range(100)] for seed in range(100)])
    assert grid.min() >= 0
    assert grid.max() < 1
    assert stats.kstest(grid.ravel(), "uniform").pvalue > 0.01
    for pairs in (np.stack([grid[:, :-1].ravel(), grid[:, 1:].ravel()]), np.stack([grid[:-1].ravel(), grid[1:].ravel()])):
        counts = np.histogram2d(*pairs, bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(counts.ravel()).pvalue > 0.01


def test_greedy_takes_the_lowest_id_among_equals():
    assert Sampler(SamplingParams()).choose(np.array([0.0, 2.0, 1.0, 2.0], dtype=np.float32), 5) == 1


def test_sampling_follows_the_distribution():
    params = SamplingParams(temperature=0.8, top_k=6, seed=11)
    logits, sampler = logits_of(2, vocab=12), Sampler(params)
    expected = distribution(logits, params) * 5000
    counts = np.bincount([sampler.choose(logits, position) for position in range(5000)], minlength=12)
    assert not counts[expected == 0].any()
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 0.01


def test_without_a_seed_every_request_draws_its_own():
    params = SamplingParams(temperature=1.0)
    assert len({Sampler(params).seed for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("bad", "census"),
    [([np.nan], "1 NaN, 0 +inf"), ([np.inf, np.inf], "0 NaN, 2 +inf")],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_an_error_that_says_what_was_found(bad, census, temperature):
    logits = np.zeros(9, dtype=np.float32)
    logits[4 : 4 + len(bad)] = bad
    with pytest.raises(VerificationError, match=rf"position 17, found {census.replace('+', '[+]')}"):
        Sampler(SamplingParams(temperature=temperature)).choose(logits, 17)


def test_logits_that_are_all_minus_infinity_are_an_error():
    with pytest.raises(VerificationError, match="3 -inf among 3"):
        Sampler(SamplingParams()).choose(np.full(3, -np.inf, dtype=np.float32), 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("seed", 1.0),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", None),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("repetition_penalty", True),
        ("logit_bias", 1),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(OutOfRangeError, match=f"{name} must be .*found {value!r}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.5, 6.0])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_its_definition(scale, top_p):
    logits = np.round(scale * logits_of(3, vocab=20_000), 1).astype(np.float32)  # rounded: there are ties
    whole = distribution(logits, SamplingParams(temperature=1.0))
    ranked = np.argsort(-whole, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(whole[ranked])[:-1]])
    expected = np.zeros_like(whole)
    expected[ranked[before < top_p]] = whole[ranked[before < top_p]]
    found = distribution(logits, SamplingParams(temperature=1.0, top_p=top_p))
    # Sums round differently, so the token at the edge may be in one of the two alone.
    assert np.count_nonzero((found > 0) != (expected > 0)) <= 1
    both = (found > 0) & (expected > 0)
    np.testing.assert_allclose(found[both], (expected / expected.sum())[both], rtol=0.01)
    assert abs(found.sum() - 1) < 1e-9


@pytest.mark.parametrize(
    ("bias", "found"),
    [
        ({1: 100.5}, "100.5 for token 1"),
        ({1: "high"}, "'high' for token 1"),
        ({-1: 0.0}, "found -1"),
        ({"1": 0.0}, "found '1'"),
        ({1: float("nan")}, "nan"),
        ({-1: 0.0, 1: 101.0}, "found -1; must be .*101.0 for token 1"),
    ],
)
def test_a_bias_out_of_range_is_named_with_its_token(bias, found):
    with pytest.raises(OutOfRangeError, match=rf"logit_bias must be .*{found}"):
        SamplingParams(logit_bias=bias)


def test_params_with_a_bias_have_a_hash_and_compare_by_it():
    first, second = (SamplingParams(logit_bias={1: bias}) for bias in (0.5, 0.6))
    assert hash(first) == hash(SamplingParams(logit_bias={1: 0.5}))
    assert first != second


def test_all_bad_values_are_named_at_once():
    with pytest.raises(OutOfRangeError, match="Expected values in range, found 5 out of it") as caught:
        SamplingParams(temperature=-1, top_k=-1, top_p=0, min_p=2, seed=-1)
    assert all(name in str(caught.value) for name in ("temperature", "top_k", "top_p", "min_p", "seed"))
