"""`/v1/chat/completions` without streams: prompts, fields, results, usage, log-probabilities, statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from domino_deploy.runtime.engine import Engine, EngineSettings
from domino_deploy.runtime.session import GenerationParams, Session
from domino_deploy.server.settings import StatisticsLevel
from tests.support.fake_engine import ScriptedEngine, client_of

TEXT = "A drafter proposes: naïve café, 東京 🙂."
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def engine(tiny_bundle: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tiny_bundle, TEXT) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> TestClient:
    return client_of(engine)


def chat(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": USER, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prompt_text(engine: ScriptedEngine) -> str:
    """The last prompt, special tokens spelt out."""
    return engine.tokenizer.decode(engine.prompts[-1], skip_special_tokens=False)


class TestAnswers:
    def test_has_the_shape_of_openai(self, client: TestClient, engine: ScriptedEngine) -> None:
        found = client.post("/v1/chat/completions", json={"model": "tiny", "messages": USER}, headers={"x-request-id": "abc-1"}).json()
        count = len(engine.tokenizer.encode(TEXT)) + 1
        prompt = len(engine.prompts[-1])
        assert found["id"] == "chatcmpl-abc-1"
        assert (found["object"], found["model"], found["system_fingerprint"]) == ("chat.completion", "tiny", None)
        assert isinstance(found["created"], int)
        assert found["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        assert found["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert "metrics" not in found
        assert "speculation" not in found

    def test_cached_tokens_are_reported(self, client: TestClient) -> None:
        first, second = chat(client), chat(client)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_the_token_limit_ends_it(self, client: TestClient, engine: ScriptedEngine, name: str) -> None:
        found = chat(client, **{name: 4})
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["choices"][0]["message"]["content"] == engine.tokenizer.decode(engine.tokenizer.encode(TEXT)[:4])
        assert found["usage"]["completion_tokens"] == 4

    @pytest.mark.parametrize("stop", ["proposes", ["café", "proposes"]])
    def test_stop_strings_end_it_and_are_left_out(self, client: TestClient, stop: Any) -> None:
        choice = chat(client, stop=stop)["choices"][0]
        assert choice["message"]["content"] == "A drafter "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "proposes")

    def test_stop_tokens_end_it(self, client: TestClient, engine: ScriptedEngine) -> None:
        tokens = engine.tokenizer.encode(TEXT)
        choice = chat(client, stop_token_ids=[tokens[3]])["choices"][0]
        assert choice["message"]["content"] == engine.tokenizer.decode(tokens[:3])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[3])

    def test_the_end_of_sequence_can_be_ignored(self, client: TestClient) -> None:
        found = chat(client, ignore_eos=True, max_tokens=200)
        assert found["usage"]["completion_tokens"] == 200
        assert found["choices"][0]["finish_reason"] == "length"

    def test_every_field_reaches_the_engine(self, client: TestClient, engine: ScriptedEngine) -> None:
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11}
        penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
        chat(client, **sampling, **penalties, logit_bias={"5": 3}, min_tokens=2, max_tokens=9, speculative=False, stop=["x"])
        params = engine.requests[-1].params
        assert {name: getattr(params.sampling, name) for name in (*sampling, *penalties)} == {**sampling, **penalties}
        assert dict(params.sampling.logit_bias) == {5: 3.0}
        assert (params.min_new_tokens, params.max_new_tokens, params.num_speculative_tokens) == (2, 9, 0)
        assert params.stop_strings == ("x",)

    def test_what_is_left_out_or_null_has_openais_defaults(self, client: TestClient, engine: ScriptedEngine) -> None:
        answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": USER, "top_p": None, "seed": None, "stop": None})
        assert answer.status_code == 200
        params = engine.requests[-1].params
        assert (params.sampling.temperature, params.sampling.top_p, params.sampling.seed) == (1.0, 1.0, None)
        assert (params.max_new_tokens, params.num_speculative_tokens) == (engine.max_model_len, None)

    def test_negative_seeds_are_seeds(self, client: TestClient, engine: ScriptedEngine) -> None:
        chat(client, seed=-1)
        assert engine.requests[-1].params.sampling.seed == 2**64 - 1

    def test_unknown_fields_and_neutral_values_are_no_matter(self, client: TestClient) -> None:
        neutral = {"n": 1, "best_of": 1, "service_tier": "auto", "store": False, "modalities": ["text"], "logit_bias": {}, "tools": None}
        chat(client, **neutral, user="me", metadata={"a": "b"}, chat_id="17", parallel_tool_calls=True, length_penalty=1.0)

    def test_a_result_equals_the_single_run_of_a_real_pair(self, tiny_bundle: Path) -> None:
        with Session.open(tiny_bundle, threads=1) as session:
            prompt = session.prompt_ids("Hello")
            params = GenerationParams(max_new_tokens=24)
            chunks = list(session.generate(prompt, params))
            expected = "".join(chunk.text for chunk in chunks)
        settings = EngineSettings(max_sequences=2)
        with Engine.open(tiny_bundle, threads=1, settings=settings) as engine:
            found = [chat(client_of(engine), max_tokens=24, speculative=flag) for flag in (True, False)]
        assert [one["choices"][0]["message"]["content"] for one in found] == [expected] * 2
        assert [one["usage"]["completion_tokens"] for one in found] == [sum(len(chunk.step.token_ids) for chunk in chunks)] * 2
        assert found[0]["choices"][0]["finish_reason"] == chunks[-1].finish_reason


class TestMessages:
    def test_the_bundles_template_makes_the_prompt(self, client: TestClient, engine: ScriptedEngine) -> None:
        parts = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
        messages = [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": parts, "name": None},
            {"role": "assistant", "content": "ok", "refusal": None, "audio": None, "function_call": None, "annotations": []},
            {"role": "user", "content": "three"},
        ]
        chat(client, messages=messages)
        assert prompt_text(engine) == (
            "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
            "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_without_the_generation_prompt(self, client: TestClient, engine: ScriptedEngine) -> None:
        chat(client, add_generation_prompt=False)
        assert prompt_text(engine) == "<|im_start|>user\nHello<|im_end|>\n"

    def test_template_variables_win_over_the_servers_own(self, engine: ScriptedEngine) -> None:
        template = "{{ messages[0].content }} {{ enable_thinking }} {{ tone }}"
        engine.tokenizer._template_source = template
        client = client_of(engine, chat_template_kwargs={"enable_thinking": True, "tone": "kind"})
        chat(client, chat_template_kwargs={"enable_thinking": False})
        assert prompt_text(engine) == "Hello False kind"

    def test_a_bundle_without_template_is_a_400(self, client: TestClient, engine: ScriptedEngine) -> None:
        engine.tokenizer._template_source = None
        answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": USER})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


class TestLogprobs:
    def test_every_token_has_one(self, client: TestClient, engine: ScriptedEngine) -> None:
        choice = chat(client, logprobs=True, top_logprobs=3)["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == len(engine.tokenizer.encode(TEXT)) + 1
        assert content[-1]["token"] == "<|im_end|>"
        assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == TEXT
        for entry in content:
            assert len(entry["top_logprobs"]) == 3
            assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
            assert math.exp(entry["logprob"]) > 0.99
            tops = [top["logprob"] for top in entry["top_logprobs"]]
            assert tops == sorted(tops, reverse=True)

    def test_parts_of_characters_are_named_by_their_bytes(self, client: TestClient) -> None:
        content = chat(client, logprobs=True)["choices"][0]["logprobs"]["content"]
        parts = [entry for entry in content if entry["token"].startswith("bytes:")]
        assert parts, "the text has characters of several tokens"
        assert all(entry["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"]) for entry in parts)
        assert all(entry["top_logprobs"] == [] for entry in content)


class TestStatistics:
    def test_have_vllms_shape(self, engine: ScriptedEngine) -> None:
        found = chat(client_of(engine, statistics_level=StatisticsLevel.DETAILED))["metrics"]["speculative_decoding"]
        accepted, drafted = found.pop("per_step_accepted"), found.pop("per_step_drafted")
        most = engine.max_speculative_tokens
        assert list(zip(drafted, accepted, strict=True)) == list(engine.witness.ends[-1][2].steps)
        assert sum(accepted) > 0
        by_length = {
            str(length): [sum(pair == (length, count) for pair in zip(drafted, accepted, strict=True)) for count in range(length + 1)]
            for length in sorted(set(drafted))
        }
        assert found == {
            "mean_acceptance_length": pytest.approx(1 + sum(accepted) / len(accepted)),
            "draft_acceptance_rate": pytest.approx(sum(accepted) / sum(drafted)),
            "acceptance_histogram": [accepted.count(number) for number in range(most + 1)],
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": sum(drafted),
            "num_spec_tokens": most,
        }

    def test_the_summary_leaves_the_steps_out(self, engine: ScriptedEngine) -> None:
        found = chat(client_of(engine, statistics_level=StatisticsLevel.SUMMARY), speculative=False)["metrics"]["speculative_decoding"]
        assert (found["num_spec_steps"], found["mean_acceptance_length"], found["draft_acceptance_rate"]) == (0, 1.0, 0.0)
        assert found["acceptance_histogram"] == [0] * (engine.max_speculative_tokens + 1)
        assert "per_step_accepted" not in found

    def test_details_name_every_token(self, client: TestClient, engine: ScriptedEngine) -> None:
        (found,) = chat(client, speculation_details=True)["speculation"]
        assert [token["id"] for token in found["tokens"][:-1]] == engine.tokenizer.encode(TEXT)
        assert "".join(token["text"] for token in found["tokens"]) == TEXT
        assert sum(token["drafted"] for token in found["tokens"]) == found["accepted"]
        assert found["proposed"] >= found["accepted"] > 0
        assert found["terms_ms"].keys() == {"draft", "head", "verify", "other"}


class TestResponseFormat:
    def test_any_json_object(self, client: TestClient, engine: ScriptedEngine) -> None:
        engine.answer = "Sure: "
        content = chat(client, response_format={"type": "json_object"}, max_tokens=100)["choices"][0]["message"]["content"]
        assert content.lstrip().startswith("{")

    def test_a_schema(self, client: TestClient) -> None:
        schema = {"type": "object", "properties": {"ok": {"enum": ["yes"]}}, "required": ["ok"], "additionalProperties": False}
        response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        choice = chat(client, response_format=response_format, max_tokens=100)["choices"][0]
        assert json.loads(choice["message"]["content"]) == {"ok": "yes"}
        assert choice["finish_reason"] == "stop"

    def test_a_schema_that_is_none_is_a_400(self, client: TestClient) -> None:
        response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "no such type"}}}
        answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": USER, "response_format": response_format})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert answer.json()["error"]["param"] == "response_format"
