"""The command `domino-deploy`: one file per command, loaded when it is called.

Nothing heavy is imported here, so `--help` answers at once.  How errors become messages and exit codes: `command.py`.
"""

from __future__ import annotations

import _thread
import errno
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from domino_deploy import __version__
from domino_deploy.cli.command import told_to_the_user
from domino_deploy.cli.console import Verbosity

# Command -> its line in `--help`, stated here so that listing the commands loads none of them.
COMMANDS = {
    "export": "Turn a drafter and its target into an ONNX bundle.",
    "verify": "Compare a bundle's graphs with PyTorch.",
    "build-engine": "Build TensorRT engines from a bundle.",
    "generate": "Generate text from a prompt, or chat (--chat), streamed.",
    "serve": "Serve a bundle to OpenAI's clients.",
    "bench": "Measure a bundle's speed-up, or a server's throughput.",
    "inspect": "Show what a bundle, a checkpoint or an ONNX file holds.",
    "regenerate": "Let the target answer training prompts.",
    "train": "Train a drafter for a target.",
    "doctor": "Tell what works here, and what is known to go wrong.",
}
# 128 + the signal, as shells report it
_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM
_AGAIN_SECONDS = 0.01


class LazyGroup(click.Group):
    """Imports `domino_deploy.cli.<command>` when that command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = name.replace("-", "_")
        return getattr(importlib.import_module(f"domino_deploy.cli.{module}"), module)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with told_to_the_user(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _termination_unwinds(), told_to_the_user(ctx):
                return super().invoke(ctx)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            where = "" if error.filename is None else f" at {error.filename}"
            raise click.ClickException(f"Expected room for what is written, found a full disk{where}. Free some and try again.") from error
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            ctx.exit(_INTERRUPTED)


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Makes SIGTERM an exit that cleans up on its way, as Ctrl-C does; by default it would leave half a bundle behind.

    Python drops what is raised in callbacks of weak references, of which torch's export has many: such a signal is sent once more.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before, report = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(_TERMINATED)), sys.unraisablehook

    is_over = False

    def kill_soon(number: int) -> None:
        time.sleep(_AGAIN_SECONDS)  # until the callback is left
        if not is_over:
            os.kill(os.getpid(), number)

    def send_again(dropped: sys.UnraisableHookArgs) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            again = signal.SIGINT
        elif isinstance(dropped.exc_value, SystemExit) and dropped.exc_value.code == _TERMINATED:
            again = signal.SIGTERM
        else:
            report(dropped)
            return
        # By a bare thread: the callback may have come in the middle of threading's own code.
        _thread.start_new_thread(kill_soon, (again,))

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        is_over = True
        sys.unraisablehook = report
        signal.signal(signal.SIGTERM, before)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "DOMINO_DEPLOY", "show_default": True},
)
@click.version_option(__version__, prog_name="domino-deploy")
@click.option("-q", "--quiet", is_flag=True, help="Results and errors only, no progress.")
@click.option("-v", "--verbose", is_flag=True, help="A line per step, also when stderr is not a terminal.")
@click.pass_context
def main(ctx: click.Context, *, quiet: bool, verbose: bool) -> None:
    """Domino speculative decoding in production: export, verify, run.

    \b
    Exit codes: 0 done; 1 a check or a run failed; 2 wrong usage; 3 something is not installed;
    4 a checkpoint, pair, bundle or engines that cannot be used; 130 interrupted; 143 terminated.
    Every option may also come from the environment: DOMINO_DEPLOY_<COMMAND>_<OPTION>.
    """
    if quiet and verbose:
        raise click.UsageError("Expected at most one of --quiet and --verbose, found both. Drop one.")
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        # A character that the terminal's encoding lacks is written as an escape; by default it would end the run.
        sys.stdout.reconfigure(errors="backslashreplace")
    ctx.obj = Verbosity.QUIET if quiet else Verbosity.VERBOSE if verbose else Verbosity.NORMAL
