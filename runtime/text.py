"""Text to tokens and back: tokenizer, chat template, incremental detokenising, stop strings.

The tokenizer is a `tokenizer.json`, the template a Jinja file; both run without transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from domino_deploy.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle
from domino_deploy.checkpoint_text import misfit_of
from domino_deploy.errors import BundleError, MissingDependencyError, RequestError
from domino_deploy.runtime.chat_template import ChatTemplate
from domino_deploy.template_variables import trained_with

if TYPE_CHECKING:
    import tokenizers

# What a decoder writes for bytes that are not (or not yet) UTF-8.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Characters or tokens from which on a call takes milliseconds: it goes through the library's batches, which let other threads run.
_LONG = 4096
# Tokens whose text is held back at most: a character has four bytes, so behind more of them lie bytes that will never be one.
_MOST_HELD = 16
# Tokens that stay behind when the others' text is given out: those that may yet become a character, and some that may belong to them.
_STILL_HELD = range(4, 8)


class Tokenizer:
    """A `tokenizer.json` and, if there is one, its chat template.

    Args:
        tokenizer_file: the `tokenizer.json`.
        chat_template: source of the Jinja template, or None.
        special_tokens: what the template may name, `bos_token` and the like.
        template_variables: further ones that it gets where nobody says otherwise.

    Raises:
        MissingDependencyError: the package tokenizers is not installed.
        BundleError: the file is missing or not a tokenizer.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str | None] | None = None,
        template_variables: Mapping[str, object] | None = None,
    ) -> None:
        self._tokenizer = _load(tokenizer_file)
        self._template_source = chat_template
        self.template_variables = dict(template_variables or {})
        # One that the target lacks is undefined in the template, as in transformers, not None.
        self._special_tokens = {name: token for name, token in (special_tokens or {}).items() if token is not None}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with special tokens, those that the tokenizer itself puts around a text (bos, mostly).

        Raises:
            RequestError: the text has no UTF-8 form.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"Expected text that UTF-8 can hold, found the lone surrogate {text[error.start]!a} at character {error.start}. "
                "Decode the bytes it came from as UTF-8."
            ) from error
        if len(text) < _LONG:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens, without the special ones unless asked for."""
        if len(token_ids) < _LONG:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def spelling(self, token_id: int) -> str | None:
        """A token as the tokenizer's file spells it; None for an id that it does not have."""
        return self._tokenizer.id_to_token(token_id)

    def ids(self) -> dict[str, int]:
        """The ids of all tokens, added ones included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def source(self) -> str:
        """The JSON text of a `tokenizer.json`."""
        return self._tokenizer.to_str()

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        return self._template_source

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    def render_chat(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, variables: Mapping[str, object] | None = None
    ) -> str:
        """The prompt text of a conversation, special tokens spelt out: encode it without adding any.

        Args:
            messages: with `role` and `content` each.
            add_generation_prompt: end where the assistant begins.
            variables: further ones that the template knows, such as `enable_thinking` of Qwen3's; they win over the tokenizer's own.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return self._template.render({**self.template_variables, **(variables or {}), **self._special_tokens, **given})

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._template_source is None:
            raise RequestError(
                "Expected a chat template for a conversation, found none beside this tokenizer. Send a plain prompt instead."
            )
        return ChatTemplate(self._template_source)


def bundle_tokenizer(bundle: Bundle) -> Tokenizer:
    """The target's tokenizer and chat template, as the bundle has them; the template gets what the drafter was trained with.

    Raises:
        BundleError: one of them cannot be read, or the tokenizer knows a token that the target has no row for.
    """
    template = bundle.path / CHAT_TEMPLATE
    try:
        source = template.read_text(encoding="utf-8") if template.is_file() else None
    except UnicodeDecodeError as error:
        raise BundleError(f"{template}: expected text in UTF-8, found: {error}. Export the bundle again.") from error
    tokenizer = Tokenizer(
        bundle.path / TOKENIZER,
        chat_template=source,
        special_tokens=bundle.manifest.special_tokens,
        template_variables=trained_with(bundle),
    )
    misfit = misfit_of(tokenizer.ids(), bundle.target.vocab_size)
    if misfit is not None:
        raise BundleError(
            f"{bundle.path / TOKENIZER}: expected token ids below {bundle.target.vocab_size}, the target's vocab_size, found {misfit}. "
            "Export the bundle again."
        )
    return tokenizer


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens, piece by piece; the pieces joined are `decode(all tokens)`.

    A token's text depends on its neighbours (merged bytes, leading spaces), so a window of recent tokens is decoded
    with and without the new one, and the difference is the piece.  Nothing is given out while the window ends inside a
    character (it decodes to U+FFFD); `flush` gives out what is left, a broken character included.

    One exception: a decoder that falls back to byte tokens shows a whole run of them as U+FFFD once one byte is wrong, also
    the characters before it, which were given out already.

    A long run of bytes that are no text is given out on the way: it must neither silence the stream nor make the window long.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # tokens of the window whose text was given out
        self._given_text = ""
        self.num_held = 0  # last tokens whose text is still to come: they end inside a character

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        self.num_held = self.num_held + 1 if text.endswith(REPLACEMENT) else 0
        if self.num_held and len(self._window) - self._given > _MOST_HELD:
            return self._advance_within(text)
        if self.num_held or len(text) <= len(self._given_text):
            return ""
        return self._advance(text, len(self._window))

    def flush(self) -> str:
        self.num_held = 0
        return self._advance(self._decode(self._window), len(self._window))

    def _advance_within(self, text: str) -> str:
        """Give out what the coming tokens cannot change any more."""
        for held in _STILL_HELD:
            count = len(self._window) - held
            before = self._decode(self._window[:count])
            if text.startswith(before):  # no character lies across the cut
                self.num_held = held
                return self._advance(before, count)
        return ""

    def _advance(self, text: str, count: int) -> str:
        """Give out `text`, that of the first `count` tokens of the window."""
        piece = text[len(self._given_text) :]
        self._window, self._given = self._window[self._given :], count - self._given
        self._given_text = self._decode(self._window[: self._given])
        return piece


class StopStrings:
    """Passes text on up to the first stop string, and holds back what may yet become one.

    `found` is the stop string, once one is complete; it and all text behind it are dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, looking: bool = True) -> str:
        """Text to give out, after more of it has come.

        Args:
            looking: look for stop strings that end in `text`; one that ended before, while nobody looked, is none any more.
        """
        if self.found is not None:
            return ""
        held, text = len(self._held), self._held + text
        # The one complete first, so that the cut does not depend on how the text was cut into pieces.
        matches = [match for stop in self._stops if (match := _first_ending_behind(held, stop, text))] if looking else []
        if matches:
            end, start = min(matches)
            self.found, self._held = text[start:end], ""
            return text[:start]
        held = self._possible_start(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text held back, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[len(text) - size :]) for stop in self._stops)), 0)


def _first_ending_behind(position: int, stop: str, text: str) -> tuple[int, int] | None:
    """End and start of the first occurrence of `stop` in `text` that ends behind `position`."""
    start = text.find(stop, max(0, position - len(stop) + 1))
    return (start + len(stop), start) if start >= 0 else None


def _load(tokenizer_file: Path) -> tokenizers.Tokenizer:
    try:
        from tokenizers import Tokenizer as FastTokenizer
    except ImportError as error:
        raise MissingDependencyError("Expected the package tokenizers, found none. Run: pip install domino-deploy") from error
    if not tokenizer_file.is_file():
        raise BundleError(f"Expected a tokenizer at {tokenizer_file}, found no such file. Export the bundle again.")
    try:
        return FastTokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise BundleError(
            f"Expected a tokenizer at {tokenizer_file}, found one that does not parse: {error}. Export the bundle again."
        ) from error
