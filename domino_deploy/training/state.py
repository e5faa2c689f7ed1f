"""Where a run stands: everything a resumed run needs to give what an uninterrupted one gives.

Parameters (fp32 masters) and both moments of AdamW go into safetensors, the rest into state.json; draws, anchors and
random tokens are functions of the step's number and need no state.  The folder is written aside and renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from domino_deploy.aside import written_aside
from domino_deploy.errors import CheckpointError, TrainingError, listed
from domino_deploy.strict_json import read_object
from domino_deploy.training.distributed import World, put, whole

_STATE, _TENSORS = "state.json", "state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_PARAMETER = "parameter"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """steps: finished ones; seconds: that they took, over all starts."""

    steps: int
    seconds: float


def save_state(
    folder: Path, module: nn.Module, optimiser: torch.optim.Optimizer, standing: Standing, made_for: Mapping[str, Any], world: World
) -> None:
    """Write the state of a run; every process must call it, the first one writes.

    Args:
        folder: of the state; what stands there is replaced once the new one is whole.
        module: whose parameters are trained.
        optimiser: AdamW over them.
        standing: how far the run is.
        made_for: facts that a resumed run must share (recipe, samples, target, start).
        world: this process.

    Raises:
        TrainingError: it cannot be written; the state before it is still there.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        for kind, tensor in {_PARAMETER: parameter, **_moments_of(optimiser, parameter)}.items():
            found = whole(tensor)
            if world.is_main:
                tensors[f"{name}/{kind}"] = found.cpu().contiguous()
    if world.is_main:
        text = json.dumps({"steps": standing.steps, "seconds": standing.seconds, "made_for": made_for}, indent=2)
        try:
            with written_aside(folder.absolute()) as aside:
                save_file(tensors, aside / _TENSORS)
                (aside / _STATE).write_text(text + "\n", encoding="utf-8")
        except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
            raise TrainingError(
                f"{folder}: expected room for the state of the run, found: {error}. Free some and run the same "
                "command: it goes on from the state before."
            ) from error
    world.wait()


def load_state(folder: Path, module: nn.Module, optimiser: torch.optim.Optimizer, made_for: Mapping[str, Any]) -> Standing | None:
    """Put a saved state into module and optimiser; None if there is none.

    Raises:
        TrainingError: the state of another run, or one that is damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not folder.exists():
        return None
    advice = "Run the command of that run, or start anew with --restart."
    try:
        state = read_object(folder / _STATE)
        standing = Standing(steps=int(state["steps"]), seconds=float(state["seconds"]))
        found_for = dict(state["made_for"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise TrainingError(f"{folder}: expected the state of a run, found: {error}. Start anew with --restart.") from error
    differing = [
        f"{name}: expected {made_for.get(name)!r}, found {found_for.get(name)!r}"
        for name in sorted({*made_for, *found_for})
        if made_for.get(name) != found_for.get(name)
    ]
    if differing:
        raise TrainingError(listed(f"{folder}: this work folder holds the state of another run", differing, advice))
    try:
        with safe_open(folder / _TENSORS, framework="pt") as file:
            for name, parameter in module.named_parameters():
                put(parameter, file.get_tensor(f"{name}/{_PARAMETER}"))
                moments: dict[str, Tensor] = {kind: torch.zeros_like(parameter) for kind in _MOMENTS}
                for kind, moment in moments.items():
                    put(moment, file.get_tensor(f"{name}/{kind}"))
                where = parameter.device if optimiser.defaults["fused"] else "cpu"  # where AdamW itself keeps it
                optimiser.state[parameter] = {"step": torch.tensor(float(standing.steps), device=where), **moments}
    except (OSError, SafetensorError, RuntimeError) as error:
        raise TrainingError(f"{folder}: expected the tensors of the run, found: {error}. Start anew with --restart.") from error
    return standing


def _moments_of(optimiser: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    return {kind: optimiser.state[parameter][kind] for kind in _MOMENTS}
