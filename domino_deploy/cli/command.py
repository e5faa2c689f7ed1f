"""What all commands share: how errors become messages and exit codes, in the words of whoever typed the command.

This is the only place where a DominoDeployError becomes a message and an exit code; an unexpected exception keeps its traceback.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
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
    """A command whose errors are told by `told_to_the_user`.

    Args:
        elsewhere: options that this command does not have, but programs that its users may come from: a sentence for who types one.
            click would guess by likeness alone, and mislead.
    """

    def __init__(self, *arguments: Any, elsewhere: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._elsewhere = elsewhere or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = tuple(args)  # click takes its arguments out of the list
        with told_to_the_user(ctx):
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                name = self._known_elsewhere(error.option_name, typed)
                if name is None:
                    raise
                message = f"Expected an option of this command, found {name}. {self._elsewhere[name]}"
                raise click.UsageError(message, ctx) from error

    def _known_elsewhere(self, name: str, typed: Sequence[str]) -> str | None:
        """The option as it was typed: click cuts -np down to -n, and -hf to -f behind our -h; vLLM takes _ for -."""
        for argument in typed:
            option = argument.partition("=")[0].replace("_", "-")
            is_cut = len(name) == 2 and option[:2] != "--" and name[1] in option
            if option in self._elsewhere and (argument.startswith(name) or is_cut):
                return option
        return None

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
        options = _options(ctx.command)
        message = error.told(lambda name: options.get(name, name)) if isinstance(error, OutOfRangeError) else str(error)
        raise CommandFailure(error, message + _variables(ctx, message)) from error


def option_name(option: click.Parameter) -> str:
    """What a reader is told: the first long name, or the first of a short one."""
    return next((name for name in option.opts if name.startswith("--")), option.opts[0])


def _options(command: click.Command) -> dict[str, str]:
    """Argument of a function -> the option that it comes from; what an option gathers, given several times, may have its plural."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    plurals = {f"{option.name}s": option_name(option) for option in options if option.multiple}
    return plurals | {option.name or "": option_name(option) for option in options}


def _variables(ctx: click.Context, message: str) -> str:
    """A line for each option named in `message` whose value is an environment variable's."""
    lines = []
    for option in ctx.command.params:
        named = any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message) for name in (*option.opts, *option.secondary_opts))
        if named and ctx.get_parameter_source(option.name or "") is ParameterSource.ENVIRONMENT:
            lines.append(f"\n{option_name(option)} was read from the environment variable {_variable(ctx, option)}.")
    return "".join(lines)


def _variable(ctx: click.Context, option: click.Parameter) -> str:
    """The first that is set, in click's order: those that the option states, then the one made from its name."""
    stated = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    return next((name for name in stated if os.environ.get(name)), made_variable(ctx, option))


def made_variable(ctx: click.Context, option: click.Parameter) -> str:
    """The environment variable that click makes from an option's name."""
    return f"{ctx.auto_envvar_prefix}_{(option.name or '').upper()}"


def unknown_variables(ctx: click.Context) -> list[str]:
    """A sentence for each environment variable that is named as this command's are and belongs to none of its options."""
    known = {made_variable(ctx, option) for option in ctx.command.get_params(ctx) if isinstance(option, click.Option)}
    prefix = f"{ctx.auto_envvar_prefix}_"
    told = []
    for name in sorted(os.environ):
        if name.startswith(prefix) and name not in known:
            near = get_close_matches(name.removeprefix(prefix), [other.removeprefix(prefix) for other in known], n=1)
            advice = f"{prefix}{near[0]} may have been meant" if near else "Unset it"
            told.append(f"Expected environment variables of options alone, found {name}, which is ignored. {advice}.")
    return told
