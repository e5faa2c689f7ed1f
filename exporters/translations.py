"""How operators of the PyTorch models become ONNX nodes.

One entry per operator: norms, attention, rotary embedding and cache updates become single nodes of ONNX opset 24, the
logit corrections become the custom nodes whose identity `plugins/op.py` holds.  Their function bodies are added later,
by `passes.add_correction_function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import onnx.defs
import torch
from onnxscript import BFLOAT16, BOOL, FLOAT, FLOAT16, INT64, values
from onnxscript.onnx_opset import opset24

from domino_deploy.errors import ExportError
from domino_deploy.model import ops as _ops  # noqa: F401  registers rotary_embedding and cache_update
from domino_deploy.plugins import op
from domino_deploy.plugins import torch_op as _torch_op  # noqa: F401  registers the logit corrections

OPSET = 24

# The exporter reads these annotations at run time to tell inputs from attributes.
TFloat = TypeVar("TFloat", bound=FLOAT | FLOAT16 | BFLOAT16)


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """PyTorch operator -> ONNX function, for `torch.onnx.export(custom_translation_table=...)`."""
    return {
        torch.ops.aten.rms_norm.default: _rms_norm,
        torch.ops.aten.scaled_dot_product_attention.default: _attention,
        torch.ops.aten.split.Tensor: _split,
        torch.ops.domino.rotary_embedding.default: _rotary_embedding,
        torch.ops.domino.cache_update.default: _cache_update,
        torch.ops.domino.fused_logit_correction.default: _fused_logit_correction,
        torch.ops.domino.top_k_logit_correction.default: _top_k_logit_correction,
        torch.ops.domino.pooled_logit_correction.default: _pooled_logit_correction,
    }


def _rms_norm(input: TFloat, normalized_shape: Sequence[int], weight: TFloat, eps: float) -> TFloat:
    if len(normalized_shape) != 1:
        raise ExportError(f"RMS norm: expected one normalised axis, found {list(normalized_shape)}. Write the norm over the last axis.")
    return opset24.RMSNormalization(input, weight, axis=-1, epsilon=eps)


def _attention(
    query: TFloat,
    key: TFloat,
    value: TFloat,
    attn_mask: BOOL | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TFloat:
    # ONNX's Attention is grouped-query by head counts, so `enable_gqa` needs no attribute.
    if attn_mask is None or dropout_p or is_causal:
        found = f"{'a' if attn_mask is not None else 'no'} mask, dropout {dropout_p}, is_causal {is_causal}"
        raise ExportError(f"attention: expected an explicit mask and no dropout, found {found}. Pass the mask as a tensor.")
    mixed, *_unused = opset24.Attention(query, key, value, attn_mask, scale=scale)  # the rest is removed by `passes.clean`
    return mixed


def _split(self: TFloat, split_size: int, dim: int = 0) -> Sequence[TFloat]:
    # The exporter's own translation makes an ONNX sequence, which few runtimes like inside a loop.
    size = self.shape[dim]
    if not isinstance(size, int) or size % split_size:
        raise ExportError(f"split: expected an axis of static size divisible by {split_size}, found {size}. Slice it instead.")
    return opset24.Split(self, num_outputs=size // split_size, axis=dim)


def _rotary_embedding(x: TFloat, cos: TFloat, sin: TFloat) -> TFloat:
    return opset24.RotaryEmbedding(x, cos, sin)


def _cache_update(cache: TFloat, rows: TFloat, write_index: INT64) -> TFloat:
    return opset24.TensorScatter(cache, rows, write_index, axis=-2, mode="linear")


def _fused_logit_correction(
    base_logits: TFloat, hidden_projection: TFloat, state_projection: TFloat, codebook: TFloat
) -> tuple[INT64, TFloat]:
    node = values.Op(values.Opset(op.DOMAIN, op.DOMAIN_OPSET), op.NAME, _correction_schema(op.NAME, op.INPUTS, op.OUTPUTS))
    return node(base_logits, hidden_projection, state_projection, codebook, **{op.NAMESPACE_ATTRIBUTE: op.DOMAIN})


def _top_k_logit_correction(
    base_logits: FLOAT, hidden_projection: FLOAT, state_projection: FLOAT, codebook: FLOAT, k: int
) -> tuple[INT64, FLOAT, FLOAT]:
    vocab_size = codebook.shape[0]
    is_small = isinstance(vocab_size, int) and vocab_size < op.MAX_TOP_K
    most, reason = (vocab_size, "the vocabulary's size") if is_small else (op.MAX_TOP_K, "the most that TensorRT can build")
    if not 1 <= k <= most:
        raise ExportError(f"top-k correction: expected k from 1 to {most}, {reason}, found {k}. Choose a k in that range.")
    schema = _correction_schema(op.TOP_K_NAME, op.INPUTS, op.TOP_K_OUTPUTS, op.K_ATTRIBUTE)
    node = values.Op(values.Opset(op.DOMAIN, op.DOMAIN_OPSET), op.TOP_K_NAME, schema)
    attributes = {op.NAMESPACE_ATTRIBUTE: op.DOMAIN, op.K_ATTRIBUTE: k}
    return node(base_logits, hidden_projection, state_projection, codebook, **attributes)


def _pooled_logit_correction(
    base_logits: FLOAT,
    hidden_projection: FLOAT,
    state_projection: FLOAT,
    codebook: FLOAT,
    codebook_mean: FLOAT,
    deviations: FLOAT,
    candidates: INT64,
    exact: bool,
) -> tuple[INT64, FLOAT, BOOL]:
    schema = _correction_schema(op.POOLED_NAME, op.POOLED_INPUTS, op.POOLED_OUTPUTS, op.EXACT_ATTRIBUTE)
    node = values.Op(values.Opset(op.DOMAIN, op.DOMAIN_OPSET), op.POOLED_NAME, schema)
    attributes = {op.NAMESPACE_ATTRIBUTE: op.DOMAIN, op.EXACT_ATTRIBUTE: int(exact)}
    return node(base_logits, hidden_projection, state_projection, codebook, codebook_mean, deviations, candidates, **attributes)


# What is not a float.
_TYPES = {"token_ids": "I", "candidates": "I", "uncertified": "B"}


def _correction_schema(name: str, inputs: Sequence[str], outputs: Sequence[str], *numbers: str) -> onnx.defs.OpSchema:
    parameter, attribute, kinds = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.Attribute, onnx.defs.OpSchema.AttrType
    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    return onnx.defs.OpSchema(
        name,
        op.DOMAIN,
        op.DOMAIN_OPSET,
        inputs=[parameter(value, _TYPES.get(value, "T")) for value in inputs],
        outputs=[parameter(value, _TYPES.get(value, "T")) for value in outputs],
        type_constraints=[("T", floats, ""), ("I", ["tensor(int64)"], ""), ("B", ["tensor(bool)"], "")],
        attributes=[
            attribute(op.NAMESPACE_ATTRIBUTE, kinds.STRING, "where the plugin is registered", required=True),
            *(attribute(number, kinds.INT, "see plugins/op.py", required=True) for number in numbers),
        ],
    )
