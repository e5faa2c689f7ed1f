"""The C++ plugin: its kernels on the CPU against the reference; and, where the tools are there, compiled, loaded and built into engines."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from onnx import TensorProto as Type
from torch import Tensor

from domino_deploy.engines import PluginForm
from domino_deploy.errors import ExportError
from domino_deploy.plugins import op
from domino_deploy.plugins.reference import fused_logit_correction
from domino_deploy.plugins.trt_plugin_launch import workspace_bytes
from tests.support.correction_engines import build, needs_rtx
from tests.support.corrections import operands
from tests.support.source_copy import ROOT

SOURCES = ROOT / "plugins" / "csrc"
EMULATION = ROOT / "tests" / "support" / "cuda_on_cpu"
SOURCE_OF_LIFE = ROOT / "tests" / "support" / "cpp_plugin.cpp"
TENSORRT_ROOT = os.environ.get("TENSORRT_ROOT", "")
# Both add the same fp32 products, in another order; logits of these operands are of magnitude up to 10.
TOLERANCE = 2e-6
# Kernel -> type of the codebook, and what the rank must be a multiple of.
KERNELS = {
    "correct_float32": (torch.float32, 1),
    "correct_float32_by_4": (torch.float32, 4),
    "correct_bfloat16": (torch.bfloat16, 1),
    "correct_bfloat16_by_8": (torch.bfloat16, 8),
}

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, of the CUDA toolkit")
needs_headers = pytest.mark.skipif(
    not (shutil.which("nvcc") and shutil.which("cmake") and TENSORRT_ROOT),
    reason="needs cmake, nvcc, and TENSORRT_ROOT with TensorRT's headers",
)


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels of plugins/csrc, compiled for the CPU."""
    if shutil.which("c++") is None and "CI" not in os.environ:
        pytest.skip("needs a C++ compiler, c++")
    library = tmp_path_factory.mktemp("cuda-on-cpu") / "correction.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    done = run("c++", *flags, "-I", SOURCES, EMULATION / "correction.cpp", "-o", library)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def corrected(kernels: ctypes.CDLL, name: str, case: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids and corrected logits of one launch of both kernels; all that they write starts as NaN or -1."""
    batch, vocab_size, rank = case[0].shape[0], *case[3].shape
    tiles = -(-vocab_size // op.TILE_SIZE)
    written = (
        torch.full((batch, tiles), torch.nan),
        torch.full((batch, tiles), -1, dtype=torch.int32),
        torch.full((batch,), -1),
        torch.full((batch,), torch.nan),
    )
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*case, *written)]
    getattr(kernels, name)(batch, vocab_size, rank, *addresses)
    return written[2], written[3]


def case_of(name: str, batch: int, vocab_size: int, rank: int, seed: int = 0) -> list[Tensor]:
    case = list(operands(batch, vocab_size, rank, seed=seed))
    case[3] = case[3].to(KERNELS[name][0])
    return case


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 129, 8), (2, 300, 63), (2, 64, 264)], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_equal_the_reference(kernels: ctypes.CDLL, name: str, sizes: tuple[int, int, int]) -> None:
    if sizes[2] % KERNELS[name][1]:
        sizes = (*sizes[:2], KERNELS[name][1] * sizes[2])
    case = case_of(name, *sizes)
    token_ids, best = corrected(kernels, name, case)
    expected_ids, expected = fused_logit_correction(*case)
    assert torch.equal(token_ids, expected_ids)
    assert torch.allclose(best, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("tiles", [1, 1023, 1024, 1025, 2500])
def test_the_reduction_takes_more_tiles_than_it_has_threads(kernels: ctypes.CDLL, tiles: int) -> None:
    """A vocabulary of 151936 has 1187."""
    values = torch.randn(2, tiles, generator=torch.Generator().manual_seed(tiles))
    values[1, 0] = values[1, -1] = 9.0  # a tie of the first and the last
    ids = torch.arange(2 * tiles, dtype=torch.int32).flip(0).reshape(2, tiles)
    token_ids, best = torch.full((2,), -1), torch.full((2,), torch.nan)
    kernels.reduce_tiles(2, tiles, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, ids, token_ids, best)))
    assert torch.equal(best, values.max(dim=-1).values)
    assert token_ids.tolist() == [ids[0, values[0].argmax()].item(), ids[1, -1].item()]


def test_kernels_give_ties_to_the_lowest_id(kernels: ctypes.CDLL) -> None:
    base, hidden, state, codebook = case_of("correct_float32", 4, 300, 3)
    base[:] = -torch.inf
    for row, ids in enumerate([[299, 140, 150], [0, 299], [31, 32, 33], []]):
        base[row, ids] = 2.0
    token_ids, best = corrected(kernels, "correct_float32", [base, hidden, state, torch.zeros_like(codebook)])
    assert token_ids.tolist() == [140, 0, 31, 0]
    assert best.tolist() == [2.0, 2.0, 2.0, -torch.inf]


def test_kernels_let_the_first_nan_win(kernels: ctypes.CDLL) -> None:
    case = case_of("correct_float32", 2, 300, 3)
    case[0][0, [130, 290]] = torch.nan
    case[0][0, 5] = torch.inf
    case[2][1, 2] = torch.nan  # of the whole row
    token_ids, best = corrected(kernels, "correct_float32", case)
    assert token_ids.tolist() == fused_logit_correction(*case)[0].tolist() == [130, 0]
    assert best.isnan().all()


@pytest.mark.parametrize("extreme", [-1e4, -100.0, 100.0, 1e4])
def test_kernels_saturate_as_silu_does(kernels: ctypes.CDLL, extreme: float) -> None:
    case = case_of("correct_float32_by_4", 2, 50, 4)
    case[1][:], case[2][:] = extreme, 0.0
    token_ids, best = corrected(kernels, "correct_float32_by_4", case)
    expected_ids, expected = fused_logit_correction(*case)
    assert torch.equal(token_ids, expected_ids)
    assert torch.allclose(best, expected, rtol=1e-6)


def test_the_plugin_names_its_inputs_as_the_operator_does() -> None:
    source = (SOURCES / "plugin_check.cpp").read_text()
    assert ", ".join(f'"{name}"' for name in op.INPUTS) in source


@needs_nvcc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_kernels_compile_without_a_warning(architecture: str, tmp_path: Path) -> None:
    output = tmp_path / "kernels.cubin"
    flags = ["-std=c++17", "-O2", "-Werror=all-warnings", f"-arch={architecture}"]
    done = run("nvcc", *flags, "-cubin", SOURCES / "fused_correction.cu", "-o", output)
    assert done.returncode == 0, done.stderr
    compiled = output.read_bytes()
    assert compiled.startswith(b"\x7fELF")
    assert compiled.count(b".text._ZN6domino15correctionTiles") >= 6  # three types, wide and narrow
    assert b".text._ZN6domino11reduceTiles" in compiled


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_a_build_without_tensorrts_headers_says_what_is_missing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TENSORRT_ROOT"}
    command = ["cmake", "-S", SOURCES, "-B", tmp_path / "build", f"-DTENSORRT_ROOT={tmp_path / 'nowhere'}"]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Expected NvInferRuntime.h under TENSORRT_ROOT" in " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    configured = run("cmake", "-S", SOURCES, "-B", folder, f"-DTENSORRT_ROOT={TENSORRT_ROOT}", "-DCMAKE_CUDA_ARCHITECTURES=80;90")
    assert configured.returncode == 0, configured.stderr
    built = run("cmake", "--build", folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "libdomino_tensorrt_plugin.so"


@needs_headers
def test_the_library_exports_what_tensorrt_looks_for_and_links_nothing_of_it(library: Path) -> None:
    exported = run("nm", "-D", "--defined-only", library).stdout
    assert {"getCreators", "setLoggerFinder"} <= {line.split()[-1] for line in exported.splitlines()}
    assert "nvinfer" not in run("nm", "-D", "--undefined-only", library).stdout.lower()
    assert "nvinfer" not in run("ldd", library).stdout


@pytest.fixture(scope="module")
def life(library: Path) -> dict[str, str]:
    """What the plugin answers from the opening of an engine to its run, and what it writes to standard error."""
    program = library.parent / "life"
    # By nvcc, which knows where CUDA's headers are.
    done = run("nvcc", "-std=c++17", "-isystem", Path(TENSORRT_ROOT) / "include", SOURCE_OF_LIFE, "-o", program, "-ldl")
    assert done.returncode == 0, done.stderr
    done = run(program, library)
    assert done.returncode == 0, done.stderr
    return {**dict(line.split(" ", 1) for line in done.stdout.splitlines()), "words": done.stderr}


@needs_headers
def test_the_plugin_opens_what_the_python_form_serialised(life: dict[str, str]) -> None:
    assert (life["creators"], life["identity"]) == ("1", f"{op.DOMAIN}::{op.NAME} {op.VERSION}")
    assert (life["own_copy"], life["serialised_fields"]) == ("1", "0")


@needs_headers
def test_the_plugin_takes_the_operators_types_and_a_workspace_for_the_largest_batch(life: dict[str, str]) -> None:
    # Of float32, float16, bfloat16, int32, int64.
    assert [life[f"takes_{place}"] for place in range(6)] == [*["1 0 0 0 0"] * 3, "1 1 1 0 0", "0 0 0 0 1", "1 0 0 0 0"]
    assert int(life["workspace"]) == 8 * 3 * (4 + 4)
    # An engine's workspace is sized by the form that built it.
    assert int(life["workspace"]) <= workspace_bytes(8, 300)


@needs_headers
def test_the_plugin_holds_sizes_against_the_codebook_before_a_run(life: dict[str, str]) -> None:
    assert (life["takes_shapes"], life["other_columns"], life["other_rows"]) == ("0", "-1", "-1")
    assert "base_logits: expected [2, 300] beside a codebook of [300, 16], found [2, 301]" in life["words"]
    assert "state_projection: expected [2, 16] beside a codebook of [300, 16], found [3, 16]" in life["words"]


@needs_headers
def test_the_plugin_refuses_other_types_by_name(life: dict[str, str]) -> None:
    assert (life["takes_types"], life["other_types"]) == ("0", "-1")
    assert "base_logits: expected float32, found float16; codebook: expected float32, float16 or bfloat16, found int32" in life["words"]


@needs_headers
def test_an_empty_batch_launches_nothing_and_a_launch_that_fails_says_so(life: dict[str, str]) -> None:
    assert life["runs_empty"] == "0"
    if "runs" in life:  # no driver here
        assert life["runs"] == "-1"
        assert "Expected both kernels to start, found: " in life["words"]


@needs_headers
@needs_rtx
@pytest.mark.parametrize("capability", ["8.0", "8.9", "12.0"])
@pytest.mark.parametrize("codebook", [Type.FLOAT, Type.FLOAT16, Type.BFLOAT16], ids=["float32", "float16", "bfloat16"])
def test_tensorrt_rtx_builds_engines_with_the_library(library: Path, codebook: int, capability: str, tmp_path: Path) -> None:
    built = build(tmp_path, PluginForm.CPP, [capability], library, codebook=codebook)
    assert built.layer_types == {"CONSTANT": 1, "PLUGIN_V3": 1}
    assert [(each.name, each.dtype) for each in built.outputs] == [("token_ids", "int64"), ("corrected_logits", "float")]


@needs_headers
@needs_rtx
@pytest.mark.parametrize(
    ("node", "call"),
    [({"base": Type.FLOAT16}, "getOutputDataTypes"), ({"codebook": Type.INT32}, "getOutputDataTypes"), ({"rank": 17}, "output shape")],
    ids=["base", "codebook", "shape"],
)
def test_tensorrt_rtx_refuses_what_the_library_refuses(library: Path, node: dict[str, int], call: str, tmp_path: Path) -> None:
    """TensorRT-RTX gives the library no logger, so its own words are on the standard error of the process that builds."""
    with pytest.raises(ExportError, match=rf"correction.*{call}.*non-zero return code"):
        build(tmp_path, PluginForm.CPP, library=library, **node)
