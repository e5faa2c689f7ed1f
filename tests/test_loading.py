"""Models loaded from folders compute what transformers computes from the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.errors import CheckpointError
from domino_deploy.model import rope
from domino_deploy.model.loading import load_drafter, load_target
from tests.support.checkpoints import ABSENT, target_config, write_drafter, write_target

# fp32 on the CPU, four layers: sums are taken in another order here and there.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama, tied": {"family": "llama"},
    "llama, untied, sharded": {"family": "llama", "tied": False, "shards": 3},
    "llama with biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "llama, linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen2, tied": {"family": "qwen2"},
    "qwen2, untied": {"family": "qwen2", "tied": False},
    "qwen2, yarn": {
        "family": "qwen2",
        "rope_theta": ABSENT,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen3, tied, sharded": {"family": "qwen3", "shards": 2},
    "qwen3, untied": {"family": "qwen3", "tied": False},
    "qwen3 with biases": {"family": "qwen3", "attention_bias": True},
    "qwen3, bfloat16": {"family": "qwen3", "dtype": "bfloat16"},
    "llama, float16": {"family": "llama", "dtype": "float16"},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_loaded_target_gives_transformers_logits_and_hidden_states(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = write_target(tmp_path, **options)
    model = load_target(open_target(folder), tapped_layers=(0, 2, 3))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        hidden, features = model.hidden_states(ids)
        expected = reference(ids, output_hidden_states=True)
        torch.testing.assert_close(model.lm_head(hidden), expected.logits, **TOLERANCE)
        # hidden_states[0] is the embedding, so layer l is entry l + 1.
        torch.testing.assert_close(features, torch.cat([expected.hidden_states[layer + 1] for layer in (0, 2, 3)], dim=-1), **TOLERANCE)
    assert not model.training


def test_a_tied_target_holds_its_embedding_once(tmp_path: Path) -> None:
    model = load_target(open_target(write_target(tmp_path)))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("nested_head", [False, True])
@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_a_loaded_drafter_holds_the_stored_tensors(tmp_path: Path, kind: str, nested_head: bool) -> None:
    folder = write_drafter(tmp_path, target_config(), kind=kind, nested_head=nested_head)
    model = load_drafter(open_drafter(folder))
    stored = {name.removeprefix("logit_head."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    loaded = model.state_dict()
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    assert not model.training


def test_the_head_computes_with_the_stored_tensors(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, target_config(), pure_draft_prefix_len=0)
    stored = load_file(folder / "model.safetensors")
    head = load_drafter(open_drafter(folder)).head
    assert head is not None
    gru = torch.nn.GRU(32, 16, bias=False, batch_first=True)
    gru.load_state_dict({name: stored[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
    generator = torch.Generator().manual_seed(3)
    prefix, hidden = torch.randn(2, 6, 32, generator=generator), torch.randn(2, 6, 32, generator=generator)
    with torch.no_grad():
        features = torch.cat([hidden, gru(prefix)[0]], dim=-1)
        expected = torch.nn.functional.silu(features @ stored["embed_proj.0.weight"].T)
        torch.testing.assert_close(head.teacher_forced(prefix, hidden), expected, rtol=1e-5, atol=1e-5)


def test_weights_take_the_dtype_asked_for_and_frequencies_stay_fp32(tmp_path: Path) -> None:
    checkpoint = open_target(write_target(tmp_path))
    model = load_target(checkpoint, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    expected, _ = rope.inverse_frequencies(checkpoint.config.rope, 16)
    assert model.inverse_frequencies.dtype is torch.float32
    torch.testing.assert_close(model.inverse_frequencies, expected, rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    tensors = load_file(write_target(tmp_path) / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.2.mlp.up_proj.weight"):
        tensors[name].view(-1)[7] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_target(open_target(tmp_path))
    assert "model.norm.weight" in str(caught.value)
    assert "model.layers.2.mlp.up_proj.weight" in str(caught.value)


def test_weights_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    tensors = load_file(write_drafter(tmp_path, target_config()) / "model.safetensors")
    tensors["fc.weight"][0, 0] = 1e5
    save_file(tensors, tmp_path / "model.safetensors")
    load_drafter(open_drafter(tmp_path))
    with pytest.raises(CheckpointError, match=r"torch\.float16[^\0]*fc\.weight"):
        load_drafter(open_drafter(tmp_path), dtype=torch.float16)
