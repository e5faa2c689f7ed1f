"""The engine over a real bundle with ONNX Runtime: 32 clients at a time say what each of them says alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from domino_deploy.runtime.constraints import Constraint
from domino_deploy.runtime.engine import Engine, EngineSettings
from domino_deploy.runtime.requests import GenerationParams, Output, Request
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.runtime.session import Backend, DrafterChoice, Session
from tests.support.scheduled_runs import Answer, Client, logprob_values

CLIENTS = 32
# Of log-probabilities around -6; products over more rows round otherwise, in the seventh digit.
ATOL = 1e-4


def mix(vocab_size: int, seed: int) -> list[tuple[list[int], GenerationParams]]:
    """Prompts of 1 to some 60 tokens, half of them with a beginning in common, and every kind of wish."""
    rng = random.Random(seed)
    stem = [rng.randrange(vocab_size) for _ in range(40)]
    clients = []
    for _ in range(CLIENTS):
        prompt = stem[: rng.choice([0, 0, 20, 40])] + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 20))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.9]),
            seed=rng.randrange(2**32),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logit_bias=rng.choice([{}, {}, {5: 1.0}]),
        )
        constraint = rng.choice([None, None, None, Constraint(kind="regex", source="([0-9]{1,3},)*[0-9]")])
        params = GenerationParams(
            sampling=sampling,
            max_new_tokens=rng.randint(1, 30),
            num_speculative_tokens=rng.choice([None, None, 0, 2]),
            ignore_eos=constraint is None and rng.random() < 0.5,
            constraint=constraint,
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        clients.append((prompt, params))
    return clients


def run_together(engine: Engine, clients: Sequence[tuple[list[int], GenerationParams]]) -> list[Answer]:
    waiting = [Client() for _ in clients]
    for number, ((prompt, params), client) in enumerate(zip(clients, waiting, strict=True)):
        engine.submit(Request(request_id=str(number), prompt_ids=prompt, params=params, deliver=client.deliver))
    return [client.wait() for client in waiting]


@pytest.mark.parametrize("drafter", list(DrafterChoice))
def test_32_mixed_clients_get_their_single_runs(tiny_bundle: Path, drafter: DrafterChoice):
    options = {"drafter": drafter, "max_model_len": 128, "threads": 1}
    with Session.open(tiny_bundle, **options) as session:  # type: ignore[arg-type]
        clients = mix(session.target.vocab_size, seed=6)
        # Upper limits to the engine, exact numbers to a session; what is said does not depend on them.
        alone = [list(session.generate(prompt, _limited(params, session))) for prompt, params in clients]
    settings = EngineSettings(max_sequences=5, prefill_rows=16, adaptive=False)
    with Engine.open(tiny_bundle, settings=settings, **options) as engine:  # type: ignore[arg-type]
        answers = run_together(engine, clients)
        again = run_together(engine, clients)  # in slots that hold rows of others
    for (prompt, params), chunks, *answered in zip(clients, alone, answers, again, strict=True):
        tokens = [token for chunk in chunks for token in chunk.tokens]
        for answer in answered:
            assert answer.ids == [token.token_id for token in tokens]
            assert answer.text == "".join(token.text for token in tokens)
            assert answer.finish_reason == chunks[-1].finish_reason
            assert answer.statistics.prompt_tokens == len(prompt)
            if params.constraint is not None:
                assert set(answer.text) <= set("0123456789,")
            if params.logprobs is not None:
                found, expected = (logprob_values((token.logprobs for token in its), params.logprobs) for its in (answer.tokens, tokens))
                assert len(found) == len(tokens)
                np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)
            if params.prompt_logprobs is not None:
                assert answer.prompt_logprobs is not None
                assert chunks[0].prompt_logprobs is not None
                found, expected = (
                    logprob_values(its, params.prompt_logprobs) for its in (answer.prompt_logprobs, chunks[0].prompt_logprobs)
                )
                assert len(found) == len(prompt) - 1
                np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)
    assert any(answer.statistics.steps for answer in answers) == (drafter is not DrafterChoice.NONE)
    assert sum(answer.statistics.cached_tokens for answer in again) > 0


def test_a_backend_of_one_sequence_serves_one_after_the_other(tiny_bundle: Path):
    pytest.importorskip("torch")
    with Session.open(tiny_bundle, max_model_len=128, threads=1) as session:
        clients = [
            (prompt, GenerationParams(max_new_tokens=6, num_speculative_tokens=params.num_speculative_tokens))
            for prompt, params in mix(session.target.vocab_size, seed=7)[:6]
        ]
        alone = [
            [token for step in session.steps(prompt, _limited(params, session)) for token in step.token_ids] for prompt, params in clients
        ]
    with Engine.open(tiny_bundle, backend=Backend.EAGER, max_model_len=128) as engine:
        assert engine.snapshot().total_rows == 128
        assert [answer.ids for answer in run_together(engine, clients)] == alone


def test_a_request_leaves_in_the_midst_of_its_answer(tiny_bundle: Path):
    client = Client()

    def deliver(output: Output) -> None:
        client.deliver(output)
        engine.cancel("0")

    with Engine.open(tiny_bundle, max_model_len=128, threads=1, settings=EngineSettings(max_sequences=2)) as engine:
        params = GenerationParams(max_new_tokens=100, ignore_eos=True, num_speculative_tokens=0)
        engine.submit(Request(request_id="0", prompt_ids=[1, 2, 3], params=params, deliver=deliver))
        answer = client.wait()
    assert answer.finish_reason == "abort"
    # It leaves before the next step; that of its prompt has a cycle, too.
    assert len(answer.tokens) == 2


def _limited(params: GenerationParams, session: Session) -> GenerationParams:
    asked = params.num_speculative_tokens
    return params if asked is None else replace(params, num_speculative_tokens=min(asked, session.default_num_speculative_tokens))
