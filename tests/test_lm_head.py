"""The LM head apart: the same numbers as the whole graphs, its weights in one graph alone, and one session for both of its users."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from domino_deploy.bundle import APART_GRAPHS, MANIFEST, Bundle, open_bundle
from domino_deploy.errors import BundleError, ExportError
from domino_deploy.exporters.export import export_bundle
from domino_deploy.exporters.lm_head import backbone_trunk, target_trunk
from domino_deploy.exporters.options import ExportOptions
from domino_deploy.precision import Dtype, Precision
from domino_deploy.runtime.backends import ort, ort_passes
from domino_deploy.signature import backbone_trunk_signature, target_trunk_signature
from tests.support.checkpoints import write_drafter, write_target

CAPACITY = 64
TEXT = list(range(20, 36))


PRECISIONS = {
    "float32": Precision(),
    "float16": Precision.of(Dtype.FLOAT16),
    "int8": Precision.of(Dtype.INT8, block_size=16),
    "untied": Precision(),
}


@pytest.fixture(scope="module", params=PRECISIONS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("apart")
    target = write_target(folder / "target", tied=request.param != "untied")
    options = ExportOptions(precision=PRECISIONS[request.param])
    return export_bundle(write_drafter(folder / "drafter", target), target, folder / "bundle", options, verify=False)


def as_whole_graphs(bundle: Bundle) -> Bundle:
    graphs = {name: graph for name, graph in bundle.manifest.graphs.items() if name not in APART_GRAPHS}
    return Bundle(path=bundle.path, manifest=dataclasses.replace(bundle.manifest, graphs=graphs))


def numbers(bundle: Bundle) -> Iterator[np.ndarray]:
    """Logits and features of a prefill and of a short pass, and the tokens drafted in between."""
    target, drafter = ort.open_pair(bundle, capacity=CAPACITY, threads=1)
    assert drafter is not None
    rows = target.forward(TEXT, 3)
    target.commit(len(TEXT))
    features = rows.features.copy()
    yield from (rows.logits.copy(), features)
    for count in (1, drafter.max_proposals):
        drafter.reset()
        drafts = drafter.propose([*TEXT, 40], features, count).token_ids
        yield drafts
        yield target.forward([40, *drafts], count + 1).logits.copy()


def test_numbers_are_those_of_the_whole_graphs(bundle: Bundle) -> None:
    assert bundle.has_lm_head_apart
    # Between graphs numbers are float16; within one, ONNX Runtime on a CPU leaves casts out and keeps float32.
    allowed = 2e-3 if bundle.precision.activations is Dtype.FLOAT16 else 1e-6
    for apart, whole in zip(numbers(bundle), numbers(as_whole_graphs(bundle)), strict=True):
        np.testing.assert_allclose(apart, whole, rtol=0, atol=allowed)


def test_its_weights_are_in_one_graph(bundle: Bundle) -> None:
    """Of tied weights the trunks look rows up; none multiplies by them."""
    multiplied = {}
    for name, file in APART_GRAPHS.items():
        graph = onnx.load(bundle.path / file, load_external_data=False).graph
        made_by = {output: node for node in graph.node for output in node.output}
        products = [node for node in graph.node if node.op_type in ("MatMul", "MatMulNBits")]
        weights = {made_by[node.input[1]].input[0] if node.input[1] in made_by else node.input[1] for node in products}
        multiplied[name] = {weight for weight in weights if "lm_head" in weight or "embed_tokens" in weight}
    assert {name: len(weights) for name, weights in multiplied.items()} == {"target_trunk": 0, "backbone_trunk": 0, "lm_head": 1}


def test_target_and_drafter_use_one_session(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    original = ort_passes.BoundGraph.__init__

    def recorded(self: ort_passes.BoundGraph, graph_file: Path, *rest: object) -> None:
        opened.append(graph_file.name)
        original(self, graph_file, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ort_passes.BoundGraph, "__init__", recorded)
    ort.open_pair(bundle, capacity=CAPACITY, threads=1)
    assert sorted(opened) == ["backbone_trunk.onnx", "head.onnx", "lm_head.onnx", "target_trunk.onnx"]
    opened.clear()
    ort.open_pair(bundle, capacity=CAPACITY, threads=1, with_drafter=False)
    assert sorted(opened) == ["lm_head.onnx", "target_trunk.onnx"], "plain decoding runs the same graphs"


def test_a_drafter_with_a_vocabulary_of_its_own_shares_nothing(tiny_bundle: Path, tmp_path: Path) -> None:
    pair = tiny_bundle.parent / "drafter", tiny_bundle.parent / "target"
    bundle = export_bundle(*pair, tmp_path / "bundle", ExportOptions(draft_vocab=tuple(range(0, 300, 2))), verify=False)
    assert not bundle.has_lm_head_apart
    assert not any((bundle.path / file).exists() for file in APART_GRAPHS.values())


@pytest.mark.parametrize("missing", list(APART_GRAPHS))
def test_a_bundle_with_some_of_the_graphs_is_refused(missing: str, tiny_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["graphs"][missing]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=f"graphs.{missing}: expected {APART_GRAPHS[missing]}, found None"):
        open_bundle(copy)


def test_a_graph_that_the_manifest_does_not_list_as_a_file_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["files"]["lm_head.onnx"]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"lm_head\.onnx: not listed in manifest.json"):
        open_bundle(copy)


def test_a_graph_whose_logits_are_no_product_is_not_cut(tiny_bundle: Path, tmp_path: Path) -> None:
    config = open_bundle(tiny_bundle)
    model = onnx.load(tiny_bundle / "target.onnx", load_external_data=False)
    next(node for node in model.graph.node if "logits" in node.output).output[0] = "products"
    model.graph.node.append(onnx.helper.make_node("Neg", ["products"], ["logits"]))
    onnx.save(model, tmp_path / "target.onnx")
    with pytest.raises(ExportError, match="expected logits to be a matrix product, found Neg"):
        target_trunk(tmp_path / "target.onnx", target_trunk_signature(config.target, config.drafter.feature_size))


def test_a_backbone_whose_lm_head_reads_something_else_is_not_cut(tiny_bundle: Path, tmp_path: Path) -> None:
    config = open_bundle(tiny_bundle)
    model = onnx.load(tiny_bundle / "backbone.onnx", load_external_data=False)
    product = next(node for node in model.graph.node if "base_logits" in node.output)
    product.input[0] = "scaled"
    at = list(model.graph.node).index(product)
    model.graph.node.insert(at, onnx.helper.make_node("Neg", ["hidden"], ["scaled"]))
    onnx.save(model, tmp_path / "backbone.onnx")
    with pytest.raises(ExportError, match="expected an LM head on hidden, found one on scaled"):
        backbone_trunk(tmp_path / "backbone.onnx", backbone_trunk_signature(config.drafter))
