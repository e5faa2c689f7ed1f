"""How many tokens per correction the bounds of docs/kernels.md leave over, on a pair's real logits.  Prints one JSON.

    python scripts/bench_contenders.py DRAFTER TARGET [--prompts-per-kind 2] [--max-new-tokens 32]

DRAFTER and TARGET are checkpoint folders.  Prompts are held-out ones, answered greedily in float32 on the CPU; every correction of every
draft counts once.  A token is left over if its upper bound reaches the best corrected logit, which a GPU's first programs do not know yet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import torch
from torch import Tensor

from domino_deploy.bench.tasks import select
from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.model import head
from domino_deploy.model.loading import load_drafter, load_target
from domino_deploy.model.spec_generate import reference_target, spec_generate
from domino_deploy.plugins import reference
from domino_deploy.plugins.triton_bounds import Approximation, by_int8_rows, by_mean, slack
from domino_deploy.runtime.text import Tokenizer

KINDS = ("templated-code", "word-problems", "short-chat")


@click.command()
@click.argument("drafter", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--prompts-per-kind", default=2)
@click.option("--max-new-tokens", default=32)
@torch.inference_mode()
def main(drafter: Path, target: Path, *, prompts_per_kind: int, max_new_tokens: int) -> None:
    """Count for one pair."""
    drafting = load_drafter(open_drafter(drafter))
    answering = reference_target(load_target(open_target(target), drafting.config.target_layer_ids))
    codebook_VR = drafting.head.codebook_VR
    ways = {"int8": by_int8_rows(codebook_VR), "pool": by_mean(*reference.deviations(codebook_VR))}
    counts: dict[str, list[int]] = {way: [] for way in ways}
    correct = head.fused_logit_correction

    def counted(base_1V: Tensor, z_1R: Tensor, s_1R: Tensor, codebook_VR: Tensor) -> tuple[Tensor, Tensor]:
        for way, approximation in ways.items():
            counts[way].append(contenders(base_1V[0], z_1R[0] + s_1R[0], codebook_VR, approximation))
        return correct(base_1V, z_1R, s_1R, codebook_VR)

    head.fused_logit_correction = counted
    for prompt_ids in _prompts(target, prompts_per_kind):
        for _ in spec_generate(answering, drafting, prompt_ids, max_new_tokens=max_new_tokens):
            pass
    json.dump({"vocabulary": len(codebook_VR), **{way: _facts(found) for way, found in counts.items()}}, sys.stdout, indent=2)
    print()


def contenders(base_V: Tensor, sum_R: Tensor, codebook_VR: Tensor, approximation: Approximation) -> int:
    """Tokens that the bound does not rule out, given the best corrected logit."""
    bottleneck_R = torch.nn.functional.silu(sum_R)
    correction_V = approximation.mean @ bottleneck_R
    if approximation.quantised is not None:
        correction_V = approximation.scales * (approximation.quantised.float() @ bottleneck_R)
    bound_V = approximation.errors * bottleneck_R.norm() + slack(len(sum_R)) * base_V.abs()
    best = (base_V + codebook_VR @ bottleneck_R).max()
    return int((base_V + correction_V + bound_V >= best).sum())


def _prompts(target: Path, prompts_per_kind: int) -> Iterator[list[int]]:
    template = target / "chat_template.jinja"
    tokenizer = Tokenizer(target / "tokenizer.json", chat_template=template.read_text(encoding="utf-8") if template.exists() else None)
    for kind in select(KINDS, (), prompts_per_kind).sets:
        for prompt in kind.prompts:
            text = tokenizer.render_chat([{"role": "user", "content": prompt}]) if tokenizer.has_chat_template else prompt
            yield tokenizer.encode(text, add_special_tokens=not tokenizer.has_chat_template)


def _facts(counts: list[int]) -> dict[str, Any]:
    return {"corrections": len(counts), "median": median(counts), "mean": round(mean(counts), 1), "most": max(counts)}


if __name__ == "__main__":
    main()
