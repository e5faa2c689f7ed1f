"""`domino-deploy bench BUNDLE`: a bundle against plain decoding and prompt lookup, in one run on one loaded target."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from domino_deploy.bench import measure, report
from domino_deploy.bench.machine import this_machine, versions
from domino_deploy.bench.measure import Decode, Mode, Prompt
from domino_deploy.bench.settings import Settings
from domino_deploy.bench.tasks import KINDS, PromptSet, select
from domino_deploy.cli.backend_flags import backend_flags
from domino_deploy.cli.bench_url import bench_url, check_flags, command_line, echo_report, url_flags
from domino_deploy.cli.command import Command
from domino_deploy.cli.console import Verbosity, echo_json
from domino_deploy.cli.drafting import open_session
from domino_deploy.cli.ranges import AT_LEAST_1, SEED, TEMPERATURE
from domino_deploy.errors import CapacityError, VerificationError, listed
from domino_deploy.precision import Dtype
from domino_deploy.runtime.prompt_lookup import PromptLookupDrafter
from domino_deploy.runtime.protocols import Drafter
from domino_deploy.runtime.session import DEFAULT_MAX_MODEL_LEN, Backend, DrafterChoice, GenerationParams, Provider, Session

_DEFAULT = Settings()
_WARM_UP = "Count from one to twenty."


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@url_flags
@click.option(
    "--kinds", multiple=True, type=click.Choice(KINDS), help="Kind of prompts, may be given several times; by default all that are there."
)
@click.option(
    "--prompts",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='JSONL of your own with "prompt" or "turns"; its name is its kind.',
)
@click.option("--prompts-per-kind", type=AT_LEAST_1, default=_DEFAULT.prompts_per_kind, help="The first so many prompts of each kind.")
@click.option("--max-new-tokens", "--max-tokens", type=AT_LEAST_1, default=_DEFAULT.max_new_tokens, help="Longest response, tokens.")
@click.option(
    "--num-speculative-tokens",
    type=AT_LEAST_1,
    default=_DEFAULT.num_speculative_tokens,
    help="Tokens drafted per cycle; by default the bundle's own number.",
)
@click.option("--temperature", type=TEMPERATURE, default=_DEFAULT.temperature, help="0 is greedy.")
@click.option("--seed", type=SEED, default=_DEFAULT.seed, help="Of the sampling, the same for every mode.")
@click.option(
    "--drafter",
    type=click.Choice([DrafterChoice.BUNDLE.value, DrafterChoice.PROMPT_LOOKUP.value]),
    default=_DEFAULT.drafter.value,
    help="The drafter to measure.",
)
@click.option("--no-prompt-lookup", is_flag=True, help="Leave out the comparison with prompt lookup.")
@click.option("--raw", is_flag=True, help="Take prompts as they are, without the chat template.")
@backend_flags
@click.option(
    "--max-model-len",
    type=AT_LEAST_1,
    default=_DEFAULT.max_model_len,
    help=f"Longest prompt and answer together, tokens; by default the target's, but not above {DEFAULT_MAX_MODEL_LEN}.",
)
@click.option("--threads", type=AT_LEAST_1, default=_DEFAULT.threads, help="Threads per graph; by default one per physical core.")
@click.option("--json", is_flag=True, help="Everything as one JSON object.")
@click.option("--markdown", is_flag=True, help="Tables as the markdown of a README.")
@click.pass_context
def bench(
    ctx: click.Context,
    *,
    bundle: Path | None,
    kinds: tuple[str, ...],
    prompts: tuple[Path, ...],
    prompts_per_kind: int,
    max_new_tokens: int,
    num_speculative_tokens: int | None,
    temperature: float,
    seed: int,
    drafter: str,
    no_prompt_lookup: bool,
    raw: bool,
    backend: str,
    provider: str,
    max_model_len: int | None,
    threads: int | None,
    json: bool,
    markdown: bool,
    **url_options: Any,
) -> None:
    """Measure a bundle's speed-up, or a server's throughput.

    Every prompt is decoded plainly, with the drafter and by prompt lookup, in turns and on the same loaded target, after
    a warm-up. tau is the tokens committed per target pass; tok/s and speed-up are of decoding alone, the prefill left
    out. Exit code 1 when a greedy fp32 response is not token for token that of plain decoding.

    With --url, any server of OpenAI's API is measured as its clients see it: streamed requests, at one concurrency after another.
    Prompts repeat, so the server may have them in its cache; "cached prompt" in the tables says how much of them it had.
    """
    if json and markdown:
        raise click.UsageError("Expected at most one of --json and --markdown, found both. Drop one.")
    check_flags(ctx)
    if bundle is None:
        bench_url(ctx)
        return
    # Values and prompts are checked before the bundle is opened: a wrong flag costs no loading time.
    settings = Settings(
        prompts_per_kind=prompts_per_kind,
        max_new_tokens=max_new_tokens,
        num_speculative_tokens=num_speculative_tokens,
        temperature=temperature,
        seed=seed,
        drafter=DrafterChoice(drafter),
        has_prompt_lookup=not no_prompt_lookup and drafter != DrafterChoice.PROMPT_LOOKUP,
        is_raw=raw,
        backend=Backend(backend),
        provider=Provider(provider),
        max_model_len=max_model_len,
        threads=threads,
    )
    selection = select(kinds, prompts, settings.prompts_per_kind)
    opening = {"backend": settings.backend, "provider": settings.provider, "max_model_len": max_model_len, "threads": threads}
    with open_session(ctx, bundle, num_speculative_tokens, drafter=settings.drafter, **opening) as session:
        tokenised = _tokenised(session, selection.sets, settings)
        warm_up = session.prompt_ids(_WARM_UP, chat=not raw)
        if selection.left_out:
            click.echo(selection.left_out, err=True)
        with _bar(ctx, len(tokenised)) as on_prompt:
            results = measure.run(_decoders(session, settings), tokenised, warm_up=warm_up, on_prompt=on_prompt)
        is_exact = settings.temperature == 0 and session.bundle.precision.activations is Dtype.FLOAT32
    made = report.Report(
        overall=measure.figures(results),
        kinds=measure.figures_by_kind(results),
        machine=this_machine(),
        versions=versions(),
        settings=replace(settings, kinds=tuple(prompt_set.kind for prompt_set in selection.sets)).to_dict(),
        command=command_line(ctx),
    )
    _show(made, json=json, markdown=markdown)
    _judge(made, is_exact=is_exact)


def _tokenised(session: Session, sets: Sequence[PromptSet], settings: Settings) -> list[Prompt]:
    """All prompts as token ids.

    Raises:
        CapacityError: prompts that leave no room for a whole response, which would end some responses early.
    """
    prompts = [
        Prompt(kind=prompt_set.kind, index=index, token_ids=tuple(session.prompt_ids(text, chat=not settings.is_raw)))
        for prompt_set in sets
        for index, text in enumerate(prompt_set.prompts)
    ]
    capacity = session.target.capacity
    problems = [
        f"{prompt.kind}, prompt {prompt.index}: {len(prompt.token_ids)} tokens"
        for prompt in prompts
        if len(prompt.token_ids) + settings.max_new_tokens > capacity
    ]
    if problems:
        intro = f"Expected prompts that leave room for {settings.max_new_tokens} tokens in a model length of {capacity}, found longer ones:"
        raise CapacityError(listed(intro, problems, "Choose a smaller --max-new-tokens, a larger --max-model-len or other prompts."))
    return prompts


def _decoders(session: Session, settings: Settings) -> dict[Mode, Decode]:
    """All modes on the session's one target, through the same loop."""

    def decoder(drafter: Drafter | None, params: GenerationParams) -> Decode:
        beside = Session(session.bundle, session.tokenizer, session.target, drafter)
        return lambda prompt_ids: beside.steps(prompt_ids, params)

    decoders = {
        Mode.PLAIN: decoder(None, settings.plain_generation),
        Mode.SPECULATIVE: decoder(session.drafter, settings.generation),
    }
    if settings.has_prompt_lookup:
        lookup = PromptLookupDrafter()
        asked = settings.num_speculative_tokens
        params = replace(settings.generation, num_speculative_tokens=None if asked is None else min(asked, lookup.max_proposals))
        decoders[Mode.PROMPT_LOOKUP] = decoder(lookup, params)
    return decoders


def _show(made: report.Report, *, json: bool, markdown: bool) -> None:
    if json:
        echo_json(made.to_dict())
    else:
        echo_report(report.tables(made), list(report.footnotes(made)), markdown=markdown)


def _judge(made: report.Report, *, is_exact: bool) -> None:
    """Refuse a run whose greedy fp32 responses differ; elsewhere rounding may decide a near-tie, so only say so.

    Raises:
        VerificationError: speculation changed a response.
    """
    lines = report.differences(made.overall.differences)
    if lines and is_exact:
        advice = "Speculation must not change a response: check the bundle with domino-deploy verify."
        raise VerificationError(listed(f"Expected every response to be plain decoding's, found {len(lines)} that differ:", lines, advice))
    for line in lines:
        click.echo(f"Note: {line}", err=True)


@contextmanager
def _bar(ctx: click.Context, total: int) -> Iterator[Callable[[Prompt], None]]:
    """A function that is told each prompt as it begins; on a terminal it moves a bar on stderr."""
    done = itertools.count()
    verbosity: Verbosity = ctx.obj
    if verbosity is Verbosity.VERBOSE:
        yield lambda prompt: click.echo(f"{next(done) + 1} of {total}: {prompt.kind}, prompt {prompt.index}", err=True)
    elif verbosity is Verbosity.NORMAL and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as display:
            task = display.add_task("Warming up", total=total)
            yield lambda prompt: display.update(task, description=prompt.kind, completed=next(done))
    else:
        yield lambda prompt: None
