"""A bundle that opens, with text in place of graphs and weights: what `domino_deploy.bundle` looks at, and nothing more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from domino_deploy.bundle import (
    FORMAT_VERSION,
    GRAPHS,
    MANIFEST,
    REQUIRED_FILES,
    GraphEntry,
    Manifest,
    SourceEntry,
    file_entries,
    write_manifest,
)
from domino_deploy.config import DrafterConfig, DrafterKind, Family, RopeConfig, RopeType, TargetConfig
from domino_deploy.precision import Precision
from domino_deploy.signature import GraphForm, backbone_signature, head_signature, target_signature

TARGET = TargetConfig(
    family=Family.QWEN3,
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6, type=RopeType.YARN, factor=4.0, original_max_position_embeddings=128),
    max_position_embeddings=512,
    has_qk_norm=True,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(1, 2),
)
DRAFTER = DrafterConfig(
    kind=DrafterKind.DOMINO,
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0),
    max_position_embeddings=512,
    has_qk_norm=True,
    block_size=6,
    num_target_layers=4,
    target_layer_ids=(0, 2),
    mask_token_id=299,
    shift_label=True,
    pure_draft_prefix_len=1,
    emb_dim=8,
    gru_hidden_dim=16,
    sliding_window=64,
    sliding_layers=(True, False),
)


FILES = (*REQUIRED_FILES, "target/model.safetensors", "drafter/model.safetensors")


def manifest_of(folder: Path) -> Manifest:
    """The manifest of whatever lies in `folder`."""
    signatures = {
        "target": target_signature(TARGET, DRAFTER.feature_size),
        "backbone": backbone_signature(DRAFTER),
        "head": head_signature(DRAFTER),
    }
    return Manifest(
        format_version=FORMAT_VERSION,
        created_by="domino-deploy test",
        libraries={"torch": "2.13.0"},
        precision=Precision(),
        form=GraphForm(),
        certified_pool=False,
        sources={"target": SourceEntry(source="org/target", revision="abc"), "drafter": SourceEntry(source="drafter", revision=None)},
        target=TARGET,
        drafter=DRAFTER,
        pairing={"vocab_size": 300, "target_layer_ids": [0, 2]},
        num_speculative_tokens=4,
        special_tokens={"bos_token": None, "eos_token": "<|im_end|>"},
        graphs={
            name: GraphEntry(file=GRAPHS[name], opset=24, inputs=signature.inputs, outputs=signature.outputs)
            for name, signature in signatures.items()
        },
        files=file_entries(folder),
        verification=None,
    )


def fill(folder: Path, content: str = "content") -> None:
    """Every file that a bundle must have, and its manifest."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{content} of {name}")
    write_manifest(folder, manifest_of(folder))


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` work on the parsed manifest.json."""
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, hidden files too: relative name -> bytes, or None for a folder or link."""
    return {
        item.relative_to(folder).as_posix(): item.read_bytes() if item.is_file() and not item.is_symlink() else None
        for item in sorted(folder.rglob("*"))
    }
