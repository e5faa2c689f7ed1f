"""The private copies that engines are built from compute what the bundle's graphs compute, without what TensorRT cannot build."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import ShapeInferencePass

from domino_deploy.bundle import GRAPHS, Bundle, open_bundle
from domino_deploy.engines import PluginForm
from domino_deploy.errors import ExportError
from domino_deploy.exporters.engine_graph import add_greedy_ids, check_operators
from domino_deploy.exporters.export import export_bundle
from domino_deploy.exporters.options import ExportOptions
from domino_deploy.plugins import op
from domino_deploy.precision import Dtype, Precision
from domino_deploy.signature import (
    BASE_LOGITS,
    DRAFT_IDS,
    GREEDY_IDS,
    HIDDEN,
    LOGIT_INDEX,
    LOGITS,
    POSITION_IDS,
    UNCERTIFIED,
    WRITE_INDEX,
    GraphSignature,
    TensorSpec,
)
from tests.support.engine_copies import random_inputs, run, write_copies

DRAFTED = 4  # of the tiny drafters' 6 proposals
PREFIX = 1


def export(tiny: Path, folder: Path, **options) -> Bundle:
    """The tiny pair, exported otherwise."""
    return export_bundle(tiny.parent / "drafter", tiny.parent / "target", folder, ExportOptions(**options), verify=False)


@pytest.fixture(scope="module")
def half_bundle(tiny_bundle, tmp_path_factory) -> Bundle:
    return export(tiny_bundle, tmp_path_factory.mktemp("half") / "bundle", precision=Precision.of(Dtype.FLOAT16))


@pytest.fixture(scope="module")
def pooled_bundle(tiny_bundle, tmp_path_factory) -> Bundle:
    return export(tiny_bundle, tmp_path_factory.mktemp("pooled") / "bundle", candidate_pool=8)


@pytest.fixture(scope="module")
def certified_bundle(tiny_bundle, tmp_path_factory) -> Bundle:
    folder = tmp_path_factory.mktemp("certified") / "bundle"
    return export(tiny_bundle, folder, candidate_pool=8, certified_pool=True, draft_vocab=tuple(range(0, 300, 3)))


def head_runs(bundle: Bundle, folder: Path, plugin: PluginForm, seed: int):
    """Outputs of the bundle's own head and of the copy, on the same three sequences."""
    signature = write_copies(bundle, folder, count=DRAFTED, plugin=plugin)["head"]
    inputs = random_inputs(signature, seed, batch=3)
    return run(bundle.path / GRAPHS["head"], inputs), run(folder / GRAPHS["head"], inputs)


@pytest.mark.parametrize("plugin", list(PluginForm))
@pytest.mark.parametrize("seed", range(3))
def test_the_unrolled_head_drafts_what_the_loop_drafts(tiny_bundle, tmp_path, plugin: PluginForm, seed: int) -> None:
    expected, found = head_runs(open_bundle(tiny_bundle), tmp_path, plugin, seed)
    assert expected[DRAFT_IDS].shape == (3, DRAFTED)
    np.testing.assert_array_equal(found[DRAFT_IDS], expected[DRAFT_IDS])


@pytest.mark.parametrize("plugin", list(PluginForm))
def test_the_unrolled_head_keeps_a_certified_pool_and_a_draft_vocabulary(certified_bundle, tmp_path, plugin: PluginForm) -> None:
    expected, found = head_runs(certified_bundle, tmp_path, plugin, seed=0)
    np.testing.assert_array_equal(found[DRAFT_IDS], expected[DRAFT_IDS])
    np.testing.assert_array_equal(found[UNCERTIFIED], expected[UNCERTIFIED])
    assert np.all(found[DRAFT_IDS] % 3 == 0)
    assert expected[UNCERTIFIED].any(), "the pool settled every token, so the comparison shows nothing"


def test_the_unrolled_head_keeps_a_plain_pool(pooled_bundle, tmp_path) -> None:
    expected, found = head_runs(pooled_bundle, tmp_path, PluginForm.NONE, seed=0)
    np.testing.assert_array_equal(found[DRAFT_IDS], expected[DRAFT_IDS])
    np.testing.assert_array_equal(found[UNCERTIFIED], expected[UNCERTIFIED])
    assert expected[UNCERTIFIED].any(), "the pool settled every token, so the comparison shows nothing"


@pytest.mark.parametrize("bundle", ["pooled_bundle", "certified_bundle"])
def test_a_pool_needs_no_operator_that_the_rtx_parser_lacks(bundle: str, tmp_path, request) -> None:
    model = copied(request.getfixturevalue(bundle), tmp_path, "head")
    assert {node.op_type for node in model.graph.all_nodes()} & {"NonZero", "If", "Loop"} == set()


def test_a_head_without_a_loop_stays_as_it_is(tiny_dflash_bundle, tmp_path) -> None:
    expected, found = head_runs(open_bundle(tiny_dflash_bundle), tmp_path, PluginForm.NONE, seed=0)
    np.testing.assert_array_equal(found[DRAFT_IDS], expected[DRAFT_IDS])


def copied(bundle: Bundle, folder: Path, graph: str, plugin: PluginForm = PluginForm.NONE) -> ir.Model:
    write_copies(bundle, folder, count=DRAFTED, plugin=plugin)
    return ir.load(folder / GRAPHS[graph])


def test_the_unrolled_head_has_no_control_flow(tiny_bundle, tmp_path) -> None:
    model = copied(open_bundle(tiny_bundle), tmp_path, "head")
    assert {node.op_type for node in model.graph.all_nodes()} & {"Loop", "If", "Scan"} == set()


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        (PluginForm.NONE, None),
        (PluginForm.AOT, op.TILES_NAME),
        (PluginForm.V3, op.NAME),
        (PluginForm.CPP, op.NAME),
    ],
)
def test_the_plugin_takes_every_corrected_proposal_and_has_no_body_to_fall_back_to(
    half_bundle, tmp_path, plugin: PluginForm, expected: str | None
) -> None:
    model = copied(half_bundle, tmp_path, "head", plugin)
    nodes = [node for node in model.graph.all_nodes() if node.domain == op.DOMAIN]
    assert [node.op_type for node in nodes] == ([] if expected is None else [expected] * (DRAFTED - PREFIX))
    assert model.functions == {}
    assert all(node.attributes[op.NAMESPACE_ATTRIBUTE].as_string() == op.DOMAIN for node in nodes)


@pytest.mark.parametrize("plugin", [PluginForm.AOT, PluginForm.V3, PluginForm.CPP])
def test_the_plugin_reads_the_codebook_as_it_is_stored(half_bundle, tmp_path, plugin: PluginForm) -> None:
    model = copied(half_bundle, tmp_path, "head", plugin)
    codebooks = {node.inputs[3] for node in model.graph.all_nodes() if node.domain == op.DOMAIN}
    assert [(value.name, value.dtype) for value in codebooks] == [("drafter.embed_proj.2.weight", ir.DataType.FLOAT16)]


@pytest.mark.parametrize("bundle", ["tiny_bundle", "tiny_dflash_bundle"])
def test_the_backbone_gives_the_first_proposals_alone(bundle: str, tmp_path, request) -> None:
    opened = open_bundle(request.getfixturevalue(bundle))
    signature = write_copies(opened, tmp_path, count=DRAFTED)["backbone"]
    inputs = random_inputs(signature, 0, batch=2, feature_rows=3, context_rows=3 + opened.drafter.block_size)
    inputs[WRITE_INDEX][:] = (0, 5)
    inputs[POSITION_IDS] = np.sort(inputs[POSITION_IDS], axis=1)
    expected, found = (run(folder / GRAPHS["backbone"], inputs) for folder in (opened.path, tmp_path))
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        wanted = values[:, :DRAFTED] if name in (HIDDEN, BASE_LOGITS) else values
        np.testing.assert_array_equal(found[name], wanted, err_msg=name)


def test_the_backbones_lm_head_works_on_the_first_proposals_alone(tiny_bundle, half_bundle, tmp_path) -> None:
    for index, bundle in enumerate((open_bundle(tiny_bundle), half_bundle)):
        model = copied(bundle, tmp_path / str(index), "backbone")
        ShapeInferencePass()(model)
        products = [node for node in model.graph if node.op_type == "MatMul" and node.outputs[0].shape is not None]
        lm_head = next(node for node in products if node.outputs[0].shape[-1] == bundle.target.vocab_size)
        assert lm_head.outputs[0].shape[1] == DRAFTED


def test_the_target_says_its_greedy_tokens(tiny_bundle, tmp_path) -> None:
    bundle = open_bundle(tiny_bundle)
    signature = write_copies(bundle, tmp_path, count=DRAFTED)["target"]
    inputs = random_inputs(signature, 0, batch=2, rows=5, logit_rows=3)
    inputs[WRITE_INDEX][:] = (0, 7)
    inputs[LOGIT_INDEX] = np.array([[0, 2, 4], [1, 1, 3]])
    expected, found = (run(folder / GRAPHS["target"], inputs) for folder in (bundle.path, tmp_path))
    assert list(found)[:2] == [LOGITS, GREEDY_IDS]
    np.testing.assert_array_equal(found[GREEDY_IDS], expected[LOGITS].argmax(-1))
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


LARGEST = np.finfo(np.float32).max
ROWS: dict[str, tuple[dict[int, float], int]] = {
    "as they come": ({7: 50.0}, 7),
    "the lowest id of equals": ({9: 50.0, 11: 50.0}, 9),
    "a sum beyond float32": (dict.fromkeys(range(0, 150_000), LARGEST) | {0: 0.0}, 1),
    "sums beyond float32 both ways": ({index: LARGEST if index % 1000 < 500 else -LARGEST for index in range(1, 150_000)}, 1),
    "all but one -inf": (dict.fromkeys(range(151_936), -np.inf) | {151_935: -1e4}, 151_935),
    "NaN first": ({0: np.nan}, -1),
    "NaN in between": ({77_777: np.nan, 5: 1e4}, -1),
    "NaN last": ({151_935: np.nan}, -1),
    "+inf": ({6: np.inf}, -1),
    "+inf and -inf": ({6: np.inf, 8: -np.inf}, -1),
    "NaN and -inf": (dict.fromkeys(range(151_936), -np.inf) | {8: np.nan}, -1),
    "nothing but -inf": (dict.fromkeys(range(151_936), -np.inf), -1),
}


def test_a_greedy_token_is_none_where_logits_are_not_finite_and_only_there() -> None:
    """With the vocabulary of Qwen3, whose sums are the longest."""
    logits = np.random.default_rng(0).standard_normal((1, len(ROWS), 151_936)).astype(np.float32)
    for row, (values, _) in zip(logits[0], ROWS.values(), strict=True):
        row[list(values)] = list(values.values())
    given = ir.val("given", ir.DataType.FLOAT, ["batch", "logit_rows", 151_936])
    node = ir.node("Identity", [given], name="identity")
    node.outputs[0].name, node.outputs[0].type = LOGITS, given.type
    model = ir.Model(ir.Graph([given], list(node.outputs), nodes=[node], opset_imports={"": 24}), ir_version=10)
    shape = ("batch", "logit_rows")
    outputs = (
        TensorSpec(name=LOGITS, dtype="float32", shape=(*shape, 151_936), meaning=""),
        TensorSpec(name=GREEDY_IDS, dtype="int64", shape=shape, meaning=""),
    )
    add_greedy_ids(model, GraphSignature(inputs=(), outputs=outputs))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run([GREEDY_IDS], {"given": logits})
    assert dict(zip(ROWS, found[0].tolist(), strict=True)) == {name: token for name, (_, token) in ROWS.items()}


@pytest.mark.parametrize("graph", ["target", "backbone"])
def test_caches_are_of_fixed_length(tiny_bundle, tmp_path, graph: str) -> None:
    bundle = open_bundle(tiny_bundle)
    signature = write_copies(bundle, tmp_path, max_model_len=40, count=DRAFTED)[graph]
    slots = 40 + DRAFTED + 1 + (bundle.drafter.block_size if graph == "backbone" else 0)
    caches = [spec for spec in (*signature.inputs, *signature.outputs) if "cache" in spec.name]
    assert caches
    assert {spec.shape[2] for spec in caches} == {slots}
    model = ir.load(tmp_path / GRAPHS[graph])
    found = {value.name: list(value.shape) for value in (*model.graph.inputs, *model.graph.outputs)}
    assert all(found[spec.name][2] == slots for spec in caches)


def test_no_attention_says_what_its_softmax_computes_in(half_bundle, tmp_path) -> None:
    attention = [node for node in copied(half_bundle, tmp_path, "target").graph if node.op_type == "Attention"]
    assert len(attention) == half_bundle.target.num_layers
    assert all("softmax_precision" not in node.attributes for node in attention)


def test_the_bundle_is_not_written_to(tiny_bundle, tmp_path) -> None:
    before = (tiny_bundle / GRAPHS["head"]).read_bytes()
    copied(open_bundle(tiny_bundle), tmp_path, "head")
    assert (tiny_bundle / GRAPHS["head"]).read_bytes() == before


def test_operators_that_cannot_be_built_are_refused_all_by_name() -> None:
    values = ir.val("x", ir.DataType.FLOAT, [1, 5000])
    nodes = [
        ir.node("MatMulNBits", [values], domain="com.microsoft", name="product"),
        ir.node("Constant", [], {"value_ints": [3841]}, name="k"),
    ]
    nodes.append(ir.node("TopK", [values, nodes[1].outputs[0]], num_outputs=2, name="pool"))
    model = ir.Model(ir.Graph([values], [nodes[-1].outputs[0]], nodes=nodes, opset_imports={"": 24}), ir_version=10)
    with pytest.raises(ExportError) as error:
        check_operators(model, "head.onnx")
    assert "product: com.microsoft::MatMulNBits" in str(error.value)
    assert "pool: TopK of 3841, above 3840" in str(error.value)


def test_the_largest_topk_that_can_be_built_passes() -> None:
    values = ir.val("x", ir.DataType.FLOAT, [1, 5000])
    count = ir.node("Constant", [], {"value_ints": [op.MAX_TOP_K]})
    top = ir.node("TopK", [values, count.outputs[0]], num_outputs=2)
    model = ir.Model(ir.Graph([values], [top.outputs[0]], nodes=[count, top], opset_imports={"": 24}), ir_version=10)
    check_operators(model, "head.onnx")
