"""The logit correction under test: seeded operands, and an operator as it stands in an exported graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor, nn

from domino_deploy.exporters.graph import export_graph
from domino_deploy.exporters.passes import add_correction_function
from domino_deploy.plugins import op
from domino_deploy.signature import GraphSignature, TensorSpec

# The names of symbolic sizes are those that signature.py has; here they merely have to differ.
BATCH, VOCAB, RANK = "batch", "capacity", "rows"


def operands(batch: int, vocab: int, rank: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """Base logits [B, V], z [B, R], s [B, R], codebook [V, R]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, vocab), (batch, rank), (batch, rank), (vocab, rank))
    scales = (2.0, 1.0, 1.0, rank**-0.5)
    return tuple((torch.randn(shape, generator=generator) * scale).to(dtype) for shape, scale in zip(shapes, scales, strict=True))


def exported(
    operator: Callable[..., tuple[Tensor, ...]], outputs: dict[str, tuple[str, tuple[int | str, ...]]], vocab: int | str = VOCAB
) -> ir.Model:
    """A graph of one correction node on `op.INPUTS` in float32, with the node's function body.

    Args:
        operator: the PyTorch operator.
        outputs: type and shape of each output, by name.
        vocab: size of the vocabulary; a name leaves it open.
    """

    class Correction(nn.Module):
        def forward(self, base: Tensor, hidden: Tensor, state: Tensor, codebook: Tensor) -> tuple[Tensor, ...]:
            return operator(base, hidden, state, codebook)

    shapes = ((BATCH, vocab), (BATCH, RANK), (BATCH, RANK), (vocab, RANK))
    signature = GraphSignature(
        inputs=tuple(
            TensorSpec(name=name, dtype="float32", shape=shape, meaning="") for name, shape in zip(op.INPUTS, shapes, strict=True)
        ),
        outputs=tuple(TensorSpec(name=name, dtype=dtype, shape=shape, meaning="") for name, (dtype, shape) in outputs.items()),
    )
    model = export_graph(Correction, signature)
    add_correction_function(model)
    return model


def session(model: ir.Model, folder: Path) -> onnxruntime.InferenceSession:
    """The model, checked by ONNX and opened by ONNX Runtime."""
    file = folder / "node.onnx"
    ir.save(model, file)
    onnx.checker.check_model(str(file), full_check=True)
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


def run(node: onnxruntime.InferenceSession, tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """All outputs of a session that has `op.INPUTS`."""
    return node.run(None, {name: tensor.numpy() for name, tensor in zip(op.INPUTS, tensors, strict=True)})


def on_runtime(node: onnxruntime.InferenceSession) -> Callable[..., tuple[Tensor, ...]]:
    """The same outputs as a function of tensors."""
    return lambda *tensors: tuple(torch.from_numpy(output) for output in run(node, tensors))


def with_logits(*rows: list[float]) -> tuple[Tensor, ...]:
    """Operands whose corrected logits are `rows`."""
    base = torch.tensor(rows)
    _, hidden, state, codebook = operands(base.shape[0], base.shape[1], 4)
    return base, hidden, state, torch.zeros_like(codebook)
