"""`generate --chat`: from a pipe, on a pseudo-terminal, and its refusals."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from domino_deploy.cli import main
from domino_deploy.runtime.engine import Engine
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.session import Session

TOKENS = 12
WAIT_SECONDS = 120.0


def chat(bundle: Path, *lines: str, flags: Sequence[str] = ()) -> Result:
    arguments = ["generate", str(bundle), "--chat", "--max-new-tokens", str(TOKENS), *flags]
    done = CliRunner().invoke(main, arguments, input="".join(f"{line}\n" for line in lines))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def answers(bundle: Path, questions: Sequence[str], *, system: str | None = None) -> list[str]:
    """What a session says to each of them, with everything before as its history."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    with Session.open(bundle) as session:
        for question in questions:
            messages.append({"role": "user", "content": question})
            prompt_ids = session.tokenizer.encode(session.tokenizer.render_chat(messages), add_special_tokens=False)
            found.append("".join(chunk.text for chunk in session.generate(prompt_ids, GenerationParams(max_new_tokens=TOKENS))))
            messages.append({"role": "assistant", "content": found[-1]})
    return found


def as_lines(found: Sequence[str]) -> str:
    return "".join(f"{answer}\n" for answer in found)


def test_every_line_is_answered_with_all_turns_before_it(tiny_bundle: Path) -> None:
    questions = ["Count to ten.", "And on to twelve?", "Why?"]
    done = chat(tiny_bundle, *questions)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == as_lines(answers(tiny_bundle, questions))
    # A question alone is answered otherwise, or the test would prove nothing.
    assert answers(tiny_bundle, questions)[1] != answers(tiny_bundle, questions[1:])[0]


@pytest.mark.parametrize("flags", [["--no-speculation"], ["--drafter", "prompt-lookup"], ["--backend", "eager"]], ids=" ".join)
def test_the_answers_do_not_depend_on_how_they_are_sped_up(flags: list[str], tiny_bundle: Path) -> None:
    questions = ["Count to ten.", "And on to twelve?"]
    assert chat(tiny_bundle, *questions, flags=flags).stdout == as_lines(answers(tiny_bundle, questions))


def test_empty_lines_are_no_messages_and_a_space_makes_a_slash_one(tiny_bundle: Path) -> None:
    done = chat(tiny_bundle, "", "   ", " /etc is a folder.")
    assert done.stdout == as_lines(answers(tiny_bundle, ["/etc is a folder."]))


def test_reset_forgets_the_turns_and_exit_ends(tiny_bundle: Path) -> None:
    done = chat(tiny_bundle, "Count to ten.", "/reset", "Why?", "/exit", "Never asked.")
    assert (done.exit_code, done.stdout) == (0, as_lines([*answers(tiny_bundle, ["Count to ten."]), *answers(tiny_bundle, ["Why?"])]))
    assert "The conversation is forgotten." in done.stderr


@pytest.mark.parametrize("end", ["/quit", "/bye", "/q"])
def test_other_words_for_exit_end_it_too(end: str, tiny_bundle: Path) -> None:
    done = chat(tiny_bundle, end, "Never asked.")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_a_wrong_command_is_told_all_that_there_are_and_help_explains_them(tiny_bundle: Path) -> None:
    wrong, helped = chat(tiny_bundle, "/quiet").stderr, chat(tiny_bundle, "/help").stderr
    for command in ("/help", "/reset", "/system TEXT", "/speculation on|off", "/stats", "/exit"):
        assert command in wrong
        assert any(line.startswith(f"{command} ") for line in helped.splitlines())
    assert "/quit, /bye, /q" in helped


def test_the_system_message_is_set_and_taken_back(tiny_bundle: Path) -> None:
    expected = answers(tiny_bundle, ["Why?"], system="Be brief.")
    assert expected != answers(tiny_bundle, ["Why?"])
    assert chat(tiny_bundle, "Why?", flags=["--system", "Be brief."]).stdout == as_lines(expected)
    done = chat(tiny_bundle, "/system Be brief.", "Why?", "/reset", "/system", "Why?")
    assert done.stdout == as_lines([*expected, *answers(tiny_bundle, ["Why?"])])


def test_speculation_off_proposes_nothing_and_changes_no_answer(tiny_bundle: Path) -> None:
    questions = ["Count to ten.", "Why?"]
    done = chat(tiny_bundle, "/speculation off", questions[0], "/stats", "/speculation on", questions[1], "/stats")
    assert done.stdout == as_lines(answers(tiny_bundle, questions))
    first, second = (line for line in done.stderr.splitlines() if line.startswith("last answer"))
    assert "drafted" not in first
    assert f"{TOKENS} tokens; prefill" in second


def test_stats_tell_what_the_next_turn_found_in_the_cache(tiny_bundle: Path) -> None:
    done = chat(tiny_bundle, "/stats", "Count to ten.", "/stats", "Why?", "/stats")
    assert done.stderr.startswith("No answer yet.")
    found = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) prompt tokens were cached", done.stderr)]
    (first_cached, first_prompt), (cached, prompt) = found
    assert first_cached == 0
    assert first_prompt <= cached < prompt  # at least the whole first prompt
    assert f"all 2 answer(s): {2 * TOKENS} tokens in" in done.stderr


def test_turns_that_do_not_fit_any_more_are_forgotten_and_it_is_said(tiny_bundle: Path) -> None:
    questions = [f"Count from {number} to ten, please." for number in range(3)]
    with Session.open(tiny_bundle) as session:
        one_turn = len(session.prompt_ids(questions[0])) + TOKENS
    done = chat(tiny_bundle, *questions, flags=["--max-model-len", str(one_turn + 4)])
    assert done.stdout == as_lines([answers(tiny_bundle, [question])[0] for question in questions])
    assert done.stderr.count("its oldest 1 turn(s) are forgotten") == 2


def test_a_message_that_can_never_fit_ends_a_piped_chat(tiny_bundle: Path) -> None:
    done = chat(tiny_bundle, "word " * 100, flags=["--max-model-len", "64"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "at most 63 tokens, the model length 64 without one for the answer" in done.stderr
    assert "start with a larger --max-model-len" in done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sistem x", "Expected a command, found '/sistem x'"),
        ("/speculation maybe", "Expected a command"),
        ("/speculation on", "Expected a drafter"),
    ],
)
def test_a_wrong_command_is_refused(line: str, words: str, tiny_bundle: Path) -> None:
    done = chat(tiny_bundle, line, flags=["--no-speculation"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(words)


@pytest.mark.parametrize("end", [(), ("/exit",)], ids=["end of file", "exit"])
def test_a_wrong_command_in_a_pipe_takes_no_other_line_with_it(end: tuple[str, ...], tiny_bundle: Path) -> None:
    done = chat(tiny_bundle, "Count to ten.", "/sistem x", "Why?", *end)
    assert (done.exit_code, done.stdout) == (2, as_lines(answers(tiny_bundle, ["Count to ten.", "Why?"])))
    assert done.stderr.endswith("other lines were answered:\n  - '/sistem x'\nCorrect these lines; the reasons are above.\n")


@pytest.mark.parametrize("flags", [["--prompt", "x"], ["--raw"]], ids=" ".join)
def test_flags_that_contradict_are_refused_before_anything_opens(flags: list[str]) -> None:
    done = chat(Path("nowhere"), flags=flags)
    assert done.exit_code == 2
    assert flags[0] in done.stderr


@pytest.mark.parametrize("drafter", ["bundle", "prompt-lookup", "none"])
def test_more_tokens_than_the_drafter_proposes_are_refused_before_anything_is_loaded(
    tiny_bundle: Path, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "open", lambda *bundle, **choices: pytest.fail("it was loaded"))
    done = chat(tiny_bundle, "x", flags=["--drafter", drafter, "--num-speculative-tokens", "99"])
    assert done.exit_code == 2
    assert "found 99" in done.stderr


def test_so_are_more_than_the_engines_were_built_for_and_the_engine_is_closed(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    real_open, real_close = Engine.open, Engine.close

    def open_for_one_token(bundle: Path, **choices: Any) -> Engine:
        engine = real_open(bundle, **choices)
        engine.max_speculative_tokens = 1
        return engine

    monkeypatch.setattr(Engine, "open", open_for_one_token)
    monkeypatch.setattr(Engine, "close", lambda engine: (real_close(engine), closed.append(engine)))
    done = chat(tiny_bundle, "x", flags=["--num-speculative-tokens", "2"])
    assert (done.exit_code, len(closed)) == (2, 1)
    assert "--num-speculative-tokens must lie in [0, 1] for this drafter, found 2" in done.stderr


def test_bytes_that_are_no_text_are_refused(tiny_bundle: Path) -> None:
    done = CliRunner().invoke(main, ["generate", str(tiny_bundle), "--chat"], input=b"caf\xe9\n")
    assert done.exit_code == 2
    assert "UTF-8 from standard input" in done.stderr


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], leader: int) -> None:
        self.process = process
        self._leader = leader
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def read_until(self, text: str, *, meanwhile: Callable[[], None] = lambda: None) -> str:
        """What came up to and with `text`, since the last call; `meanwhile` is called every few seconds until then, first at once."""
        deadline, again = time.monotonic() + WAIT_SECONDS, time.monotonic()
        while text not in self._seen:
            now = time.monotonic()
            assert now < deadline, f"{text!r} does not come: {self._seen!r}"
            if now >= again:
                meanwhile()
                again = now + 5.0
            if select.select([self._leader], [], [], 0.2)[0]:
                try:
                    self._seen += os.read(self._leader, 4096).decode(errors="replace")
                except OSError:  # what a pseudo-terminal gives once the other end is closed
                    raise AssertionError(f"{text!r} did not come: {self._seen!r}") from None
        found, _, self._seen = self._seen.partition(text)
        return found + text

    def interrupt(self) -> None:
        """What the terminal's driver does for Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


@contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    """A command of Python on a pseudo-terminal."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    # A shell starts background jobs with SIGINT ignored, and what they start inherits that.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        [sys.executable, *command], stdin=follower, stdout=follower, stderr=follower, env=environment, preexec_fn=heard
    )
    os.close(follower)
    try:
        yield Terminal(process, leader)
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_on_a_terminal_it_asks_answers_and_ends_with_ctrl_d(tiny_bundle: Path) -> None:
    (expected,) = answers(tiny_bundle, ["Count to ten."])
    flags = ("--quiet", "generate", str(tiny_bundle), "--chat", "--max-new-tokens", str(TOKENS))
    with terminal("-m", "domino_deploy.cli", *flags) as opened:
        opened.read_until("> ")
        opened.type("Count to ten.\n")
        shown = opened.read_until("> ")
        assert "".join(expected.split()) in "".join(shown.split())  # a terminal's own line ends aside
        opened.type("/nonsense\n")
        assert "Expected a command" in opened.read_until("> ")  # said, and it goes on
        # Again if need be: one that comes between the prompt and the waiting for keys is noticed with the next key only.
        opened.read_until("Ctrl-D or /exit ends the chat.", meanwhile=opened.interrupt)
        opened.read_until("> ")
        opened.type("\x04")
        assert opened.process.wait(WAIT_SECONDS) == 0


# Ctrl-C comes behind the third step of the answer, whatever the speed of the machine.
INTERRUPTED_CHAT = """
import os, signal, sys
from domino_deploy.cli import chat, main

shown = chat._take

def take(output, answer, started):
    shown(output, answer, started)
    if len(answer.steps) == 3 and not answer.finish_reason:
        os.kill(os.getpid(), signal.SIGINT)

chat._take = take
main(["--quiet", "generate", sys.argv[1], "--chat", "--max-new-tokens", "400"])
"""


def test_ctrl_c_stops_the_running_answer_alone(tiny_bundle: Path) -> None:
    with terminal("-c", INTERRUPTED_CHAT, str(tiny_bundle)) as opened:
        opened.read_until("> ")
        opened.type("Count to ten.\n")
        opened.read_until("Stopped.")
        opened.read_until("> ")
        opened.type("/stats\n")
        tokens = re.search(r"last answer: (\d+) tokens", opened.read_until("> "))
        assert tokens is not None
        assert 3 <= int(tokens[1]) < 400
        opened.type("/exit\n")
        assert opened.process.wait(WAIT_SECONDS) == 0
