"""API keys, as far as clients and the server have to agree: what a header of HTTP carries."""

from __future__ import annotations

import re

KEY_CHARACTERS = "visible ASCII characters without spaces"  # in words
_VISIBLE_ASCII = re.compile(r"[!-~]*")


def is_visible_ascii(text: str) -> bool:
    """Whether a header, or the first line of a request, carries all of this; the empty text is."""
    return _VISIBLE_ASCII.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Whether a client can send this as a key."""
    return text != "" and is_visible_ascii(text)
