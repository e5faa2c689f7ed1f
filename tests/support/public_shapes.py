"""Pairs at the full width of public ones, a few layers deep, whose weights are holes in sparse files: zeros that take no disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from domino_deploy.checkpoint_config import target_config
from domino_deploy.checkpoint_drafter import drafter_config
from domino_deploy.checkpoint_tensors import Shapes, expected_drafter_tensors, expected_target_tensors
from domino_deploy.safetensors_header import header_for
from tests.support.scripts import loaded_script

_BF16_BYTES = 2


def write_public_pair(folder: Path, shape: str, *, layers: int = 2, draft_layers: int = 1) -> tuple[Path, Path]:
    """Target and drafter in bfloat16, in the shape of "qwen3-4b" or "qwen3-8b" but for the number of layers."""
    scripts = loaded_script("random_pair")
    target = scripts.target_json(scripts.SHAPES[shape], layers)
    drafter = scripts.drafter_json(target, num_hidden_layers=draft_layers)
    shapes = {
        "target": expected_target_tensors(target_config(dict(target), "target", None)),
        "drafter": expected_drafter_tensors(drafter_config(dict(drafter), "drafter")),
    }
    for name, config in (("target", target), ("drafter", drafter)):
        _write_checkpoint(folder / name, config, shapes[name])
    scripts.write_tokenizer(folder / "target", target["vocab_size"], end_of_text=target["bos_token_id"], im_end=target["eos_token_id"])
    return folder / "target", folder / "drafter"


def _write_checkpoint(folder: Path, config: Mapping[str, Any], shapes: Shapes) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header_for({name: ("BF16", shape) for name, shape in shapes.items()})[0])
        file.truncate(file.tell() + _BF16_BYTES * sum(math.prod(shape) for shape in shapes.values()))
