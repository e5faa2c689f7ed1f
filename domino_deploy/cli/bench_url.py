"""`domino-deploy bench --url`: its options, its run, and what both ways of `bench` show alike."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.core import ParameterSource

from domino_deploy.bench import load, load_report
from domino_deploy.bench.client import Client
from domino_deploy.bench.load import LONGEST_TIMEOUT_SECONDS, Decoding, LoadSettings
from domino_deploy.bench.machine import this_machine
from domino_deploy.bench.report import Table, as_markdown
from domino_deploy.bench.tasks import select
from domino_deploy.cli.command import option_name
from domino_deploy.cli.console import echo_json, echo_table, progress
from domino_deploy.cli.ranges import AT_LEAST_0, AT_LEAST_1, FiniteRange
from domino_deploy.errors import MeasurementError, listed

_DEFAULT = LoadSettings()


def whole_numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Callback of an option that takes whole numbers from 1, separated by commas."""
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"Expected whole numbers of at least 1 separated by commas, such as 1,2,4, found {value!r:.80}.")
    return numbers


_URL_OPTIONS = (
    click.option("--url", metavar="URL", help="Measure this server instead of a bundle, e.g. http://127.0.0.1:8000."),
    click.option(
        "--concurrency",
        metavar="N,N,...",
        callback=whole_numbers,
        default=",".join(map(str, _DEFAULT.concurrency)),
        help="With --url: requests in flight, a level each.",
    ),
    click.option(
        "--requests",
        type=AT_LEAST_1,
        default=_DEFAULT.requests,
        help="With --url: requests of each level, the same in every one; prompts repeat if there are fewer.",
    ),
    click.option("--warm-up", type=AT_LEAST_0, default=_DEFAULT.warm_up_requests, help="With --url: requests before the first level."),
    click.option("--model", help="With --url: the model to ask for; by default the first that the server lists."),
    click.option("--api-key", envvar=["DOMINO_DEPLOY_BENCH_API_KEY", "OPENAI_API_KEY"], help="With --url: the server's key."),
    click.option("--plain", is_flag=True, help="With --url: ask a domino-deploy server to decode without speculation."),
    click.option(
        "--baseline",
        is_flag=True,
        help="With --url: ask a domino-deploy server for every level without speculation too, for their ratio.",
    ),
    click.option(
        "--timeout",
        type=FiniteRange(min=0, max=LONGEST_TIMEOUT_SECONDS, min_open=True),
        default=_DEFAULT.timeout_seconds,
        help="With --url: longest wait for more of an answer, seconds.",
    ),
)
_ONLY_BY_URL = {"concurrency", "requests", "warm_up", "model", "api_key", "plain", "baseline", "timeout"}
_ONLY_IN_PROCESS = {
    "num_speculative_tokens", "drafter", "no_prompt_lookup", "backend", "provider", "max_model_len", "threads",
}  # fmt: skip


def url_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """What measures a server."""
    for option in reversed(_URL_OPTIONS):
        command = option(command)
    return command


def check_flags(ctx: click.Context) -> None:
    """Hold what was given against what is measured: a bundle or a server.

    Raises:
        click.UsageError: both, neither, or options of the other.
    """
    bundle, url = ctx.params["bundle"], ctx.params["url"]
    if (bundle is None) == (url is None):
        found = "neither" if bundle is None else "both"
        raise click.UsageError(f"Expected either a BUNDLE or --url, found {found}. Name what is to be measured.")
    foreign = _ONLY_IN_PROCESS if url is not None else _ONLY_BY_URL
    # What stands in the environment is there for other runs too; only what was typed here is a contradiction.
    typed = [
        option_name(parameter)
        for parameter in ctx.command.params
        if parameter.name in foreign and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if typed:
        what = "a server (--url): its own flags decide these" if url is not None else "a bundle: these are for a server (--url)"
        raise click.UsageError(f"Expected no {', '.join(typed)} when measuring {what}. Drop them.")
    if ctx.params["plain"] and ctx.params["baseline"]:
        raise click.UsageError("Expected at most one of --plain and --baseline, which measures both ways, found both. Drop one.")


def bench_url(ctx: click.Context) -> None:
    """Measure the server at --url.

    Raises:
        RequestError: values out of range.
        MeasurementError: the server cannot be asked for its models, or not one request succeeded.
    """
    given = ctx.params
    settings = LoadSettings(
        concurrency=given["concurrency"],
        requests=given["requests"],
        warm_up_requests=given["warm_up"],
        prompts_per_kind=given["prompts_per_kind"],
        max_new_tokens=given["max_new_tokens"],
        temperature=given["temperature"],
        seed=given["seed"],
        is_raw=given["raw"],
        decoding=Decoding.PLAIN if given["plain"] else Decoding.BOTH if given["baseline"] else Decoding.SERVER,
        timeout_seconds=given["timeout"],
    )
    client = Client(given["url"], api_key=given["api_key"] or "", timeout_seconds=settings.timeout_seconds)
    selection = select(given["kinds"], given["prompts"], settings.prompts_per_kind)
    prompts = [prompt for prompt_set in selection.sets for prompt in prompt_set.prompts]
    with progress(ctx) as step:
        model = given["model"] or client.first_model()
        step("Warming up")
        measured = load.run(client, model, prompts, settings, on_level=lambda concurrency: step(f"Concurrency {concurrency}"))
    levels = load_report.levels_of(measured)
    if not any(level.succeeded for level in levels):
        intro = f"Expected answers from {given['url']}, found that every request failed:"
        raise MeasurementError(listed(intro, load_report.error_lines(levels), load_report.error_advice(levels)))
    made = load_report.LoadReport(
        turns=tuple(measured),
        url=given["url"],
        model=model,
        machine=this_machine(),
        settings={**settings.to_dict(), "kinds": [prompt_set.kind for prompt_set in selection.sets]},
        command=command_line(ctx),
    )
    if given["json"]:
        echo_json(made.to_dict())
    else:
        echo_report(list(load_report.load_tables(measured)), list(load_report.load_footnotes(made)), markdown=given["markdown"])


def echo_report(tables: Sequence[Table], notes: Sequence[str], *, markdown: bool) -> None:
    """Tables and notes, for a terminal or as the markdown of a README."""
    if markdown:
        click.echo(as_markdown(tables, notes), nl=False)
        return
    for table in tables:
        echo_table(table.columns, table.rows, title=table.title)
        click.echo()
    for note in notes:
        click.echo(note)


def command_line(ctx: click.Context) -> str:
    """The command line that gives this run, options from the environment written out; keys are left out."""
    words = ["domino-deploy", "bench"]
    for parameter in ctx.command.params:
        given = ctx.get_parameter_source(parameter.name or "") in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
        if not given or parameter.name == "api_key":
            continue
        value = ctx.params[parameter.name or ""]
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif value is True:
            words.append(option_name(parameter))
        elif isinstance(value, tuple) and not parameter.multiple:
            words += [option_name(parameter), ",".join(map(str, value))]
        else:
            words += [word for item in (value if isinstance(value, tuple) else (value,)) for word in (option_name(parameter), str(item))]
    return shlex.join(words)
