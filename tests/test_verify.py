"""Verification passes what is right and finds what is wrong: every fault here is one that an exporter could make.

A fault is built into a copy of a good bundle, which is then compared with the checkpoints it was made from.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from domino_deploy.bundle import GRAPHS, Bundle, open_bundle
from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.errors import BundleError, VerificationError
from domino_deploy.exporters.verify import VerificationReport, compare, verify_bundle
from domino_deploy.model.loading import load_drafter, load_target
from domino_deploy.safetensors_header import read_header

Fault = Callable[[onnx.GraphProto], None]


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


def compared(copy: Path, tiny_bundle: Path) -> VerificationReport:
    """The copy's graphs against the checkpoints that lie beside the bundle it is a copy of."""
    drafter = load_drafter(open_drafter(tiny_bundle.parent / "drafter"))
    target = load_target(open_target(tiny_bundle.parent / "target"), tapped_layers=drafter.config.target_layer_ids)
    return compare(unchecked(copy, tiny_bundle), (target, drafter))


def unchecked(copy: Path, tiny_bundle: Path) -> Bundle:
    """The copy as a bundle whose files nobody has looked at."""
    return dataclasses.replace(open_bundle(tiny_bundle), path=copy)


def patch(file: Path, fault: Fault) -> None:
    model = onnx.load(file, load_external_data=False)
    before = model.SerializeToString()
    fault(model.graph)
    assert model.SerializeToString() != before, "the fault changed nothing"
    file.write_bytes(model.SerializeToString())


def of_type(graph: onnx.GraphProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == op_type]


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(attribute for attribute in node.attribute if attribute.name == name)


def loop_body(graph: onnx.GraphProto) -> onnx.GraphProto:
    return attribute(of_type(graph, "Loop")[0], "body").g


def constant(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in graph.initializer if tensor.name == name)


def altered_frequency(owner: str) -> Fault:
    def fault(graph: onnx.GraphProto) -> None:
        tensor = constant(graph, f"{owner}.inverse_frequencies")
        values = numpy_helper.to_array(tensor).copy()
        values[1] *= 1.001  # as a slightly wrong rope_theta would
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    return fault


def interleaved_rotation(graph: onnx.GraphProto) -> None:
    for node in of_type(graph, "RotaryEmbedding"):
        attribute(node, "interleaved").i = 1


def swapped_angles(graph: onnx.GraphProto) -> None:
    node = of_type(graph, "RotaryEmbedding")[0]
    node.input[1], node.input[2] = node.input[2], node.input[1]


def epsilon_of_another_family(graph: onnx.GraphProto) -> None:
    for node in of_type(graph, "RMSNormalization"):
        attribute(node, "epsilon").f = 1e-5  # right: 1e-6


def no_mask(graph: onnx.GraphProto) -> None:
    del of_type(graph, "Attention")[0].input[3:]


def causal_as_well(graph: onnx.GraphProto) -> None:
    attribute(of_type(graph, "Attention")[-1], "is_causal").i = 1


def wrong_scale(graph: onnx.GraphProto) -> None:
    of_type(graph, "Attention")[1].attribute.append(onnx.helper.make_attribute("scale", 0.24))  # right: 16 ** -0.5 = 0.25


def rows_written_to_the_front(graph: onnx.GraphProto) -> None:
    of_type(graph, "TensorScatter")[-1].input[2] = ""


def keys_and_values_swapped(graph: onnx.GraphProto) -> None:
    node = of_type(graph, "Attention")[0]
    node.input[1], node.input[2] = node.input[2], node.input[1]


def taps_swapped(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if "features" in node.output)
    node.input[0], node.input[1] = node.input[1], node.input[0]


def last_rows_whatever_is_asked(graph: onnx.GraphProto) -> None:
    """Right for one sequence whose last rows are asked for in order, as a decode loop does; wrong for any other."""
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == "logit_index":
                node.input[index] = "last_rows"
    made = [
        onnx.helper.make_node("Shape", ["logit_index"], ["wanted_1"], start=1, end=2),
        onnx.helper.make_node("Shape", ["input_ids"], ["rows_1"], start=1, end=2),
        onnx.helper.make_node("Squeeze", ["wanted_1"], ["wanted"]),
        onnx.helper.make_node("Squeeze", ["rows_1"], ["rows"]),
        onnx.helper.make_node("Sub", ["rows", "wanted"], ["first"]),
        onnx.helper.make_node("Range", ["first", "rows", "one"], ["range"]),
        onnx.helper.make_node("Mul", ["logit_index", "zero"], ["zeros"]),
        onnx.helper.make_node("Add", ["zeros", "range"], ["last_rows"]),
    ]
    graph.initializer.extend([numpy_helper.from_array(np.array(value), name) for name, value in (("zero", 0), ("one", 1))])
    for position, node in enumerate(made):
        graph.node.insert(position, node)


def swapped_gates(graph: onnx.GraphProto) -> None:
    for node in of_type(loop_body(graph), "Split"):  # reset and update, the known fault of other exporters' GRUs
        node.output[0], node.output[1] = node.output[1], node.output[0]


def reset_before_the_product(graph: onnx.GraphProto) -> None:
    """linear_before_reset=0 in all but name: the new gate forgets to reset."""
    body = loop_body(graph)
    new_gate = of_type(body, "Tanh")[0].input[0]
    add = next(node for node in body.node if new_gate in node.output)
    product = next(node for node in body.node if node.op_type == "Mul" and node.output[0] in add.input)
    old = of_type(body, "Split")[1].output[2]
    add.input[list(add.input).index(product.output[0])] = old


def prefix_one_longer(graph: onnx.GraphProto) -> None:
    less = of_type(loop_body(graph), "Less")[0]
    made = next(node for node in loop_body(graph).node if less.input[1] in node.output)
    attribute(made, "value_int").i += 1


def no_prefix(graph: onnx.GraphProto) -> None:
    less = of_type(loop_body(graph), "Less")[0]
    made = next(node for node in loop_body(graph).node if less.input[1] in node.output)
    attribute(made, "value_int").i = 0


def state_not_carried(graph: onnx.GraphProto) -> None:
    body = loop_body(graph)
    carried = next(node for node in body.node if body.output[2].name in node.output)
    carried.input[0] = body.input[3].name


FAULTS = [
    ("target", altered_frequency("target")),
    ("target", interleaved_rotation),
    ("target", swapped_angles),
    ("target", epsilon_of_another_family),
    ("target", no_mask),
    ("target", causal_as_well),
    ("target", wrong_scale),
    ("target", rows_written_to_the_front),
    ("target", keys_and_values_swapped),
    ("target", taps_swapped),
    ("target", last_rows_whatever_is_asked),
    ("backbone", altered_frequency("drafter")),
    ("backbone", interleaved_rotation),
    ("backbone", epsilon_of_another_family),
    ("backbone", no_mask),
    ("backbone", causal_as_well),
    ("backbone", rows_written_to_the_front),
    ("head", swapped_gates),
    ("head", reset_before_the_product),
    ("head", prefix_one_longer),
    ("head", no_prefix),
    ("head", state_not_carried),
]


@pytest.mark.parametrize(("graph", "fault"), FAULTS, ids=lambda value: getattr(value, "__qualname__", value).split(".")[0])
def test_a_fault_in_a_graph_is_found(graph: str, fault: Fault, copy: Path, tiny_bundle: Path) -> None:
    patch(copy / GRAPHS[graph], fault)
    report = compared(copy, tiny_bundle)
    assert not report.passed
    assert {line.graph for line in report.lines if not line.passed} == {graph}
    assert report.generated == ()
    assert f"{graph}: " in report.failure()


@pytest.mark.parametrize(("owner", "tensor"), [("target", "model.layers.2.mlp.up_proj.weight"), ("drafter", "embed_proj.2.weight")])
def test_one_wrong_weight_is_found(owner: str, tensor: str, copy: Path, tiny_bundle: Path) -> None:
    file = copy / owner / "model.safetensors"
    entry = read_header(file)[tensor]
    content = bytearray(file.read_bytes())
    content[entry.offset + 3] ^= 0x40  # the highest bit of an fp32's exponent but one: a small weight becomes a huge one
    file.write_bytes(content)
    report = compared(copy, tiny_bundle)
    assert not report.passed
    assert {line.graph for line in report.lines if not line.passed} == {"target" if owner == "target" else "head"}
    with pytest.raises(BundleError, match=f"{owner}/model.safetensors: altered: expected sha256"):
        verify_bundle(copy)


def test_a_wrong_weight_is_traced_to_its_layer(copy: Path, tiny_bundle: Path) -> None:
    file = copy / "target" / "model.safetensors"
    entry = read_header(file)["model.layers.2.self_attn.v_proj.weight"]
    content = bytearray(file.read_bytes())
    content[entry.offset + 3] ^= 0x40
    file.write_bytes(content)
    report = compared(copy, tiny_bundle)
    values = [line for line in report.lines if line.name == "updated_value_cache" and line.graph == "target"]
    assert {line.first_layer for line in values} == {2}
    assert "target: updated_value_cache (1 row): error" in report.failure()
    assert "from layer 2 on" in report.failure()


def with_nan(copy: Path) -> None:
    file = copy / "target" / "model.safetensors"
    entry = read_header(file)["model.layers.3.mlp.down_proj.weight"]
    content = bytearray(file.read_bytes())
    content[entry.offset + 8 : entry.offset + 12] = np.float32(math.nan).tobytes()
    file.write_bytes(content)


def test_a_nan_is_found_and_the_report_stays_json(copy: Path, tiny_bundle: Path) -> None:
    with_nan(copy)
    report = compared(copy, tiny_bundle)
    failed = [line for line in report.lines if line.graph == "target" and line.name == "logits"]
    assert failed
    assert all(line.max_abs_error == math.inf for line in failed)
    assert all(line.not_finite is not None and line.not_finite.nan == line.not_finite.size for line in failed)
    assert all(line.not_finite is not None and not line.not_finite.in_pytorch for line in failed)
    assert "target: model.layers.3.mlp.down_proj.weight holds 1 NaN or infinite weights, the first at [0, 2]" in report.failure()
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert '"max_abs_error": null' in text


def test_a_nan_that_pytorch_computes_as_well_is_no_agreement(copy: Path) -> None:
    with_nan(copy)
    report = compare(open_bundle(copy))  # sizes are the same
    failed = [line for line in report.lines if line.graph == "target" and line.name == "logits"]
    assert failed
    assert all(line.not_finite is not None and line.not_finite.in_pytorch for line in failed)
    assert "NaN and 0 infinite of 300 values, the first at [0, 0, 0], in PyTorch too" in report.failure()


def test_speculative_generation_is_compared_as_well(copy: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs within bounds and a backend that binds them wrongly: only the loop shows it."""
    from domino_deploy.runtime.backends.ort import OrtDrafter

    propose = OrtDrafter.propose

    def reversed_proposals(self, *arguments):
        proposal = propose(self, *arguments)
        return dataclasses.replace(proposal, token_ids=proposal.token_ids[::-1][:-1])

    monkeypatch.setattr(OrtDrafter, "propose", reversed_proposals)
    report = compared(copy, tiny_bundle)
    failed = [line for line in report.lines if not line.passed]
    assert {line.graph for line in failed} == {"generation"}
    assert len(failed) == 3
    assert len(report.generated) == 3
    assert all(generation.difference is None for generation in report.generated), "speculation is lossless for any proposals"


@pytest.mark.parametrize("fixture", ["tiny_bundle", "tiny_dflash_bundle"])
def test_a_good_bundle_passes_with_room_to_spare(fixture: str, request: pytest.FixtureRequest) -> None:
    bundle: Path = request.getfixturevalue(fixture)
    steps: list[str] = []
    report = verify_bundle(bundle, progress=steps.append)
    assert report.passed
    assert {line.graph for line in report.lines} == {"target", "backbone", "head", "generation"}
    values = [line for line in report.lines if line.graph in ("target", "backbone") and "top-1" not in line.name]
    assert all(line.max_abs_error < 0.3 * line.bound for line in values), "the bounds are no longer ten times what is measured"
    assert all(line.max_abs_error == 0 for line in report.lines if line not in values)
    assert all(line.cosine is not None and line.cosine > 0.999999 for line in values)
    assert any(line.max_abs_error > 0 for line in values), "two implementations never agree to the last bit"
    assert all(generation.tokens == 32 for generation in report.generated)
    assert all(generation.accepted == generation.expected_accepted for generation in report.generated)
    assert all(sum(generation.accepted) + len(generation.accepted) + 1 == 32 for generation in report.generated)
    assert len(steps) == 6


def test_cases_cover_the_shapes_that_a_runtime_binds(tiny_bundle: Path) -> None:
    report = json.loads((tiny_bundle / "manifest.json").read_text())["verification"]
    cases = {(line["graph"], line["case"]) for line in report["lines"]}
    for graph, case in (
        ("target", "1 row"),
        ("target", "prompt of 17"),
        ("target", "batch of 3, 5 rows"),
        ("backbone", "1 feature row"),
        ("backbone", "batch of 3, 4 feature rows"),
        ("head", "batch of 1, 6 of 6 proposals"),
        ("head", "batch of 1, 1 of 6 proposals"),
        ("head", "batch of 3, 6 of 6 proposals"),
    ):
        assert (graph, case) in cases


def test_a_tokenizer_of_another_model_is_refused(copy: Path, tiny_bundle: Path) -> None:
    from tests.support.checkpoints import write_target

    other = write_target(copy.parent / "other", vocab_size=400)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    for entry in tokenizer["added_tokens"]:
        if entry["content"] == "<|mask|>":
            entry["content"] = "The"
            entry["normalized"] = False
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(VerificationError, match="expected token ids below the target's 300, found 39"):
        compared(copy, tiny_bundle)


def test_a_graph_in_the_place_of_another_is_refused(copy: Path, tiny_bundle: Path) -> None:
    shutil.copyfile(copy / "head.onnx", copy / "backbone.onnx")
    with pytest.raises(BundleError, match=r"(?s)backbone\.onnx: the graph is not the one.*input block_ids: missing"):
        compared(copy, tiny_bundle)
