"""Stage: a block's rollout, every variant, against its own bytes over the bandwidth, and against plain and compiled PyTorch.

Two kinds of base logits, as some variants look at more or fewer tokens by them: `flat`, normal with a standard deviation of 2, and
`peaked`, the same with one token of each row 10 above, as where a language model is sure.

Shape legend: B batch, N proposals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gpu_check_context import Context, Sizes
from gpu_check_corrections import DTYPES, CheckFailed
from gpu_check_loop import Head
from gpu_check_machine import bandwidth
from gpu_check_plain import PlainRollout, logit_lost, plain_step
from torch import Tensor

from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel
from domino_deploy.plugins import triton_bounds
from domino_deploy.plugins.triton_rollout import RolloutWeights, TritonRollout, embedding_table
from domino_deploy.plugins.triton_traffic import Variant

PREFIX_LEN = 1  # pure_draft_prefix_len of the public drafters
PLAIN = "plain graph"
STATES_ALONE = "full, states alone"  # no proposal is corrected: what the GRU costs
_PEAK = 10.0
_ROUNDING = 1e-3  # a logit that is lost to float32 sums, near 10

Inputs = tuple[Tensor, Tensor, Tensor]


def run(context: Context) -> None:
    """Notes per dtype, batch and kind of logits each rollout's time, bytes, launches and numbers; the compiled one last."""
    measured = bandwidth(context)
    context.note(bandwidth=measured)
    found: list[dict[str, Any]] = []
    wrong: list[str] = []
    for dtype_name, batch, kind in cases(context.sizes):
        case = {"dtype": dtype_name, "batch": batch, "logits": kind}
        if context.deadline.left < 0:
            context.note(left_out=f"from {case} on")
            break
        weights = random_weights(context, DTYPES[dtype_name])
        inputs = random_inputs(context, batch, is_peaked=kind == "peaked")
        rollouts = _measured(context, weights, inputs, measured["copy_gb_per_s"])
        found.append({**case, "rollouts": rollouts})
        context.note(cases=found)
        wrong += [f"{case}, {name}: {why}" for name, made in rollouts.items() for why in _faults(made, rollouts[PLAIN]["logit_lost"])]
        del weights, inputs
    if wrong:
        raise CheckFailed("\n- ".join(["expected tokens as good as plain PyTorch's, and a replay equal to the launches, found:", *wrong]))
    context.note(compiled=_compiled(context))


def cases(sizes: Sizes) -> list[tuple[str, int, str]]:
    """Dtype, batch and kind of logits; the drafters' own type with all of them."""
    first = [("bfloat16", batch, kind) for batch in sizes.batches for kind in ("flat", "peaked")]
    return first + [(name, sizes.batches[0], "flat") for name in ("float16", "float32")]


def random_weights(context: Context, dtype: torch.dtype) -> RolloutWeights:
    """States and corrections of a trained drafter's size: corrections with a standard deviation of about 1."""
    sizes, random = context.sizes, context.generator(1)

    def normal(rows: int, columns: int, deviation: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, device=context.device, generator=random).mul_(deviation).to(dtype)

    units = sizes.gru_hidden_dim
    return RolloutWeights(
        embedding=normal(sizes.vocab_size, sizes.hidden_size),
        w_ih=normal(3 * units, sizes.hidden_size, sizes.hidden_size**-0.5),
        w_hh=normal(3 * units, units, units**-0.5),
        state_projection=normal(sizes.rank, units, 2 * units**-0.5),
        codebook=normal(sizes.vocab_size, sizes.rank, 2 * sizes.rank**-0.5),
    )


def random_inputs(context: Context, batch: int, *, is_peaked: bool, seed: int = 2) -> Inputs:
    """Anchors int64 [B], z [B, N, R] and base logits [B, N, V], float32."""
    sizes, random = context.sizes, context.generator(seed)
    rows = (batch, sizes.proposals)
    anchors = torch.randint(sizes.vocab_size, (batch,), device=context.device, generator=random)
    z = torch.randn(*rows, sizes.rank, device=context.device, generator=random)
    base = 2 * torch.randn(*rows, sizes.vocab_size, device=context.device, generator=random)
    if is_peaked:
        sure = torch.randint(sizes.vocab_size, (*rows, 1), device=context.device, generator=random)
        base.scatter_add_(-1, sure, torch.full_like(sure, _PEAK, dtype=base.dtype))
    return anchors, z, base


def triton_rollouts(weights: RolloutWeights, batch: int, proposals: int) -> dict[str, TritonRollout]:
    """Every variant, without and with the embedding's table."""
    filtered = replace(weights, prefilter=triton_bounds.by_int8_rows(weights.codebook))
    kinds = {"": filtered, ", table": replace(filtered, table=embedding_table(weights.embedding, weights.w_ih))}
    made = {
        f"{variant}{suffix}": TritonRollout(kind, batch, proposals, variant, PREFIX_LEN)
        for suffix, kind in kinds.items()
        for variant in Variant
    }
    return made | {STATES_ALONE: TritonRollout(weights, batch, proposals, Variant.FULL, proposals)}


def filled(rollout: TritonRollout | PlainRollout, inputs: Inputs) -> Callable[[], Tensor]:
    """The rollout of its own buffers, `inputs` in them: a call copies nothing."""
    buffers = (rollout.anchor_ids, rollout.hidden_projection, rollout.base_logits)
    for buffer, given in zip(buffers, inputs, strict=True):
        buffer.copy_(given)
    return lambda: rollout(*buffers)


def _measured(context: Context, weights: RolloutWeights, inputs: Inputs, gb_per_s: float) -> dict[str, dict[str, Any]]:
    batch, proposals = inputs[2].shape[:2]
    plain = {
        "plain eager": PlainRollout(weights, batch, proposals, PREFIX_LEN, is_graph=False),
        PLAIN: PlainRollout(weights, batch, proposals, PREFIX_LEN),
    }
    ours = triton_rollouts(weights, batch, proposals)
    actions = {name: filled(rollout, inputs) for name, rollout in {**plain, **ours}.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in actions}
    for name, action in actions.items():
        if name != STATES_ALONE:
            found[name]["logit_lost"] = logit_lost(weights, *inputs, action().clone(), PREFIX_LEN)
    for name, rollout in {PLAIN: plain[PLAIN], **ours}.items():
        found[name]["replay_equals_eager"] = _replay_equals_eager(context, rollout, inputs)
    for name, time in context.times(actions).items():
        found[name] |= {"time": time}
    for name, rollout in ours.items():
        contenders = round(float(rollout.contenders[PREFIX_LEN:].sum(dim=-1).float().mean()))
        traffic = rollout.traffic(contenders)
        limit_us = traffic.total_bytes / gb_per_s / 1e3
        found[name] |= {
            "bytes": traffic.total_bytes,
            "launches": traffic.launches,
            "contenders": contenders,
            "limit_us": round(limit_us, 2),
            "of_limit": round(found[name]["time"]["median_us"] / limit_us, 2),
            "faster_than_plain": round(found[PLAIN]["time"]["median_us"] / found[name]["time"]["median_us"], 2),
        }
    return found


def _replay_equals_eager(context: Context, rollout: TritonRollout | PlainRollout, inputs: Inputs) -> bool:
    """On other inputs than those before, and then again on `inputs`."""
    is_equal = True
    for case in (random_inputs(context, len(inputs[0]), is_peaked=True, seed=3), inputs):
        replayed = filled(rollout, case)()
        kept = replayed.clone()
        # The launches that the graph was captured from write to the same memory.
        launched = rollout.eager() if isinstance(rollout, PlainRollout) else _launched(rollout, replayed)
        is_equal &= torch.equal(kept, launched)
    return is_equal


def _launched(rollout: TritonRollout, drafts: Tensor) -> Tensor:
    drafts.fill_(-1)
    rollout._launch()
    return drafts


def _faults(found: dict[str, Any], lost_by_plain: float) -> list[str]:
    """A NaN counts as a fault."""
    lost = found.get("logit_lost", 0.0)
    faults = [] if lost <= max(_ROUNDING, lost_by_plain) else [f"a token's logit is {lost} below the best, plain PyTorch's {lost_by_plain}"]
    return faults + ([] if found.get("replay_equals_eager", True) else ["replay differs from the launches"])


def _compiled(context: Context) -> list[dict[str, Any]]:
    """The plain rollout with its step compiled, bfloat16, per batch as long as time is left; the plain graph in the same rounds."""
    rows: list[dict[str, Any]] = []
    weights = random_weights(context, torch.bfloat16)
    # The CPU stands for the GPU in tests, where compiling takes longer than everything else.
    options: dict[str, Any] = {"mode": "max-autotune-no-cudagraphs"} if context.is_cuda else {"backend": "eager"}
    for batch in context.sizes.batches:
        if context.deadline.left < 0:
            break
        inputs = random_inputs(context, batch, is_peaked=False)
        step = torch.compile(plain_step, fullgraph=True, dynamic=False, **options)
        rollouts = {
            "compiled graph": PlainRollout(weights, batch, context.sizes.proposals, PREFIX_LEN, step=step),
            PLAIN: PlainRollout(weights, batch, context.sizes.proposals, PREFIX_LEN),
            "full": TritonRollout(weights, batch, context.sizes.proposals, Variant.FULL, PREFIX_LEN),
        }
        actions = {name: filled(rollout, inputs) for name, rollout in rollouts.items()}
        lost = logit_lost(weights, *inputs, actions["compiled graph"]().clone(), PREFIX_LEN)
        rows.append({"dtype": "bfloat16", "batch": batch, "logits": "flat", "logit_lost": lost, "times": context.times(actions)})
        context.note(compiled=rows)
    return rows


def heads_of(context: Context, target: TargetModel, drafter: DrafterModel) -> dict[str, Head]:
    """Rollouts of one row with a drafter's own weights, all of which take and give the same."""
    head = drafter.head
    assert head is not None, "a Domino drafter"
    weights = RolloutWeights(
        embedding=target.model.embed_tokens.weight.detach(),
        w_ih=head.prefix_gru.weight_ih_l0.detach(),
        w_hh=head.prefix_gru.weight_hh_l0.detach(),
        state_projection=head.embed_proj[0].weight.detach()[:, head.width :],
        codebook=head.codebook_VR.detach(),
    )
    proposals = drafter.config.num_proposals
    filtered = replace(weights, prefilter=triton_bounds.by_int8_rows(weights.codebook))
    made: dict[str, Head] = {"plain": PlainRollout(weights, 1, proposals, head.prefix_len)}
    return made | {str(variant): TritonRollout(filtered, 1, proposals, variant, head.prefix_len) for variant in Variant}
