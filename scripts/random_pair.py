"""Writes a random target and a Domino drafter in the shapes of public ones: python scripts/random_pair.py --shape qwen3-4b --output DIR

DIR/target and DIR/drafter are bf16 checkpoints laid out as the public ones are (sharded safetensors with an index), for
measuring export at full size without a download.  Every matrix is a window on one seeded block of N(0, 0.02) noise, 64 MB,
repeated as often as needed and begun at another place for each tensor: drawing every number would take minutes.  The block's
length has no factor in common with a row's, so rows differ from each other.  Norm weights are 1.

Memory stays at some 430 MB for any shape, most of it for libraries and noise: files are written piece by piece.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from domino_deploy.checkpoint_config import target_config
from domino_deploy.checkpoint_drafter import default_target_layer_ids, drafter_config, has_room_for_taps
from domino_deploy.checkpoint_tensors import Shapes, expected_drafter_tensors, expected_target_tensors
from domino_deploy.safetensors_header import header_for

# Widths of https://huggingface.co/Qwen/Qwen3-4B and Qwen3-8B; everything else is the same in both.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}

SEED = 0
NOISE_ELEMENTS = 2**25 - 1  # 31 * 601 * 1801: divides no power of two, and none of the factors 3, 5, 19 of the widths above
_STANDARD_DEVIATION = 0.02  # initializer_range of Qwen3
_BF16_BYTES = 2
_BF16_ONE = 0x3F80

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def target_json(shape: Mapping[str, Any], num_layers: int = 36) -> dict[str, Any]:
    """config.json of a Qwen3 target; `shape` gives the widths and may replace any other field."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_decoder_json(num_layers),
        "attention_dropout": 0.0,
        "initializer_range": _STANDARD_DEVIATION,
        "max_window_layers": num_layers,
        "rope_scaling": None,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        **shape,
    }


def drafter_json(target: Mapping[str, Any], **replaced: Any) -> dict[str, Any]:
    """config.json of a Domino drafter for a target of that config.json; fields as in the public drafters of Qwen3-4B and -8B.

    Args:
        target: its widths, vocabulary and special tokens are taken over.
        replaced: fields of another value, at top level or under `dflash_config`.
    """
    count = min(5, target["num_hidden_layers"])
    special = {
        "projector_type": "domino",
        "mask_token_id": 151669,
        "target_layer_ids": taps(count, target["num_hidden_layers"]),
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
    }
    taken = ("vocab_size", "hidden_size", "intermediate_size", "bos_token_id", "eos_token_id", "max_position_embeddings")
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_decoder_json(5),
        **{name: target[name] for name in taken},
        "num_target_layers": target["num_hidden_layers"],
        "block_size": 16,
        "tie_word_embeddings": False,
    }
    special |= {name: replaced.pop(name) for name in special.keys() & replaced.keys()}
    return config | replaced | {"dflash_config": special}


def taps(count: int, num_layers: int) -> list[int]:
    """The drafter's default taps where the target has room for them, else `count` layers spread over all of it."""
    if has_room_for_taps(count, num_layers):
        return list(default_target_layer_ids(count, num_layers))
    return [round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count)]


def write_pair(output: Path, target: Mapping[str, Any], drafter: Mapping[str, Any], *, shard_bytes: int, noise: np.ndarray) -> None:
    """Both checkpoints, in `output`/target and `output`/drafter.

    Args:
        output: a folder that has neither yet.
        target, drafter: their config.json.
        shard_bytes: most bytes of tensors in one file; a tensor that is larger has a file of its own.
        noise: bf16 bit patterns uint16 [any], from `noise_block`.

    Raises:
        CheckpointError: a config.json that this project does not read.
        FileExistsError: there is such a folder.
    """
    seeds = np.random.default_rng(SEED)
    target_shapes = expected_target_tensors(target_config(dict(target), "target", None))
    drafter_shapes = expected_drafter_tensors(drafter_config(dict(drafter), "drafter"))
    for name, config, shapes in (("target", target, target_shapes), ("drafter", drafter, drafter_shapes)):
        folder = output / name
        folder.mkdir(parents=True)
        _write_json(folder / "config.json", config)
        write_weights(folder, shapes, shard_bytes=shard_bytes, noise=noise, seeds=seeds)
    eos = target["eos_token_id"]
    _write_json(output / "target" / "generation_config.json", {"bos_token_id": target["bos_token_id"], "eos_token_id": [eos]})
    write_tokenizer(output / "target", target["vocab_size"], end_of_text=target["bos_token_id"], im_end=eos)


def noise_block(elements: int = NOISE_ELEMENTS) -> np.ndarray:
    """Seeded N(0, 0.02) noise as bf16 bit patterns, uint16 [elements]."""
    generator = torch.Generator().manual_seed(SEED)
    values = torch.randn(elements, generator=generator).mul_(_STANDARD_DEVIATION)
    return values.to(torch.bfloat16).view(torch.uint16).numpy()


def write_weights(folder: Path, shapes: Shapes, *, shard_bytes: int, noise: np.ndarray, seeds: np.random.Generator) -> None:
    """model.safetensors, or shards and their index where one file of `shard_bytes` is too small."""
    shards: list[Shapes] = [{}]
    for name, shape in shapes.items():
        if shards[-1] and _nbytes(shards[-1]) + _nbytes({name: shape}) > shard_bytes:
            shards.append({})
        shards[-1][name] = shape
    single = len(shards) == 1
    files = ["model.safetensors"] if single else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        with (folder / file).open("xb") as stream:
            _write_shard(stream, shard, noise, seeds)
    if not single:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": _nbytes(shapes)}, "weight_map": weight_map})


def write_tokenizer(folder: Path, vocab_size: int, *, end_of_text: int, im_end: int) -> None:
    """tokenizer.json of exactly `vocab_size` entries, tokenizer_config.json and a chat template.

    Text becomes its bytes, ids 0 to 255; the three special tokens of Qwen3's chat have the ids given, `<|im_start|>` the one
    before `im_end`; all other ids decode to a word of their own and are never encoded to.
    """
    special = {end_of_text: "<|endoftext|>", im_end - 1: "<|im_start|>", im_end: "<|im_end|>"}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {i: special.get(i) or (alphabet[i] if i < len(alphabet) else f"w{i}") for i in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in words.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special.values()])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _write_json(folder / "tokenizer_config.json", names)
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")


def _decoder_json(num_layers: int) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    }


def _write_shard(stream: BinaryIO, shapes: Shapes, noise: np.ndarray, seeds: np.random.Generator) -> None:
    """One safetensors file."""
    stream.write(header_for({name: ("BF16", shape) for name, shape in shapes.items()})[0])
    for shape in shapes.values():
        if len(shape) == 1:  # a norm: no shape here has biases
            stream.write(np.full(shape, _BF16_ONE, dtype="<u2").tobytes())
        else:
            for piece in _pieces(math.prod(shape), noise, int(seeds.integers(len(noise)))):
                stream.write(piece.astype("<u2", copy=False).data)


def _pieces(count: int, noise: np.ndarray, start: int) -> Iterator[np.ndarray]:
    """`count` elements of the endlessly repeated noise from `start` on."""
    while count:
        piece = noise[start : start + count]
        yield piece
        count -= len(piece)
        start = 0


def _nbytes(shapes: Shapes) -> int:
    return _BF16_BYTES * sum(math.prod(shape) for shape in shapes.values())


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@click.command()
@click.option("--shape", type=click.Choice(sorted(SHAPES)), required=True, help="Whose widths.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for target/ and drafter/.")
@click.option("--layers", type=click.IntRange(1, 36), default=36, show_default=True, help="Layers of the target.")
@click.option("--shard-gb", type=click.FloatRange(min=0, min_open=True), default=4.0, show_default=True, help="Most GB (10^9) in one file.")
def main(*, shape: str, output: Path, layers: int, shard_gb: float) -> None:
    """Write a random pair in the shape of a public one."""
    target = target_json(SHAPES[shape], layers)
    write_pair(output, target, drafter_json(target), shard_bytes=round(shard_gb * 1e9), noise=noise_block())


if __name__ == "__main__":
    main()
