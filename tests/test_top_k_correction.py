"""The top-k correction: reference, PyTorch operator and function body on ONNX Runtime agree."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor

from domino_deploy.errors import ExportError, RequestError
from domino_deploy.plugins import op
from domino_deploy.plugins.reference import corrected_logits, fused_logit_correction, top_k_logit_correction
from domino_deploy.plugins.torch_op import fused_logit_correction as fused_operator
from domino_deploy.plugins.torch_op import top_k_logit_correction as operator
from tests.support.correction_engines import needs_rtx
from tests.support.corrections import BATCH, RANK, VOCAB, exported, on_runtime, operands, session, with_logits

# Sums in another order, of logits of magnitude up to 10; a log-probability adds the logarithm of a sum over the vocabulary.
TOLERANCE = 2e-5

# Batch, vocabulary, rank, k: vocabularies beside and at multiples of the tile and of powers of two, k from 1 to all.
SIZES = [
    (1, 1, 1, 1),
    (1, 7, 3, 7),
    (3, 300, 8, 1),
    (3, 300, 8, 64),
    (2, 1001, 63, 1000),
    (2, 1001, 63, 1001),
    (32, 129, 16, 5),
    (2, 128, 8, 3),
]

Node = Callable[[int], onnxruntime.InferenceSession]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """The top-k operator as it stands in an exported graph, for a k."""
    model = top_k_model(4)
    return functools.cache(lambda k: session(with_k(model, k), tmp_path_factory.mktemp("top_k")))


def top_k_model(k: int, vocab: int | str = VOCAB) -> ir.Model:
    dtypes = dict(zip(op.TOP_K_OUTPUTS, ("int64", "float32", "float32"), strict=True))
    return exported(lambda *tensors: operator(*tensors, k), {name: (dtype, (BATCH, k)) for name, dtype in dtypes.items()}, vocab)


def with_k(model: ir.Model, k: int) -> ir.Model:
    """The same model, changed to another k."""
    (made,) = model.graph
    made.attributes[op.K_ATTRIBUTE] = ir.AttrInt64(op.K_ATTRIBUTE, k)
    for value in model.graph.outputs:
        value.shape = ir.Shape([BATCH, k])
    return model


def shape_of(value: ir.Value) -> list[int | str | None]:
    return [size.value if isinstance(size, ir.SymbolicDim) else size for size in value.shape or ()]


def every_form(node: Node, k: int) -> dict[str, Callable[..., tuple[Tensor, ...]]]:
    return {
        "reference": lambda *tensors: top_k_logit_correction(*tensors, k),
        "operator": lambda *tensors: operator(*tensors, k),
        "node": on_runtime(node(k)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reference_equals_sorting_in_python(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Ordered by Python's sort, probabilities summed by math.fsum."""
    *shape, k = sizes
    base, *rest = operands(*shape, dtype=dtype)
    tensors = (base.float(), *rest)
    token_ids, values, log_probs = top_k_logit_correction(*tensors, k)
    assert (token_ids.dtype, values.dtype, log_probs.dtype) == (torch.int64, torch.float32, torch.float32)
    for row, logits in enumerate(corrected_logits(*tensors).tolist()):
        expected = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:k]
        total = math.log(math.fsum(math.exp(logit) for logit in logits))
        assert token_ids[row].tolist() == expected
        assert values[row].tolist() == [logits[token] for token in expected]
        np.testing.assert_allclose(log_probs[row], [logits[token] - total for token in expected], atol=TOLERANCE, rtol=0)


def test_the_best_of_k_is_the_fused_corrections_token() -> None:
    tensors = operands(4, 300, 8)
    token_ids, values, _ = top_k_logit_correction(*tensors, 3)
    fused_ids, fused_values = fused_logit_correction(*tensors)
    assert torch.equal(token_ids[:, 0], fused_ids)
    assert torch.equal(values[:, 0], fused_values)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_node_equals_the_reference(sizes: tuple[int, int, int, int], node: Node) -> None:
    *shape, k = sizes
    for seed in range(3):
        tensors = operands(*shape, seed=seed)
        token_ids, values, log_probs = on_runtime(node(k))(*tensors)
        expected_ids, expected_values, expected_log_probs = top_k_logit_correction(*tensors, k)
        # Sums in another order may swap neighbours: each token must have the value that the reference gives it.
        whole = corrected_logits(*tensors)
        assert (whole.gather(-1, token_ids) - expected_values).abs().max() <= TOLERANCE
        assert (token_ids == expected_ids).float().mean() > 0.98
        assert all(len(set(row)) == k for row in token_ids.tolist())
        assert (values - expected_values).abs().max() <= TOLERANCE
        assert (log_probs - expected_log_probs).abs().max() <= TOLERANCE


@pytest.mark.parametrize("levels", [1, 2, 20])
@pytest.mark.parametrize(("vocab", "k"), [(300, 1), (300, 5), (300, 100), (300, 300), (5000, 3), (5000, 70), (5000, 1000), (5000, 3840)])
def test_all_forms_give_ties_to_the_lowest_id(vocab: int, k: int, levels: int, node: Node) -> None:
    """ONNX Runtime sorts by one of several algorithms, chosen by vocabulary and k: each has to hold."""
    base = np.random.default_rng(0).integers(0, levels, (3, vocab)).astype(np.float32)
    tensors = with_logits(*base.tolist())
    expected = np.argsort(-base, axis=-1, kind="stable")[:, :k]
    for name, form in every_form(node, k).items():
        np.testing.assert_array_equal(form(*tensors)[0], expected, err_msg=name)


@pytest.mark.parametrize("name", ["reference", "operator", "node"])
class TestExtremeLogits:
    def test_large_logits_do_not_overflow(self, name: str, node: Node) -> None:
        _, values, log_probs = every_form(node, 2)[name](*with_logits([3e38, -3e38, 1.0], [-2e4, -2e4, -3e4]))
        assert values.tolist() == torch.tensor([[3e38, 1.0], [-2e4, -2e4]]).tolist()
        assert torch.allclose(log_probs, torch.tensor([[0.0, -3e38], [-math.log(2), -math.log(2)]]))

    def test_excluded_tokens_have_no_probability(self, name: str, node: Node) -> None:
        token_ids, _, log_probs = every_form(node, 3)[name](*with_logits([-math.inf, 0.5, -math.inf]))
        assert token_ids.tolist() == [[1, 0, 2]]
        assert log_probs.tolist() == [[0.0, -math.inf, -math.inf]]

    def test_nan_is_reported_in_its_row_alone(self, name: str, node: Node) -> None:
        rows = [1.0, math.nan, 7.0, math.nan], [1.0, 3.0, 7.0, 3.0]
        token_ids, values, log_probs = every_form(node, 3)[name](*with_logits(*rows))
        assert token_ids.tolist() == [[1, 3, 2], [2, 1, 3]]
        assert values.isnan().tolist() == [[True, True, False], [False] * 3]
        assert values[0, 2] == 7.0
        assert log_probs.isnan().tolist() == [[True] * 3, [False] * 3]

    def test_an_empty_batch_is_empty(self, name: str, node: Node) -> None:
        token_ids, values, log_probs = every_form(node, 3)[name](*operands(0, 300, 8))
        assert (token_ids.shape, token_ids.dtype) == ((0, 3), torch.int64)
        assert (values.shape, values.dtype) == (log_probs.shape, log_probs.dtype) == ((0, 3), torch.float32)


@pytest.mark.parametrize("k", [-1, 0, 8])
def test_a_k_beyond_the_vocabulary_is_refused(k: int) -> None:
    for form in (top_k_logit_correction, operator):
        with pytest.raises(RequestError, match=rf"expected k from 1 to the vocabulary's 7, found {k}\. Choose"):
            form(*operands(1, 7, 3), k)


@pytest.mark.parametrize(
    ("k", "vocab", "message"),
    [
        pytest.param(op.MAX_TOP_K + 1, VOCAB, "from 1 to 3840, the most that TensorRT can build, found 3841", id="open vocabulary"),
        pytest.param(op.MAX_TOP_K + 1, 5000, "from 1 to 3840, the most that TensorRT can build, found 3841", id="large vocabulary"),
        pytest.param(41, 40, "from 1 to 40, the vocabulary's size, found 41", id="small vocabulary"),
        pytest.param(0, VOCAB, "from 1 to 3840, the most that TensorRT can build, found 0", id="none"),
    ],
)
def test_a_graph_with_a_k_that_no_engine_takes_is_refused(k: int, vocab: int | str, message: str) -> None:
    with pytest.raises(ExportError) as caught:
        top_k_model(k, vocab)
    assert str(caught.value) == f"top-k correction: expected k {message}. Choose a k in that range."


def test_the_exported_node_carries_what_an_engine_looks_it_up_by() -> None:
    model = top_k_model(4)
    (made,) = model.graph
    assert (made.domain, made.op_type, made.version) == (op.DOMAIN, op.TOP_K_NAME, op.DOMAIN_OPSET)
    assert {name: attribute.value for name, attribute in made.attributes.items()} == {op.NAMESPACE_ATTRIBUTE: op.DOMAIN, op.K_ATTRIBUTE: 4}
    assert [function.name for function in model.functions.values()] == [op.TOP_K_NAME]


# Run in a process of its own, since a failure in the library would end pytest.  Arguments: the model and compute capabilities.
_BUILD = """
import sys
import tensorrt_rtx as trt

logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(0)
parser = trt.OnnxParser(network, logger)
if not parser.parse_from_file(sys.argv[1]):
    sys.exit("not parsed: " + "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors)))
kinds = [network.get_layer(i).type.name for i in range(network.num_layers)]
assert "TOPK" in kinds and not any(kind.startswith("PLUGIN") for kind in kinds), kinds
for capability in sys.argv[2:]:
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
    if builder.build_serialized_network(network, config) is None:
        sys.exit(f"not built for {capability}")
"""


@needs_rtx
class TestTensorRtRtx:
    """Its parser takes the function bodies, and its builder, which needs no GPU, compiles them."""

    def build(self, model: ir.Model, folder: Path, sizes: dict[str, int]) -> subprocess.CompletedProcess[str]:
        for value in (*model.graph.inputs, *model.graph.outputs):
            value.shape = ir.Shape([sizes.get(size, size) if isinstance(size, str) else size for size in shape_of(value)])
        ir.save(model, folder / "body.onnx")
        capabilities = ("SM80", "SM89", "SM120")
        return subprocess.run(
            [sys.executable, "-c", _BUILD, folder / "body.onnx", *capabilities], capture_output=True, text=True, check=False
        )

    def test_takes_the_fused_body(self, tmp_path: Path) -> None:
        token_ids, values = op.OUTPUTS
        model = exported(fused_operator, {token_ids: ("int64", (BATCH,)), values: ("float32", (BATCH,))})
        done = self.build(model, tmp_path, {BATCH: 2, VOCAB: 1001, RANK: 16})
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("k", [1, 5, op.MAX_TOP_K])
    def test_takes_the_top_k_body(self, k: int, tmp_path: Path) -> None:
        done = self.build(with_k(top_k_model(4), k), tmp_path, {BATCH: 2, VOCAB: 5000, RANK: 16})
        assert done.returncode == 0, done.stderr

    def test_builds_no_larger_k(self, tmp_path: Path) -> None:
        """Else `MAX_TOP_K` would refuse too much."""
        done = self.build(with_k(top_k_model(4), op.MAX_TOP_K + 1), tmp_path, {BATCH: 2, VOCAB: 5000, RANK: 16})
        assert done.returncode == 1
        assert "not built for SM80" in done.stderr
        assert "K exceeds the maximum value allowed (3840)" in done.stderr + done.stdout


@pytest.mark.parametrize("k", [1, 5])
def test_operator_keeps_the_contract_of_torch_library(k: int) -> None:
    torch.library.opcheck(operator, (*operands(3, 40, 8), k))


def test_bodies_stay_open_in_every_size() -> None:
    """No size of the example tensors may have become a constant of the exported graph."""
    model = top_k_model(4)
    assert [size for value in model.graph.inputs for size in shape_of(value)] == [BATCH, VOCAB, BATCH, RANK, BATCH, RANK, VOCAB, RANK]
