"""What a single token is called in lists of log-probabilities: its text where it has one by itself, its bytes where it has not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from domino_deploy.runtime.text import REPLACEMENT, Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of tokenizers that fall back to bytes


@dataclass(frozen=True)
class TokenText:
    """text: "bytes:\\xe2" for a part of a character, as OpenAI writes it; a special token's name.  utf8: its bytes."""

    text: str
    utf8: bytes


class TokenTexts:
    """The texts of a tokenizer's tokens, each by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token_id: int) -> TokenText:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._text(token_id)
        return found

    def _text(self, token_id: int) -> TokenText:
        # Decoders drop the space at the beginning of a text, which the second token of two keeps.
        once, twice = self._tokenizer.decode([token_id]), self._tokenizer.decode([token_id, token_id])
        text = twice[len(once) :] if twice.startswith(once) else once
        name = self._tokenizer.spelling(token_id) or ""
        if not once:  # a special token, which decodes to nothing
            return TokenText(name, name.encode())
        if REPLACEMENT not in once + text:
            return TokenText(text, text.encode())
        utf8 = _bytes_of(name)
        if utf8 is None:
            return TokenText(text, text.encode())
        try:
            return TokenText(utf8.decode(), utf8)
        except UnicodeDecodeError:
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8), utf8)


def _bytes_of(name: str) -> bytes | None:
    """The bytes that a token's name spells, None for one that spells text."""
    if match := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(match[1], 16)])
    if all(character in _BYTES for character in name):
        return bytes(_BYTES[character] for character in name)
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes (its `encoder.py`): visible Latin-1 stands for itself, the others for the code points from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()
