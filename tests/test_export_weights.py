"""Weights on their way into a bundle: fp32, streamed, value for value; and initializers that point at them."""

from __future__ import annotations

import math
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file

from domino_deploy.checkpoint import load_tensors, open_drafter, open_target
from domino_deploy.errors import ExportError
from domino_deploy.exporters.weights import bind_weights, check_all_used, write_weights
from domino_deploy.safetensors_header import read_header
from tests.support.checkpoints import write_drafter, write_target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_written_weights_are_the_checkpoints_own(dtype: str, shards: int, tmp_path: Path) -> None:
    source = open_target(write_target(tmp_path / "target", family="qwen2", tied=False, dtype=dtype, shards=shards))
    write_weights(source, tmp_path / "model.safetensors")
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == source.tensors.keys()
    for name, tensor in load_tensors(source, torch.float32):
        assert written[name].dtype == torch.float32
        assert torch.equal(written[name], tensor)
    first = min(entry.offset for entry in read_header(tmp_path / "model.safetensors").values())
    assert first % 64 == 0


def test_written_weights_share_no_file_with_the_source(tmp_path: Path) -> None:
    """ONNX refuses hard-linked data, and whoever saves the source again would write into the bundle."""
    source = open_target(write_target(tmp_path / "target"))
    write_weights(source, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_nlink == 1
    assert not (tmp_path / "model.safetensors").is_symlink()


def test_nested_heads_are_written_under_their_canonical_names(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    source = open_drafter(write_drafter(tmp_path / "drafter", target, nested_head=True))
    write_weights(source, tmp_path / "model.safetensors")
    names = read_header(tmp_path / "model.safetensors").keys()
    assert "prefix_gru.weight_ih_l0" in names
    assert not any(name.startswith("logit_head.") for name in names)


def graph_with(**shapes: tuple[int, ...]) -> ir.Model:
    """A graph with nothing but initializers without data."""
    initializers = [ir.val(name.replace("__", "."), ir.DataType.FLOAT, shape) for name, shape in shapes.items()]
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24})
    for value in initializers:
        graph.initializers.add(value)
    return ir.Model(graph, ir_version=10)


@pytest.fixture
def checkpoints(tmp_path: Path) -> dict[str, object]:
    target = write_target(tmp_path / "target")
    return {"target": open_target(target), "drafter": open_drafter(write_drafter(tmp_path / "drafter", target))}


def test_an_initializer_becomes_the_range_that_its_name_says(checkpoints: dict[str, object], tmp_path: Path) -> None:
    model = graph_with(drafter__norm__weight=(32,), target__model__norm__weight=(32,))
    small = ir.val("shape", const_value=ir.tensor([1, 2], name="shape"))
    model.graph.initializers.add(small)
    assert bind_weights(model, checkpoints) == {"drafter.norm.weight", "target.model.norm.weight"}
    assert not isinstance(small.const_value, ir.ExternalTensor)
    for owner, name in (("drafter", "norm.weight"), ("target", "model.norm.weight")):
        tensor = model.graph.initializers[f"{owner}.{name}"].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert str(tensor.location) == f"{owner}/model.safetensors"
        content = (tmp_path / owner / "model.safetensors").read_bytes()[tensor.offset : tensor.offset + tensor.length]
        expected = load_file(tmp_path / owner / "model.safetensors")[name]
        assert torch.equal(torch.frombuffer(bytearray(content), dtype=torch.float32), expected)


def test_a_tied_lm_head_is_the_embedding(checkpoints: dict[str, object]) -> None:
    model = graph_with(target__lm_head__weight=(300, 32))
    assert bind_weights(model, checkpoints) == {"target.model.embed_tokens.weight"}
    entry = checkpoints["target"].tensors["model.embed_tokens.weight"]  # type: ignore[attr-defined]
    assert model.graph.initializers["target.lm_head.weight"].const_value.offset == entry.offset
    assert entry.nbytes == 4 * math.prod(entry.shape)


def test_all_initializers_that_do_not_fit_are_named_at_once(checkpoints: dict[str, object]) -> None:
    model = graph_with(
        target__model__norm__weight=(31,), drafter__nothing__weight=(1,), elsewhere__norm__weight=(32,), drafter__norm__weight=(32,)
    )
    with pytest.raises(ExportError) as caught:
        bind_weights(model, checkpoints)
    message = str(caught.value)
    assert "target.model.norm.weight: the graph has shape (31,), the weights ('F32', (32,))" in message
    assert "drafter.nothing.weight" in message
    assert "elsewhere.norm.weight" in message
    assert "drafter.norm.weight" not in message


def test_a_tensor_that_no_graph_uses_is_named(checkpoints: dict[str, object]) -> None:
    names = {f"{owner}.{name}" for owner, checkpoint in checkpoints.items() for name in checkpoint.tensors}  # type: ignore[attr-defined]
    check_all_used(checkpoints, [names])
    with pytest.raises(ExportError, match=r"drafter\.prefix_gru\.weight_hh_l0"):
        check_all_used(checkpoints, [names - {"drafter.prefix_gru.weight_hh_l0"}, {"target.model.norm.weight"}])
