"""The memory plan of `inspect`: from the pair that is inspected and the flags to facts, and to lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from domino_deploy.bundle import MANIFEST, open_bundle
from domino_deploy.checkpoint import Checkpoint, open_drafter, open_target
from domino_deploy.cli.console import as_bytes, echo_table
from domino_deploy.cli.inspect_facts import AnyCheckpoint, bundle_parts, open_checkpoint
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import RequestError
from domino_deploy.memory_plan import Pair, largest_batch, largest_context, plan_memory, weight_bytes
from domino_deploy.pairing import check_pairing
from domino_deploy.precision import Dtype, Precision
from domino_deploy.runtime.session import DEFAULT_MAX_MODEL_LEN
from domino_deploy.signature import GraphForm
from domino_deploy.stored_weights import DTYPES

Facts = dict[str, Any]


def memory_facts(
    path: Path, *, target: str | None, draft: str | None, batch: int | None, context: int | None, dtype: str | None, memory: float | None
) -> Facts:
    """Facts to add to those of `describe`: `pairing` of two checkpoints, `memory`, and `weights` at every precision.

    Args:
        path: a bundle or a checkpoint.
        target: the target of a drafter at `path`.
        draft: the drafter of a target at `path`.
        batch: sequences at once; None for one.
        context: tokens of each; None for what sessions allow by default.
        dtype: of `export --dtype`; None for float32, as there.
        memory: gigabytes to fill; None for no such question.

    Raises:
        CheckpointError, PairingError, BundleError: what is named cannot be used, or not together.
        RequestError: flags that do not fit what is inspected.
    """
    if (path / MANIFEST).is_file():
        given = [flag for flag, value in (("--target", target), ("--draft", draft), ("--dtype", dtype)) if value is not None]
        if given:
            raise RequestError(
                f"Expected {', '.join(given)} with a checkpoint only, found it with a bundle, which has its own. Leave it out."
            )
        bundle = open_bundle(path)
        pair = Pair(target=bundle.target, drafter=bundle.drafter, form=bundle.form)
        return {"memory": _memory(pair, bundle_parts(bundle), bundle.precision.name, batch, context, memory)}
    models = _models(path, target, draft)
    precision = Precision.of(Dtype(dtype or Dtype.FLOAT32))
    pair = Pair(target=models[0].config, drafter=None if models[1] is None else models[1].config)
    facts: Facts = {}
    if pair.drafter is not None:
        facts["pairing"] = check_pairing(pair.target, pair.drafter)
    sources = {
        owner: {name: DTYPES[entry.dtype] for name, entry in model.tensors.items()}
        for owner, model in zip(("target", "drafter"), models, strict=True)
        if model is not None
    }
    facts["weights"] = {}
    for each in Dtype:
        try:
            facts["weights"][str(each)] = weight_bytes(pair, Precision.of(each), sources)
        except RequestError:
            facts["weights"][str(each)] = None  # its matrices are not whole numbers of blocks
    pair = Pair(target=pair.target, drafter=pair.drafter, form=GraphForm(dtype=str(precision.activations)))
    return facts | {"memory": _memory(pair, weight_bytes(pair, precision, sources), precision.name, batch, context, memory)}


def show_memory(facts: Facts) -> None:
    """The plan for a reader."""
    if facts.get("weights"):
        parts = list(next(sizes for sizes in facts["weights"].values() if sizes is not None))
        rows = [(part, *(_size(sizes and sizes[part]) for sizes in facts["weights"].values())) for part in parts]
        rows.append(("all weights", *(_size(sizes and sum(sizes.values())) for sizes in facts["weights"].values())))
        click.echo()
        echo_table(("weights at", *facts["weights"]), rows)
    if "memory" in facts:
        click.echo()
        for line in _lines(facts["memory"]):
            click.echo(line)


def _models(path: Path, target: str | None, draft: str | None) -> tuple[Checkpoint[TargetConfig], Checkpoint[DrafterConfig] | None]:
    checkpoint: AnyCheckpoint = open_checkpoint(path)
    if isinstance(checkpoint.config, TargetConfig):
        if target is not None:
            raise RequestError(f"{path}: expected --draft with a target, found --target. Name the drafter instead, or leave it out.")
        return open_target(path), None if draft is None else open_drafter(draft)
    if draft is not None:
        raise RequestError(f"{path}: expected --target with a drafter, found --draft. Name its target instead.")
    if target is None:
        raise RequestError(f"{path}: expected the drafter's target for a memory plan, found none. Name it: inspect {path} --target TARGET")
    return open_target(target), open_drafter(path)


def _memory(pair: Pair, weights: dict[str, int], precision: str, batch: int | None, context: int | None, memory: float | None) -> Facts:
    sequences, tokens = batch or 1, context or min(DEFAULT_MAX_MODEL_LEN, pair.longest_context)
    facts = {"precision": precision, **plan_memory(pair, weights, batch=sequences, context=tokens).to_dict()}
    if memory is not None:
        room = int(memory * 1e9)
        facts["fits"] = {
            "memory": room,
            "largest_batch": largest_batch(pair, weights, room, context=tokens),
            "largest_context": largest_context(pair, weights, room, batch=sequences),
        }
    return facts


def _lines(memory: Facts) -> Iterator[str]:
    batch, context = memory["batch"], memory["context"]
    yield f"memory at {memory['precision']}, {batch} sequence(s) of {context} tokens: {as_bytes(memory['total'])}"
    sizes = [
        (memory["total_weights"], "weights"),
        (memory["target_cache"], f"the target's cache, {as_bytes(memory['target_cache_per_token'])} a token"),
        (memory["drafter_cache"], f"the drafter's cache, {as_bytes(memory['drafter_cache_per_token'])} a token"),
        (memory["working"], "activations of a prefill pass or of the first draft (estimate)"),
        (memory["logits"], "logits of one cycle"),
    ]
    for size, what in sizes:
        yield f"{as_bytes(size):>12}  {what}"
    yield "              and what the libraries and the engine keep for themselves"
    if "fits" in memory:
        fits = memory["fits"]
        yield (
            f"in {as_bytes(fits['memory'])}: at most {fits['largest_batch']} sequence(s) of {context} tokens, "
            f"or {batch} sequence(s) of at most {fits['largest_context']} tokens"
        )


def _size(count: int | None) -> str:
    return "-" if count is None else as_bytes(count)
