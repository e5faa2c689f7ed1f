"""The text of a prompt to tokens, as long as it is not so long that its tokens alone would fill the memory."""

from __future__ import annotations

from domino_deploy.runtime.text import Tokenizer
from domino_deploy.server.errors import ApiError

# Characters that any model's tokenizer is given; some hundred bytes are taken for each token while it works.
LEAST_MOST_CHARACTERS = 2**20


def encoded(text: str, tokenizer: Tokenizer, *, param: str, max_model_len: int, add_special_tokens: bool) -> list[int]:
    """The tokens of a text.

    Args:
        text: of a prompt.
        tokenizer: the served model's.
        param: the field that the text comes from.
        max_model_len: the served model's.
        add_special_tokens: let the tokenizer add its own.

    Raises:
        ApiError: 400; longer than `LEAST_MOST_CHARACTERS` and than a prompt of the model's longest tokens.
    """
    if len(text) > LEAST_MOST_CHARACTERS:
        most = max(LEAST_MOST_CHARACTERS, max_model_len * max(map(len, tokenizer.ids())))
        if len(text) > most:
            raise ApiError(
                400,
                f"{param}: expected at most {most} characters, found {len(text)}. Shorten it, or send it in parts.",
                param=param,
                code="context_length_exceeded",
            )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
