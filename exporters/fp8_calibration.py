"""Calibration for float8: the largest magnitudes that go into each product of the layers, over some text.

Both models run in float32 on the weights that the bundle stores.  Of the target one layer at a time is in memory, and of the drafter,
which is a few layers, all.  The same text gives the same scales.

Shape legend: B sequences, S tokens of each, F feature width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from domino_deploy.bundle import DRAFTER_FOLDER, TARGET_FOLDER, Bundle
from domino_deploy.checkpoint_tensors import EMBEDDING
from domino_deploy.engines import Calibration, ProductRange
from domino_deploy.errors import RequestError
from domino_deploy.exporters.fp8 import CalibrationText, is_float8_matrix
from domino_deploy.exporters.fp8_texts import CONVERSATIONS
from domino_deploy.exporters.stored import Stored, read_tensor, stored_tensors
from domino_deploy.model import rope
from domino_deploy.model.loading import drafter_of
from domino_deploy.model.target import TargetModel
from domino_deploy.runtime.text import Tokenizer

BUILT_IN = "built-in"

# All sequences pass a layer together, so their number is memory: 4096 tokens take 0.2 GB at a width of 12288 in float32.
MOST_TOKENS = 4096
_SEQUENCE_TOKENS = 256
_LEAST_TOKENS = 16
# A block is drafted behind these parts of each sequence.
_CONTEXTS = (0.25, 0.5, 0.75)

_FINAL_NORM = "model.norm.weight"

Progress = Callable[[str], None]


def built_in_text(tokenizer: Tokenizer) -> CalibrationText:
    """Our own conversations, question and answer, in the target's chat template if it has one."""
    prompts = []
    for question, answer in CONVERSATIONS:
        if tokenizer.has_chat_template:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            text = tokenizer.render_chat(messages, add_generation_prompt=False)
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
        else:
            prompts.append(tokenizer.encode(f"{question}\n\n{answer}"))
    return CalibrationText(source=BUILT_IN, prompts=prompts)


@torch.inference_mode()
def calibrate(bundle: Bundle, text: CalibrationText, *, progress: Progress = lambda step: None) -> Calibration:
    """The magnitudes that `fp8.quantise_fp8` takes scales from.

    Args:
        bundle: its weights are read as they are stored.
        text: joined and cut into sequences of 256 tokens (or a single shorter one); 4096 tokens are used at most.
        progress: told what is being done, one line per step.

    Raises:
        RequestError: fewer than 16 tokens, or ids outside the vocabulary.
    """
    ids_BS = _sequences(text.prompts, bundle)
    largest: dict[str, Tensor] = {}
    target = _streamed_target(bundle, progress)
    _watch(target, "target.", largest)
    _, features_BSF = target.hidden_states(ids_BS)
    progress("Calibrating the drafter")
    _run_drafter(bundle, target.model.embed_tokens, ids_BS, features_BSF, largest)
    return Calibration(
        source=text.source,
        sha256=hashlib.sha256(ids_BS.numpy().astype("<i8").tobytes()).hexdigest(),
        tokens=ids_BS.numel(),
        products={name: ProductRange(input=float(found[0]), weight=float(found[1])) for name, found in largest.items()},
    )


def _sequences(prompts: Sequence[Sequence[int]], bundle: Bundle) -> Tensor:
    """int64 [B, S]."""
    stream = [token for prompt in prompts for token in prompt][:MOST_TOKENS]
    if len(stream) < _LEAST_TOKENS:
        raise RequestError(f"Expected at least {_LEAST_TOKENS} tokens of calibration text, found {len(stream)}. Give more of it.")
    most = bundle.target.vocab_size - 1
    outside = sorted({token for token in stream if not 0 <= token <= most})
    if outside:
        raise RequestError(f"Expected calibration text in token ids from 0 to {most}, found {outside[:5]}. Use this bundle's tokenizer.")
    longest = min(bundle.target.max_position_embeddings, bundle.drafter.max_position_embeddings - bundle.drafter.block_size)
    length = min(_SEQUENCE_TOKENS, longest, len(stream))
    count = len(stream) // length
    return torch.tensor(stream[: count * length]).reshape(count, length)


def _streamed_target(bundle: Bundle, progress: Progress) -> TargetModel:
    """The target without its LM head; a layer has weights only while it runs."""
    config, stored = bundle.target, stored_tensors(bundle.path / TARGET_FOLDER)
    with torch.device("meta"):
        target = TargetModel(config, bundle.drafter.target_layer_ids)
    target.load_state_dict({name: read_tensor(stored[name]) for name in (EMBEDDING, _FINAL_NORM)}, strict=False, assign=True)
    target.inverse_frequencies = rope.inverse_frequencies(config.rope, config.head_dim)[0]
    for index, layer in enumerate(target.model.layers):
        prefix = f"model.layers.{index}."
        own = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
        _stream(layer, own, lambda number=index + 1: progress(f"Calibrating layer {number} of {config.num_layers}"))  # type: ignore[misc]
    return target.eval()


def _stream(module: nn.Module, stored: Stored, announce: Callable[[], None]) -> None:
    """Give a module its weights before it runs and take them away behind it."""

    def load(_module: nn.Module, _inputs: Any) -> None:
        announce()
        module.load_state_dict({name: read_tensor(tensor) for name, tensor in stored.items()}, assign=True)

    def drop(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        module.to("meta")

    module.register_forward_pre_hook(load)
    module.register_forward_hook(drop)


def _watch(model: nn.Module, prefix: str, largest: dict[str, Tensor]) -> None:
    """Keep in `largest`, by the names of the graph's initializers, the magnitudes [input, weight] of float8 products as they run."""

    def watched(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found = torch.stack([values.abs().amax() for values in (inputs[0], linear.get_parameter("weight"))])
            largest[name] = torch.maximum(largest.get(name, found), found)  # NaN wins

        return keep

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_float8_matrix(f"{prefix}{name}.weight"):
            module.register_forward_pre_hook(watched(f"{prefix}{name}.weight"))


def _run_drafter(bundle: Bundle, embed: nn.Embedding, ids_BS: Tensor, features_BSF: Tensor, largest: dict[str, Tensor]) -> None:
    """Draft a block behind some contexts of each sequence."""
    config, stored = bundle.drafter, stored_tensors(bundle.path / DRAFTER_FOLDER)
    drafter = drafter_of(config, {name: read_tensor(tensor) for name, tensor in stored.items()})
    _watch(drafter, "drafter.", largest)
    for part in _CONTEXTS:
        context = int(ids_BS.shape[1] * part)
        slots, rows = torch.arange(context + config.block_size), torch.arange(context, context + config.block_size)[:, None]
        everything = torch.ones(config.block_size, len(slots), dtype=torch.bool)
        # As in `model/spec_generate.py`: the context above position - window, and the whole block.
        sliding = None if config.sliding_window is None else (slots >= context) | (slots > rows - config.sliding_window)
        drafter(embed(drafter.block_ids(ids_BS[:, context])), features_BSF[:, :context], slots[None], everything, sliding)
