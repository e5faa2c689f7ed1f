"""Quality and speed of a pair's precisions against float32: agreement, perplexity, tau, speed-up.  Prints one JSON.

    python scripts/bench_precision.py REFERENCE_BUNDLE BUNDLE... [--prompts-per-kind 4] [--max-new-tokens 64]

Texts are held-out prompts (all kinds of `domino-deploy bench`) and the responses that the reference bundle gives to them,
greedily.  Agreement: share of response positions at which a bundle's most likely token is the reference's; perplexity: of a bundle on
prompts and responses.  Losslessness: a bundle's speculative output against its own plain decoding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from domino_deploy.bench.machine import this_machine, versions
from domino_deploy.bench.tasks import select
from domino_deploy.runtime.session import GenerationParams, Session

KINDS = ("templated-code", "word-problems", "short-chat", "humaneval", "mt-bench", "gsm8k")


@click.command()
@click.argument("reference", type=click.Path(path_type=Path))
@click.argument("bundles", type=click.Path(path_type=Path), nargs=-1)
@click.option("--prompts-per-kind", default=4)
@click.option("--max-new-tokens", default=64)
@click.option("--threads", type=int)
def main(reference: Path, bundles: tuple[Path, ...], *, prompts_per_kind: int, max_new_tokens: int, threads: int | None) -> None:
    """Measure bundles of one pair."""
    prompts = [prompt for kind in select(KINDS, (), prompts_per_kind).sets for prompt in kind.prompts]
    texts: list[tuple[list[int], list[int]]] = []
    rows = []
    for bundle in (reference, *bundles):
        with Session.open(bundle, threads=threads) as session:
            if not texts:
                ids = [session.prompt_ids(prompt) for prompt in prompts]
                texts = [(prompt, _generate(session, prompt, max_new_tokens, 0)[0]) for prompt in ids]
            rows.append(_row(session, texts, max_new_tokens))
            print(f"{bundle}: done", file=sys.stderr)
    facts = {"prompts": len(prompts), "max_new_tokens": max_new_tokens, "versions": versions(), "machine": vars(this_machine())}
    json.dump({"bundles": rows, **facts}, sys.stdout, indent=2, default=str)
    print()


def _row(session: Session, texts: list[tuple[list[int], list[int]]], max_new_tokens: int) -> dict[str, Any]:
    agreeing, losses = [], []
    for prompt, response in texts:
        tokens = prompt + response
        session.target.reset()
        logits = session.target.forward(tokens[:-1], len(tokens) - 1).logits.astype(np.float64)
        best = logits.argmax(-1)
        log_sum = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        losses.append(log_sum - logits[np.arange(len(best)), tokens[1:]])
        agreeing.append(best[len(prompt) - 1 :] == np.array(response))
    # Plain and speculative decoding take turns prompt by prompt, so that both see the machine in the same state.
    plain, drafted = [], []
    identical = 0
    for prompt, _ in texts:
        plain.append(_generate(session, prompt, max_new_tokens, 0))
        drafted.append(_generate(session, prompt, max_new_tokens, None))
        identical += plain[-1][0] == drafted[-1][0]
    cycles = sum(count for _, _, count in drafted)
    return {
        "precision": session.bundle.precision.name,
        "draft_vocab_size": session.bundle.form.draft_vocab_size,
        "bundle_bytes": sum(entry.bytes for entry in session.bundle.manifest.files.values()),
        "agreement": round(float(np.concatenate(agreeing).mean()), 4),
        "perplexity": round(float(np.exp(np.concatenate(losses).mean())), 3),
        "identical_to_plain": f"{identical} of {len(texts)}",
        "tau": round(sum(len(tokens) - 1 for tokens, _, _ in drafted) / max(1, cycles), 2),
        "plain_token_ms": round(median(time / max(1, count) for _, time, count in plain), 2),
        "plain_tokens_per_second": round(_rate(plain), 1),
        "speculative_tokens_per_second": round(_rate(drafted), 1),
        "speedup": round(_rate(drafted) / _rate(plain), 2),
    }


def _generate(session: Session, prompt: list[int], max_new_tokens: int, count: int | None) -> tuple[list[int], float, int]:
    """Tokens, milliseconds behind the prefill, and cycles."""
    params = GenerationParams(max_new_tokens=max_new_tokens, num_speculative_tokens=count)
    steps = list(session.steps(prompt, params))
    time = sum(step.terms_ms.total for step in steps[1:])
    return [token for step in steps for token in step.token_ids], time, len(steps) - 1


def _rate(runs: list[tuple[list[int], float, int]]) -> float:
    return 1e3 * sum(len(tokens) - 1 for tokens, _, _ in runs) / sum(time for _, time, _ in runs)


if __name__ == "__main__":
    main()
