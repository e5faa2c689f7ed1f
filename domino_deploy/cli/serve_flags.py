"""Options of `serve`, in the groups that its help shows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from domino_deploy.cli.backend_flags import backend_flags
from domino_deploy.cli.command import Command, made_variable
from domino_deploy.cli.ranges import AT_LEAST_0, AT_LEAST_1, FiniteRange, TokenCount
from domino_deploy.runtime.engine_settings import MAX_SEQUENCES, EngineSettings
from domino_deploy.runtime.session import DEFAULT_MAX_MODEL_LEN, DrafterChoice
from domino_deploy.server.logs import LogFormat
from domino_deploy.server.sampling_defaults import NAMES, GenerationConfig
from domino_deploy.server.settings import LEAST_SIZE_BYTES, LONGEST_DRAIN_SECONDS, MAX_PORT, ServerSettings, StatisticsLevel

_ENGINE = EngineSettings()
_SERVER = ServerSettings()
LOG_LEVELS = ("debug", "info", "warning", "error")


class KeyOption(click.Option):
    """Where keys come from: a variable that is set, but to nothing, is a secret that went missing, and must not open the server.

    Where the option is typed, the variable is not asked for.
    """

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        variable = made_variable(ctx, self)
        value = os.environ.get(variable)
        if value is not None and not value.strip():
            raise click.UsageError(
                f"Expected API keys by the environment variable {variable}, found it empty. Correct it, or unset it to ask for no key.", ctx
            )
        return super().resolve_envvar_value(ctx)


class _Keys(click.types.StringParamType):
    """Keys in a variable stand one per line, as in a file; by default white space would divide them, and a key with a space be two."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [line.strip() for line in rv.splitlines() if line.strip()]


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_GROUPS: Mapping[str, tuple[_Decorator, ...]] = {
    "Address and access": (
        click.option("--host", default=_SERVER.host, help="Address to listen on; 0.0.0.0 for all of this machine."),
        click.option("--port", type=click.IntRange(0, MAX_PORT), default=_SERVER.port, help="Port to listen on; 0 for any free one."),
        click.option(
            "--api-key",
            cls=KeyOption,
            type=_Keys(),
            multiple=True,
            metavar="KEY",
            help="Key that clients must send; may be given several times, in the environment variable one per line. "
            "Without any, none is asked for.",
        ),
        click.option("--api-key-file", cls=KeyOption, type=click.Path(path_type=Path), metavar="FILE", help="Further keys, one per line."),
        click.option(
            "--served-model-name",
            multiple=True,
            metavar="NAME",
            help="What clients call the model; may be given several times. By default the bundle folder's name.",
        ),
        click.option("--cors-origin", multiple=True, metavar="ORIGIN", help="Web origin whose pages may call the API; * for all."),
        click.option(
            "--allowed-host",
            multiple=True,
            metavar="NAME",
            help="Further name in the header Host that is answered to, * for any; matters on a loopback address without a key.",
        ),
        click.option("--no-page", is_flag=True, help="Leave out the page at /."),
    ),
    "Engine": (
        backend_flags,
        click.option(
            "--max-model-len",
            type=TokenCount(min=1),
            help=f"Longest prompt and answer together, tokens (32k: 32000, 32K: 32768); by default the target's, but not above "
            f"{DEFAULT_MAX_MODEL_LEN}.",
        ),
        click.option(
            "--max-num-seqs",
            type=click.IntRange(1, MAX_SEQUENCES),
            default=_ENGINE.max_sequences,
            help="Sequences decoded together by ort on the CPU; any other backend or provider serves one request at a time.",
        ),
        click.option(
            "--max-queue", type=AT_LEAST_0, default=_ENGINE.max_queued, help="Requests that may wait; more are answered with 429."
        ),
        click.option(
            "--prefill-rows", type=AT_LEAST_1, default=_ENGINE.prefill_rows, help="Most prompt tokens run between two cycles of the others."
        ),
        click.option("--threads", type=AT_LEAST_1, help="Threads per graph; by default one per physical core."),
    ),
    "Speculation": (
        click.option(
            "--drafter",
            type=click.Choice([choice.value for choice in DrafterChoice]),
            default=DrafterChoice.BUNDLE.value,
            help="Where proposals come from.",
        ),
        click.option("--no-speculation", is_flag=True, help="Plain decoding: the same as --drafter none."),
        click.option(
            "--num-speculative-tokens",
            type=AT_LEAST_0,
            default=_ENGINE.num_speculative_tokens,
            help="Most tokens drafted per cycle; by default the bundle's own number.",
        ),
        click.option("--fixed-width", is_flag=True, help="Always draft that many, whether it pays or not."),
        click.option(
            "--speculative-config",
            metavar="JSON",
            help='The same in vLLM\'s words: \'{"method": "domino", "num_speculative_tokens": 7}\'; method: domino, dflash or ngram.',
        ),
        click.option(
            "--per-request-spec-decode-metrics",
            type=click.Choice([level.value for level in StatisticsLevel]),
            default=_SERVER.statistics_level.value,
            help="What each answer says about its speculation.",
        ),
    ),
    "Requests": (
        click.option(
            "--request-timeout",
            type=FiniteRange(min=0),
            default=_SERVER.request_timeout_seconds,
            help="Seconds from a request's arrival to its last token; 0 for no limit.",
        ),
        click.option(
            "--max-body-bytes",
            type=click.IntRange(min=LEAST_SIZE_BYTES),
            default=_SERVER.max_body_bytes,
            help="Longest request body; longer ones are answered with 413.",
        ),
        click.option(
            "--chat-template-kwargs",
            metavar="JSON",
            help="Variables for the chat template where a request sets none: '{\"enable_thinking\": false}'.",
        ),
        click.option(
            "--generation-config",
            type=click.Choice([source.value for source in GenerationConfig]),
            default=GenerationConfig.AUTO.value,
            help="Sampling where a request does not say: auto, the model's generation_config.json, or none, temperature 1.",
        ),
        click.option(
            "--override-generation-config",
            metavar="JSON",
            help=f'Defaults above those: \'{{"temperature": 0.6, "top_p": 0.95}}\'; {", ".join(NAMES)}.',
        ),
        click.option(
            "--drain-seconds",
            type=FiniteRange(0, LONGEST_DRAIN_SECONDS),
            default=_SERVER.drain_seconds,
            help="After SIGTERM or Ctrl-C: how long running requests may go on.",
        ),
    ),
    "Metrics and logs": (
        click.option("--no-metrics", is_flag=True, help="Leave out /metrics."),
        click.option(
            "--log-format",
            type=click.Choice([form.value for form in LogFormat]),
            default=LogFormat.TEXT.value,
            help="Of the lines on stderr.",
        ),
        click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", help="Least level that is written."),
        click.option("--log-prompts", is_flag=True, help="Log the text of prompts and answers too."),
    ),
}


class GroupedCommand(Command):
    """A command whose help shows its options in the groups above."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        shown = {option.name: option.get_help_record(ctx) for option in options}
        for title, decorators in _GROUPS.items():
            records = [shown.pop(name) for name in _names(decorators) if shown.get(name)]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record])
        with formatter.section("Other options"):
            formatter.write_dl([record for record in shown.values() if record])


def serve_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """All options of `serve`."""
    for options in reversed(list(_GROUPS.values())):
        for option in reversed(options):
            command = option(command)
    return command


def _names(options: tuple[_Decorator, ...]) -> list[str]:
    """Names of the parameters that these decorators make, in order."""

    def holder() -> None: ...

    for option in reversed(options):
        option(holder)
    parameters: list[click.Parameter] = getattr(holder, "__click_params__", [])
    return [parameter.name for parameter in reversed(parameters) if parameter.name]
