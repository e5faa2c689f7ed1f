"""A session: text and tokens of one request, stop conditions, defaults, and what cannot be opened."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from domino_deploy.bundle import CHAT_TEMPLATE, TOKENIZER, open_bundle
from domino_deploy.errors import BundleError, CapacityError, MissingDependencyError, RequestError
from domino_deploy.runtime import opening
from domino_deploy.runtime.prompt_lookup import PromptLookupDrafter
from domino_deploy.runtime.session import Backend, Chunk, DrafterChoice, GenerationParams, SamplingParams, Session
from domino_deploy.runtime.text import Tokenizer
from tests.support.checkpoints import EOS_ID, write_tokenizer
from tests.support.doubles import ReplayTarget, ScriptedDrafter

VOCAB = 300
ANSWER = "One 🙂 two END three 東京 four"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB)
    return Tokenizer(folder / TOKENIZER)


def replaying(tokenizer: Tokenizer, answer: Sequence[int], *, speculative: bool) -> tuple[Session, list[int]]:
    """A session whose target gives `answer` behind a prompt, with a drafter that is always right or none, and the prompt."""
    prompt = tokenizer.encode("Count.")
    sequence = [*prompt, *answer, *[5] * 300]
    drafter = ScriptedDrafter([-1], sequence, VOCAB) if speculative else None
    manifest = SimpleNamespace(num_speculative_tokens=100)  # the drafter's own number is lower, and decides
    bundle: Any = SimpleNamespace(target=SimpleNamespace(eos_token_ids=(EOS_ID,)), manifest=manifest)
    return Session(bundle, tokenizer, ReplayTarget(sequence, VOCAB), drafter), prompt


def text_of(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.step.token_ids]


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
class TestText:
    def test_eos_ends_the_answer_and_is_a_token_but_no_text(self, tokenizer, speculative):
        answer = [*tokenizer.encode(ANSWER), EOS_ID]
        session, prompt = replaying(tokenizer, answer, speculative=speculative)
        chunks = list(session.generate(prompt, GenerationParams()))
        assert text_of(chunks) == ANSWER
        assert ids_of(chunks) == answer
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]

    def test_eos_can_be_ignored(self, tokenizer, speculative):
        session, prompt = replaying(tokenizer, [*tokenizer.encode("a"), EOS_ID, *tokenizer.encode("b")], speculative=speculative)
        chunks = list(session.generate(prompt, GenerationParams(ignore_eos=True, max_new_tokens=3)))
        assert (text_of(chunks), chunks[-1].finish_reason) == ("ab", "length")

    @pytest.mark.parametrize("stop", ["END", "two END", "🙂", " ", "D", "京 f", "e 東"])
    def test_a_stop_string_cuts_text_tokens_and_counters(self, tokenizer, speculative, stop):
        token_ids = tokenizer.encode(ANSWER)
        session, prompt = replaying(tokenizer, token_ids, speculative=speculative)
        chunks = list(session.generate(prompt, GenerationParams(stop_strings=("nowhere", stop))))
        assert text_of(chunks) == ANSWER[: ANSWER.index(stop)]
        assert chunks[-1].finish_reason == "stop"
        # Kept are the tokens up to the one that completes the stop string.
        kept = next(count for count in range(len(token_ids) + 1) if stop in tokenizer.decode(token_ids[:count]))
        assert ids_of(chunks) == token_ids[:kept]
        for chunk in chunks:
            assert 0 <= chunk.step.accepted <= min(chunk.step.proposed, len(chunk.step.token_ids))
        if speculative:
            assert all(len(chunk.step.token_ids) == chunk.step.accepted + 1 for chunk in chunks[:-1])

    def test_no_chunk_holds_a_broken_character_or_the_start_of_a_stop_string(self, tokenizer, speculative):
        session, prompt = replaying(tokenizer, tokenizer.encode(ANSWER), speculative=speculative)
        given_out = ""
        for chunk in session.generate(prompt, GenerationParams(stop_strings=("three 東京 four",))):
            given_out += chunk.text
            assert ANSWER.startswith(given_out)
            assert "th" not in given_out

    def test_text_held_back_for_a_stop_string_is_given_out_at_the_end(self, tokenizer, speculative):
        answer = [*tokenizer.encode("it ends in EN"), EOS_ID]
        session, prompt = replaying(tokenizer, answer, speculative=speculative)
        assert text_of(list(session.generate(prompt, GenerationParams(stop_strings=("END",))))) == "it ends in EN"

    def test_a_stop_string_goes_before_the_length_it_ends_at(self, tokenizer, speculative):
        token_ids = tokenizer.encode("x END")
        session, prompt = replaying(tokenizer, token_ids, speculative=speculative)
        chunks = list(session.generate(prompt, GenerationParams(stop_strings=("END",), max_new_tokens=len(token_ids))))
        assert (text_of(chunks), chunks[-1].finish_reason) == ("x ", "stop")

    def test_a_stop_string_goes_before_an_eos_behind_it_in_the_same_step(self, tokenizer, speculative):
        token_ids = tokenizer.encode("xENDy")
        session, prompt = replaying(tokenizer, [*token_ids, EOS_ID], speculative=speculative)
        chunks = list(session.generate(prompt, GenerationParams(stop_strings=("END",))))
        assert text_of(chunks) == "x"
        assert EOS_ID not in ids_of(chunks)

    def test_an_answer_cut_inside_a_character_is_what_decoding_gives(self, tokenizer, speculative):
        token_ids = tokenizer.encode("ab🙂")
        session, prompt = replaying(tokenizer, token_ids, speculative=speculative)
        chunks = list(session.generate(prompt, GenerationParams(max_new_tokens=len(token_ids) - 1)))
        assert text_of(chunks) == tokenizer.decode(token_ids[:-1])


def test_speculation_gives_the_chunks_fewer_steps(tokenizer):
    counts = []
    for speculative in (False, True):
        session, prompt = replaying(tokenizer, tokenizer.encode(ANSWER), speculative=speculative)
        counts.append(len(list(session.generate(prompt, GenerationParams(max_new_tokens=20)))))
    assert counts == [20, 4]


def test_a_request_overtaken_by_another_says_so_and_the_other_is_unharmed(tokenizer):
    session, prompt = replaying(tokenizer, tokenizer.encode(ANSWER), speculative=True)
    first = session.generate(prompt, GenerationParams(max_new_tokens=20))
    next(first)
    second = session.generate(prompt, GenerationParams(max_new_tokens=20))
    next(second)
    with pytest.raises(RequestError, match="one request at a time"):
        next(first)
    assert len(list(second)) == 3


def test_a_request_overtaken_before_its_first_step_leaves_the_cache_alone(tokenizer):
    session, prompt = replaying(tokenizer, tokenizer.encode(ANSWER), speculative=True)
    first, second = (session.steps(prompt, GenerationParams(max_new_tokens=20)) for _ in range(2))
    next(second)
    length = session.target.length
    with pytest.raises(RequestError, match="one request at a time"):
        next(first)
    assert session.target.length == length
    assert len(list(second)) == 3


def test_a_request_does_not_start_on_a_closed_session(tokenizer):
    session, prompt = replaying(tokenizer, tokenizer.encode(ANSWER), speculative=True)
    waiting = session.steps(prompt, GenerationParams())
    session.close()
    with pytest.raises(RequestError, match="session closed"):
        next(waiting)


def test_a_consumer_that_fails_half_way_does_no_harm_to_the_next_request(tiny_bundle):
    params = GenerationParams(max_new_tokens=20, ignore_eos=True)
    with Session.open(tiny_bundle, threads=1) as session:
        prompt, other = session.prompt_ids("Count to ten"), session.prompt_ids("A much longer prompt than the other one, about dogs.")
        expected = [step.token_ids for step in session.steps(prompt, params)]

        def fail_on_the_second_chunk():
            for index, _ in enumerate(session.generate(other, params)):
                if index:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_on_the_second_chunk()
        assert [step.token_ids for step in session.steps(prompt, params)] == expected


def test_a_closed_session_says_so(tokenizer):
    session, prompt = replaying(tokenizer, tokenizer.encode(ANSWER), speculative=True)
    running = session.steps(prompt, GenerationParams())
    next(running)
    with session:
        pass
    with pytest.raises(RequestError, match="session closed"):
        next(running)
    with pytest.raises(RequestError, match="found a closed one"):
        session.steps(prompt, GenerationParams())
    session.close()


@pytest.mark.parametrize("backend", [Backend.ORT, Backend.EAGER])  # TensorRT: tests/test_trt_backend.py
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=2)], ids=["greedy", "sampled"])
def test_every_drafter_and_backend_gives_the_same_answer(tiny_bundle, backend, sampling):
    answers = {}
    params = GenerationParams(sampling=sampling, max_new_tokens=60)
    for drafter in DrafterChoice:
        with Session.open(tiny_bundle, backend=backend, drafter=drafter, threads=1) as session:
            chunks = list(session.generate(session.prompt_ids("Count to ten: one, two,", system="Be brief."), params))
            answers[drafter] = (text_of(chunks), ids_of(chunks), chunks[-1].finish_reason)
    assert answers[DrafterChoice.BUNDLE] == answers[DrafterChoice.PROMPT_LOOKUP] == answers[DrafterChoice.NONE]
    text, token_ids, reason = answers[DrafterChoice.NONE]
    assert len(token_ids) > 20
    with Session.open(tiny_bundle, drafter=DrafterChoice.NONE, threads=1) as session:
        assert session.tokenizer.decode(token_ids[:-1] if reason == "stop" else token_ids) == text


def test_prompts_are_rendered_or_taken_as_they_are(tiny_bundle):
    with Session.open(tiny_bundle, drafter=DrafterChoice.NONE) as session:
        decode = session.tokenizer._tokenizer.decode
        assert decode(session.prompt_ids("Hi"), skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        with_system = decode(session.prompt_ids("Hi", system="Be brief."), skip_special_tokens=False)
        assert with_system == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert decode(session.prompt_ids("Hi", chat=False), skip_special_tokens=False) == "Hi"
        with pytest.raises(RequestError, match="chat prompt only"):
            session.prompt_ids("Hi", chat=False, system="Be brief.")


def test_defaults_come_from_the_target_and_the_drafter(tiny_bundle, monkeypatch):
    config = open_bundle(tiny_bundle)
    with Session.open(tiny_bundle) as session:
        assert session.target.capacity == config.target.max_position_embeddings == 512
        assert session.default_num_speculative_tokens == config.drafter.num_proposals
        assert max(step.proposed for step in session.steps([5], GenerationParams(max_new_tokens=20))) == config.drafter.num_proposals
        assert {step.proposed for step in session.steps([5], GenerationParams(max_new_tokens=9, num_speculative_tokens=2))} <= {0, 1, 2}
        assert not any(step.proposed for step in session.steps([5], GenerationParams(max_new_tokens=9, num_speculative_tokens=0)))
    monkeypatch.setattr(opening, "DEFAULT_MAX_MODEL_LEN", 100)
    with Session.open(tiny_bundle, drafter=DrafterChoice.PROMPT_LOOKUP) as session:
        assert session.target.capacity == 100
        assert isinstance(session.drafter, PromptLookupDrafter)
        with pytest.raises(CapacityError, match=r"at most 99 tokens.*found 100.*max_model_len"):
            session.steps([5] * 100, GenerationParams())


def test_session_values_out_of_range_are_all_named(tiny_bundle):
    with pytest.raises(RequestError, match=r"(?s)max_model_len must lie in \[1, 512\].*found 513.*threads must lie in \[1, \d+\].*found 0"):
        Session.open(tiny_bundle, max_model_len=513, threads=0)


def test_threads_beyond_the_processors_are_refused(tiny_bundle):
    processors = os.cpu_count() or 1
    with pytest.raises(RequestError, match=rf"threads must lie in \[1, {processors}\].*found {processors + 1}"):
        Session.open(tiny_bundle, threads=processors + 1)


def test_a_chat_template_that_is_not_utf8_is_a_damaged_bundle(tiny_bundle, tmp_path):
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    size = (folder / CHAT_TEMPLATE).stat().st_size
    (folder / CHAT_TEMPLATE).write_bytes(b"\xff" * size)
    with pytest.raises(BundleError, match=r"chat_template\.jinja: expected text in UTF-8"):
        Session.open(folder)


def test_a_tokenizer_with_a_token_that_the_target_has_no_row_for_is_refused(tiny_bundle, tmp_path):
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    text = (folder / TOKENIZER).read_text(encoding="utf-8")
    assert max(Tokenizer(folder / TOKENIZER).ids().values()) == VOCAB - 1, "the largest that fits, which every other test opens"
    (folder / TOKENIZER).write_text(re.sub(rf": {VOCAB - 2}(?=\s)", f": {VOCAB}", text), encoding="utf-8")  # of the same size
    with pytest.raises(BundleError, match=rf"tokenizer\.json: expected token ids below {VOCAB}.*found {VOCAB} \('.*Export the bundle"):
        Session.open(folder)


@pytest.mark.parametrize(
    ("backend", "package", "extra"), [("ort", "onnxruntime", "domino-deploy"), ("eager", "torch", r"domino-deploy\[export\]")]
)
def test_a_missing_package_names_what_brings_it(tiny_bundle, monkeypatch, backend, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    for module in [name for name in sys.modules if name.startswith(f"domino_deploy.runtime.backends.{backend}")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(MissingDependencyError, match=f"package {package}.*pip install '{extra}'"):
        Session.open(tiny_bundle, backend=Backend(backend))


def test_a_folder_that_is_no_bundle_is_named(tmp_path):
    with pytest.raises(BundleError, match="expected a bundle"):
        Session.open(tmp_path)


def test_steps_do_not_look_for_stop_strings(tokenizer):
    session, prompt = replaying(tokenizer, tokenizer.encode("a END b"), speculative=False)
    params = GenerationParams(stop_strings=("END",), max_new_tokens=6)
    assert [replace(step, terms_ms=None).token_ids for step in session.steps(prompt, params)] == [
        (token,) for token in tokenizer.encode("a END b")[:6]
    ]
