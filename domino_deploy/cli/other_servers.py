"""Options of vLLM and llama-server, and what stands in their place here: for who types one of them, and for the tables of
docs/serving.md, which `tests/test_serving_docs.py` holds against these."""

from __future__ import annotations

from collections.abc import Mapping

# Options that mean the same -> what is here instead: options, BUNDLE (the argument of `serve`), or "none: " and why.
Table = Mapping[tuple[str, ...], str]

_BUNDLE = "BUNDLE, which holds target and drafter: made by `domino-deploy export`"
_KEY = "`--api-key`, once for each key"
_ORIGIN = "`--cors-origin`, once for each; none by default"
_PREFIX = "none: let the proxy take the prefix away"
_TLS = "none: put a proxy with TLS in front"
_ALWAYS = "none: always on"
_CHOSEN = "none: chosen when the bundle is exported"
_TEMPLATE = "none: the bundle's own, chosen when it is exported"
_REASONING = "none: what a model thinks stays in the text; `--chat-template-kwargs` can switch thinking off"
_SEED = "none: each request has its own `seed`"

VLLM: Table = {
    ("--model",): _BUNDLE,
    ("--config",): "none: options, or the variables `DOMINO_DEPLOY_SERVE_*`",
    ("--host", "--port"): "`--host`, `--port`; 127.0.0.1 by default",
    ("--api-key",): f"{_KEY}; or `--api-key-file`",
    ("--served-model-name",): "`--served-model-name`, once for each name",
    ("--max-model-len",): "`--max-model-len`",
    ("--max-num-seqs",): "`--max-num-seqs`; beyond it `--max-queue` may wait",
    ("--max-num-batched-tokens",): "`--prefill-rows`, for the tokens of prompts alone: those of answers come on top",
    ("--speculative-config",): (
        "`--speculative-config` with `method` and `num_speculative_tokens` as they are, without `model`; of ngram `prompt_lookup_max` "
        "may be 3 and `prompt_lookup_min` 1, or left out; or `--drafter` and `--num-speculative-tokens`"
    ),
    ("--per-request-spec-decode-metrics",): "`--per-request-spec-decode-metrics`",
    ("--chat-template",): _TEMPLATE,
    ("--default-chat-template-kwargs",): "`--chat-template-kwargs`",
    ("--generation-config",): "`--generation-config`: `auto`, or `none` for its `vllm`; no path, and `max_new_tokens` does not count",
    ("--override-generation-config",): "`--override-generation-config`, of temperature, filters and repetition penalty",
    ("--reasoning-parser",): _REASONING,
    ("--enable-auto-tool-choice", "--tool-call-parser"): "none: always on, for Hermes' tags",
    ("--allowed-origins",): _ORIGIN,
    ("--enable-prefix-caching", "--enable-chunked-prefill"): _ALWAYS,
    ("--dtype", "--quantization", "--kv-cache-dtype"): _CHOSEN,
    ("--trust-remote-code",): "none: no code of a checkpoint is ever run",
    ("--enforce-eager",): "none: there is nothing to compile at the start; `--backend` says what computes",
    ("--seed",): _SEED,
    ("--disable-log-requests", "--enable-log-requests"): "`--log-level`: a line for each request at info; `--log-prompts` for texts",
    ("--uvicorn-log-level",): "`--log-level`",
    ("--ssl-keyfile", "--ssl-certfile"): _TLS,
    ("--root-path",): _PREFIX,
    ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"): (
        "none: one process serves on one device"
    ),
    ("--gpu-memory-utilization",): "none: caches take what `--max-num-seqs` and `--max-model-len` ask for",
    ("--swap-space",): "none: nothing is swapped; requests beyond the slots wait",
    ("--no-enable-prefix-caching",): "none: always on; `cached_tokens` of an answer's usage says what was found",
    ("--load-format", "--model-impl", "--limit-mm-per-prompt"): "none: a bundle is loaded in one way, and takes text alone",
}

LLAMA_SERVER: Table = {
    ("-m", "-md", "--model-draft"): f"{_BUNDLE}, not from GGUF drafters",
    ("--host", "--port"): "`--host`, `--port`; the default port is 8000",
    ("--api-key", "--api-key-file"): f"{_KEY}; `--api-key-file`, without comments",
    ("-a", "--alias"): "`--served-model-name`",
    ("-c", "--ctx-size"): "`--max-model-len`, of each slot: llama-server may share one context between its slots",
    ("-np", "--parallel"): "`--max-num-seqs`",
    ("-t",): "`--threads`",
    ("-b", "--batch-size", "-ub", "--ubatch-size"): "`--prefill-rows`",
    ("--spec-draft-n-max", "--draft-max"): "`--num-speculative-tokens`",
    ("--spec-type",): "`--drafter`: `prompt-lookup` for its ngram types",
    ("--chat-template-file",): _TEMPLATE,
    ("--chat-template-kwargs",): "`--chat-template-kwargs`",
    ("--reasoning-format",): _REASONING,
    ("--cors-origins",): _ORIGIN,
    ("--timeout",): "`--request-timeout`, for the whole request; silence in a stream is filled anyway",
    ("--no-ui", "--no-webui"): "`--no-page`",
    ("--metrics",): "none: on unless `--no-metrics`",
    ("--slots",): "none: `/metrics` counts running and waiting requests",
    ("--cache-prompt", "-cb", "--jinja"): _ALWAYS,
    ("--ssl-key-file", "--ssl-cert-file"): _TLS,
    ("--api-prefix",): _PREFIX,
    ("-ngl", "--n-gpu-layers", "-dev", "--device", "-fa", "--flash-attn"): "none: `--backend` and `--provider` say what computes",
    ("-hf", "--hf-repo"): "BUNDLE, made of hub ids by `domino-deploy export`",
    ("-n", "--n-predict"): "none: each request has its own `max_tokens`",
    ("-tb", "--threads-batch"): "`--threads`, for prompts and answers alike",
    ("-s",): _SEED,
}


def elsewhere(*tables: tuple[str, Table]) -> dict[str, str]:
    """Option -> whose it is and what is here instead, for `Command`; the first table that has an option speaks of it.

    Args:
        tables: name of a program, and its options.
    """
    found: dict[str, str] = {}
    for owner, table in tables:
        for options, here in table.items():
            told = f"there is none here{here.removeprefix('none')}" if here.startswith("none: ") else f"here it is {here}"
            for option in options:
                found.setdefault(option, f"It is {owner}'s; {told.replace('`', '')}.")
    return found
