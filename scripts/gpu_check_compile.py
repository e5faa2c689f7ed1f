"""Stage: compiles the Triton kernels of the stages behind it, in several processes; later ones find them in Triton's cache.

One after the other they would take most of the minutes, and a kernel is compiled anew for each type, kind of batch and oddness of a
size.  Nothing is measured meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from gpu_check_context import Context, Deadline, NotHereError, make_importable, sizes_named, timer_of

WORKERS = 12  # each has torch and a context of the GPU


def run(context: Context) -> None:
    """Notes how many cases were compiled; a case that fails does so again, with its error, in the stage that it is of."""
    if not context.is_cuda:
        raise NotHereError("expected a GPU to compile for, found none asked for: Triton interprets on the CPU")
    wanted = tasks(context.sizes.name)
    done, failed = 0, []
    # The pool is not waited for: what is late by then is ended with this process's group.
    pool = ProcessPoolExecutor(min(WORKERS, os.cpu_count() or 1), mp_context=get_context("spawn"))
    running = {pool.submit(compile_case, context.device, context.sizes.name, *task): task for task in wanted}
    for future in as_completed(running, timeout=max(context.deadline.left, 0.0)):
        error = future.exception()
        done += error is None
        failed += [f"{running[future]}: {error}"] if error else []
        context.note(cases=len(wanted), compiled=done, failed=failed)
    pool.shutdown()


def tasks(sizes_name: str) -> list[tuple[str, str, int, int]]:
    """("rollouts" or "forms", dtype, vocabulary, batch), and ("tactics", dtype, vocabulary, tactic)."""
    from gpu_check_corrections import DTYPES
    from gpu_check_kernels import cases
    from gpu_check_rollouts import cases as rollout_cases

    from domino_deploy.plugins.trt_plugin_kernels import TACTICS

    sizes = sizes_named(sizes_name)
    rollouts = dict.fromkeys((dtype, batch) for dtype, batch, _ in rollout_cases(sizes))
    return [
        *(("rollouts", dtype, sizes.vocab_size, batch) for dtype, batch in rollouts),
        *(("forms", dtype, vocab_size, batch) for dtype in DTYPES for vocab_size, batch in cases(sizes)),
        *(("tactics", dtype, sizes.vocab_size, tactic) for dtype in DTYPES for tactic in TACTICS),
    ]


def compile_case(device: str, sizes_name: str, what: str, dtype_name: str, vocab_size: int, number: int) -> None:
    """Runs the kernels of a case once, in a process of a pool; of a tactic, compiles the plugin's PTX as well."""
    make_importable()
    from gpu_check_corrections import DTYPES, forms_of, random_correction, tiles_then_reduction
    from gpu_check_driver import plugin_ptx
    from gpu_check_rollouts import random_weights, triton_rollouts

    from domino_deploy.plugins import triton_ops

    deadline = Deadline(0)
    note: Callable[..., None] = lambda **values: None  # noqa: E731  # nobody listens
    context = Context(
        device=device, sizes=sizes_named(sizes_name), carried=Path(), deadline=deadline, timer=timer_of(device, deadline), note=note
    )
    if what == "rollouts":
        triton_rollouts(random_weights(context, DTYPES[dtype_name]), number, context.sizes.proposals)
        return
    if what == "tactics":
        inputs = random_correction(context, 1, vocab_size, DTYPES[dtype_name])
        for launch in tiles_then_reduction(inputs, number):
            launch()
        plugin_ptx(inputs, number)
        return
    inputs = random_correction(context, number, vocab_size, DTYPES[dtype_name])
    for launch in forms_of(inputs).values():
        launch()
    triton_ops.top_k_logit_correction(*inputs.tensors, min(context.sizes.top_k, vocab_size))
