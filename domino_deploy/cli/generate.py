"""`domino-deploy generate`: one prompt, or a conversation, streamed to stdout; what it cost, on stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from domino_deploy.cli.backend_flags import backend_flags
from domino_deploy.cli.closing_line import closing_line
from domino_deploy.cli.command import Command, option_name
from domino_deploy.cli.console import Verbosity, as_utf8, from_utf8
from domino_deploy.cli.drafting import open_session
from domino_deploy.cli.ranges import AT_LEAST_0, AT_LEAST_1, MIN_P, SEED, TEMPERATURE, TOP_P
from domino_deploy.errors import RequestError
from domino_deploy.runtime.protocols import Step
from domino_deploy.runtime.requests import check_prompt
from domino_deploy.runtime.session import (
    DEFAULT_MAX_MODEL_LEN,
    Backend,
    DrafterChoice,
    GenerationParams,
    Provider,
    SamplingParams,
)

_SAMPLING = SamplingParams()
_GENERATION = GenerationParams()


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt", help="The prompt; without it, standard input is read.")
@click.option("--chat", is_flag=True, help="A conversation: every line of standard input is a message; /help lists commands.")
@click.option("--raw", is_flag=True, help="Take the prompt as it is, without the chat template.")
@click.option("--system", help="System message for the chat template.")
@click.option("--max-new-tokens", "--max-tokens", type=AT_LEAST_1, default=_GENERATION.max_new_tokens, help="Longest answer, tokens.")
@click.option("--temperature", type=TEMPERATURE, default=_SAMPLING.temperature, help="0 is greedy.")
@click.option("--top-k", type=AT_LEAST_0, default=_SAMPLING.top_k, help="Keep this many of the likeliest tokens; 0 keeps all.")
@click.option(
    "--top-p", type=TOP_P, default=_SAMPLING.top_p, help="Keep the likeliest tokens that together reach this probability; 1 keeps all."
)
@click.option(
    "--min-p", type=MIN_P, default=_SAMPLING.min_p, help="Keep tokens at least this fraction as likely as the likeliest; 0 keeps all."
)
@click.option("--seed", type=SEED, default=_SAMPLING.seed, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option(
    "--num-speculative-tokens",
    type=AT_LEAST_0,
    default=_GENERATION.num_speculative_tokens,
    help="Tokens drafted per cycle; by default the bundle's own number.",
)
@click.option(
    "--drafter",
    type=click.Choice([choice.value for choice in DrafterChoice]),
    default=DrafterChoice.BUNDLE.value,
    help="Where proposals come from.",
)
@click.option("--no-speculation", is_flag=True, help="Plain decoding: the same as --drafter none.")
@backend_flags
@click.option(
    "--max-model-len",
    type=AT_LEAST_1,
    help=f"Longest prompt and answer together, tokens; by default the target's, but not above {DEFAULT_MAX_MODEL_LEN}.",
)
@click.option("--threads", type=AT_LEAST_1, help="Threads per graph; by default one per physical core.")
@click.pass_context
def generate(
    ctx: click.Context,
    *,
    bundle: Path,
    prompt: str | None,
    chat: bool,
    raw: bool,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    num_speculative_tokens: int | None,
    drafter: str,
    no_speculation: bool,
    backend: str,
    provider: str,
    max_model_len: int | None,
    threads: int | None,
) -> None:
    """Generate text from a prompt, or chat (--chat), streamed.

    The text is token for token what the target alone would give; speculation only makes it faster. With --temperature,
    a --seed makes it repeatable.
    """
    if chat and (raw or prompt is not None):
        found = "--raw" if raw else "--prompt"
        raise click.UsageError(f"Expected --chat with messages on standard input and the chat template, found {found} too. Drop one.")
    if raw and system is not None:
        raise click.UsageError("Expected --system only with the chat template, found it with --raw. Drop one of the two.")
    if no_speculation and ctx.get_parameter_source("drafter") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("Expected at most one of --drafter and --no-speculation, found both. Drop one.")
    # Values are checked before the bundle is opened: a wrong flag costs no loading time.
    if not all(stop):
        raise click.UsageError("Expected text for --stop to end before, found an empty one. Leave it out.")
    stop = tuple(as_utf8(text, "--stop") for text in stop)
    params = GenerationParams(
        sampling=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        max_new_tokens=max_new_tokens,
        stop_strings=stop,
        num_speculative_tokens=num_speculative_tokens,
    )
    _warn_of_no_effect(ctx, params.sampling)
    system = None if system is None else as_utf8(system, "--system")
    choice = DrafterChoice.NONE if no_speculation else DrafterChoice(drafter)
    opening: dict[str, Any] = {
        "backend": Backend(backend),
        "provider": Provider(provider),
        "drafter": choice,
        "max_model_len": max_model_len,
        "threads": threads,
    }
    if chat:
        from domino_deploy.cli.chat import hold_chat  # the engine, which one prompt does without

        hold_chat(ctx, bundle, opening, params, system)
        return
    text = _prompt_text(prompt)
    with open_session(ctx, bundle, num_speculative_tokens, **opening) as session:
        prompt_ids = session.prompt_ids(text, chat=not raw, system=system)
        check_prompt(prompt_ids, session.target.capacity, called="--max-model-len")
        steps: list[Step] = []
        started = prefilled = time.perf_counter()
        for chunk in session.generate(prompt_ids, params):
            click.echo(chunk.text, nl=False)
            steps.append(chunk.step)
            if len(steps) == 1:
                prefilled = time.perf_counter()
        ended = time.perf_counter()
    click.echo()
    click.echo(closing_line(steps, prefill_seconds=prefilled - started, decode_seconds=ended - prefilled), err=True)


def _warn_of_no_effect(ctx: click.Context, sampling: SamplingParams) -> None:
    """Say which options choose among tokens where greedy decoding leaves no choice."""
    idle = [
        option_name(option)
        for option in ctx.command.params
        if option.name in ("top_k", "top_p", "min_p") and getattr(sampling, option.name) != getattr(_SAMPLING, option.name)
    ]
    if idle and sampling.temperature == 0 and ctx.obj is not Verbosity.QUIET:
        click.echo(
            f"Warning: expected a --temperature above 0 for {', '.join(idle)} to have an effect, found 0, which is greedy. Raise it.",
            err=True,
        )


def _prompt_text(prompt: str | None) -> str:
    if prompt is None:
        if sys.stdin is None or sys.stdin.isatty():  # None: closed by whoever started this process
            raise click.UsageError("Expected a prompt, found none. Give --prompt TEXT, or pipe the text in.")
        prompt = from_utf8(sys.stdin.buffer.read(), "standard input")
    else:
        prompt = as_utf8(prompt, "--prompt")
    if not prompt.strip():
        raise RequestError("Expected a prompt, found only white space. Give --prompt TEXT, or pipe the text in.")
    return prompt
