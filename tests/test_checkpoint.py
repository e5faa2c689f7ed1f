"""What a good checkpoint is read as: every family, layout and spelling."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from domino_deploy.checkpoint import Checkpoint, load_tensors, open_drafter, open_target
from domino_deploy.config import DrafterConfig, DrafterKind, Family, RopeConfig, RopeType, TargetConfig
from domino_deploy.errors import CheckpointError
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel
from tests.support.checkpoints import ABSENT, drafter_config, drafter_shapes, target_config, target_shapes, write_drafter, write_target
from tests.support.safetensors_files import write_sparse

FAMILIES = ("llama", "qwen2", "qwen3")


def shapes_of(checkpoint: Checkpoint[Any]) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in checkpoint.tensors.items()}


def state_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_target(folder: Path, **overrides: Any) -> TargetConfig:
    return open_target(write_target(folder, **overrides)).config


def read_drafter(folder: Path, **overrides: Any) -> DrafterConfig:
    return open_drafter(write_drafter(folder, target_config(), **overrides)).config


# Targets


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_has_exactly_the_tensors_of_its_model(tmp_path: Path, family: str, tied: bool) -> None:
    checkpoint = open_target(write_target(tmp_path, family=family, tied=tied))
    expected = state_shapes(TargetModel(checkpoint.config))
    if tied:
        del expected["lm_head.weight"]
    assert shapes_of(checkpoint) == expected
    assert checkpoint.config.family is Family(family)
    assert checkpoint.config.tie_word_embeddings is tied
    assert (checkpoint.source, checkpoint.folder, checkpoint.revision) == (str(tmp_path), tmp_path, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_is_read_with_the_values_of_its_config(tmp_path: Path, family: str) -> None:
    config = read_target(tmp_path, family=family, eos_token_id=[2, 7], rope_theta=5e5)
    assert config == TargetConfig(
        family=Family(family),
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=5e5),
        max_position_embeddings=512,
        has_qk_norm=family == "qwen3",
        has_qkv_bias=family == "qwen2",
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_ids=(2, 7),
    )


def test_head_dim_falls_back_to_width_over_heads(tmp_path: Path) -> None:
    assert read_target(tmp_path, head_dim=ABSENT).head_dim == 8


def test_absent_key_value_heads_mean_one_per_head(tmp_path: Path) -> None:
    assert read_target(tmp_path, num_key_value_heads=ABSENT).num_kv_heads == 4


def test_biases_of_a_llama_target_are_honoured(tmp_path: Path) -> None:
    checkpoint = open_target(write_target(tmp_path, attention_bias=True, mlp_bias=True))
    config = checkpoint.config
    assert (config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias) == (True, True, True)
    assert {"model.layers.3.self_attn.o_proj.bias", "model.layers.0.mlp.down_proj.bias"} <= checkpoint.tensors.keys()


def test_the_generation_configs_stop_ids_win(tmp_path: Path) -> None:
    write_target(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert open_target(tmp_path).config.eos_token_ids == (5, 2)


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN_CONFIG = RopeConfig(theta=1e6, type=RopeType.YARN, factor=4.0, original_max_position_embeddings=128)
LLAMA3_CONFIG = RopeConfig(
    theta=1e6, type=RopeType.LLAMA3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"rope_theta": 1000000}, RopeConfig(theta=1e6), id="theta at top level, as an integer"),
        pytest.param({"rope_theta": ABSENT}, RopeConfig(theta=1e4), id="no theta"),
        pytest.param({"rope_theta": ABSENT, "rope_parameters": {"rope_theta": 1e6}}, RopeConfig(theta=1e6), id="theta in rope_parameters"),
        pytest.param({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6}}, RopeConfig(theta=1e6), id="theta in both, the same"),
        pytest.param({"rope_theta": 1e6, "rope_scaling": None}, RopeConfig(theta=1e6), id="scaling null"),
        pytest.param(
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(theta=1e6, type=RopeType.LINEAR, factor=2.0),
            id="linear under type",
        ),
        pytest.param({"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_CONFIG, id="llama3 under rope_type"),
        pytest.param(
            {"rope_theta": ABSENT, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3}},
            LLAMA3_CONFIG,
            id="llama3 in rope_parameters",
        ),
        pytest.param(
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}}, YARN_CONFIG, id="yarn, both spellings"
        ),
        pytest.param(
            {
                "rope_theta": 1e6,
                "rope_scaling": {"type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": True},
            },
            RopeConfig(
                theta=1e6,
                type=RopeType.YARN,
                factor=4.0,
                beta_fast=16,
                beta_slow=2,
                attention_factor=1.5,
                original_max_position_embeddings=128,
            ),
            id="yarn with its details",
        ),
    ],
)
def test_rotary_settings_are_read_from_every_place(tmp_path: Path, fields: dict[str, Any], expected: RopeConfig) -> None:
    assert read_target(tmp_path, **fields).rope == expected


def test_shards_give_the_tensors_of_one_file(tmp_path: Path) -> None:
    single = open_target(write_target(tmp_path / "single"))
    sharded = open_target(write_target(tmp_path / "sharded", shards=3))
    assert shapes_of(single) == shapes_of(sharded)
    assert len({entry.file for entry in sharded.tensors.values()}) == 3
    weights = dict(load_tensors(single, torch.float32))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_tensors(sharded, torch.float32))


@pytest.mark.parametrize(("dtype", "name"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_weights_load_in_the_dtype_asked_for(tmp_path: Path, dtype: str, name: str) -> None:
    checkpoint = open_target(write_target(tmp_path, dtype=dtype))
    assert {entry.dtype for entry in checkpoint.tensors.values()} == {name}
    loaded, stored = dict(load_tensors(checkpoint, torch.float32)), load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == stored.keys()
    for key, tensor in loaded.items():
        torch.testing.assert_close(tensor, stored[key].float(), rtol=0, atol=0)


def test_an_entry_points_at_the_tensors_bytes(tmp_path: Path) -> None:
    entry = open_target(write_target(tmp_path)).tensors["model.layers.2.mlp.up_proj.weight"]
    content = entry.file.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    expected = load_file(tmp_path / "model.safetensors")["model.layers.2.mlp.up_proj.weight"]
    assert torch.equal(torch.frombuffer(bytearray(content), dtype=torch.float32).reshape(entry.shape), expected)


def test_a_tied_target_may_store_its_embedding_twice(tmp_path: Path) -> None:
    weights = load_file(write_target(tmp_path) / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in open_target(tmp_path).tensors


def test_stored_rotary_frequencies_of_old_checkpoints_are_skipped(tmp_path: Path) -> None:
    weights = load_file(write_target(tmp_path) / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, tmp_path / "model.safetensors")
    assert open_target(tmp_path).tensors.keys() == weights.keys()


# Drafters


@pytest.mark.parametrize("nested_head", [False, True], ids=["flat head", "logit_head."])
@pytest.mark.parametrize("layout", ["nested", "flat"])
@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_a_drafter_has_exactly_the_tensors_of_its_model(tmp_path: Path, kind: str, layout: str, nested_head: bool) -> None:
    checkpoint = open_drafter(write_drafter(tmp_path, target_config(), kind=kind, layout=layout, nested_head=nested_head, shards=2))
    assert shapes_of(checkpoint) == state_shapes(DrafterModel(checkpoint.config))
    assert checkpoint.config.kind is DrafterKind(kind)


@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_a_domino_drafter_is_read_with_the_values_of_its_config(tmp_path: Path, layout: str) -> None:
    assert read_drafter(tmp_path, layout=layout) == DrafterConfig(
        kind=DrafterKind.DOMINO,
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4),
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
    )


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("prefix", [0, 1])
def test_shift_label_and_prefix_are_read_as_they_stand(tmp_path: Path, shift_label: bool, prefix: int) -> None:
    config = read_drafter(tmp_path, shift_label=shift_label, pure_draft_prefix_len=prefix)
    assert (config.shift_label, config.pure_draft_prefix_len, config.num_proposals) == (shift_label, prefix, 6 if shift_label else 5)


def test_the_alias_causal_v5_is_domino(tmp_path: Path) -> None:
    assert read_drafter(tmp_path, projector_type="causal_v5").kind is DrafterKind.DOMINO


def test_a_plain_dflash_drafter_has_unshifted_labels(tmp_path: Path) -> None:
    config = read_drafter(tmp_path, kind="dflash")
    assert (config.kind, config.shift_label, config.num_proposals) == (DrafterKind.DFLASH, False, 5)


def test_a_field_in_two_places_with_one_value_is_fine(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, target_config())
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"emb_dim": 8, "domino_config": {"gru_hidden_dim": 16}}))
    assert open_drafter(folder).config.emb_dim == 8


def test_domino_fields_are_read_from_domino_config(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, target_config())
    raw = json.loads((folder / "config.json").read_text())
    names = ("shift_label", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim")
    raw["domino_config"] = {name: raw["dflash_config"].pop(name) for name in names}
    (folder / "config.json").write_text(json.dumps(raw))
    config = open_drafter(folder).config
    assert (config.shift_label, config.pure_draft_prefix_len, config.emb_dim, config.gru_hidden_dim) == (True, 1, 8, 16)


@pytest.mark.parametrize(
    ("layers", "target_layers", "expected"), [(1, 28, (14,)), (2, 28, (1, 25)), (5, 36, (1, 9, 17, 25, 33)), (3, 30, (1, 14, 27))]
)
def test_absent_target_layer_ids_follow_dflashs_formula(tmp_path: Path, layers: int, target_layers: int, expected: tuple[int, ...]) -> None:
    folder = write_drafter(tmp_path, target_config(num_hidden_layers=target_layers), target_layer_ids=ABSENT, num_hidden_layers=layers)
    assert open_drafter(folder).config.target_layer_ids == expected


def test_sliding_layers_are_read_per_layer(tmp_path: Path) -> None:
    config = read_drafter(tmp_path, layer_types=["full_attention", "sliding_attention"], sliding_window=4, use_sliding_window=True)
    assert (config.sliding_layers, config.sliding_window) == ((False, True), 4)


def test_full_attention_layers_have_no_window(tmp_path: Path) -> None:
    config = read_drafter(tmp_path, layer_types=["full_attention"] * 2, sliding_window=4, use_sliding_window=False)
    assert (config.has_sliding_layers, config.sliding_window) == (False, None)


# The public checkpoints, as SpecForge's configs mirror them.
QWEN3_8B_DOMINO = {
    "emb_dim": 256,
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "shift_label": True,
    },
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_4B_DOMINO = {**QWEN3_8B_DOMINO, "hidden_size": 2560, "intermediate_size": 9728}


@pytest.mark.parametrize(
    ("raw", "width", "wide", "head_millions", "backbone_millions"),
    [
        pytest.param(QWEN3_8B_DOMINO, 4096, 12288, 55.9, 1049, id="8B"),
        pytest.param(QWEN3_4B_DOMINO, 2560, 9728, 50.8, 537, id="4B"),
    ],
)
def test_public_domino_checkpoints_are_read_without_their_weights(
    tmp_path: Path, raw: dict[str, Any], width: int, wide: int, head_millions: float, backbone_millions: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write_sparse(tmp_path / "model.safetensors", drafter_shapes(raw))
    tracemalloc.start()
    checkpoint = open_drafter(tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert checkpoint.config == DrafterConfig(
        kind=DrafterKind.DOMINO,
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=wide,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        max_position_embeddings=40960,
        has_qk_norm=True,
        block_size=16,
        num_target_layers=36,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151669,
        shift_label=True,
        pure_draft_prefix_len=1,
        emb_dim=256,
        gru_hidden_dim=1024,
    )
    # Parameter counts that the paper gives: the head is 5.3 % of the drafter.
    head = sum(entry.nbytes for name, entry in checkpoint.tensors.items() if name.startswith(("prefix_gru", "embed_proj"))) / 2e6
    total = sum(entry.nbytes for entry in checkpoint.tensors.values()) / 2e6
    assert (head, total - head) == (pytest.approx(head_millions, abs=0.1), pytest.approx(backbone_millions, abs=1))
    assert peak_bytes < 5e6


def test_the_27b_layout_without_shift_is_read(tmp_path: Path) -> None:
    special = {**QWEN3_8B_DOMINO["dflash_config"], "target_layer_ids": [1, 16, 31, 46, 61], "shift_label": False}  # type: ignore[dict-item]
    raw = {**QWEN3_8B_DOMINO, "bos_token_id": None, "num_target_layers": 64, "dflash_config": special, "pad_token_id": 248044}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write_sparse(tmp_path / "model.safetensors", drafter_shapes(raw))
    config = open_drafter(tmp_path).config
    assert (config.shift_label, config.num_proposals, config.target_layer_ids) == (False, 15, (1, 16, 31, 46, 61))


# Sources


def hub_snapshot(root: Path, folder: Path) -> Path:
    """`folder` in the layout of the hub's cache: links from a snapshot to blobs."""
    snapshot, blobs = root / "snapshots" / ("a" * 40), root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        shutil.copy(path, blobs / f"hash-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"hash-{path.name}")
    return snapshot


def test_a_hub_id_is_fetched_without_pickles_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_snapshot(tmp_path / "models--org--name", write_target(tmp_path / "target"))
    calls = []

    def fetch(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    checkpoint = open_target("org/name", revision="main")
    assert calls == [
        ("org/name", {"revision": "main", "allow_patterns": ["*.json", "*.safetensors", "*.jinja"], "ignore_patterns": ["*/*"]}),
    ]
    assert (checkpoint.source, checkpoint.folder, checkpoint.revision) == ("org/name", snapshot, "a" * 40)


def test_an_existing_folder_is_never_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    assert open_target("org/name").revision is None


def test_a_failed_download_says_that_there_is_no_such_folder_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("network is down")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=r"org/name.*no such folder.*network is down"):
        open_target("org/name", revision="v1")


def test_the_hubs_words_for_a_failed_download_are_short_and_name_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("not in the cache, and so on") from OSError("no route\n\nto host \x1b[31m" + "!" * 500)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError) as caught:
        open_target("org/name")
    assert re.fullmatch(
        r"org/name: expected a folder here or a repository on the hub, found no such folder, and a download that failed: "
        r'"no route to host \\x1b\[31m!{100,200}\.\.\."\. Check the spelling, the revision and the network, or name a local folder\.',
        str(caught.value),
    )


def test_the_factory_writes_what_its_shapes_say(tmp_path: Path) -> None:
    write_target(tmp_path / "t", family="qwen2", tied=False)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "t" / "model.safetensors").items()}
    assert stored == target_shapes(target_config(family="qwen2", tied=False))
    raw = drafter_config(tmp_path / "t")
    assert raw["vocab_size"] == 300
    assert raw["dflash_config"]["mask_token_id"] == 299
