"""The fused logit correction in its three CPU forms: reference, PyTorch operator, and ONNX node run by its function body."""

from __future__ import annotations

import math

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from domino_deploy.plugins import op
from domino_deploy.plugins.reference import corrected_logits, fused_logit_correction
from domino_deploy.plugins.torch_op import fused_logit_correction as operator
from tests.support.corrections import BATCH, exported, operands, run, session

# Largest difference to the formula in fp64, per dtype of the base logits, for logits of magnitude up to 10.  fp16 and bf16
# round the result once, at a spacing of 2**-7 and 2**-4 just below 16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}

SIZES = [(1, 1, 1), (1, 7, 3), (3, 300, 8), (2, 1001, 63), (5, 64, 256)]


def formula(base: Tensor, hidden: Tensor, state: Tensor, codebook: Tensor) -> list[list[float]]:
    """base + W2 SiLU(z + s), one multiplication after the other, in Python's own fp64."""
    rows = []
    for b in range(base.shape[0]):
        sums = [float(z) + float(s) for z, s in zip(hidden[b], state[b], strict=True)]
        bottleneck = [x / (1.0 + math.exp(-x)) for x in sums]
        rows.append(
            [float(base[b, v]) + sum(w * float(c) for w, c in zip(bottleneck, codebook[v], strict=True)) for v in range(base.shape[1])]
        )
    return rows


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    """The operator as it stands in an exported graph, with symbolic sizes, run by ONNX Runtime."""
    token_ids, best = op.OUTPUTS
    model = exported(operator, {token_ids: ("int64", (BATCH,)), best: ("float32", (BATCH,))})
    assert [(node.domain, node.op_type) for node in model.graph] == [(op.DOMAIN, op.NAME)]
    return session(model, tmp_path_factory.mktemp("node"))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reference_equals_the_formula(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    tensors = operands(*sizes, dtype=dtype)
    expected = torch.tensor(formula(*tensors), dtype=torch.float64)
    assert expected.abs().max() < 16
    found = corrected_logits(*tensors)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype]
    tokens, best = fused_logit_correction(*tensors)
    assert torch.equal(tokens, found.argmax(-1))
    assert torch.equal(best, found.max(-1).values)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_node_equals_the_reference(sizes: tuple[int, int, int], node: onnxruntime.InferenceSession) -> None:
    for seed in range(5):
        tensors = operands(*sizes, seed=seed)
        tokens, best = fused_logit_correction(*tensors)
        found_tokens, found_best = run(node, tensors)
        np.testing.assert_array_equal(found_tokens, tokens.numpy())
        np.testing.assert_allclose(found_best, best.numpy(), atol=TOLERANCE[torch.float32], rtol=0)


def test_all_forms_give_ties_to_the_lowest_id(node: onnxruntime.InferenceSession) -> None:
    base, hidden, state, codebook = operands(2, 300, 8)
    base[:] = -1.0
    base[0, [299, 17, 40]] = 2.0
    base[1, 0] = base[1, 299] = 2.0
    tensors = (base, hidden, state, torch.zeros_like(codebook))
    for tokens in (fused_logit_correction(*tensors)[0], operator(*tensors)[0], torch.from_numpy(run(node, tensors)[0])):
        assert tokens.tolist() == [17, 0]


def test_all_forms_take_an_empty_batch(node: onnxruntime.InferenceSession) -> None:
    tensors = operands(0, 300, 8)
    for tokens, best in (fused_logit_correction(*tensors), operator(*tensors), map(torch.from_numpy, run(node, tensors))):
        assert (tokens.shape, tokens.dtype) == ((0,), torch.int64)
        assert (best.shape, best.dtype) == ((0,), torch.float32)


@pytest.mark.parametrize("extreme", [-1e4, -100.0, 100.0, 1e4])
def test_all_forms_saturate_as_silu_does(extreme: float, node: onnxruntime.InferenceSession) -> None:
    """SiLU(x) is x for large x and 0 for very negative x; x * sigmoid(x) written with exp(-x) would overflow to NaN."""
    base, _, state, codebook = operands(2, 50, 4)
    tensors = (base, torch.full((2, 4), extreme), torch.zeros_like(state), codebook)
    expected = base.double() + max(extreme, 0.0) * codebook.double().sum(-1)
    for tokens, best in (fused_logit_correction(*tensors), operator(*tensors), map(torch.from_numpy, run(node, tensors))):
        assert torch.equal(tokens, expected.argmax(-1))
        assert torch.allclose(best.double(), expected.max(-1).values, rtol=1e-5)


def test_identity_is_what_exported_bundles_carry() -> None:
    """Engines and plugin libraries are found by these strings: changing one breaks every bundle that exists."""
    assert (op.DOMAIN, op.NAME, op.VERSION, op.DOMAIN_OPSET) == ("domino", "Fused" + "LogitCorrection", "1", 1)
    assert op.NAMESPACE_ATTRIBUTE == "plugin_namespace"
    assert op.INPUTS == ("base_logits", "hidden_projection", "state_projection", "codebook")
    assert op.OUTPUTS == ("token_ids", "corrected_logits")
    assert ("TopKLogitCorrection", "k", (*op.OUTPUTS, "log_probs")) == (op.TOP_K_NAME, op.K_ATTRIBUTE, op.TOP_K_OUTPUTS)
    assert (op.TILES_NAME, op.TILES_OUTPUTS) == ("LogitCorrectionTiles", ("tile_values", "tile_ids"))


def test_operator_keeps_the_contract_of_torch_library() -> None:
    torch.library.opcheck(operator, operands(3, 40, 8))
