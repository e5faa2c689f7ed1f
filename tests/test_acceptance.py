"""The acceptance rule emits the target's distribution: chi-square tests, and proof that they catch wrong rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from scipy import stats

from domino_deploy.runtime.acceptance import accept
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.sampling import SamplingParams, distribution, inverse_cdf
from tests.support.doubles import MatchedDrafter, RandomDrafter, ToyDrafter, ToyTarget, toy_logits

VOCAB = 8
PROMPT = (3, 1)
SETTINGS = {
    "hot": SamplingParams(temperature=1.3),
    "cool": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.0, top_k=4),
    "top-p and min-p": SamplingParams(temperature=1.0, top_p=0.85, min_p=0.05),
}
# Wrong rules give p-values far below this (the tests at the end); a right one fails with this probability, seeds fixed.
SIGNIFICANCE = 1e-3

Probabilities = list[np.ndarray]
Rule = Callable[[Probabilities, list[int], np.random.Generator], list[int]]


@pytest.mark.parametrize(
    ("drafts", "target", "expected"),
    [
        ([], [4], [4]),
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3], [1, 2, 9], [1, 2, 9]),
        ([1, 2, 3], [7], [7]),
    ],
)
def test_accepted_drafts_and_one_token_of_the_target(drafts, target, expected):
    assert accept(target.__getitem__, drafts) == expected


def test_no_row_behind_the_first_disagreement_is_looked_at():
    rows = []
    accept(lambda row: rows.append(row) or 0, [0, 5, 0, 0])
    assert rows == [0, 1]


@cache
def toy_distribution(prefix: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    return distribution(toy_logits(prefix, VOCAB), params)


def law(params: SamplingParams, tokens: int) -> dict[tuple[int, ...], float]:
    """Exact joint distribution of the first tokens behind the prompt, under plain decoding."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        joint = {
            (*run, token): mass * probability
            for run, mass in joint.items()
            for token, probability in enumerate(toy_distribution((*PROMPT, *run), params))
        }
    return joint


def p_value(samples: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square p-value; outcomes expected fewer than 5 times are counted as one, impossible ones must not occur."""
    counts = Counter(samples)
    if any(expected[outcome] == 0 for outcome in counts):
        return 0.0
    common = [outcome for outcome, mass in expected.items() if mass * len(samples) >= 5]
    observed = [counts[outcome] for outcome in common]
    wanted = [expected[outcome] * len(samples) for outcome in common]
    rest = len(samples) - sum(wanted)
    if rest > 5:
        observed.append(len(samples) - sum(observed))
        wanted.append(rest)
    return float(stats.chisquare(observed, np.array(wanted) * (sum(observed) / sum(wanted))).pvalue)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drafter", [None, RandomDrafter(VOCAB), MatchedDrafter(VOCAB)], ids=["plain", "random", "matched"])
def test_the_decode_loop_samples_the_target_distribution(settings, drafter):
    params, target = SETTINGS[settings], ToyTarget(VOCAB)
    samples = []
    for seed in range(2500):
        sampling = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=seed)
        # Two tokens more than are compared, so that the drafts are not cut to the length wanted.
        request = GenerationParams(sampling=sampling, max_new_tokens=5)
        steps = generate(target, drafter, PROMPT, request, num_speculative_tokens=0 if drafter is None else 3)
        samples.append(tuple(token for step in steps for token in step.token_ids)[:3])
    assert p_value(samples, law(params, 3)) > SIGNIFICANCE
    assert p_value([run[:2] for run in samples], law(params, 2)) > SIGNIFICANCE


def run_of(rule: Rule, drafter: ToyDrafter, params: SamplingParams, rng: np.random.Generator) -> tuple[int, ...]:
    """Three tokens, verified block by block with `rule`."""
    tokens = PROMPT
    while len(tokens) < len(PROMPT) + 3:
        drafts: list[int] = []
        for _ in range(3):
            drafts.append(drafter.draft((*tokens, *drafts)) or 0)
        rows = [toy_distribution((*tokens, *drafts[:row]), params) for row in range(4)]
        tokens = (*tokens, *rule(rows, drafts, rng))
    return tokens[len(PROMPT) : len(PROMPT) + 3]


def product_rule(rows: Probabilities, drafts: list[int], rng: np.random.Generator) -> list[int]:
    return accept(lambda row: inverse_cdf(rows[row], rng.random()), drafts)


def draw(probabilities: np.ndarray, rng: np.random.Generator) -> int:
    return inverse_cdf(probabilities, rng.random())


def without(probabilities: np.ndarray, token: int) -> np.ndarray:
    rest = probabilities.copy()
    rest[token] = 0
    return rest


def point_mass_rule(rows: Probabilities, drafts: list[int], rng: np.random.Generator) -> list[int]:
    """Speculative sampling as published (arXiv 2211.17192, algorithm 1) for a draft distribution that is one token."""
    for row, draft in enumerate(drafts):
        if rng.random() >= rows[row][draft]:
            return [*drafts[:row], draw(without(rows[row], draft), rng)]
    return [*drafts, draw(rows[-1], rng)]


def always_accept(rows: Probabilities, drafts: list[int], rng: np.random.Generator) -> list[int]:
    return [*drafts, draw(rows[-1], rng)]


def argmax_when_rejected(rows: Probabilities, drafts: list[int], rng: np.random.Generator) -> list[int]:
    for row, draft in enumerate(drafts):
        if rng.random() >= rows[row][draft]:
            return [*drafts[:row], int(without(rows[row], draft).argmax())]
    return [*drafts, draw(rows[-1], rng)]


def draft_not_excluded(rows: Probabilities, drafts: list[int], rng: np.random.Generator) -> list[int]:
    for row, draft in enumerate(drafts):
        if rng.random() >= rows[row][draft]:
            return [*drafts[:row], draw(rows[row], rng)]
    return [*drafts, draw(rows[-1], rng)]


def same_uniform_for_the_residual(rows: Probabilities, drafts: list[int], rng: np.random.Generator) -> list[int]:
    for row, draft in enumerate(drafts):
        uniform = rng.random()
        if uniform >= rows[row][draft]:
            return [*drafts[:row], inverse_cdf(without(rows[row], draft), uniform)]
    return [*drafts, draw(rows[-1], rng)]


def same_uniform_for_every_row(rows: Probabilities, drafts: list[int], rng: np.random.Generator) -> list[int]:
    uniform = rng.random()
    return accept(lambda row: inverse_cdf(rows[row], uniform), drafts)


def row_too_far(rows: Probabilities, drafts: list[int], rng: np.random.Generator) -> list[int]:
    return accept(lambda row: draw(rows[min(row + 1, len(drafts))], rng), drafts)


def accept_if_likely_beside_the_best(rows: Probabilities, drafts: list[int], rng: np.random.Generator) -> list[int]:
    for row, draft in enumerate(drafts):
        if rng.random() >= rows[row][draft] / rows[row].max():
            return [*drafts[:row], draw(without(rows[row], draft), rng)]
    return [*drafts, draw(rows[-1], rng)]


DRAFTERS = {"random": RandomDrafter(VOCAB), "matched": MatchedDrafter(VOCAB)}


def p_value_of(rule: Rule, drafter: str, settings: str) -> float:
    rng, params = np.random.default_rng(0), SETTINGS[settings]
    return p_value([run_of(rule, DRAFTERS[drafter], params, rng) for _ in range(4000)], law(params, 3))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", [product_rule, point_mass_rule])
def test_drawing_the_targets_own_token_is_in_law_the_published_rule(rule, drafter, settings):
    assert p_value_of(rule, drafter, settings) > SIGNIFICANCE


WRONG = [
    always_accept,
    argmax_when_rejected,
    draft_not_excluded,
    same_uniform_for_the_residual,
    same_uniform_for_every_row,
    row_too_far,
    accept_if_likely_beside_the_best,
]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", WRONG)
def test_the_same_check_catches_a_wrong_rule(rule, drafter):
    assert p_value_of(rule, drafter, "hot") < SIGNIFICANCE


def test_the_loop_check_catches_uniforms_that_forget_the_position(monkeypatch):
    monkeypatch.setattr("domino_deploy.runtime.sampling.uniform", lambda seed, position: np.random.default_rng(seed).random())
    with pytest.raises(AssertionError):
        test_the_decode_loop_samples_the_target_distribution("hot", MatchedDrafter(VOCAB))
