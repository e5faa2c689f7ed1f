"""`domino-deploy inspect`: facts against the files they were made of."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from domino_deploy.cli import main
from tests.support.checkpoints import drafter_config, drafter_shapes, write_drafter, write_target


def facts_of(path: Path) -> dict:
    done = CliRunner().invoke(main, ["inspect", str(path), "--json"])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def small_graph(tmp_path: Path) -> Path:
    """Two Relu nodes, one of them inside an If, and one operator of another domain."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    y = helper.make_tensor_value_info("y.0", TensorProto.INT64, ["batch"])
    branch = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["z"])], "branch", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("If", ["r"], ["i"], then_branch=branch, else_branch=branch),
        helper.make_node("Mystery", ["i"], ["y.0"], domain="domino"),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid("domino", 1)]
    )
    onnx.save(model, tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


def test_a_graphs_facts_are_those_it_was_made_of(small_graph: Path) -> None:
    facts = facts_of(small_graph)
    assert (facts["kind"], facts["bytes"]) == ("onnx", small_graph.stat().st_size)
    assert facts["graphs"]["small"] == {
        "opset": {"ai.onnx": 24, "domino": 1},
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}],
        "outputs": [{"name": "y.0", "dtype": "int64", "shape": ["batch"]}],
        "operators": {"Relu": 3, "If": 1, "domino::Mystery": 1},
        "functions": [],
    }


def test_a_graphs_table_is_readable_as_text(small_graph: Path) -> None:
    lines = CliRunner().invoke(main, ["inspect", str(small_graph)]).stdout.splitlines()
    assert "small: 5 nodes: Relu 3, If 1, domino::Mystery 1" in lines
    assert "input\tx\tfloat32\tbatch x 3" in lines


def test_a_checkpoints_facts_are_those_of_its_files(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", dtype="bfloat16")
    facts = facts_of(write_drafter(tmp_path / "drafter", target))
    shapes = drafter_shapes(drafter_config(target))
    assert facts["kind"] == "drafter checkpoint"
    assert {name: tuple(tensor["shape"]) for name, tensor in facts["tensors"].items()} == shapes
    assert facts["parameters"] == sum(map(math.prod, shapes.values()))
    assert (facts["bytes"], facts["dtypes"]) == (4 * facts["parameters"], {"F32": len(shapes)})
    assert facts["config"]["gru_hidden_dim"] == 16

    facts = facts_of(target)
    assert (facts["kind"], facts["config"]["family"], list(facts["dtypes"])) == ("target checkpoint", "llama", ["BF16"])
    assert facts["bytes"] == 2 * facts["parameters"]


def test_a_bundles_facts_join_manifest_and_graphs(tiny_bundle: Path) -> None:
    facts = facts_of(tiny_bundle)
    manifest = json.loads((tiny_bundle / "manifest.json").read_text())
    assert facts["kind"] == "bundle"
    assert facts["files"] == manifest["files"]
    assert facts["graphs"].keys() == {"target", "backbone", "head"}
    for name, graph in facts["graphs"].items():
        model = onnx.load(tiny_bundle / manifest["graphs"][name]["file"], load_external_data=False)
        assert [tensor["name"] for tensor in graph["inputs"]] == [value.name for value in model.graph.input]
        assert [tensor["name"] for tensor in graph["outputs"]] == [value.name for value in model.graph.output]
        outermost = Counter(node.op_type for node in model.graph.node if not node.domain)
        assert all(graph["operators"][operator] >= count for operator, count in outermost.items())


def test_a_bundles_table_gives_the_caches_of_all_layers_one_row(tiny_bundle: Path) -> None:
    lines = CliRunner().invoke(main, ["inspect", str(tiny_bundle)]).stdout.splitlines()
    caches = [line for line in lines if line.startswith("input\tkey_cache")]
    assert [line.split("\t")[1] for line in caches] == ["key_cache.* (4 layers)", "key_cache.* (2 layers)"]


@pytest.mark.parametrize("content", [b"not a graph", b""], ids=["garbage", "empty"])
def test_an_onnx_file_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "torn.onnx").write_bytes(content)
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "torn.onnx")])
    assert (done.exit_code, done.stdout) == (4, "")
    assert "torn.onnx: expected an ONNX graph" in done.stderr
