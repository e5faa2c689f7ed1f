"""The folder that a training run leaves: the public layout, read back before it counts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save_file as real_save_file
from torch import Tensor

from domino_deploy.aside import written_aside
from domino_deploy.checkpoint import load_tensors, open_drafter, open_target
from domino_deploy.checkpoint_drafter import drafter_config as parsed_drafter_config
from domino_deploy.config import DrafterConfig, DrafterKind, Family, RopeConfig, RopeType, TargetConfig
from domino_deploy.errors import TrainingError
from domino_deploy.exporters.export import export_bundle
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.training.save import public_config, save_drafter
from tests.support.checkpoints import write_target
from tests.support.tiny_models import drafter_config, randomize, target_config, tiny_drafter

SCALES = torch.tensor([3.0, 0.5])
KINDS = [DrafterKind.DOMINO, DrafterKind.DFLASH]

# config.json of the public Qwen3-8B and Qwen3-4B Domino drafters of block 16, less the two widths and `auto_map`.
PUBLIC = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "mask_token_id": 151669,
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "shift_label": True,
        "target_layer_ids": [1, 9, 17, 25, 33],
    },
    "dtype": "bfloat16",
    "emb_dim": 256,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def folded(drafter: DrafterModel, scales: Tensor) -> dict[str, Tensor]:
    """The state dict for raw features: every tap's columns of `fc` divided by its scale, then `fc` brought to rms 0.02."""
    state = dict(drafter.state_dict())
    fc = torch.cat([columns / scale for columns, scale in zip(state["fc.weight"].chunk(len(scales), dim=1), scales, strict=True)], dim=1)
    state["fc.weight"] = 0.02 * fc / fc.pow(2).mean().sqrt()
    return state


class TestConfig:
    @pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(4096, 12288), (2560, 9728)], ids=["8B", "4B"])
    def test_has_the_fields_of_the_public_checkpoint_and_no_others(self, hidden_size: int, intermediate_size: int) -> None:
        shape: dict[str, Any] = {
            "vocab_size": 151936,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "rope": RopeConfig(theta=1e6),
            "max_position_embeddings": 40960,
            "has_qk_norm": True,
        }
        target = TargetConfig(
            **shape, family=Family.QWEN3, num_layers=36, tie_word_embeddings=False, bos_token_id=151643, eos_token_ids=(151645,)
        )
        config = DrafterConfig(
            **shape,
            kind=DrafterKind.DOMINO,
            num_layers=5,
            block_size=16,
            num_target_layers=36,
            target_layer_ids=(1, 9, 17, 25, 33),
            mask_token_id=151669,
            shift_label=True,
            pure_draft_prefix_len=1,
            emb_dim=256,
            gru_hidden_dim=1024,
        )
        found = public_config(config, torch.bfloat16, target)
        assert found == PUBLIC | {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        assert parsed_drafter_config(found, "config.json") == config

    def test_of_a_dflash_drafter_names_no_head(self) -> None:
        found = public_config(drafter_config(DrafterKind.DFLASH), torch.float16)
        assert found.keys() == (PUBLIC.keys() | {"hidden_size", "intermediate_size"}) - {"emb_dim"}
        assert found["dflash_config"] == {"mask_token_id": 60, "target_layer_ids": [0, 2], "shift_label": True}

    @pytest.mark.parametrize(("ids", "expected"), [((), None), ((5,), 5), ((5, 7), [5, 7])])
    def test_states_every_end_of_text_id_of_the_target(self, ids: tuple[int, ...], expected: object) -> None:
        assert public_config(drafter_config(), torch.float16, target_config(eos_token_ids=ids))["eos_token_id"] == expected

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"sliding_window": 8, "sliding_layers": (False, True)},
            {"rope": RopeConfig(theta=5e5, type=RopeType.LINEAR, factor=2.0)},
            {"rope": RopeConfig(theta=5e5, type=RopeType.YARN, factor=4.0, original_max_position_embeddings=64)},
            {"rope": RopeConfig(theta=5e5, type=RopeType.LLAMA3, factor=4.0, original_max_position_embeddings=64)},
        ],
        ids=["plain", "sliding", "linear", "yarn", "llama3"],
    )
    def test_transformers_reads_it_unchanged(
        self, kind: DrafterKind, changes: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers import Qwen3Config

        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        written = public_config(drafter_config(kind, **changes), torch.float16, target_config(bos_token_id=3, eos_token_ids=(5, 7)))
        read = Qwen3Config.from_dict(json.loads(json.dumps(written)))
        scaling = written.pop("rope_scaling") or {"rope_type": "default"}
        assert read.rope_parameters == {"rope_theta": written.pop("rope_theta"), **scaling}
        assert str(read.dtype).removeprefix("torch.") == written.pop("dtype")
        assert {name: getattr(read, name) for name in written} == written
        assert caplog.text == ""


class TestWeights:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shift_label", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_open_again_as_the_drafter_that_was_trained(
        self, kind: DrafterKind, shift_label: bool, dtype: torch.dtype, tmp_path: Path
    ) -> None:
        drafter = tiny_drafter(kind=kind, shift_label=shift_label)
        save_drafter(drafter, SCALES, tmp_path, dtype=dtype, target=target_config(bos_token_id=3, eos_token_ids=(5,)))
        assert open_drafter(tmp_path).config == drafter.config
        found, expected = weights_of(tmp_path), folded(drafter, SCALES)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype is dtype
            torch.testing.assert_close(tensor, expected[name].to(dtype), rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=1e-7)
        assert config_of(tmp_path)["dtype"] == str(dtype).removeprefix("torch.")

    def test_are_readable_by_whoever_may_read_the_config(self, tmp_path: Path) -> None:
        save_drafter(tiny_drafter(), SCALES, tmp_path, max_shard_bytes=8000)
        assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "config.json").stat().st_mode}

    @pytest.mark.parametrize("most", [3000, 8000, 20_000])
    def test_of_a_large_drafter_come_in_files_of_at_most_the_size_asked_for(self, most: int, tmp_path: Path) -> None:
        drafter = tiny_drafter()
        save_drafter(drafter, SCALES, tmp_path / "whole")
        save_drafter(drafter, SCALES, tmp_path / "sharded", max_shard_bytes=most)
        files = sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
        assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        assert len(files) > 1
        for file in files:
            path = tmp_path / "sharded" / file
            assert path.stat().st_size <= most or len(load_file(path)) == 1
        index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file in files for name in load_file(tmp_path / "sharded" / file)}
        whole, sharded = (dict(load_tensors(open_drafter(tmp_path / name), torch.float32)) for name in ("whole", "sharded"))
        assert index["metadata"]["total_size"] == 2 * sum(tensor.numel() for tensor in whole.values())
        assert whole.keys() == sharded.keys()
        assert all(torch.equal(whole[name], sharded[name]) for name in whole)

    def test_that_fit_one_file_have_no_index(self, tmp_path: Path) -> None:
        save_drafter(tiny_drafter(), SCALES, tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]

    def test_another_dtype_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TrainingError, match=r"float16.*found torch\.float64"):
            save_drafter(tiny_drafter(), SCALES, tmp_path, dtype=torch.float64)


class TestExport:
    @pytest.mark.parametrize("kind", KINDS)
    def test_takes_the_folder_unchanged(self, kind: DrafterKind, tmp_path: Path) -> None:
        target = write_target(tmp_path / "target", family="qwen3", eos_token_id=[1, 2])
        config = drafter_config(
            kind,
            vocab_size=300,
            hidden_size=32,
            num_target_layers=4,
            mask_token_id=299,
            max_position_embeddings=512,
        )
        drafter = randomize(DrafterModel(config), seed=1)
        save_drafter(drafter, SCALES, tmp_path / "drafter", target=open_target(target).config, max_shard_bytes=20_000)
        bundle = export_bundle(tmp_path / "drafter", target, tmp_path / "bundle")
        assert bundle.manifest.drafter == config
        copied = json.loads((tmp_path / "bundle" / "drafter" / "config.json").read_text())
        assert copied == config_of(tmp_path / "drafter") | {"dtype": "float32"}  # bundles hold float32


def dropping(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def renaming(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {new if key == old else key: tensor for key, tensor in tensors.items()}


def swapping(one: str, other: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {one: tensors[other], other: tensors[one]}


def casting(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: tensors[name].to(dtype)}


K, V = "layers.1.self_attn.k_proj.weight", "layers.1.self_attn.v_proj.weight"


class TestReadingBack:
    @pytest.mark.parametrize(
        ("kind", "fault", "message"),
        [
            (DrafterKind.DOMINO, dropping("prefix_gru.weight_hh_l0"), r"missing: prefix_gru\.weight_hh_l0"),
            (DrafterKind.DFLASH, dropping("hidden_norm.weight"), r"missing: hidden_norm\.weight"),
            (DrafterKind.DOMINO, renaming(K, f"model.{K}"), r"missing: layers\.1\.self_attn\.k_proj"),
            (DrafterKind.DFLASH, renaming("norm.weight", "final_norm.weight"), r"surplus: final_norm\.weight"),
            # These open: the head's early name is read as today's, both shapes fit, and mixed dtypes are allowed.
            (DrafterKind.DOMINO, renaming("embed_proj.0.weight", "logit_head.embed_proj.0.weight"), r"found \['logit_head\.embed_proj"),
            (DrafterKind.DOMINO, swapping(K, V), r"k_proj\.weight: other values(?s:.*)v_proj\.weight: other values"),
            (DrafterKind.DFLASH, casting(K, torch.float32), r"expected \['layers.*'F16'.*'F32'"),
        ],
        ids=["dropped", "dropped-dflash", "renamed", "renamed-dflash", "nested-head", "swapped", "other-dtype"],
    )
    def test_a_weights_file_that_is_not_what_was_to_be_written_is_refused(
        self, kind: DrafterKind, fault: Callable[..., Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "domino_deploy.training.save.save_file", lambda tensors, path, **options: real_save_file(fault(tensors), path, **options)
        )
        with pytest.raises(TrainingError, match=message), written_aside(tmp_path / "drafter") as folder:
            save_drafter(tiny_drafter(kind=kind), SCALES, folder)
        assert list(tmp_path.iterdir()) == []

    def test_a_value_that_the_disk_changed_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def flipping(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
            real_save_file(tensors, path, **options)
            with path.open("r+b") as file:
                file.seek(-2, os.SEEK_END)
                last = file.read(1)
                file.seek(-2, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))

        monkeypatch.setattr("domino_deploy.training.save.save_file", flipping)
        with pytest.raises(TrainingError, match="other values than were to be written"):
            save_drafter(tiny_drafter(), SCALES, tmp_path)

    def test_a_config_that_says_something_else_is_refused(self, tmp_path: Path) -> None:
        # The layout has one field for the biases of all four projections.
        drafter = DrafterModel(drafter_config(has_qkv_bias=True))
        with pytest.raises(TrainingError, match=r"missing: layers\.0\.self_attn\.o_proj\.bias"):
            save_drafter(drafter, SCALES, tmp_path)

    def test_fields_without_a_meaning_need_not_survive(self, tmp_path: Path) -> None:
        drafter = tiny_drafter(kind=DrafterKind.DFLASH, emb_dim=6, sliding_window=8, sliding_layers=(False, False))
        save_drafter(drafter, SCALES, tmp_path)
        assert open_drafter(tmp_path).config == drafter_config(DrafterKind.DFLASH)


class TestNumbersThatCannotBeStored:
    def test_weights_beyond_fp16_are_named_with_a_way_out_that_works(self, tmp_path: Path) -> None:
        drafter = tiny_drafter()
        with torch.no_grad():
            drafter.norm.weight[3] = -1e5
            drafter.layers[0].mlp.up_proj.weight[1, 2] = 7e4
        with pytest.raises(TrainingError) as caught, written_aside(tmp_path / "drafter") as folder:
            save_drafter(drafter, SCALES, folder)
        message = str(caught.value)
        assert "2 tensor(s)" in message
        assert "norm.weight: 1e+05 is too large" in message
        assert "layers.0.mlp.up_proj.weight: 7e+04 is too large" in message
        assert "bfloat16" in message
        assert list(tmp_path.iterdir()) == []
        save_drafter(drafter, SCALES, tmp_path / "drafter", dtype=torch.bfloat16)
        assert weights_of(tmp_path / "drafter")["norm.weight"][3].item() == pytest.approx(-1e5, rel=8e-3)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_weights_that_are_not_finite_in_training_either(self, value: float, dtype: torch.dtype, tmp_path: Path) -> None:
        drafter = tiny_drafter()
        with torch.no_grad():
            drafter.hidden_norm.weight[:2] = value
        with pytest.raises(TrainingError, match=r"hidden_norm\.weight: 2 of 24 values are not finite(?s:.*)lower the learning rate"):
            save_drafter(drafter, SCALES, tmp_path / "drafter", dtype=dtype)
        assert not (tmp_path / "drafter").exists()

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")])
    def test_a_full_disk(self, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("domino_deploy.training.save.save_file", full)
        with pytest.raises(TrainingError, match=r"MB, found: .*No space left on device.*Make room"):
            save_drafter(tiny_drafter(), SCALES, tmp_path)
