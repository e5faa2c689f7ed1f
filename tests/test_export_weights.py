"""Weights on their way into a bundle: fp32, streamed, value for value; and initializers that point at them."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_deploy.checkpoint import INDEX, load_tensors, open_drafter, open_target
from domino_deploy.errors import CheckpointError, ExportError
from domino_deploy.exporters.placement import AnyCheckpoint, Placement
from domino_deploy.exporters.stored import Stored, read_tensor, stored_tensors
from domino_deploy.exporters.weights import bind_weights, check_all_used, write_weights
from domino_deploy.precision import Dtype, Precision
from domino_deploy.safetensors_header import read_header
from tests.support.checkpoints import write_drafter, write_target

FLOAT32 = Precision()


def place(source: AnyCheckpoint, folder: Path, precision: Precision = FLOAT32, placement: Placement = Placement.LINK) -> Stored:
    folder.mkdir()
    return write_weights(source, folder, precision, placement)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_stored_weights_are_the_checkpoints_own(dtype: str, shards: int, tmp_path: Path) -> None:
    source = open_target(write_target(tmp_path / "target", family="qwen2", tied=False, dtype=dtype, shards=shards))
    stored = place(source, tmp_path / "new")
    assert stored.keys() == source.tensors.keys()
    for name, tensor in load_tensors(source, torch.float32):
        assert stored[name].dtype is Dtype.FLOAT32
        assert torch.equal(read_tensor(stored[name]), tensor)
    assert stored_tensors(tmp_path / "new") == stored
    if dtype != "float32":
        assert all(min(entry.offset for entry in read_header(file).values()) % 64 == 0 for file in (tmp_path / "new").glob("*.safetensors"))


@pytest.mark.parametrize("shards", [1, 3])
def test_files_that_stay_as_they_are_are_linked_and_the_rest_is_new(shards: int, tmp_path: Path) -> None:
    source = open_target(write_target(tmp_path / "target", dtype="bfloat16", shards=shards))
    place(source, tmp_path / "linked", Precision.of(Dtype.BFLOAT16))
    place(source, tmp_path / "copied", Precision.of(Dtype.BFLOAT16), Placement.COPY)
    place(source, tmp_path / "converted", Precision.of(Dtype.FLOAT16))
    for name in sorted({entry.file.name for entry in source.tensors.values()}):
        assert (tmp_path / "linked" / name).samefile(tmp_path / "target" / name)
        assert (tmp_path / "copied" / name).read_bytes() == (tmp_path / "target" / name).read_bytes()
        assert (tmp_path / "copied" / name).stat().st_nlink == (tmp_path / "converted" / name).stat().st_nlink == 1


def test_a_shard_of_another_type_alone_is_converted(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", dtype="bfloat16", shards=3)
    odd = sorted(folder.glob("*.safetensors"))[1]
    save_file({name: tensor.float() for name, tensor in load_file(odd).items()}, odd)
    source = open_target(folder)
    stored = place(source, tmp_path / "new", Precision.of(Dtype.BFLOAT16))
    assert {tensor.dtype for tensor in stored.values()} == {Dtype.BFLOAT16}
    links = {file.name: file.stat().st_nlink for file in (tmp_path / "new").glob("*.safetensors")}
    assert links == {file.name: 1 if file == odd else 2 for file in folder.glob("*.safetensors")}
    assert open_target(_with_config(folder, tmp_path / "new")).config == source.config


def test_where_links_are_refused_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*paths: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    source = open_target(write_target(tmp_path / "target"))
    place(source, tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == (tmp_path / "target" / "model.safetensors").read_bytes()


def test_nested_heads_are_found_under_their_canonical_names(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    source = open_drafter(write_drafter(tmp_path / "drafter", target, nested_head=True, dtype="bfloat16"))
    for precision in (Precision.of(Dtype.BFLOAT16), FLOAT32):
        stored = place(source, tmp_path / precision.name, precision)
        assert "prefix_gru.weight_ih_l0" in stored
        assert not any(name.startswith("logit_head.") for name in stored)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16])
def test_a_shard_of_nothing_but_copies_or_frequencies_is_left_out(name: str, dtype: Dtype, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", tied=True, shards=2)
    index = json.loads((folder / INDEX).read_text())
    embedding = load_file(folder / index["weight_map"]["model.embed_tokens.weight"])["model.embed_tokens.weight"]
    save_file({name: embedding if name == "lm_head.weight" else torch.ones(8)}, folder / "last.safetensors")
    index["weight_map"][name] = "last.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    source = open_target(folder)
    stored = place(source, tmp_path / "new", Precision.of(dtype))
    assert stored.keys() == source.tensors.keys() == stored_tensors(tmp_path / "new").keys()
    assert not (tmp_path / "new" / "last.safetensors").exists()
    assert open_target(_with_config(folder, tmp_path / "new")).tensors.keys() == source.tensors.keys()


def test_a_file_named_like_one_of_the_bundles_own_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", write_target(tmp_path / "target"))
    file = (folder / "model.safetensors").rename(folder / "draft_vocab.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(load_file(file), file.name)}))
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match=r"draft_vocab\.safetensors, which bundles use themselves"):
        place(open_drafter(folder), tmp_path / "new")
    assert file.read_bytes() == before
    assert not list((tmp_path / "new").iterdir())


def test_weights_beyond_the_type_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", dtype="float32")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        place(open_target(folder), tmp_path / "new", Precision.of(Dtype.FLOAT16))


def _with_config(source: Path, folder: Path) -> Path:
    shutil.copyfile(source / "config.json", folder / "config.json")
    return folder


def graph_with(**shapes: tuple[int, ...]) -> ir.Model:
    """A graph with nothing but initializers without data."""
    initializers = [ir.val(name.replace("__", "."), ir.DataType.FLOAT, shape) for name, shape in shapes.items()]
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24})
    for value in initializers:
        graph.initializers.add(value)
    return ir.Model(graph, ir_version=10)


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, Stored]:
    target = write_target(tmp_path / "target")
    write_drafter(tmp_path / "drafter", target)
    return {owner: stored_tensors(tmp_path / owner) for owner in ("target", "drafter")}


def test_an_initializer_becomes_the_range_that_its_name_says(stored: dict[str, Stored], tmp_path: Path) -> None:
    model = graph_with(drafter__norm__weight=(32,), target__model__norm__weight=(32,))
    small = ir.val("shape", const_value=ir.tensor([1, 2], name="shape"))
    model.graph.initializers.add(small)
    assert bind_weights(model, stored) == {"drafter.norm.weight", "target.model.norm.weight"}
    assert not isinstance(small.const_value, ir.ExternalTensor)
    for owner, name in (("drafter", "norm.weight"), ("target", "model.norm.weight")):
        tensor = model.graph.initializers[f"{owner}.{name}"].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert str(tensor.location) == f"{owner}/model.safetensors"
        content = (tmp_path / owner / "model.safetensors").read_bytes()[tensor.offset : tensor.offset + tensor.length]
        expected = load_file(tmp_path / owner / "model.safetensors")[name]
        assert torch.equal(torch.frombuffer(bytearray(content), dtype=torch.float32), expected)


def test_a_tied_lm_head_is_the_embedding(stored: dict[str, Stored]) -> None:
    model = graph_with(target__lm_head__weight=(300, 32))
    assert bind_weights(model, stored) == {"target.model.embed_tokens.weight"}
    entry = stored["target"]["model.embed_tokens.weight"].parts[""]
    assert model.graph.initializers["target.lm_head.weight"].const_value.offset == entry.offset
    assert entry.nbytes == 4 * math.prod(entry.shape)


def test_all_initializers_that_do_not_fit_are_named_at_once(stored: dict[str, Stored]) -> None:
    model = graph_with(
        target__model__norm__weight=(31,), drafter__nothing__weight=(1,), elsewhere__norm__weight=(32,), drafter__norm__weight=(32,)
    )
    with pytest.raises(ExportError) as caught:
        bind_weights(model, stored)
    message = str(caught.value)
    assert "target.model.norm.weight: the graph has FLOAT [31], the weights ('F32', (32,))" in message
    assert "drafter.nothing.weight" in message
    assert "elsewhere.norm.weight" in message
    assert "drafter.norm.weight" not in message


def test_a_tensor_that_no_graph_uses_is_named(stored: dict[str, Stored]) -> None:
    names = {f"{owner}.{name}" for owner, tensors in stored.items() for name in tensors}
    check_all_used(stored, [names])
    with pytest.raises(ExportError, match=r"drafter\.prefix_gru\.weight_hh_l0"):
        check_all_used(stored, [names - {"drafter.prefix_gru.weight_hh_l0"}, {"target.model.norm.weight"}])
