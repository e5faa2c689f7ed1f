"""Every bad checkpoint is refused with one CheckpointError that names what is wrong, without reading weights.

Tensors and folders one by one; settings: test_bad_configs.py; headers: test_bad_headers.py; hostile and oversized files, and pairs, are
the corpus's (test_bad_checkpoint_corpus.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.errors import CheckpointError
from tests.support.checkpoints import target_config, write_drafter, write_target
from tests.support.refusals import CONFIG, INDEX, WEIGHTS, named, refusal

# Tensors


def _edit(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


TARGET_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "two missing": (
        lambda t: [t.pop("model.norm.weight"), t.pop("model.layers.3.mlp.up_proj.weight")],
        ("missing: model.norm.weight, expected shape [32]", "missing: model.layers.3.mlp.up_proj.weight, expected shape [64, 32]"),
    ),
    "a layer too many": (
        lambda t: t.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(64, 32)}),
        ("surplus: model.layers.4.mlp.up_proj.weight of shape [64, 32]",),
    ),
    "a bias that the config denies": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        ("surplus: model.layers.0.self_attn.q_proj.bias", "attention_bias"),
    ),
    "misshapen": (
        lambda t: t.update({"model.embed_tokens.weight": torch.zeros(299, 32)}),
        ("misshapen: model.embed_tokens.weight, expected [300, 32], found [299, 32]",),
    ),
    "a head_dim of another model": (
        lambda t: t.update({"model.layers.1.self_attn.q_proj.weight": torch.zeros(32, 32)}),
        ("model.layers.1.self_attn.q_proj.weight, expected [64, 32], found [32, 32]",),
    ),
    "mistyped": (
        lambda t: t.update(
            {"model.norm.weight": torch.zeros(32, dtype=torch.float64), "model.layers.0.mlp.up_proj.weight": torch.zeros(64, 32).char()}
        ),
        ("mistyped: model.norm.weight", "found F64", "mistyped: model.layers.0.mlp.up_proj.weight", "found I8"),
    ),
    "another head than the embedding it is tied to": (
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        ("tie_word_embeddings is true", "lm_head.weight differs from model.embed_tokens.weight"),
    ),
    "everything at once": (
        lambda t: [t.pop("model.norm.weight"), t.update({"extra.weight": torch.zeros(1), "model.embed_tokens.weight": torch.zeros(3)})],
        ("3 problem(s)", "missing: model.norm.weight", "surplus: extra.weight", "misshapen: model.embed_tokens.weight"),
    ),
    "no tensors": (lambda t: t.clear(), ("hold only 0 tensors",)),
}


@pytest.mark.parametrize(("edit", "items"), TARGET_TENSORS.values(), ids=TARGET_TENSORS)
def test_a_target_with_bad_tensors_is_refused(tmp_path: Path, edit: Callable[..., object], items: tuple[str, ...]) -> None:
    _edit(write_target(tmp_path), edit)
    assert named(refusal(open_target, tmp_path), *items)


def test_an_untied_target_needs_its_head(tmp_path: Path) -> None:
    _edit(write_target(tmp_path, tied=False), lambda t: t.pop("lm_head.weight"))
    assert named(refusal(open_target, tmp_path), "missing: lm_head.weight, expected shape [300, 32]")


DRAFTER_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "head dropped when saved": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith(("prefix_gru", "embed_proj"))],
        (
            "missing: prefix_gru.weight_ih_l0, expected shape [48, 32]",
            "prefix_gru.weight_hh_l0",
            "embed_proj.0.weight",
            "embed_proj.2.weight",
        ),
    ),
    "head twice": (
        lambda t: t.update({"logit_head.embed_proj.2.weight": torch.zeros(300, 8)}),
        ("embed_proj.2.weight is present twice", "logit_head."),
    ),
    "a GRU with biases": (lambda t: t.update({"prefix_gru.bias_ih_l0": torch.zeros(48)}), ("surplus: prefix_gru.bias_ih_l0",)),
    "a bias gate": (lambda t: t.update({"bias_gate.weight": torch.zeros(1, 32)}), ("surplus: bias_gate.weight", "use_bias_gate")),
    "a bias norm": (lambda t: t.update({"bias_norm.weight": torch.zeros(16)}), ("surplus: bias_norm.weight", "use_bias_norm")),
    "a reduced draft vocabulary": (
        lambda t: t.update({"d2t": torch.zeros(100, dtype=torch.int64), "t2d": torch.zeros(300, dtype=torch.bool)}),
        ("surplus: d2t", "surplus: t2d", "reduced draft vocabulary"),
    ),
    "an embedding of its own": (
        lambda t: t.update({"embed_tokens.weight": torch.zeros(300, 32), "lm_head.weight": torch.zeros(300, 32)}),
        ("surplus: embed_tokens.weight", "the target's embedding", "surplus: lm_head.weight", "the target's LM head"),
    ),
    "features of one layer less": (
        lambda t: t.update({"fc.weight": torch.zeros(32, 32)}),
        ("misshapen: fc.weight, expected [32, 64], found [32, 32]",),
    ),
}


@pytest.mark.parametrize(("edit", "items"), DRAFTER_TENSORS.values(), ids=DRAFTER_TENSORS)
def test_a_drafter_with_bad_tensors_is_refused(tmp_path: Path, edit: Callable[..., object], items: tuple[str, ...]) -> None:
    _edit(write_drafter(tmp_path, target_config()), edit)
    assert named(refusal(open_drafter, tmp_path), *items)


@pytest.mark.parametrize("nested_head", [False, True])
def test_a_domino_head_is_never_dropped_to_run_as_dflash(tmp_path: Path, nested_head: bool) -> None:
    tensors = load_file(write_drafter(tmp_path, target_config(), nested_head=nested_head) / WEIGHTS)
    write_drafter(tmp_path, target_config(), kind="dflash")
    save_file(tensors, tmp_path / WEIGHTS)
    assert named(
        refusal(open_drafter, tmp_path),
        "prefix_gru.weight_ih_l0",
        "embed_proj.2.weight",
        "a Domino checkpoint must never run as plain DFlash",
    )


def test_a_flood_of_surplus_tensors_gives_a_short_message(tmp_path: Path) -> None:
    _edit(write_target(tmp_path), lambda t: t.update({f"surplus.{i}": torch.zeros(1) for i in range(1000)}))
    message = refusal(open_target, tmp_path)
    assert named(message, "surplus.0 ", "and 800 more")
    assert len(message) < 20_000


# Roles and folders


def test_a_drafter_passed_as_target_is_called_a_drafter(tmp_path: Path) -> None:
    write_drafter(tmp_path, target_config())
    assert named(refusal(open_target, tmp_path), "expected a target, found a drafter", "DFlashDraftModel")


def test_a_target_passed_as_drafter_is_called_a_target(tmp_path: Path) -> None:
    write_target(tmp_path)
    assert named(refusal(open_drafter, tmp_path), "expected a Domino or DFlash drafter", "LlamaForCausalLM", "looks like a target")


def _only_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def _index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def _fifo(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


SINGLE_FOLDERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no config": (lambda f: (f / CONFIG).unlink(), (CONFIG, WEIGHTS)),
    "a folder for a config": (lambda f: [(f / CONFIG).unlink(), (f / CONFIG).mkdir()], (CONFIG, "not a regular file")),
    "an empty folder": (lambda f: [path.unlink() for path in f.iterdir()], (CONFIG, "empty folder")),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), (WEIGHTS, INDEX, "no weights")),
    "pickle only": (_only_pickle, ("pytorch_model.bin", "Only safetensors are read", WEIGHTS)),
    "weights under another name": (lambda f: (f / WEIGHTS).rename(f / "drafter.safetensors"), ("drafter.safetensors", WEIGHTS)),
    "weights that are a pipe": (_fifo, (WEIGHTS, "not a regular file")),
    "an index beside a single file": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}'),
        ("found both", INDEX),
    ),
    "generation_config that is no JSON": (
        lambda f: (f / "generation_config.json").write_text("{"),
        ("generation_config.json", "valid JSON"),
    ),
    "a huge config": (lambda f: os.truncate(f / CONFIG, 2**34), (CONFIG, "at most", str(2**34))),
}


def _named(folder: Path, file: str) -> None:
    """Have the index name `file` for every tensor."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], file)
    (folder / INDEX).write_text(json.dumps(index))


SHARDED_FOLDERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a shard missing": (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), ("model-00002-of-00002.safetensors", "no such file")),
    "an index without weight_map": (lambda f: _index(f, lambda index: index.pop("weight_map")), (INDEX, "weight_map")),
    "an index with numbers for files": (lambda f: _index(f, lambda index: index["weight_map"].update({"a": 1})), (INDEX, "weight_map")),
    "an index with a tensor too many": (
        lambda f: _index(f, lambda index: index["weight_map"].update({"ghost.weight": "model-00001-of-00002.safetensors"})),
        ("ghost.weight is not in model-00001-of-00002.safetensors",),
    ),
    "an index with a tensor too few": (
        lambda f: _index(f, lambda index: index["weight_map"].pop("model.norm.weight")),
        ("model.norm.weight is in model-0000", "not in the index"),
    ),
    "an index that names a pickle": (lambda f: _named(f, "pytorch_model.bin"), (INDEX, ".safetensors files", "pytorch_model.bin")),
    "an index that names another file of the folder": (lambda f: _named(f, "config.json"), (INDEX, ".safetensors files", "config.json")),
    "an index that is no JSON": (lambda f: (f / INDEX).write_text("weights"), (INDEX, "valid JSON")),
}


@pytest.mark.parametrize(("damage", "items"), SINGLE_FOLDERS.values(), ids=SINGLE_FOLDERS)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], object], items: tuple[str, ...]) -> None:
    folder = tmp_path / "checkpoint"
    write_target(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    damage(folder)
    assert named(refusal(open_target, folder), *items)


@pytest.mark.parametrize(("damage", "items"), SHARDED_FOLDERS.values(), ids=SHARDED_FOLDERS)
def test_a_damaged_sharded_folder_is_refused(tmp_path: Path, damage: Callable[[Path], object], items: tuple[str, ...]) -> None:
    folder = write_target(tmp_path / "checkpoint", shards=2)
    damage(folder)
    assert named(refusal(open_target, folder), *items)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path, shards=2)
    first, second = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: load_file(first)[name]}, second)
    assert named(refusal(open_target, folder), name, second.name, first.name)


@pytest.mark.parametrize(
    ("source", "revision", "item"),
    [
        ("no-such-folder", None, "existing folder or a hub id"),
        ("./org/name", None, "existing folder or a hub id"),
        ("/no/such/folder", None, "existing folder or a hub id"),
        ("~/org", None, "existing folder or a hub id"),
        ("a/b/c", None, "existing folder or a hub id"),
        ("", None, "existing folder or a hub id"),
        ("a" * 5000, None, "existing folder or a hub id"),
        ("org/na\0me", None, "existing folder or a hub id"),
        (".", "v1", "no revision"),
    ],
)
def test_a_source_that_is_neither_folder_nor_hub_id_is_refused(source: str, revision: str | None, item: str) -> None:
    with pytest.raises(CheckpointError, match=item):
        open_target(source, revision=revision)


def test_a_file_as_source_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path)
    with pytest.raises(CheckpointError, match="found a file"):
        open_target(tmp_path / WEIGHTS)
