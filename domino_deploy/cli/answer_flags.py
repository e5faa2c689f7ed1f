"""Options of the commands that let a target answer prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from domino_deploy.cli.ranges import AT_LEAST_1
from domino_deploy.training.answer_options import Answering

_DEFAULT = Answering()
_OPTIONS = (
    click.option("--target", required=True, metavar="TARGET", help="Target checkpoint: a folder or a hub id."),
    click.option("--target-revision", help="Hub revision of the target."),
    click.option("--max-prompt-tokens", type=AT_LEAST_1, default=_DEFAULT.max_prompt_tokens, help="Longer prompts are left out."),
    click.option("--max-new-tokens", "--max-tokens", type=click.IntRange(min=2), default=_DEFAULT.max_new_tokens, help="Longest response."),
    click.option("--batch-size", type=AT_LEAST_1, default=_DEFAULT.batch_size, help="Responses decoded together."),
    click.option(
        "--chat-template-kwargs", metavar="JSON", help="Variables for the target's chat template: '{\"enable_thinking\": false}'."
    ),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="auto: a GPU if there is one."),
)


def answer_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """The target, what it may answer and where it runs."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
