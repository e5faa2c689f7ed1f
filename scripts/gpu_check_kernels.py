"""Stages: numbers and times of the correction's kernels, every dtype, against float64 and against the memory's bandwidth.

Shape legend: B batch, V vocabulary, k tokens of a top-k.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_check_context import Context, Sizes
from gpu_check_corrections import (
    DTYPES,
    FORMS,
    CheckFailed,
    Correction,
    Launch,
    exact_logits,
    forms_of,
    plain_correction,
    random_correction,
)
from gpu_check_machine import bandwidth
from torch import Tensor

from domino_deploy.plugins import reference, triton_ops

_LOG_PROB_ERROR = 1e-4  # of a log-softmax over 151,936 fp32 logits near 10: some 100 roundings


def numbers(context: Context) -> None:
    """Notes per dtype, vocabulary, batch and form how far it is from float64, in parts of what fp32 rounding allows."""
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for dtype_name, dtype in DTYPES.items():
        for vocab_size, batch in cases(context.sizes):
            if context.deadline.left < 0:
                context.note(left_out=f"from {dtype_name}, vocabulary {vocab_size}, batch {batch} on")
                break
            case = {"dtype": dtype_name, "vocab_size": vocab_size, "batch": batch}
            inputs = random_correction(context, batch, vocab_size, dtype)
            rows += [{**case, "form": name, **found} for name, found in compared(inputs, context.sizes.top_k).items()]
            context.note(corrections=rows)
        special = {name: special_cases(context, dtype, name) for name in FORMS}
        context.note(**{f"special_{dtype_name}": special})
        wrong += [f"{dtype_name}, {form}: {case}" for form, cases in special.items() for case, is_right in cases.items() if not is_right]
    # Written so that NaN is wrong.
    wrong += [str(row) for row in rows if not (row["error_of_allowed"] <= 1 and row["lost_of_allowed"] <= 1)]
    if wrong:
        raise CheckFailed("\n- ".join(["expected the float64 results within fp32 rounding, found:", *wrong]))


def cases(sizes: Sizes) -> list[tuple[int, int]]:
    """Vocabulary and batch: the whole vocabulary with every batch, each odd one with one of them, as every pair is compiled anew."""
    batches = sizes.batches
    odd = [(vocab_size, batches[number % len(batches)]) for number, vocab_size in enumerate(sizes.odd_vocab_sizes)]
    return [(sizes.vocab_size, batch) for batch in batches] + odd


def compared(inputs: Correction, top_k: int) -> dict[str, dict[str, Any]]:
    """Per form: ids unlike fp32 PyTorch's, the worst error of a logit, and the worst logit that was lost to a better token."""
    right_BV, allowed_BV = exact_logits(inputs)
    expected_ids, _ = reference.fused_logit_correction(*inputs.tensors)
    best, best_ids = right_BV.max(dim=-1)
    found = {}
    for name, launch in forms_of(inputs).items():
        tokens, values = launch()
        places = tokens.clamp(0, right_BV.shape[1] - 1)[:, None]
        chosen, allowed = right_BV.gather(1, places)[:, 0], allowed_BV.gather(1, places)[:, 0]
        error, lost = (values.double() - chosen).abs(), best - chosen
        found[name] = {
            "ids_that_differ": int((tokens != expected_ids).sum()),
            "error": float(error.max()),
            "error_of_allowed": float((error / allowed).max()),
            "lost_of_allowed": float((lost / (allowed + allowed_BV.gather(1, best_ids[:, None])[:, 0])).max()),
        }
    found["top_k"] = _compared_top_k(inputs, top_k, right_BV, allowed_BV)
    return found


def _compared_top_k(inputs: Correction, top_k: int, right_BV: Tensor, allowed_BV: Tensor) -> dict[str, Any]:
    k = min(top_k, right_BV.shape[1])
    tokens_Bk, values_Bk, log_probs_Bk = triton_ops.top_k_logit_correction(*inputs.tensors, k)
    expected_ids, _, _ = reference.top_k_logit_correction(*inputs.tensors, k)
    places = tokens_Bk.clamp(0, right_BV.shape[1] - 1)
    chosen, allowed = right_BV.gather(1, places), allowed_BV.gather(1, places)
    best, best_ids = right_BV.topk(k, dim=-1)
    error, lost = (values_Bk.double() - chosen).abs(), best - chosen
    log_prob_error = (log_probs_Bk.double() - (chosen - right_BV.logsumexp(dim=-1, keepdim=True))).abs()
    return {
        "ids_that_differ": int((tokens_Bk != expected_ids).sum()),
        "error": float(error.max()),
        "error_of_allowed": float(torch.maximum((error / allowed).max(), (log_prob_error / _LOG_PROB_ERROR).max())),  # keeps NaN
        "lost_of_allowed": float((lost / (allowed + allowed_BV.gather(1, best_ids))).max()),
    }


def special_cases(context: Context, dtype: torch.dtype, form: str) -> dict[str, bool]:
    """A tie, and a NaN, in tiles far apart; row 1 of the batch is what shows that rows do not touch each other."""
    inputs = random_correction(context, 2, context.sizes.vocab_size, dtype)
    first, second = context.sizes.vocab_size // 3, context.sizes.vocab_size - 1

    def winners() -> tuple[Tensor, Tensor]:
        launch: Launch = forms_of(inputs)[form]
        tokens, values = launch()
        return tokens.clone(), values.clone()

    inputs.codebook[second] = inputs.codebook[first]
    inputs.base[1, 5] = 1000.0
    inputs.base[0, first] = inputs.base[0, second] = 1000.0
    tie, _ = winners()
    inputs.base[0, second] = torch.nan
    tokens, values = winners()
    return {
        "a tie goes to the lowest id": int(tie[0]) == first,
        "NaN wins and is reported": int(tokens[0]) == second and bool(values[0].isnan()),
        "rows do not touch each other": int(tie[1]) == int(tokens[1]) == 5 and not bool(values[1].isnan()),
    }


def times(context: Context) -> None:
    """Notes per dtype and batch the time of each form, of plain PyTorch on the same inputs, and of moving the bytes once."""
    measured = bandwidth(context)
    context.note(bandwidth=measured)
    rows: list[dict[str, Any]] = []
    # bfloat16 first: the drafters' own type.
    for dtype_name in sorted(DTYPES):
        for batch in context.sizes.batches:
            if context.deadline.left < 0:
                context.note(left_out=f"from {dtype_name}, batch {batch} on")
                return
            rows.append({"dtype": dtype_name, "batch": batch, **_timed(context, dtype_name, batch, measured["copy_gb_per_s"])})
            context.note(corrections=rows)


def _timed(context: Context, dtype_name: str, batch: int, gb_per_s: float) -> dict[str, Any]:
    inputs = random_correction(context, batch, context.sizes.vocab_size, DTYPES[dtype_name])
    k = context.sizes.top_k
    found = context.times(
        {
            **forms_of(inputs),
            f"top_{k}": lambda: triton_ops.top_k_logit_correction(*inputs.tensors, k),
            "pytorch": lambda: plain_correction(inputs),
        }
    )
    limit_us = inputs.bytes / gb_per_s / 1e3
    return {
        "bytes": inputs.bytes,
        "limit_us": round(limit_us, 2),
        "times": found,
        "of_limit": {name: round(time["median_us"] / limit_us, 2) for name, time in found.items()},
        "faster_than_pytorch": {name: round(found["pytorch"]["median_us"] / time["median_us"], 2) for name, time in found.items()},
    }
