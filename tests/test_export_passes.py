"""Each graph pass on a graph written out for it."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from domino_deploy.errors import ExportError
from domino_deploy.exporters import passes
from domino_deploy.exporters.graph import export_graph
from domino_deploy.plugins import op
from domino_deploy.signature import GraphSignature, TensorSpec


def model(text: str) -> ir.Model:
    return ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 24]>\n{text}')


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def constant_input(node: ir.Node, index: int) -> list[int]:
    producer = node.inputs[index].producer()
    assert producer is not None
    return list(producer.attributes["value_ints"].as_ints())


class TestReshapeByPosition:
    def reshaped(self, source: str, wanted: str) -> ir.Node:
        graph = model(f"agraph (float[{source}] x, int64[n] shape) => (float[{wanted}] y) <float[{wanted}] y> {{ y = Reshape (x, shape) }}")
        passes.reshape_by_position(graph)
        (node,) = (node for node in graph.graph if node.op_type == "Reshape")
        return node

    def test_kept_axes_become_zeros(self) -> None:
        assert constant_input(self.reshaped("batch,rows,32", "batch,rows,2,16"), 1) == [0, 0, 2, 16]

    def test_merged_axes_become_their_size(self) -> None:
        assert constant_input(self.reshaped("batch,rows,2,16", "batch,rows,32"), 1) == [0, 0, 32]

    @pytest.mark.parametrize(
        ("source", "wanted"),
        [
            pytest.param("batch,rows,32", "rows,batch,32", id="axes moved"),
            pytest.param("batch,32", "2,batch,16", id="axis further back"),
            pytest.param("batch,rows", "product", id="axes merged to an unknown size"),
        ],
    )
    def test_anything_else_is_left_alone(self, source: str, wanted: str) -> None:
        node = self.reshaped(source, wanted)
        assert node.inputs[1] is not None
        assert node.inputs[1].name == "shape"


def test_constants_are_folded_and_weights_are_not() -> None:
    graph = model(
        """agraph (float[batch] x) => (float[batch] y) <float[2,2] weight> {
            one = Constant <value = int64 {1}> ()
            scale = Cast <to = 1> (one)
            slice = ReduceSum <keepdims = 0> (weight)
            scaled = Mul (x, scale)
            y = Mul (scaled, slice)
        }"""
    )
    weight = next(node for node in graph.graph if node.op_type == "ReduceSum").inputs[0]
    assert weight is not None
    graph.graph.initializers.add(weight)  # without data, as the exporters leave it
    passes.fold_constants(graph)
    passes.clean(graph)
    assert "Cast" not in operators(graph)
    assert "ReduceSum" in operators(graph)


def test_cleaning_removes_what_nothing_uses_and_what_tells_about_the_machine() -> None:
    graph = model("agraph (float[batch] x) => (float[batch] y) { unused = Exp (x) y = Identity (x) }")
    for node in graph.graph:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = "File /home/someone/model.py"
        node.doc_string = "/home/someone"
    graph.graph.inputs[0].metadata_props["pkg.torch.export.path"] = "/home/someone"
    graph.metadata_props["origin"] = "/home/someone"
    passes.clean(graph)
    assert operators(graph) == ["Identity"]
    assert b"someone" not in ir.to_proto(graph).SerializeToString()


def test_expressions_get_the_names_they_stand_for() -> None:
    graph = model("agraph (float[a] x) => (float[b] y) { y = Identity (x) }")
    for value in (graph.graph.inputs[0], graph.graph.outputs[0]):
        value.shape = ir.Shape(["feature_rows + 6", 4])
    passes.name_dimensions(graph, {"feature_rows + 6": "context_rows"})
    assert graph.graph.inputs[0].shape == ir.Shape(["context_rows", 4])
    assert graph.graph.outputs[0].shape == ir.Shape(["context_rows", 4])


def spec(name: str, *shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, meaning="")


class TestCheckSignature:
    GRAPH = "agraph (float[batch,4] x, int64[batch] n) => (float[batch,4] y) { y = Identity (x) }"

    def test_passes_what_fits(self) -> None:
        fitting = GraphSignature(inputs=(spec("x", "batch", 4), spec("n", "batch", dtype="int64")), outputs=(spec("y", "batch", 4),))
        passes.check_signature(model(self.GRAPH), fitting)

    @pytest.mark.parametrize(
        ("inputs", "fragment"),
        [
            pytest.param((spec("z", "batch", 4), spec("n", "batch", dtype="int64")), "'z'", id="name"),
            pytest.param((spec("x", "batch", 5), spec("n", "batch", dtype="int64")), "5", id="size"),
            pytest.param((spec("x", "rows", 4), spec("n", "batch", dtype="int64")), "'rows'", id="symbol"),
            pytest.param((spec("x", "batch", 4), spec("n", "batch")), "'float32'", id="dtype"),
            pytest.param((spec("n", "batch", dtype="int64"), spec("x", "batch", 4)), "'n'", id="order"),
            pytest.param((spec("x", "batch", 4),), "expected 2 inputs and outputs, found 3", id="count"),
        ],
    )
    def test_names_what_does_not(self, inputs: tuple[TensorSpec, ...], fragment: str) -> None:
        with pytest.raises(ExportError, match="agraph does not have its signature") as caught:
            passes.check_signature(model(self.GRAPH), GraphSignature(inputs=inputs, outputs=(spec("y", "batch", 4),)))
        assert fragment in str(caught.value)


def test_a_module_that_cannot_be_exported_is_an_export_error() -> None:
    from torch import Tensor, nn

    class DataDependent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    signature = GraphSignature(inputs=(spec("x", "batch", 4),), outputs=(spec("y", "batch", 4),))
    with pytest.raises(ExportError, match="DataDependent: expected an exportable module"):
        export_graph(DataDependent, signature)


def test_attention_without_a_mask_is_refused() -> None:
    """Translating it would be easy, and would hide that a caller forgot the mask."""
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Unmasked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    signature = GraphSignature(inputs=(spec("x", "batch", 2, "rows", 4),), outputs=(spec("y", "batch", 2, "rows", 4),))
    with pytest.raises(ExportError, match="expected an explicit mask and no dropout, found no mask"):
        export_graph(Unmasked, signature)


def test_correction_bodies_are_added_where_they_are_used() -> None:
    graph = model("agraph (float[batch] x) => (float[batch] y) { y = Identity (x) }")
    passes.add_correction_function(graph)
    assert not graph.functions
    node = ir.node(op.NAME, [None] * len(op.INPUTS), domain=op.DOMAIN, num_outputs=len(op.OUTPUTS))
    graph.graph.append(node)
    passes.add_correction_function(graph)
    (function,) = ir.to_proto(graph).functions
    assert [node.op_type for node in function.node] == [
        *("Add", "Sigmoid", "Mul", "Gemm", "ArgMax", "Constant", "Unsqueeze", "GatherElements", "Squeeze"),
    ]
