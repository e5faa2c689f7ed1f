"""From committed tokens to what a client may see: texts token by token, stop strings, and the cut behind them.

One implementation for sessions and the engine.  Tokens go in step by step, however many a step has; what comes out, all in all, does not
depend on how they were cut into steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from domino_deploy.runtime.protocols import Step
from domino_deploy.runtime.requests import STOP, GenerationParams, OutputToken, TokenLogprobs
from domino_deploy.runtime.text import IncrementalDetokenizer, StopStrings


@dataclass(frozen=True, kw_only=True)
class Released:
    """What one step made certain.

    step: as it counts: without the tokens behind the one that completes a stop string, and then with the finish reason "stop".
    tokens: released now, of this step and of earlier ones; all that are left, if the step ends the answer.
    """

    step: Step
    tokens: tuple[OutputToken, ...]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class OutputStream:
    """The answer to one request.

    A token is held back while its text is the beginning of a character, or may turn out to begin a stop string.  Of one token the checks
    are, in this order: stop token, stop string, length; the first and the last are the decode loop's (`decode.cut`).

    Args:
        decode: text of tokens.
        params: the request; its `stop_token_ids` with the target's end-of-sequence tokens, where these end it.
        eos_token_ids: the target's end-of-sequence tokens, which are no `stop_reason`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], params: GenerationParams, eos_token_ids: Collection[int] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(decode)
        self._stops = StopStrings(params.stop_strings)
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._min_new_tokens = params.min_new_tokens
        self._count = 0  # tokens that have text, a stop token has none
        self._waiting: deque[_Waiting] = deque()
        self._certain = ""  # text that may go out, and belongs to waiting tokens
        self._stop_token: int | None = None

    @property
    def found_stop(self) -> bool:
        """Whether a stop string ended the answer."""
        return self._stops.found is not None

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or the stop token that ended the answer; None for the target's own end-of-sequence token and for none."""
        return self._stops.found if self._stop_token in self._eos_token_ids else self._stops.found or self._stop_token

    def push(self, step: Step, logprobs: Sequence[TokenLogprobs] = ()) -> Released:
        """Take the tokens of a step.

        Args:
            step: ends with its stop token, if it has one, and has the finish reason of the decode loop.
            logprobs: of the step's tokens, in order, or none; more than those are left alone.
        """
        kept = 0
        given: Sequence[TokenLogprobs | None] = logprobs or [None] * len(step.token_ids)
        for token, of_token in zip(step.token_ids, given, strict=False):
            self._take(_Waiting(token_id=token, drafted=kept < step.accepted, logprobs=of_token))
            kept += 1
            if self.found_stop:
                break
        tokens = self.finish() if step.finish_reason is not None and not self.found_stop else self._release()
        if self.found_stop:
            step = replace(step, token_ids=step.token_ids[:kept], accepted=min(step.accepted, kept), finish_reason=STOP)
        return Released(step=step, tokens=tokens)

    def finish(self) -> tuple[OutputToken, ...]:
        """All tokens held back, once no more will come: what is left of a character shows as the decoder shows it."""
        if not self.found_stop:
            self._flush()
            self._certain += self._stops.flush()
        return self._release(is_last=True)

    def _take(self, token: _Waiting) -> None:
        if token.token_id in self._stop_token_ids:
            self._stop_token = token.token_id
            self._flush()  # what is left of a character is the text of the tokens before
            self._waiting.append(token)
        else:
            self._count += 1
            text = self._detokenizer.push(token.token_id)
            token.is_inside_character = self._detokenizer.num_held > 0
            self._waiting.append(token)
            if text:
                # Of a long run of bytes that are no text, the last tokens are held on.
                last_given = self._waiting[-1 - self._detokenizer.num_held]
                last_given.text, last_given.is_inside_character = text, False
                self._pass_on(text)

    def _flush(self) -> None:
        """Give the rest of the text to the last token that has a part in it."""
        text = self._detokenizer.flush()
        if text:
            self._waiting[-1].text = text
            self._pass_on(text)
        for token in self._waiting:
            token.is_inside_character = False

    def _pass_on(self, text: str) -> None:
        self._certain += self._stops.push(text, looking=self._count >= self._min_new_tokens)

    def _release(self, *, is_last: bool = False) -> tuple[OutputToken, ...]:
        """The longest run of waiting tokens whose text is certain; all of them once nothing more can come."""
        number = len(self._waiting) if is_last or self.found_stop else self._num_certain()
        return tuple(self._released(self._waiting.popleft()) for _ in range(number))

    def _num_certain(self) -> int:
        number, length = 0, 0
        for index, token in enumerate(self._waiting):
            length += len(token.text)
            if length > len(self._certain):
                break
            if not token.is_inside_character:
                number = index + 1
        return number

    def _released(self, token: _Waiting) -> OutputToken:
        text, self._certain = self._certain[: len(token.text)], self._certain[len(token.text) :]
        return OutputToken(token_id=token.token_id, text=text, drafted=token.drafted, logprobs=token.logprobs)


@dataclass(kw_only=True)
class _Waiting:
    """A token, the piece of text that ends with it, and whether its text is still to come, as it ends inside a character."""

    token_id: int
    drafted: bool
    logprobs: TokenLogprobs | None
    text: str = ""
    is_inside_character: bool = False
