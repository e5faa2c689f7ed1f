"""What sampling a request gets that does not say: the model's own, the operator's, or OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from domino_deploy.bundle import Bundle, open_bundle, write_manifest
from domino_deploy.errors import CheckpointError, RequestError
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.server.sampling_defaults import OPENAI, GenerationConfig, checked_override, described, sampling_defaults
from tests.support.bundles import fill, manifest_of
from tests.support.fake_engine import ScriptedEngine, client_of

AUTO, NONE = GenerationConfig.AUTO, GenerationConfig.NONE
# That of Qwen3-4B.
QWEN3 = {"bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    PLAIN: {"model": "tiny", "prompt": "Hi"},
}


def bundle_with(folder: Path, config: str | None) -> Bundle:
    fill(folder)
    if config is not None:
        (folder / "target" / "generation_config.json").write_text(config)
        write_manifest(folder, manifest_of(folder))
    return open_bundle(folder)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, OPENAI),
        ({}, OPENAI),
        (QWEN3, SamplingParams(temperature=0.6, top_k=20, top_p=0.95)),
        ({"temperature": 0, "min_p": 0.1, "repetition_penalty": 1.05}, SamplingParams(min_p=0.1, repetition_penalty=1.05)),
        ({"temperature": None, "top_k": -1, "top_p": 1}, OPENAI),
        # Of transformers, and not of vLLM: neither greedy decoding nor a limit.
        ({"do_sample": False, "max_new_tokens": 2, "typical_p": 0.5, "presence_penalty": 9}, OPENAI),
    ],
)
def test_a_models_own_sampling_counts(tmp_path: Path, config: dict[str, Any] | None, expected: SamplingParams) -> None:
    bundle = bundle_with(tmp_path, None if config is None else json.dumps(config))
    assert sampling_defaults(bundle, AUTO, {}) == expected
    assert sampling_defaults(bundle, NONE, {}) == OPENAI


def test_the_operators_fields_are_above_the_models(tmp_path: Path) -> None:
    bundle = bundle_with(tmp_path, json.dumps(QWEN3))
    override = {"temperature": 0.2, "top_k": None, "min_p": 0.1}
    assert sampling_defaults(bundle, AUTO, override) == SamplingParams(temperature=0.2, top_k=20, top_p=0.95, min_p=0.1)
    assert sampling_defaults(bundle, NONE, override) == SamplingParams(temperature=0.2, min_p=0.1)


def test_a_file_that_is_not_the_bundles_is_not_read(tmp_path: Path) -> None:
    bundle = bundle_with(tmp_path, None)
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(QWEN3))
    assert sampling_defaults(bundle, AUTO, {}) == OPENAI


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            '{"temperature": -1, "top_p": "0.9"}',
            ("temperature must be", "found -1", "top_p must be", "found '0.9'", "--generation-config none"),
        ),
        (f'{{"temperature": 1{"0" * 400}, "top_k": 1{"0" * 400}}}', ("temperature must be", "top_k must be")),
        ('{"top_k": 2.5, "repetition_penalty": true}', ("top_k must be", "repetition_penalty must be")),
        ('{"temperature": NaN}', ("valid JSON object",)),
        ("[]", ("JSON object", "list")),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_but_where_it_does_not_count(tmp_path: Path, config: str, told: tuple[str, ...]) -> None:
    bundle = bundle_with(tmp_path, config)
    with pytest.raises(CheckpointError) as caught:
        sampling_defaults(bundle, AUTO, {})
    assert all(words in str(caught.value) for words in ("generation_config.json", *told))
    assert sampling_defaults(bundle, NONE, {}) == OPENAI


def test_all_that_is_wrong_with_the_operators_fields_is_told() -> None:
    with pytest.raises(RequestError) as caught:
        checked_override({"temperature": float("nan"), "top_p": 0, "max_new_tokens": 5, "seed": 1})
    told = ("--override-generation-config", "temperature must be", "top_p must be", "max_new_tokens: not one of", "seed: not one of")
    assert all(words in str(caught.value) for words in told)


def test_a_flood_of_unknown_fields_is_told_in_a_few_lines() -> None:
    with pytest.raises(RequestError) as caught:
        checked_override({f"field{number}": 1 for number in range(1000)} | {"temperature": 10**400})
    assert len(str(caught.value).splitlines()) < 20
    assert len(str(caught.value)) < 3000


def test_people_are_told_what_is_not_as_openai_has_it() -> None:
    assert described(OPENAI) == "temperature 1"
    assert described(SamplingParams(temperature=0.6, top_k=20, top_p=0.95)) == "temperature 0.6, top_k 20, top_p 0.95"


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tiny_bundle, "ok") as engine:
        yield engine


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_request_gets_the_defaults_but_for_what_it_says(engine: ScriptedEngine, path: str) -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.2)
    client: TestClient = client_of(engine, sampling=defaults)

    def sampling(**fields: Any) -> SamplingParams:
        answer = client.post(path, json={**BODIES[path], "max_tokens": 4, **fields})
        assert answer.status_code == 200, answer.text
        return engine.requests[-1].params.sampling

    assert sampling() == defaults
    assert sampling(temperature=None, top_p=None) == defaults
    assert sampling(top_k=5, seed=3) == SamplingParams(temperature=0.6, top_k=5, top_p=0.95, min_p=0.1, repetition_penalty=1.2, seed=3)
    assert sampling(temperature=0, top_k=-1, top_p=1, min_p=0, repetition_penalty=1) == SamplingParams()
