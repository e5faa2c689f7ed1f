"""Random pairs in public shapes, and the script that measures their export: both at tiny widths."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import click
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.pairing import check_pairing
from tests.support.scripts import loaded_script

TINY = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TINY_TOKENS = {"bos_token_id": 290, "eos_token_id": 292}
TINY_DRAFTER = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
TINY_HEAD = {"mask_token_id": 299, "emb_dim": 8, "gru_hidden_dim": 16}


random_pair, bench_export = loaded_script("random_pair"), loaded_script("bench_export")


def write(folder: Path, *, tied: bool = True, num_layers: int = 6, shard_bytes: int = 30_000) -> Path:
    target = random_pair.target_json(TINY | TINY_TOKENS | {"tie_word_embeddings": tied}, num_layers)
    drafter = random_pair.drafter_json(target, **TINY_DRAFTER, **TINY_HEAD)
    random_pair.write_pair(folder, target, drafter, shard_bytes=shard_bytes, noise=random_pair.noise_block(1009))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_a_pair_opens_and_fits_together(tmp_path, tied):
    pair = write(tmp_path, tied=tied)
    target, drafter = open_target(pair / "target"), open_drafter(pair / "drafter")
    check_pairing(target.config, drafter.config)
    assert target.config.tie_word_embeddings is tied
    assert drafter.config.target_layer_ids == (0, 1, 2, 4, 5)
    assert (drafter.config.emb_dim, drafter.config.gru_hidden_dim, drafter.config.shift_label) == (8, 16, True)


def test_matrices_are_distinct_windows_of_small_noise_and_norms_are_one(tmp_path):
    found = tensors(write(tmp_path) / "target")
    noise = torch.from_numpy(random_pair.noise_block(1009)).view(torch.bfloat16)
    assert noise.float().std() == pytest.approx(0.02, rel=0.1)
    starts = set()
    for name, tensor in found.items():
        assert tensor.dtype is torch.bfloat16
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
            continue
        flat = tensor.flatten()
        start = next(i for i in range(1009) if torch.equal(noise.roll(-i)[:32], flat[:32]))
        assert torch.equal(flat, noise.roll(-start).repeat(math.ceil(len(flat) / 1009))[: len(flat)]), name
        starts.add(start)
        assert len(tensor.unique(dim=0)) == len(tensor), f"{name} has two equal rows"
    assert len(starts) > 0.9 * sum(tensor.dim() == 2 for tensor in found.values())


def test_two_runs_write_the_same_bytes(tmp_path):
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert len(files) > 8
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def test_shards_hold_no_more_than_asked_and_the_index_counts_them(tmp_path):
    folder = write(tmp_path, shard_bytes=30_000) / "target"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = tensors(folder)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert index["weight_map"].keys() == found.keys()
    shards = sorted(folder.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert len(shards) > 2
    assert all(path.stat().st_size < 30_000 + 4096 for path in shards)  # tensors, and the header


def test_one_file_that_is_large_enough_needs_no_index(tmp_path):
    folder = write(tmp_path, shard_bytes=10**9) / "target"
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]


def test_the_tokenizer_has_every_id_and_keeps_text(tmp_path):
    tokenizer = Tokenizer.from_file(str(write(tmp_path) / "target" / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab().values()) == list(range(300))
    ids = tokenizer.encode("<|im_start|>Größe 東京\n<|im_end|>").ids
    assert (ids[0], ids[-1]) == (291, 292)
    assert tokenizer.decode(ids) == "Größe 東京\n"
    assert tokenizer.decode([280]) == "w280"


# The parameters that the model cards state: 4.02 and 8.19 billion parameters, drafters of 0.588 and 1.105.
@pytest.mark.parametrize(
    ("shape", "target_parameters", "drafter_parameters"), [("qwen3-4b", 4.02e9, 0.588e9), ("qwen3-8b", 8.19e9, 1.105e9)]
)
def test_public_shapes_have_the_public_sizes(shape, target_parameters, drafter_parameters):
    raw = random_pair.target_json(random_pair.SHAPES[shape])
    target = random_pair.target_config(raw, "target", None)
    drafter = random_pair.drafter_config(random_pair.drafter_json(raw), "drafter")
    assert drafter.target_layer_ids == (1, 9, 17, 25, 33)
    assert drafter.mask_token_id == 151669
    sizes = [random_pair.expected_target_tensors(target), random_pair.expected_drafter_tensors(drafter)]
    counts = [sum(math.prod(shape) for shape in shapes.values()) for shapes in sizes]
    assert counts == pytest.approx([target_parameters, drafter_parameters], rel=2e-3)


@pytest.mark.parametrize("num_layers", range(1, 37))
def test_taps_of_a_truncated_target_are_distinct_layers_of_it(num_layers):
    layers = random_pair.taps(min(5, num_layers), num_layers)
    assert len(set(layers)) == min(5, num_layers)
    assert set(layers) <= set(range(num_layers))


def test_linked_files_count_as_not_written(tmp_path):
    (tmp_path / "source").write_bytes(b"x" * 1000)
    bundle = tmp_path / "bundle"
    (bundle / "target").mkdir(parents=True)
    os.link(tmp_path / "source", bundle / "target" / "model.safetensors")
    (bundle / "manifest.json").write_bytes(b"y" * 10)
    assert bench_export.file_sizes(bundle) == {"bundle_bytes": 1010, "written_bytes": 10, "linked_files": 1}


@pytest.mark.skipif(not Path("/usr/bin/time").exists(), reason="GNU time is not installed")
def test_peak_memory_and_seconds_are_the_commands_own():
    code = "import time; filled = b'1' * 200_000_000; time.sleep(0.5)"
    found = bench_export.measured([sys.executable, "-c", code])
    assert 200 < found["peak_memory_mb"] < 300
    assert 0.5 <= found["seconds"] < 30
    assert 0 < found["cpu_seconds"] < found["seconds"]


@pytest.mark.skipif(not Path("/usr/bin/time").exists(), reason="GNU time is not installed")
def test_a_failed_command_has_no_figures():
    with pytest.raises(click.ClickException, match="expected exit code 0, found 3"):
        bench_export.measured([sys.executable, "-c", "raise SystemExit(3)"])


def test_missing_gnu_time_is_said():
    with pytest.raises(click.ClickException, match="apt-get install time"):
        bench_export.measured(["true"], gnu_time="no-such-program")
