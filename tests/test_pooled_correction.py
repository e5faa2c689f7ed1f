"""The pooled logit correction: its certificate is never wrong, and reference, operator and function body agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from domino_deploy.exporters.graph import export_graph
from domino_deploy.exporters.passes import add_correction_function
from domino_deploy.plugins import op
from domino_deploy.plugins.reference import (
    candidates,
    corrected_logits,
    deviations,
    fused_logit_correction,
    pooled_logit_correction,
    rounding_slack,
)
from domino_deploy.plugins.torch_op import pooled_logit_correction as operator
from domino_deploy.signature import GraphSignature, TensorSpec

VOCAB, RANK = 40, 8
# Sums in another order: a few units in the last place of logits up to 2**7, which the largest operands reach.
TOLERANCE = 1e-4


def operands(seed: int, batch: int = 3, norm_scale: float = 1.0, base_scale: float = 2.0) -> tuple[Tensor, ...]:
    """Base logits [B, V], z [B, R], s [B, R], codebook [V, R], whose rows share a part and differ in length from it."""
    generator = torch.Generator().manual_seed(seed)
    base = base_scale * torch.randn(batch, VOCAB, generator=generator)
    hidden, state = torch.randn(2, batch, RANK, generator=generator)
    lengths = norm_scale * torch.rand(VOCAB, 1, generator=generator) ** 3
    return (
        base,
        hidden,
        state,
        lengths * torch.randn(VOCAB, RANK, generator=generator) + norm_scale * torch.randn(RANK, generator=generator),
    )


def with_pool(tensors: tuple[Tensor, ...], size: int) -> tuple[Tensor, ...]:
    base, _, _, codebook = tensors
    return (*tensors, *deviations(codebook), candidates(base, size))


@pytest.fixture(scope="module", params=[False, True], ids=["pool alone", "exact"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, onnxruntime.InferenceSession]:
    """Whether it is exact, and the operator as it stands in an exported graph, run by ONNX Runtime."""
    exact: bool = request.param

    class Correction(nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return operator(*tensors, exact)

    # The names of symbolic sizes are those that signature.py has; here they merely have to differ.
    batch, vocab, rank, size = "batch", "capacity", "rows", "proposals"
    shapes = ((batch, vocab), (batch, rank), (batch, rank), (vocab, rank), (rank,), (vocab,), (batch, size))
    dtypes = {"candidates": "int64", "token_ids": "int64", "uncertified": "bool"}

    def spec(name: str, shape: tuple[str, ...]) -> TensorSpec:
        return TensorSpec(name=name, dtype=dtypes.get(name, "float32"), shape=shape, meaning="")

    signature = GraphSignature(
        inputs=tuple(spec(name, shape) for name, shape in zip(op.POOLED_INPUTS, shapes, strict=True)),
        outputs=tuple(spec(name, (batch,)) for name in op.POOLED_OUTPUTS),
    )
    model = export_graph(Correction, signature)
    add_correction_function(model)
    (made,) = model.graph
    assert (made.domain, made.op_type) == (op.DOMAIN, op.POOLED_NAME)
    assert {name: attribute.value for name, attribute in made.attributes.items()} == {"plugin_namespace": "domino", "exact": int(exact)}
    file: Path = tmp_path_factory.mktemp("node") / "node.onnx"
    ir.save(model, file)
    onnx.checker.check_model(str(file), full_check=True)
    return exact, onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, tensors: tuple[Tensor, ...]) -> list[np.ndarray]:
    return session.run(list(op.POOLED_OUTPUTS), {name: tensor.numpy() for name, tensor in zip(op.POOLED_INPUTS, tensors, strict=True)})


def winner_outside(tensors: tuple[Tensor, ...]) -> Tensor:
    """Rows [B] whose argmax over the whole vocabulary, ties to the lowest id, is none of the candidates."""
    tokens, _ = fused_logit_correction(*tensors[:4])
    return ~(tensors[-1] == tokens[:, None]).any(dim=-1)


@pytest.mark.parametrize("exact", [False, True])
def test_operator_keeps_the_contract_of_torch_library(exact: bool) -> None:
    torch.library.opcheck(operator, (*with_pool(operands(0), 5), exact))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, VOCAB),
    norm_scale=st.sampled_from([0.0, 1e-3, 0.1, 1.0, 10.0, 1e4]),
    base_scale=st.sampled_from([0.0, 1e-3, 1.0, 10.0, 1e4]),
    rounded=st.booleans(),
)
@example(seed=0, size=1, norm_scale=0.0, base_scale=0.0, rounded=False)
def test_a_certified_row_has_its_winner_inside(seed: int, size: int, norm_scale: float, base_scale: float, rounded: bool) -> None:
    base, *rest = operands(seed, norm_scale=norm_scale, base_scale=base_scale)
    tensors = with_pool((base.round() if rounded else base, *rest), size)  # rounded: many ties
    _, _, uncertified = pooled_logit_correction(*tensors, False)
    assert not (winner_outside(tensors) & ~uncertified).any()
    exact_tokens, best, same = pooled_logit_correction(*tensors, True)
    assert torch.equal(same, uncertified)
    whole = corrected_logits(*tensors[:4])
    settled = whole.gather(-1, exact_tokens[:, None])[:, 0]
    # Which of two tokens wins that differ in the last places is for the order of sums to say, inside the pool as well.
    slack = rounding_slack(RANK) * (whole.abs().amax() + norm_scale * 100)
    assert (whole.amax(dim=-1) - settled <= slack).all()
    assert (best - settled).abs().max() <= slack


def test_the_certificate_is_worth_something() -> None:
    """Rows of ordinary size: most are certified by half of the vocabulary, few by a single token, all by the whole."""
    shares = {}
    for size in (1, VOCAB // 2, VOCAB):
        flags = [pooled_logit_correction(*with_pool(operands(seed, norm_scale=0.5), size), False)[2] for seed in range(100)]
        shares[size] = float(torch.cat(flags).float().mean())
    assert 0.5 < shares[1] <= 1.0
    assert 0.0 < shares[VOCAB // 2] < 0.3
    assert shares[VOCAB] == 0.0


def test_the_rounding_slack_covers_the_bound_that_is_met_exactly() -> None:
    """An outside token that deviates along the bottleneck reaches its bound; ranks and scales at which rounding could hide that."""
    missed = 0
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        rank, scale = (1, 7, 64, 256)[seed % 4], 10.0 ** (seed % 5 - 2)
        hidden = scale * torch.randn(1, rank, generator=generator)
        bottleneck = nn.functional.silu(hidden)
        codebook = torch.randn(1, rank, generator=generator).repeat(2, 1)
        codebook[1] += bottleneck[0] * torch.rand(1, generator=generator)  # both deviate from their mean along the bottleneck
        base = torch.tensor([[0.0, -100.0 * scale]])
        tensors = (base, hidden, torch.zeros_like(hidden), codebook)
        # Make it a tie in exact arithmetic: what is left is rounding.
        exact = base.double() + bottleneck.double() @ codebook.double().T
        base[0, 0] += float(exact[0, 1] - exact[0, 0])
        pooled = (*tensors, *deviations(codebook), torch.zeros(1, 1, dtype=torch.int64))
        if winner_outside(pooled):
            missed += 1
            assert pooled_logit_correction(*pooled, False)[2].all(), (seed, rank, scale)
    assert missed > 50, "ties that never go outside prove nothing"


def test_a_pool_that_is_too_small_gives_another_token() -> None:
    base = torch.tensor([[3.0, 2.0, 1.0]])
    codebook = torch.tensor([[0.0], [0.0], [5.0]])
    tensors = with_pool((base, torch.full((1, 1), 2.0), torch.zeros(1, 1), codebook), 2)
    assert tensors[-1].tolist() == [[0, 1]]
    found = {exact: pooled_logit_correction(*tensors, exact) for exact in (False, True)}
    assert (found[False][0].tolist(), found[True][0].tolist()) == ([0], [2])
    assert found[False][2].all()
    assert found[True][2].all()
    assert found[True][1].item() == pytest.approx(1 + 5 * 2 / (1 + np.exp(-2)), rel=1e-6)


def test_candidates_are_the_highest_ties_to_the_lowest_id_in_rising_order() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 5.0, 3.0, 3.0], [0.0] * 6])
    assert candidates(logits, 3).tolist() == [[1, 2, 3], [0, 1, 2]]
    assert candidates(logits[None], 4).tolist() == [[[1, 2, 3, 4], [0, 1, 2, 3]]]


@pytest.mark.parametrize("size", [1, 5, VOCAB])
def test_node_equals_the_reference(size: int, node: tuple[bool, onnxruntime.InferenceSession]) -> None:
    exact, session = node
    seen = set()
    for seed in range(40):
        tensors = with_pool(operands(seed, batch=1 + seed % 3, norm_scale=(0.1, 1.0, 5.0)[seed % 3]), size)
        expected = pooled_logit_correction(*tensors, exact)
        tokens, best, uncertified = run(session, tensors)
        np.testing.assert_array_equal(tokens, expected[0].numpy())
        np.testing.assert_allclose(best, expected[1].numpy(), atol=TOLERANCE, rtol=1e-5)
        np.testing.assert_array_equal(uncertified, expected[2].numpy())
        seen |= set(uncertified.tolist())
    assert seen == ({False} if size == VOCAB else {False, True})


def test_all_forms_give_ties_to_the_lowest_id(node: tuple[bool, onnxruntime.InferenceSession]) -> None:
    exact, session = node
    base, hidden, state, codebook = operands(0, batch=2)
    base[:] = -1.0
    base[0, [39, 17, 30]] = 2.0
    base[1, 0] = base[1, 39] = 2.0
    # Row 0: all three tie inside.  Row 1: the pool takes 0 and 1, and a tie outside it has the higher id.
    tensors = with_pool((base, hidden, state, torch.zeros_like(codebook)), 3)
    found = (pooled_logit_correction(*tensors, exact)[0], operator(*tensors, exact)[0], torch.from_numpy(run(session, tensors)[0]))
    for tokens in found:
        assert tokens.tolist() == [17, 0]


def test_a_tie_with_a_token_outside_is_not_certified(node: tuple[bool, onnxruntime.InferenceSession]) -> None:
    """Token 2's correction makes it the equal of token 5, which alone is in the pool; the lower id wins."""
    exact, session = node
    base = torch.full((1, VOCAB), -50.0)
    base[0, 5], base[0, 2] = 8.0, 4.0
    hidden = torch.full((1, 1), 1e4)  # SiLU is the identity there
    codebook = torch.zeros(VOCAB, 1)
    codebook[2] = 4.0 / 1e4
    tensors = with_pool((base, hidden, torch.zeros(1, 1), codebook), 1)
    assert float(corrected_logits(*tensors[:4])[0, 2]) == 8.0
    for tokens, _, uncertified in (pooled_logit_correction(*tensors, exact), run(session, tensors)):
        assert uncertified.tolist() == [True]
        assert tokens.tolist() == [2 if exact else 5]


def test_all_forms_take_an_empty_batch(node: tuple[bool, onnxruntime.InferenceSession]) -> None:
    exact, session = node
    tensors = with_pool(operands(0, batch=0), 4)
    for found in (pooled_logit_correction(*tensors, exact), operator(*tensors, exact), map(torch.from_numpy, run(session, tensors))):
        assert [(value.shape, value.dtype) for value in found] == [((0,), torch.int64), ((0,), torch.float32), ((0,), torch.bool)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_what_is_not_finite_is_not_certified(value: float, node: tuple[bool, onnxruntime.InferenceSession]) -> None:
    exact, session = node
    base, hidden, state, codebook = operands(1, batch=2)
    hidden[0, 0] = value
    tensors = with_pool((base, hidden, state, codebook), 4)
    assert bool(pooled_logit_correction(*tensors, exact)[2][0])
    assert bool(run(session, tensors)[2][0])
