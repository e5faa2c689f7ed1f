"""`generate --chat`: a conversation over the engine, which keeps the caches of one turn for the next.

On a terminal, what goes wrong is said and the conversation goes on.  From a pipe, a message that cannot be answered ends the command, since
all later ones build on it; a wrong line that begins with / is said, the others are answered, and the exit code tells.
"""

from __future__ import annotations

import itertools
import queue
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from domino_deploy.cli.closing_line import closing_line
from domino_deploy.cli.console import as_utf8, from_utf8, progress
from domino_deploy.cli.drafting import check_count, check_count_for
from domino_deploy.errors import DominoDeployError, RequestError, listed, shortened
from domino_deploy.runtime.engine import Engine, EngineSettings
from domino_deploy.runtime.protocols import Step
from domino_deploy.runtime.requests import ERROR, LENGTH, GenerationParams, Output, Request, RequestStatistics, check_prompt

PROMPT = "> "
COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/system TEXT": "the system message from now on; without TEXT, none",
    "/speculation on|off": "draft tokens, or decode plainly",
    "/stats": "what the last answer and the whole conversation took",
    "/exit": "end, as /quit, /bye, /q and Ctrl-D do",
}
_ENDS = ("/exit", "/quit", "/bye", "/q")

# Part of the model length that old turns are dropped for, so that an answer has room; less if less is asked for.
_ANSWER_SHARE = 0.25


def hold_chat(ctx: click.Context, bundle: Path, opening: Mapping[str, Any], params: GenerationParams, system: str | None) -> None:
    """Answer lines of standard input until they end.

    Args:
        ctx: the command's.
        bundle: the bundle's folder.
        opening: arguments of `Engine.open`.
        params: of every answer.
        system: the first system message.

    Raises:
        DominoDeployError: the bundle cannot be opened or, without a terminal, a message cannot be answered or a command be obeyed.
    """
    if sys.stdin is None:  # closed by whoever started this process
        raise click.UsageError("Expected messages on standard input, found it closed. Pipe them in, or run this on a terminal.")
    wanted = params.num_speculative_tokens
    check_count_for(bundle, opening["drafter"], wanted)
    settings = EngineSettings(max_sequences=1, num_speculative_tokens=wanted)
    with progress(ctx) as step:
        step(f"Opening {bundle}")
        engine = Engine.open(bundle, settings=settings, **opening)
    with engine:
        check_count(wanted, most=engine.max_speculative_tokens)  # engines may be built for fewer
        _Chat(engine, params, system).run()


@dataclass(kw_only=True)
class _Answer:
    """What came of one message."""

    text: str = ""
    steps: list[Step] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: str | None = None
    statistics: RequestStatistics | None = None


class _Chat:
    """The conversation so far, and the answers it cost."""

    def __init__(self, engine: Engine, params: GenerationParams, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self._system = system
        self._turns: list[tuple[str, str]] = []
        self._answers: list[_Answer] = []
        self._speculates = True
        self._numbers = itertools.count()
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> None:
        if self._is_terminal:
            _note("Ctrl-D ends, /help lists commands.")
        wrong = []
        for line in self._lines():
            is_command = line.startswith("/")
            try:
                if is_command:
                    if not self._obey(line):
                        break
                elif line.strip():
                    self._answer(line.strip())
            except DominoDeployError as error:
                if self._engine.failure is not None or not (self._is_terminal or is_command):
                    raise
                _note(str(error))
                if is_command:
                    wrong.append(f"{line!r:.60}")
        if wrong and not self._is_terminal:
            intro = f"Expected commands that can be obeyed, found {len(wrong)} that could not, while the other lines were answered:"
            raise RequestError(listed(intro, shortened(wrong, most=10), "Correct these lines; the reasons are above."))

    def _lines(self) -> Iterator[str]:
        if not self._is_terminal:
            for content in sys.stdin.buffer:
                yield from_utf8(content, "standard input").rstrip("\r\n")
            return
        import readline  # noqa: F401  lines can be edited and called back

        while True:
            try:
                yield as_utf8(self._typed(), "standard input")
            except EOFError:
                click.echo(err=True)
                return
            except KeyboardInterrupt:
                click.echo(err=True)
                _note("Ctrl-D or /exit ends the chat.")

    def _typed(self) -> str:
        if sys.stdout.isatty():
            return input(PROMPT)
        click.echo(PROMPT, nl=False, err=True)  # stdout takes the answers alone
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _obey(self, line: str) -> bool:
        """Whether the conversation goes on."""
        command, _, text = line.partition(" ")
        text = text.strip()
        if command in _ENDS:
            return False
        if command == "/help":
            _note("\n".join(f"{usage:<23}{what}" for usage, what in COMMANDS.items()))
            _note("Ctrl-C stops a running answer. A message that begins with / needs a space before it.")
        elif command == "/reset":
            self._turns.clear()
            _note("The conversation is forgotten.")
        elif command == "/system":
            self._system = text or None
            _note("The system message is set." if text else "There is no system message now.")
        elif command == "/speculation" and text in ("on", "off"):
            self._set_speculation(text == "on")
        elif command == "/stats":
            self._show_stats()
        else:
            raise RequestError(
                f"Expected a command, found {line!r:.60}. There are {', '.join(COMMANDS)}; "
                "a message that begins with / needs a space before it."
            )
        return True

    def _set_speculation(self, is_on: bool) -> None:
        if is_on and self._engine.max_speculative_tokens == 0:
            raise RequestError("Expected a drafter for speculation, found none. Leave out --no-speculation and --drafter none.")
        self._speculates = is_on
        _note("Tokens are drafted." if is_on else "Decoding is plain.")

    def _show_stats(self) -> None:
        if not self._answers:
            _note("No answer yet.")
            return
        last = self._answers[-1]
        found = last.statistics
        line = closing_line(last.steps, prefill_seconds=last.prefill_seconds, decode_seconds=last.decode_seconds)
        if found is not None:
            line += f"; {found.cached_tokens} of {found.prompt_tokens} prompt tokens were cached"
        tokens = sum(len(step.token_ids) for answer in self._answers for step in answer.steps)
        seconds = sum(answer.prefill_seconds + answer.decode_seconds for answer in self._answers)
        _note(f"last answer: {line}\nall {len(self._answers)} answer(s): {tokens} tokens in {seconds:.1f} s")

    def _answer(self, message: str) -> None:
        prompt_ids = self._fitting_prompt(message)
        answer = _Answer()
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        params = self._params if self._speculates else replace(self._params, num_speculative_tokens=0)
        request = Request(request_id=f"chat-{next(self._numbers)}", prompt_ids=prompt_ids, params=params, deliver=outputs.put)
        started = time.perf_counter()
        self._engine.submit(request)
        is_stopped = False
        while answer.finish_reason is None:
            try:
                _take(outputs.get(), answer, started)
            except KeyboardInterrupt:
                self._engine.cancel(request.request_id)
                if not self._is_terminal:
                    raise
                is_stopped = True
        click.echo()
        if is_stopped:
            _note("Stopped.")
        elif answer.finish_reason == LENGTH:
            _note("Cut at the longest length; --max-new-tokens and --max-model-len set it.")
        self._answers.append(answer)
        if answer.text:  # a question stopped before its answer is not part of what the next one builds on
            self._turns.append((message, answer.text))

    def _fitting_prompt(self, message: str) -> list[int]:
        """The conversation's tokens; its oldest turns are forgotten where it would leave too little room for an answer.

        Raises:
            RequestError: the chat template refuses it.
            CapacityError: the message is too long by itself.
        """
        most = self._engine.max_model_len
        room = min(self._params.max_new_tokens, max(1, int(most * _ANSWER_SHARE)))
        dropped = 0
        while True:
            prompt_ids = self._prompt_ids(self._turns[dropped:], message)
            if len(prompt_ids) + room <= most or dropped == len(self._turns):
                break
            dropped += 1
        check_prompt(prompt_ids, most, called="--max-model-len")
        if dropped:
            del self._turns[:dropped]
            _note(f"The conversation outgrew the model length of {most} tokens: its oldest {dropped} turn(s) are forgotten.")
        return prompt_ids

    def _prompt_ids(self, turns: list[tuple[str, str]], message: str) -> list[int]:
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        for asked, answered in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": message})
        tokenizer = self._engine.tokenizer
        return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


def _take(output: Output, answer: _Answer, started: float) -> None:
    """Show an output and add it to its answer.

    Raises:
        DominoDeployError and others: the engine failed.
    """
    if output.finish_reason == ERROR and output.error is not None:
        raise output.error
    click.echo(output.text, nl=False)
    answer.text += output.text
    seconds = time.perf_counter() - started
    if output.step is not None:
        if not answer.steps:
            answer.prefill_seconds = seconds
        answer.steps.append(output.step)
    answer.decode_seconds = max(0.0, seconds - answer.prefill_seconds)
    answer.finish_reason = output.finish_reason
    answer.statistics = output.statistics


def _note(text: str) -> None:
    """For the reader, not part of any answer."""
    click.echo(text, err=True)
