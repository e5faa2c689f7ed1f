"""Tiny seeded checkpoints as folders: targets of every family, and drafters of every layout.

    target = write_target(tmp_path / "target", family="qwen3")
    drafter = write_drafter(tmp_path / "drafter", target)

Any other keyword is a config.json field; `ABSENT` as a value leaves the field out.  Tensor names and shapes are written
out here a second time on purpose: they are what `domino_deploy.checkpoint` is tested against.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ABSENT: Any = object()

BOS_ID, IM_START_ID, EOS_ID = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A drafter proposes tokens; the target verifies them and keeps the longest prefix it agrees with.",
    "Count to ten: one, two, three, four, five, six, seven, eight, nine, ten.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
    "Größe, naïve café, übermäßig: 東京 and Москва, with an emoji 🙂 at the end.",
)

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Fields that a public checkpoint keeps under `dflash_config`; the rest of a drafter's config.json is top level.
DFLASH_FIELDS = frozenset(
    {
        "projector_type",
        "mask_token_id",
        "target_layer_ids",
        "shift_label",
        "pure_draft_prefix_len",
        "emb_dim",
        "gru_hidden_dim",
        "use_bias_gate",
        "use_bias_norm",
    }
)


def write_target(
    folder: Path, *, family: str = "llama", tied: bool = True, dtype: str = "float32", shards: int = 1, seed: int = 0, **overrides: Any
) -> Path:
    """A random target with tokenizer and chat template: vocabulary 300, width 32, 4 layers, 4 heads over 2, head width 16."""
    config = target_config(family=family, tied=tied, dtype=dtype, **overrides)
    write_checkpoint(folder, config, seeded_tensors(target_shapes(config), seed, dtype), shards=shards)
    write_tokenizer(folder, config["vocab_size"])
    return folder


def write_drafter(
    folder: Path,
    target: Path | Mapping[str, Any],
    *,
    kind: str = "domino",
    layout: str = "nested",
    nested_head: bool = False,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 1,
    **overrides: Any,
) -> Path:
    """A random drafter for `target` (its folder or config): 2 layers, block 6, rank 8, GRU width 16, shifted labels.

    Args:
        folder: made if needed.
        target: what vocabulary, width and tapped layers must fit.
        kind: "domino" or "dflash".
        layout: "nested" keeps the drafter's fields under `dflash_config`, "flat" at top level.
        nested_head: name the head's tensors `logit_head.*`, as early SpecForge checkpoints do.
        dtype: of every tensor: "float32", "float16" or "bfloat16".
        shards: more than one gives an index and that many files.
        seed: of the weights.
        overrides: config.json fields, put where `layout` says.
    """
    config = drafter_config(target, kind=kind, layout=layout, dtype=dtype, **overrides)
    shapes = drafter_shapes(config, nested_head=nested_head)
    write_checkpoint(folder, config, seeded_tensors(shapes, seed, dtype), shards=shards)
    return folder


def target_config(*, family: str = "llama", tied: bool = True, dtype: str = "float32", **overrides: Any) -> dict[str, Any]:
    """config.json of the tiny target."""
    config = {
        "architectures": [_ARCHITECTURES.get(family, "OtherForCausalLM")],
        "model_type": family,
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": dtype,
    }
    if family != "qwen2":
        config["attention_bias"] = False
    if family == "llama":
        config["mlp_bias"] = False
    else:
        config["use_sliding_window"] = False
    return _overridden(config, overrides)


def drafter_config(
    target: Path | Mapping[str, Any], *, kind: str = "domino", layout: str = "nested", dtype: str = "float32", **overrides: Any
) -> dict[str, Any]:
    """config.json of the tiny drafter for `target`."""
    if isinstance(target, Path):
        target = json.loads((target / "config.json").read_text(encoding="utf-8"))
    target_layers = target["num_hidden_layers"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_target_layers": target_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "block_size": 6,
        "dtype": dtype,
    }
    special = {"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": sorted({0, target_layers // 2})}
    if kind == "domino":
        special |= {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1, "emb_dim": 8, "gru_hidden_dim": 16}
    special |= {name: overrides.pop(name) for name in DFLASH_FIELDS & overrides.keys()}
    special = _overridden({}, special)
    config |= {"dflash_config": special} if layout == "nested" else special
    return _overridden(config, overrides)


def target_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a target's tensors, as transformers saves them."""
    vocab, width = config["vocab_size"], config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, width)
    family = config["model_type"]
    has_bias = family == "qwen2" or bool(config.get("attention_bias"))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= _layer_shapes(config, prefix, qk_norm=family == "qwen3", qkv_bias=has_bias)
        if has_bias and family != "qwen2":
            shapes[f"{prefix}self_attn.o_proj.bias"] = (width,)
        if config.get("mlp_bias"):
            wide = config["intermediate_size"]
            shapes |= {f"{prefix}mlp.{part}_proj.bias": (size,) for part, size in (("gate", wide), ("up", wide), ("down", width))}
    return shapes


def drafter_shapes(config: Mapping[str, Any], *, nested_head: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a drafter's tensors, as a public checkpoint has them."""
    fields = {**config, **config.get("dflash_config", {})}
    width = config["hidden_size"]
    taps = len(fields.get("target_layer_ids") or range(config["num_hidden_layers"]))
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, taps * width), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= _layer_shapes(config, f"layers.{layer}.", qk_norm=True, qkv_bias=False)
    if "projector_type" in fields:
        rank, state = fields.get("emb_dim", 8), fields.get("gru_hidden_dim", 16)
        prefix = "logit_head." if nested_head else ""
        shapes |= {
            f"{prefix}prefix_gru.weight_ih_l0": (3 * state, width),
            f"{prefix}prefix_gru.weight_hh_l0": (3 * state, state),
            f"{prefix}embed_proj.0.weight": (rank, width + state),
            f"{prefix}embed_proj.2.weight": (config["vocab_size"], rank),
        }
    return shapes


def seeded_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """Random weights, scaled so that activations keep their size and greedy decoding does not repeat one token."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            weight = 0.1 * noise if name.endswith("bias") else 1.0 + 0.1 * noise
        elif name.endswith("embed_tokens.weight"):
            weight = 0.25 * noise
        else:
            weight = 1.5 * noise * shape[1] ** -0.5
        tensors[name] = weight.to(getattr(torch, dtype))
    return tensors


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, shards: int = 1) -> None:
    """config.json and the weights, in one file or in `shards` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata=metadata)
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_tokenizer(folder: Path, vocab_size: int = 300) -> None:
    """tokenizer.json (byte-level BPE of exactly `vocab_size` entries), tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(vocab_size), encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


@functools.cache
def _tokenizer_json(vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The last id is left for the mask token.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    missing = vocab_size - 1 - tokenizer.get_vocab_size()
    if missing < 0:
        raise ValueError(f"a byte-level tokenizer has at least {vocab_size - missing} entries, asked for {vocab_size}")
    tokenizer.add_tokens([AddedToken(f"<|unused_{i}|>", special=True) for i in range(missing)])
    tokenizer.add_special_tokens([AddedToken("<|mask|>", special=True)])
    return tokenizer.to_str(pretty=True)


def _layer_shapes(config: Mapping[str, Any], prefix: str, *, qk_norm: bool, qkv_bias: bool) -> dict[str, tuple[int, ...]]:
    width, wide = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config.get("num_key_value_heads", config["num_attention_heads"]) * head
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (wide, width),
        "mlp.up_proj.weight": (wide, width),
        "mlp.down_proj.weight": (width, wide),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if qkv_bias:
        shapes |= {f"self_attn.{part}_proj.bias": (size,) for part, size in (("q", queries), ("k", keys), ("v", keys))}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def _overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**config, **overrides}.items() if value is not ABSENT}
