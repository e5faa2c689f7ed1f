"""The head graph: its Loop drafts token for token what `DominoHead.rollout` drafts, for every prefix and every length."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from domino_deploy.config import DrafterConfig, DrafterKind
from domino_deploy.errors import RequestError
from domino_deploy.exporters.onnx_from_head import onnx_from_head
from domino_deploy.model.draft_vocab import DraftVocab, selected
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.head import CandidatePool
from domino_deploy.plugins import op
from domino_deploy.signature import GraphForm
from tests.support.bundles import DRAFTER, TARGET

PREFIXES = (0, 1, 3)
PLAIN = dataclasses.replace(DRAFTER, sliding_window=None, sliding_layers=(), gru_hidden_dim=20)


@pytest.fixture(scope="module")
def graphs() -> dict[int, ir.Model]:
    """Exported once per prefix length; weights are still missing."""
    return {prefix: onnx_from_head(config(prefix), TARGET) for prefix in PREFIXES}


def config(prefix: int) -> DrafterConfig:
    return dataclasses.replace(PLAIN, pure_draft_prefix_len=prefix)


def weights(seed: int = 0) -> tuple[DrafterModel, nn.Embedding]:
    """A drafter whose correction and state matter as much as the base logits do."""
    generator = torch.Generator().manual_seed(seed)
    drafter, embed = DrafterModel(PLAIN).eval(), nn.Embedding(TARGET.vocab_size, TARGET.hidden_size)
    with torch.no_grad():
        for parameter in (*drafter.parameters(), *embed.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.5 if parameter.dim() == 2 else 1.0))
    return drafter, embed


def session(
    model: ir.Model, drafter: DrafterModel, embed: nn.Embedding, file: Path, vocab: DraftVocab | None = None
) -> onnxruntime.InferenceSession:
    tensors = {f"drafter.{name}": tensor for name, tensor in drafter.state_dict().items()} | {
        "target.model.embed_tokens.weight": embed.weight
    }
    if vocab is not None:
        tensors |= {f"draft_vocab.{name}": tensor for name, tensor in vocab.state_dict().items()}
    for name, value in model.graph.initializers.items():
        if name in tensors:
            value.const_value = ir.tensor(tensors[name].detach().numpy(), name=name)
    ir.save(model, file)
    onnx.checker.check_model(str(file), full_check=True)
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


def inputs(batch: int, proposals: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(TARGET.vocab_size, (batch,), generator=generator)
    hidden = torch.randn(batch, proposals, TARGET.hidden_size, generator=generator)
    return anchors, hidden, torch.randn(batch, proposals, TARGET.vocab_size, generator=generator)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from all_nodes(attribute.g)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_loop_equals_the_rollout(prefix: int, graphs: dict[int, ir.Model], tmp_path: Path) -> None:
    drafter, embed = weights()
    assert drafter.head is not None
    drafter.head.prefix_len = prefix
    head = session(graphs[prefix], drafter, embed, tmp_path / "head.onnx")
    corrected = 0
    for batch in (1, 3):
        # Fewer proposals than the prefix, as many, more, all, and more than a block has: the length is symbolic.
        for proposals in (1, 2, 3, 4, PLAIN.num_proposals, 9):
            for seed in range(3):
                anchors, hidden, base = inputs(batch, proposals, seed)
                with torch.inference_mode():
                    expected = drafter.draft(embed, anchors, hidden, base).numpy()
                feeds = {"anchor_ids": anchors.numpy(), "hidden": hidden.numpy(), "base_logits": base.numpy()}
                (found,) = head.run(["draft_ids"], feeds)
                assert found.dtype == np.int64
                np.testing.assert_array_equal(found, expected)
                plain = base.argmax(-1).numpy()
                np.testing.assert_array_equal(found[:, :prefix], plain[:, :prefix])
                corrected += int((found != plain).sum())
    assert corrected > 100, "a correction that changes nothing proves nothing"


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_correction_is_one_node_with_a_body(prefix: int, graphs: dict[int, ir.Model]) -> None:
    model = ir.to_proto(graphs[prefix])
    (node,) = (node for node in all_nodes(model.graph) if node.domain)
    assert (node.domain, node.op_type) == (op.DOMAIN, op.NAME)
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert attributes == {op.NAMESPACE_ATTRIBUTE: op.DOMAIN.encode()}
    assert (len(node.input), len(node.output)) == (len(op.INPUTS), len(op.OUTPUTS))
    (function,) = model.functions
    assert (function.domain, function.name) == (op.DOMAIN, op.NAME)
    assert (tuple(function.input), tuple(function.output)) == (op.INPUTS, op.OUTPUTS)
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 24, op.DOMAIN: op.DOMAIN_OPSET}


def test_no_trip_repeats_what_all_trips_share(graphs: dict[int, ir.Model]) -> None:
    """Weights, their slices and the hidden projection stand outside of the loop."""
    model = ir.to_proto(graphs[1])
    (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
    body = loop.attribute[0].g
    inside = {node.op_type for node in all_nodes(body)}
    assert inside.isdisjoint({"Slice", "Transpose", "MatMul", "SplitToSequence", "SequenceAt", "Cast"})
    assert len(body.initializer) == 0
    projections = [node for node in model.graph.node if node.op_type == "MatMul"]
    assert [node.input[0] for node in projections] == ["hidden"]
    assert sum(tensor.name == "drafter.embed_proj.0.weight" for tensor in model.graph.initializer) == 1


def test_names_are_unique_across_the_loop(graphs: dict[int, ir.Model]) -> None:
    """A name in a loop body that the graph around it has too would be another value to some runtimes."""
    for model in graphs.values():
        proto = ir.to_proto(model)
        names = [output for node in all_nodes(proto.graph) for output in node.output]
        names += [value.name for value in (*proto.graph.input, *proto.graph.initializer)]
        assert len(names) == len(set(names))


def test_a_plain_prefix_costs_no_correction(graphs: dict[int, ir.Model]) -> None:
    """Either branch holds only its own kind of proposal, and without a prefix there is no branch."""
    (branch,) = (node for node in all_nodes(ir.to_proto(graphs[1]).graph) if node.op_type == "If")
    branches = {attribute.name: [node.op_type for node in attribute.g.node] for attribute in branch.attribute}
    assert branches == {"then_branch": ["ArgMax"], "else_branch": [op.NAME]}
    assert not any(node.op_type == "If" for node in all_nodes(ir.to_proto(graphs[0]).graph))


def test_ties_go_to_the_lowest_id(graphs: dict[int, ir.Model], tmp_path: Path) -> None:
    drafter, embed = weights()
    with torch.no_grad():
        drafter.embed_proj[2].weight.zero_()  # no correction: what ties in the base logits still ties
    head = session(graphs[1], drafter, embed, tmp_path / "head.onnx")
    anchors, hidden, base = inputs(2, 4, seed=0)
    base[:] = 0.0
    base[:, :, [41, 7, 250]] = 3.0
    (found,) = head.run(["draft_ids"], {"anchor_ids": anchors.numpy(), "hidden": hidden.numpy(), "base_logits": base.numpy()})
    assert (found == 7).all()


@pytest.mark.parametrize("is_certified", [False, True], ids=["pool alone", "certified"])
@pytest.mark.parametrize("prefix", [0, 1])
def test_a_pooled_loop_equals_the_rollout_with_its_counts(prefix: int, is_certified: bool, tmp_path: Path) -> None:
    drafter, embed = weights()
    assert drafter.head is not None
    drafter.head.prefix_len = prefix
    other_tokens, counts = 0, []
    for size in (1, 40) if prefix else (40, TARGET.vocab_size):
        form = GraphForm(candidate_pool=size)
        head = session(onnx_from_head(config(prefix), TARGET, form, is_certified), drafter, embed, tmp_path / "head.onnx")
        pool = CandidatePool(size=size, is_certified=is_certified)
        for batch, proposals, seed in ((1, 1, 0), (1, PLAIN.num_proposals, 1), (3, PLAIN.num_proposals, 2), (3, 9, 3)):
            anchors, hidden, base = inputs(batch, proposals, seed)
            feeds = {"anchor_ids": anchors.numpy(), "hidden": hidden.numpy(), "base_logits": base.numpy()}
            with torch.inference_mode():
                expected = drafter.rollout(embed, anchors, hidden, base, pool=pool)
                whole = drafter.draft(embed, anchors, hidden, base)
            found, uncertified = head.run(["draft_ids", "uncertified"], feeds)
            np.testing.assert_array_equal(found, expected.token_ids.numpy())
            np.testing.assert_array_equal(uncertified, expected.uncertified.numpy())
            assert (uncertified <= max(0, proposals - prefix)).all()
            other_tokens += int((found != whole.numpy()).sum())
            counts.append((size, int(uncertified.sum())))
    assert (other_tokens == 0) == is_certified
    assert sum(count for size, count in counts if size < TARGET.vocab_size) > 10
    assert sum(count for size, count in counts if size == TARGET.vocab_size) == 0


def test_a_pooled_loop_repeats_nothing_that_trips_share(tmp_path: Path) -> None:
    model = ir.to_proto(onnx_from_head(config(1), TARGET, GraphForm(candidate_pool=8), True))
    (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
    inside = [node.op_type for node in all_nodes(loop.attribute[0].g)]
    assert op.POOLED_NAME in inside
    assert {"TopK", "ReduceL2", "ReduceMean", "Slice", "Transpose", "MatMul"}.isdisjoint(inside)
    outside = [node.op_type for node in model.graph.node]
    assert [outside.count(name) for name in ("TopK", "ReduceL2", "ReduceMean")] == [2, 1, 1]
    assert [function.name for function in model.functions] == [op.POOLED_NAME]
    names = [output for node in all_nodes(model.graph) for output in node.output]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("size", [0, 16], ids=["whole", "pool"])
def test_a_draft_vocabulary_is_drafted_from_and_embedded_by_its_token_ids(size: int, tmp_path: Path) -> None:
    drafter, embed = weights()
    assert drafter.head is not None
    chosen = torch.tensor([3, 5, 8, 60, 61, 100, *range(120, 200, 2)])
    vocab = selected(chosen, embed.weight, drafter.head.codebook_VR)
    form = GraphForm(candidate_pool=size, draft_vocab_size=len(chosen))
    head = session(onnx_from_head(config(1), TARGET, form, size > 0), drafter, embed, tmp_path / "head.onnx", vocab)
    pool = CandidatePool(size=size, is_certified=True) if size else None
    for batch, seed in ((1, 0), (3, 1)):
        anchors, hidden, base = inputs(batch, PLAIN.num_proposals, seed)
        # The same as the whole vocabulary in which nothing else can win.
        masked = torch.full_like(base, -1e9)
        masked[..., chosen] = base[..., chosen]
        with torch.inference_mode():
            expected = drafter.draft(embed, anchors, hidden, masked).numpy()
            ours = drafter.rollout(embed, anchors, hidden, base[..., chosen], pool=pool, vocab=vocab).token_ids.numpy()
        feeds = {"anchor_ids": anchors.numpy(), "hidden": hidden.numpy(), "base_logits": base[..., chosen].numpy()}
        found = head.run(["draft_ids"], feeds)[0]
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(found, expected)
        assert set(found.ravel().tolist()) <= set(chosen.tolist())


@pytest.mark.parametrize(
    ("changes", "form", "certified", "message"),
    [
        ({}, GraphForm(candidate_pool=TARGET.vocab_size + 1), False, f"to {TARGET.vocab_size} tokens"),
        ({}, GraphForm(candidate_pool=-1), False, "found -1"),
        ({}, GraphForm(candidate_pool=20, draft_vocab_size=10), False, "to 10 tokens"),
        ({}, GraphForm(), True, "Say how many candidates"),
        ({"kind": DrafterKind.DFLASH}, GraphForm(candidate_pool=5), False, "DFlash"),
    ],
)
def test_a_pool_without_a_meaning_is_refused(changes: dict[str, object], form: GraphForm, certified: bool, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        onnx_from_head(dataclasses.replace(PLAIN, **changes), TARGET, form, certified)


def test_a_dflash_head_drafts_from_a_draft_vocabulary(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, kind=DrafterKind.DFLASH, emb_dim=0, gru_hidden_dim=0)
    model = onnx_from_head(config, TARGET, GraphForm(draft_vocab_size=20))
    (initializer,) = (value for value in model.graph.initializers.values() if value.const_value is None)
    assert initializer.name == "draft_vocab.token_ids"
    chosen = np.arange(7, 67, 3)
    initializer.const_value = ir.tensor(chosen, name=initializer.name)
    ir.save(model, tmp_path / "head.onnx")
    head = onnxruntime.InferenceSession(tmp_path / "head.onnx", providers=["CPUExecutionProvider"])
    base = inputs(3, 5, seed=1)[2][..., :20]
    (found,) = head.run(["draft_ids"], {"base_logits": base.numpy()})
    np.testing.assert_array_equal(found, chosen[base.argmax(-1).numpy()])


def test_a_dflash_head_is_the_argmax_alone(tmp_path: Path) -> None:
    model = onnx_from_head(dataclasses.replace(PLAIN, kind=DrafterKind.DFLASH, emb_dim=0, gru_hidden_dim=0), TARGET)
    assert [node.op_type for node in model.graph] == ["ArgMax"]
    assert not model.graph.initializers
    ir.save(model, tmp_path / "head.onnx")
    head = onnxruntime.InferenceSession(tmp_path / "head.onnx", providers=["CPUExecutionProvider"])
    for batch, proposals in ((1, 1), (3, 5)):
        _, _, base = inputs(batch, proposals, seed=1)
        (found,) = head.run(["draft_ids"], {"base_logits": base.numpy()})
        np.testing.assert_array_equal(found, base.argmax(-1).numpy())
