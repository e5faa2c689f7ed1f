"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from domino_deploy.runtime.requests import OutputToken, TokenLogprobs
from domino_deploy.server.token_texts import TokenTexts

# JSON has no -inf; OpenAI's reference names this number for what is "very unlikely".
_LEAST = -9999.0


def chat_logprobs(tokens: Iterable[OutputToken], texts: TokenTexts) -> dict[str, Any]:
    """The shape of chat completions."""
    content = []
    for token in tokens:
        assert token.logprobs is not None, "asked for, so given"
        top = [_entry(token_id, logprob, texts) for token_id, logprob in token.logprobs.top]
        content.append({**_entry(token.token_id, token.logprobs.logprob, texts), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The shape of plain completions: four lists of one length, filled piece by piece.

    Offsets are those of the texts that the client gets; a token that only begins a character has the offset of that character.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0

    def of_prompt(self, token_ids: Sequence[int], pieces: Sequence[str], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Of the prompt's tokens, whose texts are `pieces`; nothing precedes the first one, so it has none."""
        lists = _empty_lists()
        for token_id, piece, of_token in zip(token_ids, pieces, logprobs, strict=True):
            self._add(lists, token_id, piece, of_token)
        return lists

    def of_answer(self, tokens: Iterable[OutputToken]) -> dict[str, list[Any]]:
        """Of the next tokens of the answer."""
        lists = _empty_lists()
        for token in tokens:
            self._add(lists, token.token_id, token.text, token.logprobs)
        return lists

    def _add(self, lists: dict[str, list[Any]], token_id: int, piece: str, logprobs: TokenLogprobs | None) -> None:
        lists["tokens"].append(self._texts[token_id].text)
        lists["text_offset"].append(self._offset)
        self._offset += len(piece)
        if logprobs is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        lists["token_logprobs"].append(_finite(logprobs.logprob))
        likeliest: dict[str, float] = {}
        # The chosen token is always among them, as in OpenAI's; of two tokens of one text the likelier counts.
        for other, logprob in (*logprobs.top, (token_id, logprobs.logprob)):
            likeliest.setdefault(self._texts[other].text, _finite(logprob))
        lists["top_logprobs"].append(likeliest)


def joined_logprobs(first: dict[str, list[Any]] | None, second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two stretches as one."""
    return second if first is None else {name: first[name] + second[name] for name in first}


def _empty_lists() -> dict[str, list[Any]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def _entry(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text = texts[token_id]
    return {"token": text.text, "logprob": _finite(logprob), "bytes": list(text.utf8)}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
