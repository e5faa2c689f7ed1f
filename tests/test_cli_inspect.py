"""`domino-deploy inspect`: facts against the files they were made of."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from domino_deploy.bundle import APART_GRAPHS, GRAPHS
from domino_deploy.cli import main
from tests.support.bundles import change_manifest
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
    assert facts["graphs"].keys() == {*GRAPHS, *APART_GRAPHS}
    for name, graph in facts["graphs"].items():
        model = onnx.load(tiny_bundle / manifest["graphs"][name]["file"], load_external_data=False)
        assert [tensor["name"] for tensor in graph["inputs"]] == [value.name for value in model.graph.input]
        assert [tensor["name"] for tensor in graph["outputs"]] == [value.name for value in model.graph.output]
        outermost = Counter(node.op_type for node in model.graph.node if not node.domain)
        assert all(graph["operators"][operator] >= count for operator, count in outermost.items())


def test_a_bundles_table_gives_the_caches_of_all_layers_one_row(tiny_bundle: Path) -> None:
    lines = CliRunner().invoke(main, ["inspect", str(tiny_bundle)]).stdout.splitlines()
    caches = [line for line in lines if line.startswith("input\tkey_cache")]
    assert [line.split("\t")[1] for line in caches] == ["key_cache.* (4 layers)", "key_cache.* (2 layers)"] * 2, "whole graphs and trunks"


@pytest.mark.parametrize("content", [b"not a graph", b""], ids=["garbage", "empty"])
def test_an_onnx_file_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "torn.onnx").write_bytes(content)
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "torn.onnx")])
    assert (done.exit_code, done.stdout) == (4, "")
    assert "torn.onnx: expected an ONNX graph" in done.stderr


def test_types_that_onnx_does_not_name_are_shown_by_number(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info("x", TensorProto.UNDEFINED, None), helper.make_tensor_value_info("y", 99, [1])]
    onnx.save(helper.make_model(helper.make_graph([], "g", values, [])), tmp_path / "odd.onnx")
    (graph,) = facts_of(tmp_path / "odd.onnx")["graphs"].values()
    assert [tensor["dtype"] for tensor in graph["inputs"]] == ["type 0 of ONNX", "type 99 of ONNX"]


@pytest.mark.parametrize("report", [{}, {"lines": "x"}, {"lines": [1]}, {"lines": [{}]}])
def test_figures_of_another_form_do_not_stop_the_rest(report: dict, tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    change_manifest(bundle, lambda manifest: manifest.update(verification=report))
    done = CliRunner().invoke(main, ["inspect", str(bundle)])
    assert done.exit_code == 0, done.output
    assert "verification: recorded in another form than this version's\n" in done.stdout


class TestParts:
    def test_a_bundles_parts_are_all_its_weights(self, tiny_bundle: Path) -> None:
        facts = facts_of(tiny_bundle)
        written = sum(
            tensor["data_offsets"][1] - tensor["data_offsets"][0]
            for file in tiny_bundle.rglob("*.safetensors")
            for name, tensor in header(file).items()
            if name != "__metadata__"
        )
        assert sum(facts["parts"].values()) == written
        assert list(facts["parts"]) == ["embedding and LM head", "target layers", "drafter backbone", "head", "head codebook"]
        assert facts["parts"]["embedding and LM head"] == 300 * 32 * 4

    def test_hard_links_are_those_of_the_files(self, tiny_bundle: Path) -> None:
        facts = facts_of(tiny_bundle)
        assert facts["hard_links"] == [name for name in facts["files"] if (tiny_bundle / name).stat().st_nlink > 1]
        lines = CliRunner().invoke(main, ["inspect", str(tiny_bundle)]).stdout.splitlines()
        shown = [line.split("\t")[0] for line in lines if line.endswith("\thard link")]
        assert shown == facts["hard_links"]
        assert any(line.startswith("precision: ") for line in lines)
        assert any(line.startswith("form: ") for line in lines)

    def test_a_checkpoints_parts_are_all_its_bytes(self, tmp_path: Path) -> None:
        target = write_target(tmp_path / "target", tied=False)
        facts, drafter = facts_of(target), facts_of(write_drafter(tmp_path / "drafter", target))
        assert sum(facts["parts"].values()) == facts["bytes"]
        assert list(facts["parts"]) == ["embedding", "LM head", "target layers"]
        assert sum(drafter["parts"].values()) == drafter["bytes"]
        assert drafter["parts"]["head codebook"] == 4 * 300 * 8


class TestMemoryPlan:
    def plan(self, *arguments: str | Path) -> dict:
        done = CliRunner().invoke(main, ["inspect", *map(str, arguments), "--json"])
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    def test_of_a_bundle_it_has_the_files_own_sizes(self, tiny_bundle: Path) -> None:
        facts = self.plan(tiny_bundle, "--batch", "3", "--context", "100")
        memory = facts["memory"]
        assert memory["weights"] == facts["parts"]
        assert (memory["batch"], memory["context"], memory["precision"]) == (3, 100, "float32")
        assert memory["target_cache"] == 3 * 100 * 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes
        parts = ("total_weights", "target_cache", "drafter_cache", "working", "logits")
        assert memory["total"] == sum(memory[part] for part in parts)
        assert "weights" not in facts

    def test_of_two_checkpoints_it_has_every_precision_and_the_pairing(self, tmp_path: Path) -> None:
        target = write_target(tmp_path / "target", family="qwen3", tied=False, dtype="bfloat16")
        drafter = write_drafter(tmp_path / "drafter", target, dtype="bfloat16", intermediate_size=64)
        facts = self.plan(drafter, "--target", target, "--dtype", "int8", "--context", "64")
        assert facts["pairing"]["target_layer_ids"] == facts["config"]["target_layer_ids"]
        assert list(facts["weights"]) == ["float32", "float16", "bfloat16", "int8", "int4"]
        assert facts["memory"]["weights"] == facts["weights"]["int8"]
        assert sum(facts["weights"]["float32"].values()) == 2 * sum(facts["weights"]["bfloat16"].values())
        other = self.plan(target, "--draft", drafter, "--dtype", "int8", "--context", "64")
        assert (other["memory"], other["pairing"]) == (facts["memory"], facts["pairing"])

    def test_the_cache_has_the_precisions_activations(self, tmp_path: Path) -> None:
        target = write_target(tmp_path / "target")
        whole, half, quantised = (
            self.plan(target, "--dtype", dtype)["memory"]["target_cache_per_token"] for dtype in ("float32", "float16", "int4")
        )
        assert whole == quantised == 2 * half

    def test_a_precision_whose_blocks_do_not_fit_is_left_open(self, tmp_path: Path) -> None:
        target = write_target(tmp_path / "target", intermediate_size=48)
        assert self.plan(target, "--context", "10")["weights"]["int4"] is None
        done = CliRunner().invoke(main, ["inspect", str(target), "--context", "10"])
        assert "target layers" in done.stdout
        assert done.stdout.splitlines()[-1].strip() == "and what the libraries and the engine keep for themselves"
        done = CliRunner().invoke(main, ["inspect", str(target), "--dtype", "int4"])
        assert (done.exit_code, "48 inputs" in done.stderr) == (2, True)

    def test_what_fits_into_given_memory(self, tiny_bundle: Path) -> None:
        done = CliRunner().invoke(main, ["inspect", str(tiny_bundle), "--memory", "0.01", "--context", "16"])
        fits = self.plan(tiny_bundle, "--memory", "0.01", "--context", "16")["memory"]["fits"]
        assert fits["memory"] == 10_000_000
        assert fits["largest_batch"] > 1
        batch, context = fits["largest_batch"], fits["largest_context"]
        text = f"in 10.0 MB: at most {batch} sequence(s) of 16 tokens, or 1 sequence(s) of at most {context} tokens"
        assert done.stdout.splitlines()[-1] == text

    @pytest.mark.parametrize(
        ("arguments", "fragment"),
        [
            (("BUNDLE", "--dtype", "int4"), "Expected --dtype with a checkpoint only"),
            (("BUNDLE", "--target", "x"), "Expected --target with a checkpoint only"),
            (("BUNDLE", "--context", "99999"), "  - --context must be at most"),
            (("BUNDLE", "--memory", "nan"), "'nan' is not a finite number"),
            (("BUNDLE/target.onnx", "--batch", "2"), "Expected a bundle or a checkpoint"),
            (("DRAFTER", "--batch", "2"), "expected the drafter's target"),
            (("DRAFTER", "--draft", "x"), "expected --target with a drafter"),
            (("TARGET", "--target", "x"), "expected --draft with a target"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_flags_that_do_not_fit_are_wrong_usage(self, arguments: tuple[str, ...], fragment: str, tiny_bundle: Path) -> None:
        places = {"BUNDLE": tiny_bundle, "DRAFTER": tiny_bundle.parent / "drafter", "TARGET": tiny_bundle.parent / "target"}
        first, *rest = arguments
        name, _, file = first.partition("/")
        done = CliRunner().invoke(main, ["inspect", str(places[name] / file), *rest])
        assert (done.exit_code, done.stdout) == (2, "")
        assert fragment in done.stderr


def header(file: Path) -> dict:
    with file.open("rb") as content:
        return json.loads(content.read(int.from_bytes(content.read(8), "little")))
