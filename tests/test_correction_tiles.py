"""The tiled correction: reference and function body on ONNX Runtime give the best token of every tile."""

from __future__ import annotations

import math

import onnx_ir as ir
import onnxruntime
import pytest
import torch

from domino_deploy.exporters.passes import add_correction_function
from domino_deploy.exporters.translations import OPSET
from domino_deploy.plugins import op
from domino_deploy.plugins.reference import corrected_logits, fused_logit_correction, logit_correction_tiles
from tests.support.corrections import on_runtime, operands, session, with_logits

# Sums in another order, of logits of magnitude up to 10.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    """The tiled operator, written out: it comes into graphs by lowering the fused one, not by an export."""
    inputs = ", ".join(f"float[{shape}] {name}" for name, shape in zip(op.INPUTS, ("b, v", "b, r", "b, r", "v, r"), strict=True))
    values, ids = op.TILES_OUTPUTS
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": {OPSET}, "{op.DOMAIN}": {op.DOMAIN_OPSET}]>
        graph ({inputs}) => (float[b, t] {values}, int32[b, t] {ids}) {{
            {values}, {ids} = {op.DOMAIN}.{op.TILES_NAME} <{op.NAMESPACE_ATTRIBUTE} = "{op.DOMAIN}"> ({", ".join(op.INPUTS)})
        }}"""
    )
    add_correction_function(model)
    return session(model, tmp_path_factory.mktemp("tiles"))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 127, 8), (2, 128, 8), (3, 129, 8), (2, 1001, 63), (32, 300, 16)], ids=str)
def test_reference_and_node_give_the_best_of_each_tile(sizes: tuple[int, int, int], tiles: onnxruntime.InferenceSession) -> None:
    tensors = operands(*sizes)
    whole = corrected_logits(*tensors)
    starts = range(0, sizes[1], op.TILE_SIZE)
    expected_ids = [[start + max(range(len(part)), key=part.__getitem__) for start, part in in_tiles(row)] for row in whole.tolist()]
    for values, ids in (logit_correction_tiles(*tensors), on_runtime(tiles)(*tensors)):
        assert (values.dtype, ids.dtype) == (torch.float32, torch.int32)
        assert values.shape == ids.shape == (sizes[0], len(starts))
        assert ids.tolist() == expected_ids
        assert torch.allclose(values, whole.gather(-1, ids.long()), atol=TOLERANCE, rtol=0)


def test_reference_takes_an_empty_batch() -> None:
    values, ids = logit_correction_tiles(*operands(0, 300, 8))
    assert (values.shape, ids.shape) == ((0, 3), (0, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_reference_takes_a_narrow_codebook_and_computes_in_float32(dtype: torch.dtype) -> None:
    base, hidden, state, codebook = operands(2, 300, 16)
    narrow = logit_correction_tiles(base, hidden, state, codebook.to(dtype))
    widened = logit_correction_tiles(base, hidden, state, codebook.to(dtype).float())
    assert torch.equal(narrow[0], widened[0])
    assert torch.equal(narrow[1], widened[1])


def test_the_best_tile_holds_the_fused_corrections_token() -> None:
    tensors = operands(4, 1001, 8)
    values, ids = logit_correction_tiles(*tensors)
    best = values.argmax(dim=-1, keepdim=True)
    token_ids, corrected = fused_logit_correction(*tensors)
    assert torch.equal(ids.gather(-1, best)[:, 0].long(), token_ids)
    assert torch.equal(values.gather(-1, best)[:, 0], corrected)


def test_ties_go_to_the_lowest_id_of_each_tile(tiles: onnxruntime.InferenceSession) -> None:
    logits = torch.zeros(300)
    logits[[40, 17, 299, 257]] = 2.0
    tensors = with_logits(logits.tolist(), [-math.inf] * 300)
    for _, ids in (logit_correction_tiles(*tensors), on_runtime(tiles)(*tensors)):
        assert ids.tolist() == [[17, 128, 257], [0, 128, 256]]


def test_nan_is_reported_in_its_tile_alone(tiles: onnxruntime.InferenceSession) -> None:
    logits = torch.arange(300.0)
    logits[[150, 140]] = math.nan
    tensors = with_logits(logits.tolist())
    for values, ids in (logit_correction_tiles(*tensors), on_runtime(tiles)(*tensors)):
        assert values.isnan().tolist() == [[False, True, False]]
        assert ids.tolist() == [[127, 140, 299]]


def in_tiles(row: list[float]) -> list[tuple[int, list[float]]]:
    return [(start, row[start : start + op.TILE_SIZE]) for start in range(0, len(row), op.TILE_SIZE)]
