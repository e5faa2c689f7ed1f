"""`/v1/completions`: prompts of every kind, echo, log-probabilities as evaluation tools read them, several prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from domino_deploy.backends import Backend
from domino_deploy.runtime.engine import Engine, EngineSettings
from domino_deploy.runtime.session import GenerationParams, Session
from domino_deploy.server.metrics import Metrics
from tests.support.doubles import toy_logits
from tests.support.fake_engine import ScriptedEngine, client_of

PROMPT = "Count to ten:"
TEXT = " one, two, 東京."


@pytest.fixture
def engine(tiny_bundle: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tiny_bundle, TEXT) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> TestClient:
    return client_of(engine)


def complete(client: TestClient, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 64, **fields}
    answer = client.post("/v1/completions", json={name: value for name, value in body.items() if value is not ...})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


class TestAnswers:
    def test_has_the_shape_of_openai(self, client: TestClient, engine: ScriptedEngine) -> None:
        found = complete(client)
        assert found["id"].startswith("cmpl-")
        assert (found["object"], found["model"]) == ("text_completion", "tiny")
        assert found["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
        counts = len(engine.tokenizer.encode(PROMPT)), len(engine.tokenizer.encode(TEXT)) + 1
        assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == counts

    def test_sixteen_tokens_if_the_client_does_not_say(self, client: TestClient, engine: ScriptedEngine) -> None:
        complete(client, max_tokens=...)
        assert engine.requests[-1].params.max_new_tokens == 16

    def test_token_ids_are_a_prompt_as_they_are(self, client: TestClient, engine: ScriptedEngine) -> None:
        tokens = engine.tokenizer.encode(PROMPT)
        assert complete(client, tokens)["choices"][0]["text"] == TEXT
        assert engine.prompts[-1] == tuple(tokens)

    @pytest.mark.parametrize("as_tokens", [False, True])
    def test_several_prompts_get_a_choice_each_in_their_order(self, client: TestClient, engine: ScriptedEngine, as_tokens: bool) -> None:
        texts = [f"Prompt {number}" for number in range(9)]  # more than the engine has slots
        prompts: list[Any] = [engine.tokenizer.encode(text) for text in texts]
        # Each is answered by its own last tokens, the later ones at greater length.
        engine.answer = lambda prompt: list(prompt[-1:]) * len(prompt) * (1 + prompts.index(list(prompt)))
        found = complete(client, prompts if as_tokens else texts, max_tokens=200)
        assert [choice["index"] for choice in found["choices"]] == list(range(9))
        expected = [engine.tokenizer.decode(prompt[-1:] * len(prompt) * (1 + place)) for place, prompt in enumerate(prompts)]
        assert [choice["text"] for choice in found["choices"]] == expected
        assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert len(engine.witness.ends) == 9

    def test_more_prompts_than_may_wait_take_turns(self, tiny_bundle: Path) -> None:
        with ScriptedEngine(tiny_bundle, TEXT, max_sequences=2, max_queued=0) as engine:
            found = complete(client_of(engine), ["a", "b", "c", "d", "e"])
        assert [choice["text"] for choice in found["choices"]] == [TEXT] * 5

    def test_a_result_equals_the_single_run_of_a_real_pair(self, tiny_bundle: Path) -> None:
        prompts = [PROMPT, "def add(a, b):", "The quick brown fox"]
        params = GenerationParams(max_new_tokens=20)
        with Session.open(tiny_bundle, threads=1) as session:
            expected = ["".join(chunk.text for chunk in session.generate(session.prompt_ids(text, chat=False), params)) for text in prompts]
        with Engine.open(tiny_bundle, threads=1, settings=EngineSettings(max_sequences=2)) as engine:
            found = complete(client_of(engine), prompts, max_tokens=20)
        assert [choice["text"] for choice in found["choices"]] == expected


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class TestEchoAndLogprobs:
    def test_echo_puts_the_prompt_first(self, client: TestClient, engine: ScriptedEngine) -> None:
        assert complete(client, echo=True)["choices"][0]["text"] == PROMPT + TEXT
        assert complete(client, engine.tokenizer.encode(PROMPT), echo=True)["choices"][0]["text"] == PROMPT + TEXT

    def test_the_four_lists_have_one_entry_per_token(self, client: TestClient, engine: ScriptedEngine) -> None:
        choice = complete(client, logprobs=2)["choices"][0]
        lists = choice["logprobs"]
        tokens = [*engine.tokenizer.encode(TEXT), 2]
        assert {name: len(values) for name, values in lists.items()} == dict.fromkeys(
            ("text_offset", "token_logprobs", "tokens", "top_logprobs"), len(tokens)
        )
        assert lists["tokens"][-1] == "<|im_end|>"
        assert lists["text_offset"][-1] == len(TEXT)
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert token.startswith(("bytes:", "<|im_end|>")) or TEXT[offset : offset + len(token)] == token
        for token, logprob, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
            assert top[token] == logprob == max(top.values())
            assert len(top) == 2

    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_the_likelihood_of_a_prompt_as_lm_eval_asks_for_it(self, client: TestClient, engine: ScriptedEngine, max_tokens: int) -> None:
        # Token ids, echo, one top token; of the toy target's own logits, since nothing is scripted inside a prompt.
        prompts = [engine.tokenizer.encode(text) for text in (PROMPT, "naïve café 🙂")]
        found = complete(client, prompts, echo=True, logprobs=1, max_tokens=max_tokens, seed=1234)
        assert found["usage"]["completion_tokens"] == max_tokens * 2
        for prompt, choice in zip(prompts, found["choices"], strict=True):
            lists = choice["logprobs"]
            assert [len(values) for values in lists.values()] == [len(prompt) + max_tokens] * 4
            assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
            assert choice["finish_reason"] == "length"
            for place in range(1, len(prompt)):
                expected = log_softmax(toy_logits(tuple(prompt[:place]), 300))
                assert lists["token_logprobs"][place] == pytest.approx(expected[prompt[place]], abs=1e-5)
                assert max(lists["top_logprobs"][place].values()) == pytest.approx(expected.max(), abs=1e-5)
                is_greedy = max(lists["top_logprobs"][place], key=lists["top_logprobs"][place].get) == lists["tokens"][place]
                assert is_greedy == (int(expected.argmax()) == prompt[place])
        assert found["choices"][0]["text"] == PROMPT + (engine.tokenizer.decode(engine.tokenizer.encode(TEXT)[:1]) if max_tokens else "")

    def test_offsets_go_on_behind_the_prompt(self, client: TestClient) -> None:
        choice = complete(client, echo=True, logprobs=0)["choices"][0]
        lists = choice["logprobs"]
        assert lists["text_offset"] == sorted(lists["text_offset"])
        whole = [place for place, token in enumerate(lists["tokens"]) if not token.startswith(("bytes:", "<|"))]
        for place in whole:
            offset, token = lists["text_offset"][place], lists["tokens"][place]
            assert choice["text"][offset : offset + len(token)] == token

    def test_tokens_behind_a_stop_string_are_in_no_list(self, client: TestClient, engine: ScriptedEngine) -> None:
        found = complete(client, stop="two", logprobs=1)
        choice = found["choices"][0]
        assert choice["text"] == TEXT[: TEXT.index("two")]
        lengths = {len(values) for values in choice["logprobs"].values()}
        assert lengths == {found["usage"]["completion_tokens"]}
        last = engine.tokenizer.encode(TEXT)[: found["usage"]["completion_tokens"]]
        assert "two" in engine.tokenizer.decode(last)
        assert "two" not in engine.tokenizer.decode(last[:-1])

    def test_a_prompt_alone_generates_nothing(self, tiny_bundle: Path) -> None:
        metrics = Metrics("tiny")
        with Engine.open(tiny_bundle, threads=1, max_model_len=64, observer=metrics) as engine:
            metrics.watch(engine, provider="cpu", drafter="bundle")
            found = complete(client_of(engine), [PROMPT, "Other"], echo=True, max_tokens=0)
        assert [choice["text"] for choice in found["choices"]] == [PROMPT, "Other"]
        assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}

        def of(name: str, **labels: str) -> float | None:
            return metrics.registry.get_sample_value(f"vllm:{name}", {"model_name": "tiny", "engine": "0", **labels})

        usage = found["usage"]
        assert usage["completion_tokens"] == of("generation_tokens_total") == of("request_generation_tokens_sum") == 0
        assert usage["prompt_tokens"] == of("prompt_tokens_total") == of("request_prompt_tokens_sum") > 0
        assert (of("request_success_total", finished_reason="length"), of("request_success_total", finished_reason="stop")) == (2, 0)
        assert (of("request_prefill_time_seconds_count"), of("time_to_first_token_seconds_count")) == (2, 0)

    @pytest.mark.parametrize("max_tokens", [0, 3])
    def test_a_backend_without_logprobs_of_a_prompt_says_which_field_to_leave_out(self, tiny_bundle: Path, max_tokens: int) -> None:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "echo": True}
        with Engine.open(tiny_bundle, backend=Backend.EAGER, max_model_len=64) as engine:
            client = client_of(engine)
            error = client.post("/v1/completions", json=body | {"logprobs": 1}).json()["error"]
            assert client.post("/v1/completions", json=body).status_code == 200
        assert error["param"] == "echo"
        assert "expected echo without logprobs" in error["message"]
        assert "prompt_logprobs" not in error["message"]


class TestSpecialTokens:
    @pytest.mark.parametrize(("flag", "expected"), [(None, [0]), (True, [0]), (False, [])])
    def test_the_tokenizers_own_ones_unless_refused(
        self, client: TestClient, engine: ScriptedEngine, flag: bool | None, expected: Sequence[int]
    ) -> None:
        plain = engine.tokenizer.encode

        def with_bos(text: str, *, add_special_tokens: bool = True) -> list[int]:
            return ([0] if add_special_tokens else []) + plain(text, add_special_tokens=False)

        engine.tokenizer.encode = with_bos  # type: ignore[method-assign]
        complete(client, add_special_tokens=flag, max_tokens=1)
        assert engine.prompts[-1] == (*expected, *plain(PROMPT))
