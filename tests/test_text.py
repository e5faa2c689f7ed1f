"""Streamed text is the decoded text, stop strings cut at the right character, templates render as in transformers."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from domino_deploy.errors import BundleError, RequestError
from domino_deploy.runtime.text import REPLACEMENT, IncrementalDetokenizer, StopStrings, Tokenizer
from tests.support.checkpoints import EOS_ID, IM_START_ID, write_tokenizer

TEXTS = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "accents": "Größe, naïve café, übermäßig, Ångström, Łódź",
    "Chinese and Japanese": "東京は日本の首都です。北京是中国的首都。",
    "Cyrillic, Arabic, Hindi": "Москва — столица; مرحبا بالعالم; नमस्ते दुनिया",
    "emoji": "👩‍👩‍👧‍👦 flags 🇩🇪🇯🇵 skin 👍🏽 end 🙂",
    "spaces": "  two  spaces\n\n\ttab and trailing  ",
    "replacement characters that are meant": "a\N{REPLACEMENT CHARACTER}b \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} c",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    template = (folder / "chat_template.jinja").read_text()
    return Tokenizer(folder / "tokenizer.json", chat_template=template)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """A Llama-2 style tokenizer: leading spaces as ▁, unknown characters as byte tokens."""
    words = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *["▁The", "▁dog", "▁sleeps", "The", "dog", "s", ".", ",", "▁▁", "é"],
    ]
    model = models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    fast.add_special_tokens(["<s>"])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.json"
    fast.save(str(path))
    return Tokenizer(path)


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text_and_holds_no_broken_character(tokenizer, text):
    token_ids = tokenizer.encode(TEXTS[text])
    assert len(token_ids) > len(set(TEXTS[text])) / 2
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == TEXTS[text]
    if REPLACEMENT not in TEXTS[text]:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_text_is_given_out_as_soon_as_its_characters_are_whole(tokenizer):
    pieces = pieces_of(tokenizer, tokenizer.encode("a🙂b"))
    # Four bytes of the emoji: three times nothing, then all of it.
    assert pieces == ["a", "", "", "", "🙂", "b", ""]


@given(token_ids=st.lists(st.integers(0, 299), max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_tokens_stream_to_what_decoding_them_at_once_gives(tokenizer, token_ids):
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_bytes_that_never_become_a_character_are_given_out_on_the_way(tokenizer):
    broken = tokenizer.encode("é")[1:]
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    pieces = []
    for _ in range(500):
        pieces.append(detokenizer.push(broken[0]))
        assert len(detokenizer._window) < 50, "every push decodes the window"
    assert 470 < len("".join(pieces)) < 500, "somebody waits for the text"
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(broken * 500)


@given(token_ids=st.lists(st.sampled_from([0, 1, 2]), min_size=17, max_size=80), text=st.text("aé東🙂", max_size=8))
@settings(max_examples=300, deadline=None)
def test_long_runs_of_broken_bytes_stream_to_what_decoding_them_at_once_gives(tokenizer, token_ids, text):
    first, second, third = (tokenizer.encode("東")[place] for place in range(3))
    broken = [(first, second, third)[token] for token in token_ids]
    whole = [*broken, *tokenizer.encode(text), *broken]
    assert "".join(pieces_of(tokenizer, whole)) == tokenizer.decode(whole)


def test_other_threads_go_on_while_a_long_text_becomes_tokens_and_text_again(tokenizer):
    text = "hello wor " * 40_000
    found: list[object] = []
    for work in (lambda: tokenizer.encode(text, add_special_tokens=False), lambda: tokenizer.decode(found[0])):
        thread = threading.Thread(target=lambda work=work: found.append(work()))
        thread.start()
        turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            turns += 1
        assert turns > 10, "it held the interpreter's lock"
    assert found[0] == tokenizer.encode("hello wor ", add_special_tokens=False) * 40_000
    assert found[1] == text


@pytest.mark.parametrize("text", ["The dog sleeps.", "The  dog", " The dog", "é 東京 🙂 dog"])
def test_leading_spaces_and_byte_tokens_of_sentencepiece(sentencepiece, text):
    token_ids = sentencepiece.encode(text)
    assert token_ids[0] == 1
    assert "".join(pieces_of(sentencepiece, token_ids)) == sentencepiece.decode(token_ids)
    assert not any(REPLACEMENT in piece for piece in pieces_of(sentencepiece, token_ids))


def test_special_tokens_leave_no_text_and_do_not_disturb_their_neighbours(tokenizer):
    hello, world = tokenizer.encode("hello"), tokenizer.encode(" world")
    assert "".join(pieces_of(tokenizer, [*hello, EOS_ID, IM_START_ID, *world, EOS_ID])) == "hello world"


def test_a_character_cut_off_by_the_end_is_flushed_as_decoding_gives_it(tokenizer):
    token_ids = tokenizer.encode("a🙂")[:-1]
    pieces = pieces_of(tokenizer, token_ids)
    assert pieces[:-1] == ["a", "", "", ""]
    assert "".join(pieces) == tokenizer.decode(token_ids)


def through(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    stream = StopStrings(stops)
    given_out = [stream.push(piece) for piece in pieces]
    return [*given_out, stream.flush()], stream.found is not None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "found"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], False),
        (["END"], ["ab", "END", "cd"], ["ab", "", "", ""], True),
        (["END"], ["abEN", "Dcd"], ["ab", "", ""], True),
        (["END"], ["abE", "N", "D"], ["ab", "", "", ""], True),
        (["END"], ["abEN", "d"], ["ab", "ENd", ""], False),
        (["END"], ["abEN"], ["ab", "EN"], False),
        (["END"], ["abENDcdEND"], ["ab", ""], True),
        (["aab"], ["aa", "ab"], ["", "a", ""], True),
        (["\n\n", "User:"], ["hi\nUs", "er:", "x"], ["hi\n", "", "", ""], True),
        (["b", "abc"], ["abc"], ["a", ""], True),
    ],
)
def test_stop_strings_hold_back_cut_and_drop(stops, pieces, expected, found):
    assert through(stops, pieces) == (expected, found)


@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
@settings(max_examples=500, deadline=None)
def test_where_stop_strings_cut_does_not_depend_on_the_pieces(text, stops, cuts):
    ends = [end for stop in stops if (start := text.find(stop)) >= 0 for end in [(start + len(stop), start)]]
    expected = text[: min(ends)[1]] if ends else text
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces, found = through(stops, [text[start:end] for start, end in pairwise(edges)])
    assert ("".join(pieces), found) == (expected, bool(ends))


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>&amp;</b> 東京"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "line breaks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n<u>{{ m.content }}</u>\n  {% endif %}\n{% endfor %}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ unk_token }}{{ unk_token is defined }}",
    "tojson": "{{ messages | tojson }} {{ messages[1] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "prompt": "{{ messages[-1].content }}{% if add_generation_prompt %}<a>{% endif %}",
    "namespace": "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{% endfor %}{{ n.k }}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path, template, add_generation_prompt):
    write_tokenizer(tmp_path)
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "unk_token": None}
    ours = Tokenizer(tmp_path / "tokenizer.json", chat_template=TEMPLATES[template], special_tokens=special)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|endoftext|>", eos_token="<|im_end|>")
    expected = theirs.apply_chat_template(
        MESSAGES, chat_template=TEMPLATES[template], tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert ours.render_chat(MESSAGES, add_generation_prompt=add_generation_prompt) == expected


def test_a_rendered_conversation_encodes_to_the_special_tokens_it_spells(tokenizer):
    token_ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Hi"}]), add_special_tokens=False)
    assert token_ids[0] == IM_START_ID
    assert token_ids.count(IM_START_ID) == 2
    assert token_ids.count(EOS_ID) == 1


def test_a_template_that_refuses_its_messages_is_a_bad_request(tmp_path):
    write_tokenizer(tmp_path)
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    with pytest.raises(RequestError, match="roles must alternate"):
        Tokenizer(tmp_path / "tokenizer.json", chat_template=template).render_chat([{"role": "tool", "content": ""}])


def test_a_refusal_that_quotes_a_long_message_is_cut(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", chat_template="{{ raise_exception('not this: ' ~ messages[0].content) }}")
    with pytest.raises(RequestError, match="not this: xxx") as caught:
        tokenizer.render_chat([{"role": "user", "content": "x" * 100_000}])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"])
def test_a_template_cannot_leave_its_sandbox(tmp_path, template):
    write_tokenizer(tmp_path)
    with pytest.raises(RequestError, match=r"(unsafe|not safely callable)"):
        Tokenizer(tmp_path / "tokenizer.json", chat_template=template).render_chat(MESSAGES)


def test_a_template_that_does_not_compile_is_named(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(BundleError, match="does not compile"):
        Tokenizer(tmp_path / "tokenizer.json", chat_template="{% for %}").render_chat(MESSAGES)


def test_a_conversation_without_a_template_is_refused(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="found none beside this tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json").render_chat(MESSAGES)


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(BundleError, match="no such file"):
        Tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(BundleError, match="does not parse"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_text_that_utf8_cannot_hold_is_a_bad_request(tokenizer):
    with pytest.raises(RequestError, match=r"lone surrogate '\\udcff' at character 1"):
        tokenizer.encode("a\udcff")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 9**9**9 > 1 }}", r"the operator \*\* is not available"),
        ("{{ lipsum(1000000) }}", "lipsum' is undefined"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}endless{% endfor %}{% endfor %}", "more than .* characters of output"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ messages[99].content.x }}", "no element 99"),
    ],
)
def test_a_template_that_fails_or_never_ends_is_a_bad_request(tmp_path, template, reason):
    write_tokenizer(tmp_path)
    with pytest.raises(RequestError, match=reason):
        Tokenizer(tmp_path / "tokenizer.json", chat_template=template).render_chat(MESSAGES)


def test_special_tokens_do_not_replace_the_messages(tmp_path):
    write_tokenizer(tmp_path)
    special = {"messages": "none", "add_generation_prompt": "x", "self": "y"}
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", chat_template="{{ messages[0].content }}", special_tokens=special)
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"
