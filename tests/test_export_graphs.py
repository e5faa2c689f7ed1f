"""The exported graphs: exactly the operators they are meant to have, the signature's names, and weights that lie elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from domino_deploy.bundle import GRAPHS, open_bundle
from domino_deploy.exporters.export import check_onnx
from domino_deploy.exporters.stored import stored_tensors
from domino_deploy.safetensors_header import TensorEntry
from domino_deploy.signature import backbone_signature, head_signature, target_signature

BUNDLES = pytest.mark.parametrize("fixture", ["tiny_bundle", "tiny_dflash_bundle"])


@pytest.fixture
def bundle(fixture: str, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(fixture)


def graph(bundle: Path, name: str) -> onnx.ModelProto:
    return onnx.load(bundle / GRAPHS[name], load_external_data=False)


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of loop bodies and branches too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes(attribute.g)


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in nodes(model.graph))


# What a layer has; the rest of a graph is bookkeeping, projections and activations.
PLUMBING = {
    *("Add", "Cast", "Concat", "Constant", "Cos", "Expand", "Gather", "GatherElements", "MatMul", "Mul", "Reshape", "Sigmoid", "Sin"),
    *("Slice", "Transpose", "Unsqueeze"),
}


@BUNDLES
@pytest.mark.parametrize("name", ["target", "backbone"])
def test_layers_are_made_of_the_fused_operators(name: str, bundle: Path) -> None:
    opened = open_bundle(bundle)
    config = opened.target if name == "target" else opened.drafter
    count = operators(graph(bundle, name))
    layers = config.num_layers
    norms = 2 * layers + 1 + (2 * layers if config.has_qk_norm else 0)
    if name == "backbone":
        norms += 1  # hidden_norm
    expected = {"Attention": layers, "TensorScatter": 2 * layers, "RotaryEmbedding": 2 * layers, "RMSNormalization": norms}
    assert {operator: count[operator] for operator in expected} == expected
    assert count.keys() - expected.keys() <= PLUMBING
    assert "Softmax" not in count
    assert "Pow" not in count


@BUNDLES
def test_attention_says_nothing_but_its_inputs(bundle: Path) -> None:
    for name in ("target", "backbone"):
        for node in nodes(graph(bundle, name).graph):
            if node.op_type == "Attention":
                assert len(node.input) == 4
                assert len(node.output) == 1, "TensorRT takes no further outputs"
            if node.op_type == "TensorScatter":
                attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
                assert attributes == {"axis": -2, "mode": b"linear"}


@BUNDLES
def test_sliding_layers_read_the_sliding_mask(bundle: Path) -> None:
    config = open_bundle(bundle).drafter
    masks = [node.input[3] for node in nodes(graph(bundle, "backbone").graph) if node.op_type == "Attention"]
    sliding = config.sliding_layers or (False,) * config.num_layers
    assert masks == ["sliding_attention_mask" if is_sliding else "attention_mask" for is_sliding in sliding]


@BUNDLES
@pytest.mark.parametrize("name", list(GRAPHS))
def test_only_the_heads_own_operator_lies_outside_onnx(name: str, bundle: Path) -> None:
    model = graph(bundle, name)
    is_domino_head = name == "head" and open_bundle(bundle).drafter.emb_dim > 0
    assert {entry.domain for entry in model.opset_import} == ({"", "domino"} if is_domino_head else {""})
    assert [function.name for function in model.functions] == (["FusedLogitCorrection"] if is_domino_head else [])
    assert {entry.version for entry in model.opset_import if not entry.domain} == {24}


@BUNDLES
def test_inputs_and_outputs_are_the_signatures(bundle: Path) -> None:
    opened = open_bundle(bundle)
    signatures = {
        "target": target_signature(opened.target, opened.drafter.feature_size),
        "backbone": backbone_signature(opened.drafter),
        "head": head_signature(opened.drafter),
    }
    for name, signature in signatures.items():
        model = graph(bundle, name)
        found = [
            (
                value.name,
                onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name,
                tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
            )
            for value in (*model.graph.input, *model.graph.output)
        ]
        assert found == [(spec.name, spec.dtype, spec.shape) for spec in (*signature.inputs, *signature.outputs)]
        entry = opened.manifest.graphs[name]
        assert (entry.inputs, entry.outputs) == (signature.inputs, signature.outputs)


def entries_of(folder: Path) -> dict[str, TensorEntry]:
    """Where each tensor of a floating type lies."""
    return {name: tensor.parts[""] for name, tensor in stored_tensors(folder).items()}


@BUNDLES
def test_weights_are_ranges_of_the_bundles_safetensors(bundle: Path) -> None:
    entries = {owner: entries_of(bundle / owner) for owner in ("target", "drafter")}
    used = set()
    for name in GRAPHS:
        for tensor in graph(bundle, name).graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                assert np.prod(tensor.dims) * 8 <= 1024, f"{tensor.name} is no small constant"
                continue
            place = {entry.key: entry.value for entry in tensor.external_data}
            owner, _, weight = tensor.name.partition(".")
            weight = "model.embed_tokens.weight" if weight == "lm_head.weight" and weight not in entries[owner] else weight
            entry = entries[owner][weight]
            assert place["location"] == f"{owner}/{entry.file.name}"
            assert (int(place["offset"]), int(place["length"]), tuple(tensor.dims)) == (entry.offset, entry.nbytes, entry.shape)
            used.add((owner, weight))
    assert used == {(owner, weight) for owner, named in entries.items() for weight in named}


@BUNDLES
def test_embedding_and_lm_head_exist_once_for_the_pair(bundle: Path) -> None:
    opened = open_bundle(bundle)
    rows = opened.target.vocab_size
    wide = [
        (owner, name)
        for owner in ("target", "drafter")
        for name, entry in entries_of(bundle / owner).items()
        if entry.shape == (rows, opened.target.hidden_size)
    ]
    expected = [("target", "model.embed_tokens.weight")]
    if not opened.target.tie_word_embeddings:
        expected.append(("target", "lm_head.weight"))
    assert sorted(wide) == sorted(expected)


@BUNDLES
def test_graphs_are_small_and_tell_nothing_about_the_machine(bundle: Path) -> None:
    for file in GRAPHS.values():
        content = (bundle / file).read_bytes()
        assert len(content) < 100_000
        for secret in (b"/site-packages", b".py", b"stack_trace", str(Path.home()).encode(), str(bundle.parent).encode()):
            assert secret not in content


@BUNDLES
def test_graphs_pass_the_checker_and_open_without_warnings(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for file in GRAPHS.values():
        check_onnx(bundle / file)
        onnxruntime.InferenceSession(bundle / file, providers=["CPUExecutionProvider"])
    assert capfd.readouterr().err == ""


def test_reshapes_compute_no_sizes_at_run_time(tiny_bundle: Path) -> None:
    for name in ("target", "backbone"):
        model = graph(tiny_bundle, name)
        made_by = {output: node.op_type for node in model.graph.node for output in node.output}
        shapes = [node.input[1] for node in model.graph.node if node.op_type == "Reshape"]
        assert shapes, "no Reshape found"
        assert {made_by[shape] for shape in shapes} == {"Constant"}
        assert operators(model)["Shape"] == 0


def test_the_manifest_lists_every_file(tiny_bundle: Path) -> None:
    found = {item.relative_to(tiny_bundle).as_posix() for item in tiny_bundle.rglob("*") if item.is_file()}
    assert found - {"manifest.json"} == open_bundle(tiny_bundle).manifest.files.keys()
    assert json.loads((tiny_bundle / "manifest.json").read_text())["verification"]["passed"] is True
