"""GGUF to checkpoint: a tiny file made with gguf's own writer, against transformers' reading of the same file."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from domino_deploy.errors import CheckpointError, MissingDependencyError
from domino_deploy.gguf_target import checkpoint_from_gguf, weights_from_gguf

gguf = pytest.importorskip("gguf", reason="gguf comes with the extra `train`")

WIDTH, HEADS, KV_HEADS, HEAD_DIM, WIDE, LAYERS = 32, 4, 2, 8, 64, 2
ALPHABET = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]  # GPT-2's byte alphabet
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, "he", "ll", "hell"]


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's layout of a query or key projection: the two rotary halves of a head alternate row by row."""
    rows = []
    for head in np.split(weight, heads):
        first, second = np.split(head, 2)
        for pair in zip(first, second, strict=True):
            rows.extend(pair)
    return np.stack(rows)


def tiny_weights(*, tied: bool) -> dict[str, np.ndarray]:
    """Seeded weights under transformers' names."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (len(TOKENS), WIDTH), "model.norm": (WIDTH,)}
    if not tied:
        shapes["lm_head"] = (len(TOKENS), WIDTH)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
            f"{prefix}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            f"{prefix}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            f"{prefix}.self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj": (WIDE, WIDTH),
            f"{prefix}.mlp.up_proj": (WIDE, WIDTH),
            f"{prefix}.mlp.down_proj": (WIDTH, WIDE),
            f"{prefix}.input_layernorm": (WIDTH,),
            f"{prefix}.post_attention_layernorm": (WIDTH,),
        }
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name in GGUF_NAMES:
        return f"{GGUF_NAMES[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"


def write_gguf(
    path: Path,
    *,
    tied: bool = True,
    architecture: str = "llama",
    quantization: Any = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    change: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """A whole Llama model of a few kilobytes; `change` may add fields."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])  # control tokens, then normal ones
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    change(writer)
    for name, weight in tiny_weights(tied=tied).items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        stored = interleaved(weight, heads) if heads else weight
        if quantization is not None and weight.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(stored, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(name), stored)
    for name, weight in (extra_tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_come_back_under_transformers_names_and_layout(tmp_path: Path, tied: bool) -> None:
    folder = checkpoint_from_gguf(write_gguf(tmp_path / "tiny.gguf", tied=tied), tmp_path / "made")
    expected, found = tiny_weights(tied=tied), loaded(folder)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_checkpoint_gives_the_logits_of_transformers_own_gguf_reader(tmp_path: Path, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate", reason="transformers' GGUF reader needs it")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = write_gguf(tmp_path / "tiny.gguf", tied=tied, quantization=gguf.GGMLQuantizationType.Q8_0)
    folder = checkpoint_from_gguf(file, tmp_path / "made")
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    input_ids = torch.tensor([[5, 70, 3, 41, 11, 9, 30]])
    with torch.inference_mode():
        torch.testing.assert_close(ours(input_ids).logits, theirs(input_ids).logits, atol=1e-4, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "hello <|im_end|> Größe"
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)(text).input_ids
    assert TOKENS.index("hell") in tokenizer(text).input_ids


def test_config_says_what_the_file_said(tmp_path: Path) -> None:
    folder = checkpoint_from_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "made")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    expected = {
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": WIDTH,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected


def test_right_hash_is_accepted_and_a_wrong_one_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    right = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(CheckpointError, match=f"expected sha256 {'0' * 64}, found {right}"):
        checkpoint_from_gguf(file, tmp_path / "made", sha256="0" * 64)
    assert_nothing_left(tmp_path)
    checkpoint_from_gguf(file, tmp_path / "made", sha256=right)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", architecture="gemma3")
    with pytest.raises(CheckpointError, match="expected architecture llama, found gemma3"):
        checkpoint_from_gguf(file, tmp_path / "made")
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["rope_freqs.weight"],
        ["blk.0.attn_q.bias"],
        ["blk.0.ffn_gate_exps.weight"],
        ["blk.0.attn_q.extra.weight"],
        ["blk.x.attn_q.weight", "output.scale"],
    ],
    ids=" ".join,
)
def test_tensors_without_a_place_are_all_listed(tmp_path: Path, names: list[str]) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", extra_tensors={name: np.ones(4, dtype=np.float32) for name in names})
    with pytest.raises(CheckpointError) as caught:
        checkpoint_from_gguf(file, tmp_path / "made")
    assert all(name in str(caught.value) for name in names)
    assert "token_embd" not in str(caught.value)
    assert_nothing_left(tmp_path)


SETTINGS: dict[str, tuple[Callable[[Any], None], str]] = {
    "rope scaling": (
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        "llama.rope.scaling.type: expected none, found yarn",
    ),
    "partial rotation": (lambda writer: writer.add_rope_dimension_count(4), "llama.rope.dimension_count: expected 8, found 4"),
    "other key length": (lambda writer: writer.add_key_length(16), "llama.attention.key_length: expected 8, found 16"),
    "experts": (lambda writer: writer.add_expert_count(4), "llama.expert_count: expected 0, found 4"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_that_would_be_lost_is_refused(tmp_path: Path, name: str) -> None:
    change, message = SETTINGS[name]
    file = write_gguf(tmp_path / "tiny.gguf", change=change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_from_gguf(file, tmp_path / "made")
    assert_nothing_left(tmp_path)


def test_missing_field_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_head_count(HEADS)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"expected the field llama\.embedding_length, found none"):
        checkpoint_from_gguf(tmp_path / "tiny.gguf", tmp_path / "made")
    assert_nothing_left(tmp_path)


def test_missing_file_and_existing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a GGUF file, found none"):
        checkpoint_from_gguf(tmp_path / "tiny.gguf", tmp_path / "made")
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "made").mkdir()
    with pytest.raises(CheckpointError, match="expected no such folder yet"):
        checkpoint_from_gguf(tmp_path / "tiny.gguf", tmp_path / "made")
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.parametrize(("module", "convert"), [("transformers", checkpoint_from_gguf), ("gguf", weights_from_gguf)])
def test_a_missing_package_is_named_with_the_extra(module: str, convert: Callable[..., object], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"{module}.*not installed.*domino-deploy\[train\]"):
        convert(tmp_path / "model.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_failure_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    def fail(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_from_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "made")
    assert_nothing_left(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
@pytest.mark.parametrize(
    ("umask", "folder_mode", "file_mode"), [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640), (0o077, 0o700, 0o600)], ids=oct
)
def test_modes_follow_the_umask(tmp_path: Path, umask: int, folder_mode: int, file_mode: int) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    before = os.umask(umask)
    try:
        folder = checkpoint_from_gguf(file, tmp_path / "made")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == folder_mode
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= modes.keys()
    assert set(modes.values()) == {file_mode}


def assert_nothing_left(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["tiny.gguf"]
