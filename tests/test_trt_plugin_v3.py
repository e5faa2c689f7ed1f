"""The V3 plugin: parsed and built into engines by TensorRT-RTX, led through its life, and launched by Triton's interpreter (no GPU)."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import TensorProto as Type
from torch import Tensor

pytest.importorskip("triton", reason="the extra tensorrt is not installed")

from domino_deploy.engines import Flavour, PluginForm
from domino_deploy.errors import EngineError, ExportError, MissingDependencyError
from domino_deploy.exporters.engine_worker import run_job
from domino_deploy.exporters.trt_api import BuildJob
from domino_deploy.plugins import op
from domino_deploy.plugins.ptx import Ptx
from domino_deploy.plugins.reference import fused_logit_correction
from domino_deploy.plugins.trt_plugin_launch import CorrectionKernels, LoadedCorrection, workspace_bytes
from tests.support.correction_engines import ENGINE, build, needs_rtx
from tests.support.corrections import operands
from tests.support.source_copy import ROOT

# Both add the same fp32 products, in another order; logits of these operands are of magnitude up to 10.
TOLERANCE = 2e-6
CODEBOOKS = {"float32": Type.FLOAT, "float16": Type.FLOAT16, "bfloat16": Type.BFLOAT16}


def environment(**variables: str) -> dict[str, str]:
    """That of a child process, whatever Triton is told in this one."""
    return {**{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}, **variables}


def child(module: str, *arguments: object, **variables: str) -> str:
    """The last line that a process of its own prints."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] if done.stdout else ""


@pytest.fixture(scope="module")
def life() -> Any:
    """An engine's life with a float16 codebook, batch 2, vocabulary 300, rank 16."""
    return json.loads(child("tests.support.v3_plugin", "float16", 2, 300, 16))


@needs_rtx
@pytest.mark.parametrize("capability", ["8.0", "8.9", "12.0"])
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_the_parser_makes_a_plugin_layer_and_the_engine_carries_the_kernels(codebook: str, capability: str, tmp_path: Path) -> None:
    built = build(tmp_path, PluginForm.V3, [capability], codebook=CODEBOOKS[codebook])
    assert built.layer_types == {"CONSTANT": 1, "PLUGIN_V3": 1}
    assert [(each.name, each.dtype, each.shape) for each in built.outputs] == [
        ("token_ids", "int64", (-1,)),
        ("corrected_logits", "float", (-1,)),
    ]
    engine = (tmp_path / ENGINE).read_bytes()
    assert f'"codebook_type": "{codebook}"'.encode() in engine
    assert set(re.findall(rb"\.target (\w+)", engine)) == {b"sm_80" if capability == "8.0" else b"sm_89"}
    assert b"correction_tiles_kernel" in engine
    assert b"reduce_tiles_kernel" in engine


@needs_rtx
@pytest.mark.parametrize(("plugin", "layers"), [(PluginForm.V3, 1), (PluginForm.NONE, 0)])
def test_the_parser_takes_the_plugin_for_an_exported_head(plugin: PluginForm, layers: int, tiny_bundle: Path, tmp_path: Path) -> None:
    """The bundle's own file: the node is found by its attributes, inside of the rollout's Loop."""
    job = BuildJob(
        flavour=Flavour.TENSORRT_RTX,
        graph="head",
        onnx_file=str(tiny_bundle / "head.onnx"),
        engine_file=None,
        profiles=(),
        workspace=0,
        opt_level=3,
        plugin=plugin,
    )
    assert run_job(job, tmp_path, lambda step: None).layer_types.get("PLUGIN_V3", 0) == layers


@needs_rtx
def test_without_the_plugin_the_node_is_its_body(tmp_path: Path) -> None:
    built = build(tmp_path, PluginForm.NONE, has_body=True)
    assert "PLUGIN_V3" not in built.layer_types
    with pytest.raises(ExportError, match="Plugin not found"):
        build(tmp_path, PluginForm.NONE)


@needs_rtx
def test_a_node_that_asks_for_another_version_does_not_get_this_one(tmp_path: Path) -> None:
    assert "PLUGIN_V3" not in build(tmp_path, PluginForm.V3, version="2", has_body=True).layer_types
    with pytest.raises(ExportError, match="Plugin not found"):
        build(tmp_path, PluginForm.V3, version="2")


@needs_rtx
@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"base": Type.FLOAT16}, "base_logits: expected float32, found float16"),
        ({"codebook": Type.INT32}, "codebook: expected float32, float16 or bfloat16, found int32"),
        ({"rank": 17}, r"hidden_projection: expected \[\?, 16\] beside a codebook of \[300, 16\], found \[\?, 17\]"),
    ],
    ids=["base", "codebook", "shape"],
)
def test_other_inputs_are_refused_in_the_plugins_own_words(node: dict[str, int], words: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=words):
        build(tmp_path, PluginForm.V3, **node)


@needs_rtx
def test_gpus_without_the_kernels_instructions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"compute capability 8\.0 or higher.*found 7\.5"):
        build(tmp_path, PluginForm.V3, ["8.9", "7.5"])


@needs_rtx
def test_types_and_formats_are_the_operators(life: Any) -> None:
    assert life["types"] == ["INT64", "FLOAT"]
    assert life["taken"] == [["FLOAT"], ["FLOAT"], ["FLOAT"], ["FLOAT", "HALF", "BF16"], ["INT64"], ["FLOAT"]]
    assert not life["other_format"]


@needs_rtx
def test_the_workspace_is_for_the_largest_batch(life: Any) -> None:
    """Eight rows of three tiles, a value and an id of four bytes each."""
    assert life["workspace"] == workspace_bytes(8, 300) == 2 * 8 * 3 * 4
    assert workspace_bytes(1, 300) == 2 * 16  # each half is aligned


@needs_rtx
def test_sizes_that_were_open_are_held_against_the_codebook_before_a_run(life: Any) -> None:
    assert life["taken_shapes"] == "nothing was refused"
    assert "base_logits: expected [2, 300] beside a codebook of [300, 16], found [2, 301]" in life["refused_shapes"]


@needs_rtx
def test_the_kernels_survive_serialisation(life: Any) -> None:
    assert life["survives"]
    assert (life["kernels"]["codebook_type"], life["kernels"]["rank"], life["kernels"]["tile_size"]) == ("float16", 16, op.TILE_SIZE)
    assert ".target sm_89\n" in life["kernels"]["tiles"]["text"]


@needs_rtx
def test_an_engine_without_readable_kernels_is_refused(life: Any) -> None:
    assert life["no_kernels"].startswith("EngineError: Expected an engine built with the Python form")
    assert "C++ plugin library" in life["no_kernels"]
    assert life["damaged"].startswith("EngineError: Expected the kernels")


@needs_rtx
def test_kernels_are_loaded_once_and_unloaded_by_their_own_plugin(life: Any) -> None:
    launch = ["launch", [1, 2, 3, 4], [5, 6], 7, 2, 300, 16, 8]
    assert life["launches"] == [["load", "float16"], launch, launch, ["close"]]


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_there_is_one_clear_error() -> None:
    ptx = Ptx(text="", entry="", num_warps=4, shared_bytes=0)
    with pytest.raises(MissingDependencyError, match=r"Expected an NVIDIA driver \(libcuda\.so\.1\), found none"):
        LoadedCorrection(CorrectionKernels(tiles=ptx, reduction=ptx, codebook_type="float32", rank=16))


def test_bytes_that_are_no_kernels_are_refused() -> None:
    for data in (b"", b"[]", b"{}", b'{"tiles": {}}', b"\xff", b'{"tiles": {}, "reduction": {}, "more": 1}'):
        with pytest.raises(EngineError, match=r"Expected the kernels of domino::FusedLogitCorrection in the engine, found \d+ bytes"):
            CorrectionKernels.from_bytes(data)


def cases(codebook_type: str) -> list[list[Tensor]]:
    """Operands: of odd sizes, for float32 also of no row, with ties, and with a NaN."""
    found = [list(operands(2, 300, 63, seed=3))]
    if codebook_type == "float32":
        ties, nan = list(operands(2, 300, 8)), list(operands(1, 300, 8))
        ties[0][:], ties[3][:] = -1.0, 0.0
        ties[0][0, [299, 140, 150]] = 2.0
        ties[0][1, 0] = ties[0][1, 299] = 2.0
        nan[0][0, 200] = torch.nan
        found += [ties, nan, list(operands(0, 300, 8)), list(operands(1, 1, 1))]
    for case in found:
        case[3] = case[3].to(getattr(torch, codebook_type))
    return found


@pytest.mark.parametrize("codebook_type", CODEBOOKS)
def test_launches_give_what_the_reference_does(codebook_type: str, tmp_path: Path) -> None:
    """The plugin's own launches with the serialised kernels, by a driver that Triton's interpreter stands in for."""
    kernels, tensors, results = (tmp_path / name for name in ("kernels", "tensors", "results"))
    code = (
        "import sys; from domino_deploy.plugins.trt_plugin_kernels import *; from domino_deploy.plugins.trt_plugin_launch import *;"
        "kernels = CorrectionKernels(tiles=tiles_ptx(sys.argv[1], 63, 80), reduction=reduce_ptx(80), codebook_type=sys.argv[1], rank=63);"
        "open(sys.argv[2], 'wb').write(kernels.to_bytes())"
    )
    subprocess.run([sys.executable, "-c", code, codebook_type, kernels], cwd=ROOT, env=environment(), check=True)
    given = cases(codebook_type)
    torch.save(given, tensors)
    child("tests.support.interpreted_driver", kernels, tensors, results, TRITON_INTERPRET="1")
    for case, (token_ids, corrected) in zip(given, torch.load(results), strict=True):
        expected_ids, expected = fused_logit_correction(*case)
        assert torch.equal(token_ids, expected_ids)
        assert torch.allclose(corrected, expected, atol=TOLERANCE, rtol=0, equal_nan=True)
    if codebook_type == "float32":
        assert torch.load(results)[1][0].tolist() == [140, 0]
        assert torch.load(results)[2][0].tolist() == [200]
