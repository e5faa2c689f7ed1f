"""A trained drafter as a folder in the public checkpoint layout, read back before it counts as saved.

What lives here: config.json, the weights and the check that both say what the trained model does.  What does not: opening such a
folder (`domino_deploy.checkpoint`) and putting it in its place at once or not at all (`domino_deploy.aside`).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from domino_deploy.checkpoint import CONFIG, INDEX, WEIGHTS, load_tensors, open_drafter
from domino_deploy.config import DrafterConfig, DrafterKind, RopeConfig, RopeType, TargetConfig
from domino_deploy.errors import CheckpointError, TrainingError, listed, shortened
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.template_variables import TRAINED_WITH

MAX_SHARD_BYTES = 5 * 10**9  # as public checkpoints are split

_STORED_RMS = 0.02  # of `fc`'s entries: that of a freshly initialised linear layer of the supported families
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ENTRY_BYTES = 160  # of one header line beside the tensor's name; rounded up from the longest that safetensors writes


def save_drafter(
    drafter: DrafterModel,
    scales: Tensor,
    folder: Path,
    *,
    target: TargetConfig | None = None,
    trained_with: Mapping[str, object] | None = None,
    dtype: torch.dtype = torch.float16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json and the weights into `folder`, then open it again and compare.

    Args:
        drafter: trained on features divided by `scales`, on any device.
        scales: [T] rms of each tap; folded into `fc`, so that the checkpoint takes raw features.
        folder: made if it does not exist; without an older checkpoint in it.
        target: gives the ids of bos and eos; None leaves them null.
        trained_with: variables that the chat template got, for whoever serves the drafter.
        dtype: of the stored tensors: float32, float16 or bfloat16.
        max_shard_bytes: the largest weights file; more is split into several files with an index.  A single tensor is never split.

    Raises:
        TrainingError: weights that are not finite in `dtype`, a folder that cannot be written to, or one that does not open again
            with these very tensors.
    """
    if dtype not in _DTYPES:
        raise TrainingError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, found {dtype}. Store the drafter in one of these.")
    stored = _stored(drafter, scales, dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = public_config(drafter.config, dtype, target) | ({TRAINED_WITH: dict(trained_with)} if trained_with else {})
        text = json.dumps(config, indent=2) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")
        _write_weights(folder, stored, max_shard_bytes)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in stored.values())
        raise TrainingError(
            f"Expected to write the drafter, {size / 1e6:.1f} MB, found: {error}. Make room or name another folder, and run again."
        ) from error
    _compare(folder, drafter.config, stored)


def public_config(config: DrafterConfig, dtype: torch.dtype, target: TargetConfig | None = None) -> dict[str, object]:
    """config.json of the public Domino checkpoints: the fields of a Qwen3 backbone, the rest under `dflash_config`.

    No `auto_map`: it would name a Python file for transformers to run, and the folder holds none.
    """
    special: dict[str, object] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "shift_label": config.shift_label,
    }
    top: dict[str, object] = {}
    if config.kind is DrafterKind.DOMINO:
        special |= {
            "projector_type": "domino",
            "pure_draft_prefix_len": config.pure_draft_prefix_len,
            "emb_dim": config.emb_dim,
            "gru_hidden_dim": config.gru_hidden_dim,
        }
        top["emb_dim"] = config.emb_dim  # public checkpoints state it here too
    sliding = config.sliding_layers if config.has_sliding_layers else (False,) * config.num_layers
    eos = target.eos_token_ids if target else ()
    return {
        **top,
        **_rope(config.rope),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "bos_token_id": target.bos_token_id if target else None,
        "eos_token_id": list(eos) if len(eos) > 1 else next(iter(eos), None),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_target_layers": config.num_target_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": config.has_qkv_bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "use_sliding_window": config.has_sliding_layers,
        "sliding_window": config.sliding_window if config.has_sliding_layers else None,
        # Read only where there is no layer_types: the first layer that slides.
        "max_window_layers": sliding.index(True) if config.has_sliding_layers else config.num_layers,
        "dtype": str(dtype).removeprefix("torch."),
        "dflash_config": special,
    }


@torch.no_grad()
def _stored(drafter: DrafterModel, scales: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors as the files hold them: on the CPU, in `dtype`, `scales` folded in."""
    stored, problems, diverged = {}, [], False
    for name, trained in drafter.state_dict().items():
        tensor = trained.detach().float().cpu()
        if name == "fc.weight":
            folded = tensor / scales.float().cpu().repeat_interleave(drafter.config.hidden_size)
            # `hidden_norm` undoes any common factor; this one keeps fp16 away from its subnormals.
            tensor = folded * (_STORED_RMS / folded.square().mean().sqrt())
        stored[name] = tensor.to(dtype).contiguous()
        if not tensor.isfinite().all():
            diverged = True
            problems.append(f"{name}: {int((~tensor.isfinite()).sum())} of {tensor.numel()} values are not finite")
        elif not stored[name].isfinite().all():
            problems.append(f"{name}: {tensor.abs().max().item():.3g} is too large, {dtype} ends at {torch.finfo(dtype).max:.3g}")
    if problems:
        advice = "Store it in bfloat16 or float32, which reach further (save_dtype of the recipe)."
        if diverged:
            advice = "The training has diverged: lower the learning rate, and train again from an earlier state."
        intro = f"Expected weights that are finite in {dtype}, found {len(problems)} tensor(s) that are not"
        raise TrainingError(listed(intro, shortened(problems, most=20), advice))
    return stored


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    shards = _shards(tensors, max_shard_bytes)
    files = [WEIGHTS]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG, folder / file)  # safetensors writes with mode 0600


def _shards(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors in order, as many to a file as fit beside their header lines."""
    shards: list[dict[str, Tensor]] = [{}]
    used = start = 2 * _ENTRY_BYTES  # the header's length, its metadata and its padding
    for name, tensor in tensors.items():
        size = tensor.nbytes + len(name) + _ENTRY_BYTES
        if shards[-1] and used + size > max_shard_bytes:
            shards.append({})
            used = start
        shards[-1][name] = tensor
        used += size
    return shards


def _compare(folder: Path, config: DrafterConfig, stored: Mapping[str, Tensor]) -> None:
    """Refuse a folder that is not, tensor by tensor, what was to be written."""
    advice = "Check the disk, and save again from the last training checkpoint; if it happens again, report it with this message."
    try:
        opened = open_drafter(folder)
    except CheckpointError as error:
        raise TrainingError(f"Expected the saved drafter to open again, found:\n{error}\n{advice}") from error
    config = _as_read(config)
    problems = [
        f"config.json: {field.name} must be {getattr(config, field.name)}, found {getattr(opened.config, field.name)}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(opened.config, field.name)
    ]
    for name, tensor in load_tensors(opened, torch.float32):
        entry, expected = opened.tensors[name], stored[name]
        wanted, found = [name, _DTYPES[expected.dtype], tuple(expected.shape)], [entry.name, entry.dtype, entry.shape]
        if found != wanted:
            problems.append(f"{name}: expected {wanted}, found {found}")
        elif not torch.equal(tensor, expected.float()):
            problems.append(f"{name}: other values than were to be written")
    if problems:
        raise TrainingError(listed("Expected the saved drafter to read back as it was written, found differences", problems, advice))


def _as_read(config: DrafterConfig) -> DrafterConfig:
    """The config as a reader of config.json has it: fields without a meaning are unset."""
    if not config.has_sliding_layers:
        config = dataclasses.replace(config, sliding_window=None, sliding_layers=())
    if config.kind is DrafterKind.DFLASH:
        config = dataclasses.replace(config, pure_draft_prefix_len=0, emb_dim=0, gru_hidden_dim=0)
    return config


def _rope(rope: RopeConfig) -> dict[str, object]:
    """`rope_theta`, and `rope_scaling` with the settings of its type."""
    keys = {
        RopeType.DEFAULT: (),
        RopeType.LINEAR: ("factor",),
        RopeType.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        RopeType.YARN: ("factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings"),
    }[rope.type]
    if not keys:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    settings = {key: getattr(rope, key) for key in keys if getattr(rope, key) is not None}
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": str(rope.type)} | settings}
