"""The plugins' kernels as PTX, and what the plugins take (no GPU)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra tensorrt is not installed")

from domino_deploy.errors import ExportError
from domino_deploy.plugins.trt_plugin_inputs import check_shapes, check_types
from domino_deploy.plugins.trt_plugin_kernels import TACTICS, portable_capability, reduce_ptx, tiles_ptx


def assembled(ptx: str, architecture: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What NVIDIA's assembler, which Triton brings, says about PTX on another architecture: the work of a driver that loads it."""
    import triton

    name = "ptxas-blackwell" if int(architecture.removeprefix("sm_")) >= 100 else "ptxas"
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    command = [
        Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name,
        f"--gpu-name={architecture}",
        "-o",
        folder / "cubin",
        file,
    ]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90", "sm_100", "sm_120", "sm_121"])
def test_portable_ptx_runs_on_every_later_gpu(architecture: str, tmp_path: Path) -> None:
    capability = portable_capability([])
    for ptx in (tiles_ptx("float16", 256, capability), reduce_ptx(capability)):
        done = assembled(ptx.text, architecture, tmp_path)
        assert done.returncode == 0, done.stderr


def test_triton_writes_ptx_of_9_0_for_that_gpu_alone(tmp_path: Path) -> None:
    """Why the kernels are not compiled for 9.0 and later."""
    done = assembled(tiles_ptx("float16", 256, 90).text, "sm_100", tmp_path)
    assert done.returncode != 0


def test_what_is_compiled_for_suits_the_oldest_gpu() -> None:
    asked = {(): 80, ("8.0", "12.0"): 80, ("8.7",): 86, ("8.9",): 89, ("12.1", "9.0"): 89}
    assert {each: portable_capability(each) for each in asked} == asked
    with pytest.raises(ExportError, match=r"8\.0 or higher.*found 7\.5"):
        portable_capability(["9.0", "7.5"])


@pytest.mark.parametrize(("codebook_type", "bits"), [("float32", 32), ("float16", 16), ("bfloat16", 16)])
def test_rows_are_read_sixteen_bytes_at_a_time_where_the_rank_allows_it(codebook_type: str, bits: int) -> None:
    wide = [tiles_ptx(codebook_type, 256, 80, tactic).text for tactic in TACTICS]
    narrow = tiles_ptx(codebook_type, 63, 80).text
    assert all("ld.global.v4.b32" in each for each in wide)
    assert f"ld.global.b{bits}" in narrow
    assert "ld.global.v4.b32" not in narrow


def test_types_and_shapes_of_the_operator_are_taken() -> None:
    for codebook in ("FLOAT", "HALF", "BF16"):
        check_types(["FLOAT", "FLOAT", "FLOAT", codebook])
    check_shapes([[None, 300], [None, 16], [None, 16], [300, 16]])
    check_shapes([[2, None], [2, 16], [None, None], [300, 16]])


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([[2, 300], [2, 16], [2, 16], [16]], "codebook: expected 2 dimensions, found 1"),
        ([[2, 1, 300], [2, 1, 16], [2, 16], [300, 16]], "hidden_projection: expected 2 dimensions, found 3"),
        (
            [[2, 300], [3, 16], [2, 16], [300, 16]],
            r"hidden_projection: expected \[2, 16\] beside a codebook of \[300, 16\], found \[3, 16\]",
        ),
        ([[2, 300], [2, 16], [2, 8], [300, 16]], r"state_projection: expected \[2, 16\] beside .* found \[2, 8\]"),
        ([[2, 0], [2, 16], [2, 16], [0, 16]], "codebook: expected a fixed number of rows and columns"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(shapes: list[list[int | None]], words: str) -> None:
    with pytest.raises(ExportError, match=words):
        check_shapes(shapes)


def test_the_plugins_modules_load_neither_triton_nor_tensorrt() -> None:
    """Running an engine needs the launching part alone; the rest waits until something is compiled or registered."""
    modules = "trt_plugin, trt_plugin_inputs, trt_plugin_kernels, trt_plugin_launch, trt_plugin_v3"
    heavy = {"triton", "tensorrt", "torch", "cuda"}
    code = f"import sys; from domino_deploy.plugins import {modules}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
