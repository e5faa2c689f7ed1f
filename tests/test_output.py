"""What of an answer goes out, and when: however tokens are cut into steps, it is what the whole text says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domino_deploy.bundle import TOKENIZER
from domino_deploy.runtime.output import OutputStream, Released
from domino_deploy.runtime.protocols import Step
from domino_deploy.runtime.requests import GenerationParams, OutputToken, TokenLogprobs
from domino_deploy.runtime.text import REPLACEMENT, Tokenizer
from tests.support.checkpoints import EOS_ID, write_tokenizer

# Tokens of a byte-level tokenizer in small: pieces of UTF-8, some of them cut inside a character, and one that is no text.
PIECES = [b"a", b"b", b"ab", b" ", "é".encode()[:1], "é".encode()[1:], "🙂".encode()[:2], "🙂".encode()[2:], b"a" + "é".encode()[:1], b""]
NO_TEXT = PIECES.index(b"")
STOP = len(PIECES)
STOPS = ["a", "b", "ab", "ba", "é", "🙂", "aé", "b ", "abab", REPLACEMENT]


def decode(token_ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in token_ids).decode("utf-8", errors="replace")


def logprobs_of(token_ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id=token, logprob=-float(index)) for index, token in enumerate(token_ids)]


def steps_of(token_ids: Sequence[int], sizes: Sequence[int], finish_reason: str | None) -> list[Step]:
    """The tokens in runs of these sizes (in a ring): each but its last accepted, as a decode loop gives them."""
    steps, start = [], 0
    while start < len(token_ids):
        kept = tuple(token_ids[start : start + sizes[len(steps) % len(sizes)]])
        start += len(kept)
        steps.append(Step(token_ids=kept, proposed=len(kept), accepted=len(kept) - 1))
    return [*steps[:-1], replace(steps[-1], finish_reason=finish_reason)]


def pushed(stream: OutputStream, steps: Sequence[Step], logprobs: Sequence[TokenLogprobs]) -> list[Released]:
    """All that comes out, step by step, up to the one that ends it."""
    released: list[Released] = []
    count = 0
    for step in steps:
        released.append(stream.push(step, logprobs[count:]))
        count += len(step.token_ids)
        if released[-1].step.finish_reason is not None:
            break
    return released


def tokens_in(released: Sequence[Released]) -> list[OutputToken]:
    return [token for each in released for token in each.tokens]


def naive(token_ids: Sequence[int], params: GenerationParams) -> tuple[str, int, str | None]:
    """Text, tokens and stop string of an answer from the texts of all its beginnings.

    A text is only looked at up to where it ends on a whole character, since more tokens could change it, except for the whole.
    """
    certain = ""
    for count in range(1, len(token_ids) + 1):
        is_end = count == len(token_ids) or token_ids[count] in params.stop_token_ids
        text = decode([token for token in token_ids[:count] if token not in params.stop_token_ids])
        if text.endswith(REPLACEMENT) and not is_end:
            continue
        if count >= params.min_new_tokens:
            found = [
                (end, end - len(stop), stop)
                for stop in params.stop_strings
                for end in range(len(certain) + 1, len(text) + 1)
                if text[:end].endswith(stop)
            ]
            if found:
                _, start, stop = min(found)
                return text[:start], count, stop
        certain = text
    return certain, len(token_ids), None


answers = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=14)


@given(
    answer=answers,
    ends_with_stop_token=st.booleans(),
    stops=st.lists(st.sampled_from(STOPS), max_size=3),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    min_new_tokens=st.sampled_from([0, 0, 1, 3, 6]),
)
@settings(max_examples=600, deadline=None)
def test_any_cut_into_steps_gives_the_naive_answer(answer, ends_with_stop_token, stops, sizes, min_new_tokens):
    token_ids = [*answer, STOP] if ends_with_stop_token else answer
    params = GenerationParams(stop_strings=tuple(stops), stop_token_ids=(STOP,), min_new_tokens=min_new_tokens)
    reason = "stop" if ends_with_stop_token else "length"
    logprobs = logprobs_of(token_ids)
    stream = OutputStream(decode, params)
    released = pushed(stream, steps_of(token_ids, sizes, reason), logprobs)
    text, count, stop = naive(token_ids, params)

    tokens = tokens_in(released)
    assert "".join(token.text for token in tokens) == text
    assert [token.logprobs for token in tokens] == logprobs[: len(tokens)]
    assert [token.token_id for token in tokens] == token_ids[: len(tokens)]
    assert [token for each in released for token in each.step.token_ids] == token_ids[: len(tokens)]
    assert released[-1].step.finish_reason == ("stop" if stop is not None else reason)
    assert stream.stop_reason == (stop if stop is not None else STOP if ends_with_stop_token else None)
    # A stop string that only the end of the answer completes leaves the stop token behind it, which was chosen before.
    assert len(tokens) in (count, count + ends_with_stop_token)

    one_by_one = OutputStream(decode, params)
    single = tokens_in(pushed(one_by_one, steps_of(token_ids, [1], reason), logprobs))
    assert [replace(token, drafted=False) for token in tokens] == single


@given(answer=answers, stops=st.lists(st.sampled_from(STOPS), max_size=3), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_what_went_out_is_a_beginning_of_every_possible_answer(answer, stops, sizes):
    """No split character, and nothing that a stop string could still take back, whatever comes next."""
    params = GenerationParams(stop_strings=tuple(stops))
    stream, sent, taken = OutputStream(decode, params), "", []
    for step in steps_of(answer, sizes, None):
        released = stream.push(step)
        sent, taken = sent + released.text, [*taken, *step.token_ids]
        if released.step.finish_reason is not None:
            return
        assert not sent.endswith(REPLACEMENT)
        for more in [[], *([token] for token in range(len(PIECES))), *([first, second] for first in range(4) for second in range(4))]:
            assert naive([*taken, *more], params)[0].startswith(sent)


@given(answer=answers, sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_counters_of_a_cut_step_are_those_of_its_tokens(answer, sizes):
    stream = OutputStream(decode, GenerationParams(stop_strings=("ab", "é")))
    for each in pushed(stream, steps_of(answer, sizes, "length"), []):
        assert each.step.accepted <= min(each.step.proposed, len(each.step.token_ids))
        assert len(each.step.token_ids) - each.step.accepted in (0, 1)


@pytest.mark.parametrize(
    ("answer", "reason", "stops", "expected", "stop_reason"),
    [
        ("xENDy", "length", ("END",), ("x", "stop"), "END"),  # a stop string inside the last step goes before the length
        ("xEND", "length", ("END",), ("x", "stop"), "END"),
        ("xEN", "length", ("END",), ("xEN", "length"), None),
        ("xyz", "length", (), ("xyz", "length"), None),
        ("END", "length", ("END",), ("", "stop"), "END"),
        ("ENDEND", "length", ("END", "ND"), ("", "stop"), "END"),  # the one complete first, and of two the one that begins first
    ],
)
def test_checks_come_in_their_order(answer, reason, stops, expected, stop_reason):
    stream = OutputStream(lambda ids: "".join(map(chr, ids)), GenerationParams(stop_strings=stops))
    token_ids = tuple(map(ord, answer))
    released = stream.push(Step(token_ids=token_ids, proposed=len(token_ids), accepted=len(token_ids), finish_reason=reason))
    assert (released.text, released.step.finish_reason) == expected
    assert stream.stop_reason == stop_reason


def test_the_targets_own_end_is_no_stop_reason_but_a_requested_stop_token_is():
    for token, reason in ((7, 7), (8, None)):
        stream = OutputStream(lambda ids: "", GenerationParams(stop_token_ids=(7, 8)), eos_token_ids=(8,))
        stream.push(Step(token_ids=(token,), finish_reason="stop"))
        assert stream.stop_reason == reason


def test_drafted_tokens_are_told_from_the_targets_own():
    stream = OutputStream(lambda ids: "x" * len(ids), GenerationParams())
    assert [token.drafted for token in stream.push(Step(token_ids=(1, 2, 3), proposed=4, accepted=2)).tokens] == [True, True, False]


def test_an_abandoned_answer_gives_out_what_was_held_back():
    stream = OutputStream(decode, GenerationParams(stop_strings=("abab",)))
    assert stream.push(Step(token_ids=(2, 4))).tokens == ()
    assert "".join(token.text for token in stream.finish()) == "ab" + REPLACEMENT


def test_tokens_without_text_go_out_at_once():
    stream = OutputStream(decode, GenerationParams())
    assert [token.token_id for token in stream.push(Step(token_ids=(NO_TEXT, NO_TEXT))).tokens] == [NO_TEXT, NO_TEXT]


def test_bytes_that_never_become_a_character_do_not_hold_the_answer_back():
    stream = OutputStream(decode, GenerationParams())
    tokens = tokens_in([stream.push(Step(token_ids=(PIECES.index("é".encode()[1:]),))) for _ in range(100)])
    assert len(tokens) > 75
    assert "".join(token.text for token in (*tokens, *stream.finish())) == REPLACEMENT * 100


@pytest.mark.parametrize("ends_with_stop_token", [False, True])
@pytest.mark.parametrize("beginning", [b"a", "é".encode()[:1], b""])
def test_a_long_run_of_bytes_that_are_no_text_may_end_anywhere(beginning: bytes, ends_with_stop_token: bool) -> None:
    """Of such a run, some tokens are given out while the last ones are held: each way to end must find those still there."""
    first, broken = PIECES.index(beginning), PIECES.index("é".encode()[:1])
    params = GenerationParams(stop_token_ids=(STOP,))
    for length in range(1, 70):
        token_ids = [first, *[broken] * length]
        stream = OutputStream(decode, params)
        released = [token for token_id in token_ids for token in stream.push(Step(token_ids=(token_id,))).tokens]
        if ends_with_stop_token:
            released += stream.push(Step(token_ids=(STOP,), finish_reason="stop")).tokens
            token_ids.append(STOP)
        else:
            released += stream.finish()
        assert [token.token_id for token in released] == token_ids
        assert "".join(token.text for token in released) == decode([token for token in token_ids if token != STOP])


def test_the_text_of_a_real_tokenizer_goes_to_the_tokens_that_complete_it(tmp_path):
    write_tokenizer(tmp_path, 300)
    tokenizer = Tokenizer(tmp_path / TOKENIZER)
    token_ids = [*tokenizer.encode("é 東京 🙂 end"), EOS_ID]
    stream = OutputStream(tokenizer.decode, GenerationParams(stop_token_ids=(EOS_ID,)))
    tokens = tokens_in(pushed(stream, steps_of(token_ids, [3], "stop"), []))
    assert "".join(token.text for token in tokens) == "é 東京 🙂 end"
    assert [token.token_id for token in tokens] == token_ids
    assert not any(REPLACEMENT in token.text for token in tokens)
    assert tokens[-1].text == ""
