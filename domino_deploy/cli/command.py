"""What all commands share: how errors become messages and exit codes, in the words of whoever typed the command.

This is the only place where a DominoDeployError becomes a message and an exit code; an unexpected exception keeps its traceback.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource

from domino_deploy.errors import DominoDeployError, OutOfRangeError


class CommandFailure(click.ClickException):
    """A DominoDeployError on its way to stderr, with the exit code it asks for."""

    def __init__(self, error: DominoDeployError, message: str) -> None:
        super().__init__(message)
        self.exit_code = error.exit_code  # type: ignore[misc]  # click reads it from the instance, as its documentation says


class Command(click.Command):
    """A command whose errors are told by `told_to_the_user`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with told_to_the_user(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with told_to_the_user(ctx):
            return super().invoke(ctx)


@contextmanager
def told_to_the_user(ctx: click.Context) -> Iterator[None]:
    """Around a command's parsing and its work: errors of the package get their exit code; arguments out of range are told as the
    options that they come from, and options that were not typed as the environment variables that they come from."""
    try:
        yield
    except click.UsageError as error:
        message = error.format_message()
        variables = _variables(ctx, message)
        if not variables:
            raise
        raise click.UsageError(message + variables, error.ctx) from error
    except DominoDeployError as error:
        message = error.told(lambda name: _options(ctx.command).get(name, name)) if isinstance(error, OutOfRangeError) else str(error)
        raise CommandFailure(error, message + _variables(ctx, message)) from error


def _options(command: click.Command) -> dict[str, str]:
    """Parameter -> the option's first long name."""
    return {option.name or "": next((name for name in option.opts if name.startswith("--")), option.opts[0]) for option in command.params}


def _variables(ctx: click.Context, message: str) -> str:
    """A line for each option named in `message` whose value is an environment variable's."""
    lines = []
    for option in ctx.command.params:
        named = any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message) for name in (*option.opts, *option.secondary_opts))
        if named and ctx.get_parameter_source(option.name or "") is ParameterSource.ENVIRONMENT:
            lines.append(f"\n{option.opts[0]} was read from the environment variable {_variable(ctx, option)}.")
    return "".join(lines)


def _variable(ctx: click.Context, option: click.Parameter) -> str:
    """The first that is set, in click's order: those that the option states, then the one made from its name."""
    stated = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    made = f"{ctx.auto_envvar_prefix}_{(option.name or '').upper()}"
    return next((name for name in stated if os.environ.get(name)), made)
