"""Stage: the speculative loop at the shape of a public pair, and its terms: T_draft, T_head, T_verify by width, T_plain.

Weights are random, so drafts are all but never accepted: the loop shows what a cycle costs, not what it gains.  A cycle pays
when it commits more than `break_even_tau` tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from gpu_check_context import Context
from gpu_check_loop import Loop, random_models
from gpu_check_rollouts import heads_of

T = TypeVar("T")


def run(context: Context) -> None:
    """Notes the terms (medians of many replays), the loop's own time per cycle, and where its text leaves plain decoding's."""
    sizes = context.sizes
    target, drafter = random_models(context)
    parameters = {
        name: sum(parameter.numel() for parameter in model.parameters()) for name, model in (("target", target), ("drafter", drafter))
    }
    context.note(shape=sizes.name, context=sizes.context, parameters=parameters)
    width = drafter.config.num_proposals + 1
    # As many slots as the loops fill while next to nothing is accepted; the loop ends where they are used up.
    loop = Loop(target, drafter, slots=sizes.context + 2 * (sizes.cycles + width), widths=(*sizes.widths, width))
    prompt = torch.randint(sizes.vocab_size, (sizes.context,), generator=torch.Generator().manual_seed(0)).tolist()
    loop.prefill(prompt)
    heads = heads_of(context, target, drafter)
    inputs = (torch.zeros(1, dtype=torch.int64, device=context.device), *loop.draft())

    actions: dict[str, Callable[[], object]] = {"plain": loop.plain, "draft": loop.draft}
    actions |= {f"verify_{rows}": loop.verify[rows] for rows in (*sizes.widths, width)}
    actions |= {f"head_{name}": partial(head, *inputs) for name, head in heads.items()}
    times = context.times(actions)
    found = terms(times)
    context.note(times=times, terms=found)

    best = min(heads, key=found["head_us"].__getitem__)
    for _ in loop.generate(prompt, heads[best], 2):  # warms up what no graph holds
        pass
    plain, plain_us = _steady(loop.decode(prompt, sizes.cycles))
    cycles, cycle_us = _steady(loop.generate(prompt, heads[best], sizes.cycles))
    text = [token for _, committed in cycles for token in committed]
    compared = min(len(text), len(plain))
    same = next((i for i in range(compared) if text[i] != plain[i]), compared)
    of_cycle = (found["draft_us"] + found["head_us"][best] + found["verify_us"][str(width)]) / cycle_us
    context.note(
        head=best,
        cycle_us=round(cycle_us, 1),
        plain_token_us=round(plain_us, 1),
        terms_of_cycle=round(of_cycle, 3),
        break_even_tau=round(cycle_us / plain_us, 3),
        tokens_per_cycle=round((len(text) - 1) / max(len(cycles) - 1, 1), 3),
        compared_tokens=compared,
        same_tokens=same,
    )


def terms(times: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Medians in microseconds, by term."""
    medians = {name: found["median_us"] for name, found in times.items()}

    def under(prefix: str) -> dict[str, float]:
        return {name.removeprefix(prefix): value for name, value in medians.items() if name.startswith(prefix)}

    return {"plain_us": medians["plain"], "draft_us": medians["draft"], "head_us": under("head_"), "verify_us": under("verify_")}


def _steady(steps: Iterable[T]) -> tuple[list[T], float]:
    """What the steps give, and the microseconds of one; the first, which reads the prompt, is left out."""
    seen: list[T] = []
    begun = 0.0
    for step in steps:  # each has waited for the GPU
        seen.append(step)
        if len(seen) == 1:
            begun = time.perf_counter()
    return seen, (time.perf_counter() - begun) * 1e6 / max(len(seen) - 1, 1)
