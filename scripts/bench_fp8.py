"""What float8 costs: the target with products in float8, and in the bundle's own type, against float32.  Prints JSON.

    python scripts/bench_fp8.py BUNDLE [--threads N]

BUNDLE is in float16 or bfloat16.  The graph is the one that `build-engine --fp8` builds from, run by ONNX Runtime on the CPU; of
bfloat16 a float32 copy, since ONNX Runtime lacks the operators.  Text is our own and not that of the calibration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor
from torch.nn import functional as F

from domino_deploy.bundle import TARGET_GRAPH, Bundle, open_bundle
from domino_deploy.exporters.fp8 import quantise_fp8
from domino_deploy.exporters.fp8_calibration import built_in_text, calibrate
from domino_deploy.exporters.precision import as_float32
from domino_deploy.exporters.stored import load_stored
from domino_deploy.precision import Dtype
from domino_deploy.runtime.kv_cache import causal_mask
from domino_deploy.runtime.text import bundle_tokenizer
from domino_deploy.signature import (
    ATTENTION_MASK,
    INPUT_IDS,
    LOGIT_INDEX,
    LOGITS,
    POSITION_IDS,
    WRITE_INDEX,
    key_cache,
    value_cache,
)

TEXTS = (
    "How do I make pancakes without eggs?\n\nMix one cup of flour with a tablespoon of sugar, two teaspoons of baking powder and a "
    "pinch of salt. Stir in one cup of milk and two tablespoons of oil until the batter is smooth. Let it rest for five minutes. Heat a "
    "pan, pour in a small ladle of batter and turn the pancake when bubbles form on top. Serve with maple syrup or a little lemon juice.",
    "Write a Python function that returns the largest even number in a list.\n\ndef largest_even(numbers):\n"
    "    evens = [n for n in numbers if n % 2 == 0]\n    if not evens:\n        return None\n    return max(evens)\n\n"
    "The list comprehension keeps the even numbers, and max picks the largest. If there are none the function returns None.",
    "What caused the fall of the Berlin Wall?\n\nBy 1989 the economy of East Germany was failing and many people were leaving through "
    "Hungary and Czechoslovakia. Mass protests in Leipzig and other cities demanded reform. On the evening of 9 November a spokesman "
    "announced new travel rules and said by mistake that they applied at once. Crowds gathered at the crossings, and the guards, who had "
    "no clear orders, opened the gates.",
    "A tank holds 240 litres and drains 8 litres per minute. How long until it is a quarter full?\n\nA quarter of 240 litres is 60 "
    "litres. So 240 - 60 = 180 litres must drain. At 8 litres per minute this takes 180 / 8 = 22.5 minutes.",
)


@click.command()
@click.argument("path", metavar="BUNDLE", type=click.Path(path_type=Path))
@click.option("--threads", default=0, help="Of ONNX Runtime; 0 for one per core.")
def main(*, path: Path, threads: int) -> None:
    """Compare both forms of a bundle's target with float32."""
    bundle = open_bundle(path)
    tokenizer = bundle_tokenizer(bundle)
    texts = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
    calibration = calibrate(bundle, built_in_text(tokenizer))
    exact = _by_pytorch(bundle, texts)
    forms = {}
    for name in (str(bundle.precision.activations), "float8"):
        model = ir.load(bundle.path / TARGET_GRAPH)
        if name == "float8":
            quantise_fp8(model, calibration.products)
        forms[name] = _by_onnxruntime(bundle, model, texts, threads)
    result = {
        "tokens": sum(len(ids) for ids in texts),
        "calibration_tokens": calibration.tokens,
        "float32": {"perplexity": _perplexity(exact, texts)},
        **{name: _compared(found, exact, texts) for name, found in forms.items()},
    }
    print(json.dumps(result, indent=2))


def _by_pytorch(bundle: Bundle, texts: list[Tensor]) -> list[Tensor]:
    """Logits [S, V] of each text."""
    target, _ = load_stored(bundle)
    with torch.inference_mode():
        return [target.lm_head(target.hidden_states(ids[None])[0])[0] for ids in texts]


def _by_onnxruntime(bundle: Bundle, model: ir.Model, texts: list[Tensor], threads: int) -> list[Tensor]:
    dtype = bundle.precision.activations
    if dtype is Dtype.BFLOAT16:
        as_float32(model)
        dtype = Dtype.FLOAT32
    ir.external_data.load_to_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(session.run([LOGITS], _inputs(bundle, ids, str(dtype)))[0])[0] for ids in texts]


def _inputs(bundle: Bundle, ids: Tensor, dtype: str) -> Mapping[str, np.ndarray[Any, Any]]:
    rows, config = len(ids), bundle.target
    cache = np.zeros((1, config.num_kv_heads, rows, config.head_dim), dtype)
    return {
        INPUT_IDS: ids.numpy()[None],
        POSITION_IDS: np.arange(rows)[None],
        ATTENTION_MASK: causal_mask(0, np.empty((rows, rows), np.bool_))[None, None],
        WRITE_INDEX: np.zeros(1, np.int64),
        LOGIT_INDEX: np.arange(rows)[None],
        **{name(layer): cache for layer in range(config.num_layers) for name in (key_cache, value_cache)},
    }


def _compared(found: list[Tensor], exact: list[Tensor], texts: list[Tensor]) -> dict[str, float]:
    own, true = torch.cat(found), torch.cat(exact)
    divergence = F.kl_div(own.log_softmax(-1), true.log_softmax(-1), reduction="batchmean", log_target=True)
    return {
        "perplexity": _perplexity(found, texts),
        "agreement": round(float((own.argmax(-1) == true.argmax(-1)).float().mean()), 4),
        "kl_divergence": round(max(0.0, float(divergence)), 5),
        "relative_error": round(float((own - true).norm() / true.norm()), 5),
    }


def _perplexity(logits: list[Tensor], texts: list[Tensor]) -> float:
    losses = [F.cross_entropy(own[:-1], ids[1:], reduction="none") for own, ids in zip(logits, texts, strict=True)]
    return round(float(torch.cat(losses).mean().exp()), 3)


if __name__ == "__main__":
    main()
