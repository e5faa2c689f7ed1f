"""`domino-deploy serve`: a bundle behind an OpenAI-compatible API."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from domino_deploy.api_keys import KEY_CHARACTERS, is_key
from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.cli.command import unknown_variables
from domino_deploy.cli.console import Verbosity, as_bytes, from_utf8, json_flag, progress, template_variables
from domino_deploy.cli.drafting import most_proposals
from domino_deploy.cli.extras import needs
from domino_deploy.cli.inspect_facts import bundle_parts
from domino_deploy.cli.other_servers import LLAMA_SERVER, VLLM, elsewhere
from domino_deploy.cli.serve_flags import GroupedCommand, serve_flags
from domino_deploy.config import DrafterKind
from domino_deploy.errors import RequestError, listed
from domino_deploy.memory_plan import Pair, plan_memory
from domino_deploy.resources import free_memory
from domino_deploy.runtime.engine import Engine
from domino_deploy.runtime.engine_settings import EngineSettings
from domino_deploy.runtime.opening import check_provider, checked_capacity, serves_together
from domino_deploy.runtime.prompt_lookup import NGRAM_SIZES
from domino_deploy.runtime.session import Backend, DrafterChoice, Provider
from domino_deploy.server.logs import LogFormat, configure_logging
from domino_deploy.server.sampling_defaults import GenerationConfig, checked_override, described, sampling_defaults
from domino_deploy.server.settings import ServerSettings, StatisticsLevel
from domino_deploy.template_variables import differing, shown, trained_with

_LOG = logging.getLogger(__name__)
_NGRAM = "ngram"  # vLLM's word for prompt lookup
# vLLM's words for how many tokens prompt lookup matches; here it is fixed.
_NGRAM_LIMITS = {"prompt_lookup_max": max(NGRAM_SIZES), "prompt_lookup_min": min(NGRAM_SIZES)}
_SOURCES = {DrafterChoice.BUNDLE: "the drafter", DrafterChoice.PROMPT_LOOKUP: "prompt lookup", DrafterChoice.NONE: "plain decoding"}


@click.command(cls=GroupedCommand, elsewhere=elsewhere(("vLLM", VLLM), ("llama-server", LLAMA_SERVER)))
@click.argument("bundle", type=click.Path(path_type=Path))
@serve_flags
@click.pass_context
def serve(ctx: click.Context, *, bundle: Path, **flags: Any) -> None:
    """Serve a bundle to OpenAI's clients.

    Prints what it will run, then the base URL once it takes requests. Every answer is what the target alone would give.
    SIGTERM and Ctrl-C let running requests finish first (exit code 0); a second one ends it at once.
    """
    with needs("serve"):
        from domino_deploy.server.app import create_app
        from domino_deploy.server.metrics import Metrics
        from domino_deploy.server.run import base_url, bound_socket, run
    # Values are checked before the bundle is opened, the port is taken before the models are loaded: what fails, fails at once.
    settings = _server_settings(flags)
    override = checked_override(json_flag(flags["override_generation_config"] or "{}", "--override-generation-config"))
    backend, provider = Backend(flags["backend"]), Provider(flags["provider"])
    check_provider(backend, provider)
    opened = open_bundle(bundle)
    settings = replace(settings, sampling=sampling_defaults(opened, GenerationConfig(flags["generation_config"]), override))
    trained = trained_with(opened)
    drafter, num_speculative_tokens = _speculation(ctx, flags, opened)
    if drafter is DrafterChoice.BUNDLE:
        settings = replace(settings, trained_with=trained)
    runs_on = f"{backend}, {provider}" if backend is Backend.ORT else str(backend)
    is_together = serves_together(backend, provider)
    context = checked_capacity(opened, backend, flags["max_model_len"], flags["threads"])
    engine_settings = EngineSettings(
        max_sequences=flags["max_num_seqs"] if is_together else 1,
        max_queued=flags["max_queue"],
        prefill_rows=flags["prefill_rows"],
        num_speculative_tokens=num_speculative_tokens,
        adaptive=not flags["fixed_width"],
    )
    log_format = LogFormat(flags["log_format"])
    listening = bound_socket(settings.host, settings.port)
    url = base_url(listening, settings.host)
    # From here on stderr has nothing but lines of the log.
    configure_logging(log_format, flags["log_level"])
    for sentence in unknown_variables(ctx):
        _LOG.warning(sentence)
    variables = {**trained, **settings.chat_template_kwargs}
    for sentence in differing(settings.trained_with, variables):
        _LOG.warning("%s; drafts are worse for it. Leave it out of --chat-template-kwargs.", sentence)
    lines = _plan(opened, context, settings, engine_settings, drafter, variables, runs_on=runs_on, is_together=is_together)
    if ctx.obj is not Verbosity.QUIET:
        click.echo("\n".join(lines))
    if ctx.get_parameter_source("max_num_seqs") is not ParameterSource.DEFAULT:
        _warn_of_cut("--max-num-seqs", flags["max_num_seqs"], engine_settings.max_sequences, f"{runs_on} serves")
    metrics = Metrics(settings.served_model_names[0] if settings.served_model_names else opened.path.resolve().name)
    with listening:
        with nullcontext(_LOG.info) if log_format is LogFormat.JSON else progress(ctx) as step:
            step(f"Opening {bundle}")
            engine = Engine.open(
                bundle,
                backend=backend,
                provider=provider,
                drafter=drafter,
                max_model_len=flags["max_model_len"],
                threads=flags["threads"],
                settings=engine_settings,
                observer=metrics,
            )
        flag = "--num-speculative-tokens" if flags["speculative_config"] is None else "--speculative-config's number of tokens"
        _warn_of_cut(flag, num_speculative_tokens, engine.max_speculative_tokens, f"{_SOURCES[drafter]} drafts")
        metrics.watch(engine, provider=provider if backend is Backend.ORT else backend, drafter=drafter)
        app = create_app(engine, settings, metrics)
        names = ", ".join(app.state.server.model_names)
        ctx.exit(run(app, listening, announce=lambda: click.echo(f"Serving {names} at {url}")))


def _server_settings(flags: Mapping[str, Any]) -> ServerSettings:
    return ServerSettings(
        host=flags["host"],
        port=flags["port"],
        api_keys=(*flags["api_key"], *_keys_in(flags["api_key_file"])),
        served_model_names=flags["served_model_name"],
        cors_origins=flags["cors_origin"],
        allowed_hosts=flags["allowed_host"],
        max_body_bytes=flags["max_body_bytes"],
        request_timeout_seconds=flags["request_timeout"] or None,
        drain_seconds=flags["drain_seconds"],
        statistics_level=StatisticsLevel(flags["per_request_spec_decode_metrics"]),
        chat_template_kwargs=template_variables(flags["chat_template_kwargs"]),
        has_metrics=not flags["no_metrics"],
        has_page=not flags["no_page"],
        logs_prompts=flags["log_prompts"],
    )


def _keys_in(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RequestError(f"Expected API keys in {file}, found it unreadable: {error.strerror}. Correct --api-key-file.") from error
    keys = [line.strip() for line in from_utf8(content, str(file)).splitlines() if line.strip()]
    bad = sum(not is_key(key) for key in keys)
    if bad:
        raise RequestError(
            f"Expected API keys of {KEY_CHARACTERS} in {file}, one per line, found {bad} of {len(keys)} that are not. "
            "Correct --api-key-file."
        )
    if not keys:  # an empty file must not mean an open server
        raise RequestError(f"Expected API keys in {file}, one per line, found none. Write at least one, or leave --api-key-file out.")
    return keys


def _speculation(ctx: click.Context, flags: Mapping[str, Any], bundle: Bundle) -> tuple[DrafterChoice, int | None]:
    """Where proposals come from and how many at most, from our flags or from vLLM's one."""
    asked = {
        name
        for name in ("drafter", "no_speculation", "num_speculative_tokens", "speculative_config")
        # A flag that the environment sets to false asks for nothing.
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT and flags[name] is not False
    }
    if {"drafter", "no_speculation"} <= asked:
        raise click.UsageError("Expected at most one of --drafter and --no-speculation, found both. Drop one.")
    if flags["speculative_config"] is None:
        return DrafterChoice.NONE if flags["no_speculation"] else DrafterChoice(flags["drafter"]), flags["num_speculative_tokens"]
    others = sorted(f"--{name.replace('_', '-')}" for name in asked - {"speculative_config"})
    if others:
        raise click.UsageError(f"Expected --speculative-config alone, found it with {', '.join(others)}. Drop one or the other.")
    return _from_vllm(flags["speculative_config"], bundle.drafter.kind)


def _from_vllm(text: str, kind: DrafterKind) -> tuple[DrafterChoice, int | None]:
    """vLLM's `--speculative-config`, as far as it says what a bundle does not say already."""
    config = json_flag(text, "--speculative-config")
    known = ("method", "num_speculative_tokens", *_NGRAM_LIMITS)
    problems = [
        f"{name}: {'the drafter is in BUNDLE' if name == 'model' else 'not a field that is used here'}"
        for name in config
        if name not in known
    ]
    method, count = config.get("method", str(kind)), config.get("num_speculative_tokens")
    if method not in (str(kind), _NGRAM):
        problems.append(f"method: expected {kind}, this bundle's drafter, or {_NGRAM}, found {method!r}")
    if count is not None and (type(count) is not int or count < 0):
        problems.append(f"num_speculative_tokens: expected a whole number, found {count!r}")
    for name, value in _NGRAM_LIMITS.items():
        if name in config and method != _NGRAM:
            problems.append(f"{name}: expected for the method {_NGRAM} alone, found for {method!r}")
        elif config.get(name, value) != value:
            problems.append(f"{name}: expected {value}, which is fixed here, found {config[name]!r}")
    if problems:
        raise RequestError(listed("--speculative-config cannot be used", problems, "Correct or leave out these fields."))
    return DrafterChoice.PROMPT_LOOKUP if method == _NGRAM else DrafterChoice.BUNDLE, count


def _plan(
    bundle: Bundle,
    context: int,
    settings: ServerSettings,
    engine: EngineSettings,
    drafter: DrafterChoice,
    variables: Mapping[str, Any],
    *,
    runs_on: str,
    is_together: bool,
) -> list[str]:
    """What is about to run and the memory it can take, in lines for people; what is wrong with it is logged."""
    with_drafter = drafter is DrafterChoice.BUNDLE
    pair = Pair(target=bundle.target, drafter=bundle.drafter if with_drafter else None, form=bundle.form)
    plan = plan_memory(pair, bundle_parts(bundle), batch=engine.max_sequences, context=min(context, pair.longest_context))
    weights, caches = sum(plan.weights.values()), plan.target_cache + plan.drafter_cache
    free = free_memory()
    if free is not None and plan.total > free:
        _LOG.warning(
            "Expected at least %s of free memory for full slots, found %s. Lower --max-num-seqs or --max-model-len.",
            as_bytes(plan.total),
            as_bytes(free),
        )
    if settings.is_open_to_the_network and not settings.api_keys:
        _LOG.warning(
            "%s can be reached from other machines, and no API key is asked for. Set --api-key, or listen on 127.0.0.1.", settings.host
        )
    lines = {
        "bundle": f"{bundle.path}, {bundle.precision.name}",
        "target": bundle.manifest.sources["target"].source,
        "proposals": _proposals(bundle, engine, drafter),
        "runs on": runs_on,
        "slots": _slots(engine, context, runs_on, is_together=is_together),
        "memory": f"{as_bytes(plan.total)} once all slots are full: weights {as_bytes(weights)}, caches {as_bytes(caches)}",
        "sampling": f"{described(settings.sampling)}, where a request does not say",
        "template": f"{shown(variables)}, where a request does not say" if variables else "",
        "access": f"{len(settings.api_keys)} API key(s)" if settings.api_keys else "no API key needed",
    }
    width = max(map(len, lines)) + 2
    return [f"{name:<{width}}{line}" for name, line in lines.items() if line]


def _warn_of_cut(flag: str, asked: int | None, most: int, whose: str) -> None:
    """Say that an upper limit is above what there is."""
    if asked is not None and asked > most:
        _LOG.warning("%s %d at most; %s %d is the same as %d.", whose, most, flag, asked, most)


def _slots(engine: EngineSettings, context: int, runs_on: str, *, is_together: bool) -> str:
    """Requests that run at a time, and those that wait."""
    length = f"of up to {context} tokens"
    if not is_together:
        return f"one request at a time {length}, all that {runs_on} serves; {engine.max_queued} more may wait for their turn"
    return f"{engine.max_sequences} sequence{'s' * (engine.max_sequences > 1)} {length}; {engine.max_queued} more may wait"


def _proposals(bundle: Bundle, engine: EngineSettings, drafter: DrafterChoice) -> str:
    """Where drafted tokens come from, how many there are at most, and when."""
    asked = bundle.manifest.num_speculative_tokens if engine.num_speculative_tokens is None else engine.num_speculative_tokens
    most = min(asked, most_proposals(bundle, drafter))
    if most == 0:
        return "none, plain decoding"
    source = _SOURCES[drafter]
    if drafter is DrafterChoice.BUNDLE:
        source += f" {bundle.manifest.sources['drafter'].source} ({bundle.drafter.kind})"
    return f"{source}, up to {most} per cycle, {'by what pays' if engine.adaptive else 'always'}"
