"""What a request asks for, under speculation: everything equals plain decoding, wherever in an accepted run it falls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domino_deploy.bundle import TOKENIZER
from domino_deploy.runtime.backends.eager import EagerDrafter, EagerTarget
from domino_deploy.runtime.constraints import Constraint
from domino_deploy.runtime.logprobs import token_logprobs
from domino_deploy.runtime.protocols import Drafter
from domino_deploy.runtime.requests import GenerationParams, OutputToken
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.runtime.session import Chunk, Session
from domino_deploy.runtime.text import REPLACEMENT, Tokenizer
from tests.support.checkpoints import EOS_ID, write_tokenizer
from tests.support.doubles import RandomDrafter, ReplayTarget, ScriptedDrafter, ToyTarget, toy_logits
from tests.support.scheduled_runs import logprob_values
from tests.support.tiny_models import tiny_drafter, tiny_target

# The text of each token of a small vocabulary; two are halves of a character, the last is the end of the sequence.
PIECES = [b"a", b"b", b"ab", b" ", "é".encode()[:1], "é".encode()[1:], b"c", b"</s>"]
VOCAB, EOS = len(PIECES), len(PIECES) - 1
WIDTH = 5
PROMPT = [3, 1, 4]


class PieceTokenizer:
    """Tokens of `PIECES`; the end of the sequence has no text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(PIECES[token] for token in token_ids if token != EOS).decode("utf-8", errors="replace")


def session_of(drafter: Drafter | None, *, capacity: int = 64) -> Session:
    bundle: Any = SimpleNamespace(target=SimpleNamespace(eos_token_ids=(EOS,)), manifest=SimpleNamespace(num_speculative_tokens=WIDTH))
    tokenizer: Any = PieceTokenizer()
    return Session(bundle, tokenizer, ToyTarget(VOCAB, capacity), drafter)


def tokens_of(chunks: Sequence[Chunk]) -> list[OutputToken]:
    return [token for chunk in chunks for token in chunk.tokens]


def told(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """All that a client can see of an answer, but how it was cut into chunks."""
    tokens = tokens_of(chunks)
    return {
        "ids": [token.token_id for token in tokens],
        "texts": [token.text for token in tokens],
        "logprobs": [token.logprobs for token in tokens],
        "prompt_logprobs": chunks[0].prompt_logprobs,
        "finish_reason": chunks[-1].finish_reason,
    }


def checked(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Chunks that fit their steps: counters of the tokens kept, drafted tokens those accepted."""
    tokens = tokens_of(chunks)
    assert [token.token_id for token in tokens] == [token for chunk in chunks for token in chunk.step.token_ids]
    assert sum(token.drafted for token in tokens) == sum(chunk.step.accepted for chunk in chunks)
    for chunk in chunks:
        assert 0 <= chunk.step.accepted <= min(chunk.step.proposed, len(chunk.step.token_ids))
        assert len(chunk.step.token_ids) - chunk.step.accepted in ((0, 1) if chunk is chunks[-1] else (1,))
    return chunks


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    seed=st.just(3),
    presence_penalty=st.sampled_from([0.0, 1.0, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 1.5]), max_size=2),
)
requests = st.builds(
    lambda min_new_tokens, **fields: GenerationParams(min_new_tokens=min(min_new_tokens, fields["max_new_tokens"]), **fields),
    sampling=samplings,
    max_new_tokens=st.integers(1, 24),
    min_new_tokens=st.sampled_from([0, 0, 3, 9]),
    stop_strings=st.lists(st.sampled_from(["ab", "c", "é", " a", "aab", REPLACEMENT]), max_size=2).map(tuple),
    stop_token_ids=st.sets(st.integers(0, VOCAB - 1), max_size=1).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, 2]),
)


@given(
    params=requests,
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    room=st.integers(1, 30),
    width=st.integers(1, 6),
    script=st.lists(st.integers(0, VOCAB - 1) | st.just(-1) | st.just(-1) | st.just(-2), min_size=1, max_size=10),
)
@settings(max_examples=300, deadline=None)
def test_speculation_changes_nothing_that_a_client_can_see(params, prompt, room, width, script):
    capacity = len(prompt) + room
    plain = told(checked(list(session_of(None, capacity=capacity).generate(prompt, params))))
    drafters = [RandomDrafter(VOCAB), ScriptedDrafter(script, [*prompt, *plain["ids"]], VOCAB)]
    for drafter in drafters:
        session = session_of(drafter, capacity=capacity)
        speculative = GenerationParams(**{**params.__dict__, "num_speculative_tokens": width})
        assert told(checked(list(session.generate(prompt, speculative)))) == plain


def plain_and_speculative(**fields: Any) -> tuple[dict[str, Any], list[Chunk]]:
    """An answer of plain decoding, and the chunks of one whose every draft is what plain decoding gave there."""
    params = GenerationParams(**{"max_new_tokens": 30, "ignore_eos": True, **fields})
    plain = told(list(session_of(None).generate(PROMPT, params)))
    drafter = ScriptedDrafter([-1], [*PROMPT, *plain["ids"]], VOCAB)
    return plain, list(checked(list(session_of(drafter).generate(PROMPT, params))))


# The first token is the prefill's own: place 1 is the first of an accepted run, place WIDTH the last, the one behind it the target's.
@pytest.mark.parametrize("place", range(WIDTH + 3))
class TestAtEveryPlaceOfARun:
    def ids(self) -> list[int]:
        return plain_and_speculative()[0]["ids"]

    def test_a_token_limit(self, place):
        plain, chunks = plain_and_speculative(max_new_tokens=place + 1)
        assert told(chunks) == plain
        assert plain["ids"] == self.ids()[: place + 1]
        assert plain["finish_reason"] == "length"

    def test_a_stop_token(self, place):
        ids = self.ids()
        plain, chunks = plain_and_speculative(stop_token_ids=(ids[place],))
        assert told(chunks) == plain
        assert plain["ids"] == ids[: ids.index(ids[place]) + 1]

    def test_the_end_of_min_new_tokens(self, place):
        """A token that the target would choose everywhere, and that ends the answer as soon as it may."""
        fields = {"sampling": SamplingParams(logit_bias={6: 50.0}), "stop_token_ids": (6,), "min_new_tokens": place}
        plain, chunks = plain_and_speculative(**fields)
        assert told(chunks) == plain
        assert len(plain["ids"]) == place + 1
        assert plain["ids"].index(6) == place

    def test_a_stop_string_that_the_token_there_completes(self, place):
        answer = [2, 6, 1, 3, 0, 6, 2, 3]  # "abcb acab ": no three letters come twice
        text = PieceTokenizer().decode(answer[: place + 1])
        params = GenerationParams(stop_strings=(text[-3:],), logprobs=0)
        sequence = [*PROMPT, *answer, *[EOS] * 60]
        told_of = {}
        for drafter in (None, ScriptedDrafter([-1], sequence, VOCAB)):
            session = session_of(drafter)
            session.target = ReplayTarget(sequence, VOCAB)
            told_of[drafter is None] = told(checked(list(session.generate(PROMPT, params))))
        assert told_of[False] == told_of[True]
        assert told_of[True]["ids"] == answer[: place + 1]
        assert len(told_of[True]["logprobs"]) == place + 1
        assert "".join(told_of[True]["texts"]) == text[:-3]
        assert told_of[True]["finish_reason"] == "stop"

    def test_a_penalty_that_the_token_there_sets_off(self, place):
        """The reference is one pass per token over logits that are a function of the prefix, penalised from the definition."""
        sampling = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
        plain, chunks = plain_and_speculative(sampling=sampling, max_new_tokens=place + 2)
        tokens: list[int] = []
        for _ in range(place + 2):
            logits = toy_logits((*PROMPT, *tokens), VOCAB).astype(np.float64)
            for token in set(tokens):
                logits[token] -= 2.0 + 2.0 * tokens.count(token)
            tokens.append(int(logits.argmax()))
        assert told(chunks) == plain
        assert plain["ids"] == tokens

    def test_logprobs(self, place):
        plain, chunks = plain_and_speculative(logprobs=3, max_new_tokens=place + 1)
        assert told(chunks) == plain
        prefix = (*PROMPT, *plain["ids"][:place])
        assert plain["logprobs"][place] == token_logprobs(toy_logits(prefix, VOCAB), plain["ids"][place], 3)


def test_runs_are_as_long_as_these_tests_take_them_to_be():
    _, chunks = plain_and_speculative(max_new_tokens=2 * WIDTH + 3)
    assert [chunk.step.accepted for chunk in chunks] == [0, WIDTH, WIDTH]


def test_logprobs_of_a_prompt_are_those_of_its_rows():
    plain, _ = plain_and_speculative(prompt_logprobs=2)
    expected = [token_logprobs(toy_logits(tuple(PROMPT[:at]), VOCAB), PROMPT[at], 2) for at in range(1, len(PROMPT))]
    assert plain["prompt_logprobs"] == (None, *expected)


TEXT_VOCAB = 300
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "integer", "maximum": 99}}, "required": ["a"]}
TINY_REQUESTS: dict[str, dict[str, Any]] = {
    "penalties": {"sampling": SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3)},
    "bias, sampled": {"sampling": SamplingParams(temperature=1.0, seed=4, logit_bias={7: 4.0, 9: -100.0})},
    "minimum": {"min_new_tokens": 9, "stop_token_ids": tuple(range(0, 300, 2))},
    "schema": {"constraint": Constraint(kind="json_schema", source=json.dumps({**SCHEMA, "additionalProperties": False}))},
    "schema, sampled": {
        "constraint": Constraint(kind="json_object"),
        "sampling": SamplingParams(temperature=1.5, seed=2),
        "min_new_tokens": 12,
    },
    "expression": {"constraint": Constraint(kind="regex", source="(one|two|three)(, (one|two|three))*")},
}


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, TEXT_VOCAB)
    return Tokenizer(folder / TOKENIZER)


@pytest.mark.parametrize("request_name", TINY_REQUESTS)
def test_a_real_pair_gives_what_its_target_gives_alone(tiny_tokenizer, request_name):
    target, model = tiny_target(vocab_size=TEXT_VOCAB), tiny_drafter(vocab_size=TEXT_VOCAB)
    bundle: Any = SimpleNamespace(target=SimpleNamespace(eos_token_ids=(EOS_ID,)), manifest=SimpleNamespace(num_speculative_tokens=WIDTH))
    prompt = tiny_tokenizer.encode("Count: ")
    params = GenerationParams(**{"max_new_tokens": 40, "logprobs": 2, "prompt_logprobs": 1, **TINY_REQUESTS[request_name]})
    answers = []
    for drafter in (None, EagerDrafter(model, target, 128)):
        with Session(bundle, tiny_tokenizer, EagerTarget(target, 128), drafter) as session:
            answers.append(told(checked(list(session.generate(prompt, params)))))
    plain, speculative = answers
    for name in ("ids", "texts", "finish_reason"):
        assert speculative[name] == plain[name]
    for name, top in (("logprobs", 2), ("prompt_logprobs", 1)):
        found, expected = (logprob_values(answer[name], top) for answer in (speculative, plain))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)  # other shapes of products
