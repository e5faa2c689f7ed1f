"""The ahead-of-time plugin for TensorRT, driven through NVIDIA's own plugin classes and registry (no GPU, no builder)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from domino_deploy.plugins import op
from domino_deploy.plugins.trt_plugin_kernels import TACTICS
from tests.support import tensorrt_stand_in
from tests.support.source_copy import ROOT

pytest.importorskip("triton", reason="the extra tensorrt is not installed")

VOCAB, RANK = 151936, 256
TYPES = ["FLOAT", "FLOAT", "FLOAT", "HALF"]
Drive = Callable[..., list[Any]]


def call(
    types: list[str] = TYPES, vocab: int = VOCAB, rank: int = RANK, batch: int = 2, is_batch_fixed: bool = False, tactic: int = 1
) -> dict[str, object]:
    """One node of the plugin, in an order of inputs as in `op.INPUTS`."""
    rows, columns, hidden = [batch, is_batch_fixed], [vocab, True], [rank, True]
    return {"types": types, "shapes": [[rows, columns], [rows, hidden], [rows, hidden], [columns, hidden]], "tactic": tactic}


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """Calls a plugin that is registered in a process of its own; the answers, or the refusals in words."""
    environment = tensorrt_stand_in.environment(tmp_path_factory.mktemp("stand-in"))

    def run(*calls: dict[str, object], registrations: list[list[str]] = [["8.9"]]) -> list[Any]:  # noqa: B006 (not changed)
        request = json.dumps({"registrations": registrations, "calls": calls})
        command = [sys.executable, "-m", "tests.support.tensorrt_stand_in.quick_plugin", request]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def node(drive: Drive) -> Any:
    """What TensorRT is told about one node of Qwen3's size."""
    (answer,) = drive(call())
    return answer


def test_the_plugin_is_in_nvidias_registry_without_attributes(node: Any) -> None:
    assert node["fields"] == []


def test_outputs_are_one_value_and_one_id_per_tile(node: Any) -> None:
    assert node["types"] == ["FLOAT", "INT32"]
    assert node["shapes"] == [[2, 1187], [2, 1187]]
    assert -(-VOCAB // op.TILE_SIZE) == 1187


def test_only_the_codebook_may_have_another_type(node: Any) -> None:
    linear = [
        [[name, "LINEAR"] for name in ("FLOAT", "FLOAT", "FLOAT", codebook, "FLOAT", "INT32")] for codebook in ("FLOAT", "HALF", "BF16")
    ]
    assert node["combinations"] == linear


def test_a_vocabulary_that_fills_no_tile_gets_one_more(drive: Drive) -> None:
    answers = drive(call(vocab=300, rank=7), call(vocab=256, rank=7), call(vocab=1, rank=1))
    assert [answer["shapes"][0] for answer in answers] == [[2, 3], [2, 2], [2, 1]]
    assert [answer["scalars"] for answer in answers] == [[300, 7], [256, 7], [1, 1]]


def test_every_tactic_launches_a_block_per_tile_and_row(drive: Drive, node: Any) -> None:
    assert node["tactics"] == sorted(TACTICS)
    kernels = set()
    for tactic, answer in zip(TACTICS, drive(*(call(tactic=tactic) for tactic in TACTICS)), strict=True):
        launch = {name: value for name, (value, _) in answer["launch"].items()}
        shared = launch.pop("shared_mem")
        assert 0 <= shared <= 48 * 1024
        assert launch == {
            "grid_x": 1187,
            "grid_y": 2,
            "grid_z": 1,
            "block_x": 32 * TACTICS[tactic].num_warps,
            "block_y": 1,
            "block_z": 1,
        }
        assert answer["scalars"] == [VOCAB, RANK]
        kernels.add(answer["ptx"])
    assert len(kernels) == len(TACTICS)


def test_a_fixed_batch_size_leaves_nothing_to_run_time(drive: Drive, node: Any) -> None:
    """TensorRT issue 4849: a launch that depends on a dynamic shape loads the kernel again whenever the shape changes."""
    (fixed,) = drive(call(is_batch_fixed=True))
    assert all(is_constant for _, is_constant in fixed["launch"].values())
    assert [name for name, (_, is_constant) in node["launch"].items() if not is_constant] == ["grid_y"]


@pytest.mark.parametrize("codebook", ["FLOAT", "HALF", "BF16"])
def test_the_kernels_parameters_are_inputs_scalars_outputs(drive: Drive, codebook: str) -> None:
    (answer,) = drive(call(types=["FLOAT", "FLOAT", "FLOAT", codebook]))
    ptx = answer["ptx"]
    (entry,) = re.findall(r"\.visible \.entry (\w+)\(([^)]*)\)", ptx)
    assert entry[0] == answer["entry"] == "correction_tiles_kernel"
    # Triton adds two pointers, for which TensorRT passes null.
    assert re.findall(r"\.param \.(\w+)", entry[1]) == ["u64"] * 4 + ["u32"] * 2 + ["u64"] * 4
    assert ".target sm_89\n" in ptx
    assert re.findall(r"\.version (\S+)", ptx) == ["8.0"]


def test_inputs_of_other_types_are_refused_by_name(drive: Drive) -> None:
    (refusal,) = drive(call(types=["HALF", "FLOAT", "INT32", "INT8"]))
    assert refusal.startswith("domino::")
    for line in (
        "base_logits: expected float32, found float16",
        "state_projection: expected float32, found int32",
        "codebook: expected float32, float16 or bfloat16, found int8",
    ):
        assert line in refusal


def test_inputs_of_other_sizes_are_refused_by_name(drive: Drive) -> None:
    wrong = call(vocab=300, rank=16)
    wrong["shapes"][0][1] = [301, True]  # type: ignore[index]
    dynamic = call(vocab=300, rank=16)
    dynamic["shapes"][3][0] = [300, False]  # type: ignore[index]
    refusals = drive(wrong, dynamic)
    assert "base_logits: expected [?, 300] beside a codebook of [300, 16], found [?, 301]" in refusals[0]
    assert "codebook: expected a fixed number of rows and columns, found [?, 16]" in refusals[1]


def test_one_process_has_one_kernel(drive: Drive) -> None:
    # 9.0 runs what is compiled for 8.9, the portable PTX below it.
    assert drive(registrations=[["8.9"], ["9.0"]]) == []
    (refusal,) = drive(registrations=[["8.9"], ["8.0"]])
    assert "one for compute capability 8.9 and now for 8.0" in refusal
    (refusal,) = drive(registrations=[["7.5"]])
    assert "compute capability 8.0 or higher" in refusal
    assert "found 7.5" in refusal


def test_without_tensorrt_there_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.11: cannot open shared object file')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from domino_deploy.plugins import trt_plugin; trt_plugin.register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingDependencyError: Expected TensorRT 10.9 or newer" in done.stderr
    assert "pip install 'domino-deploy[tensorrt]'" in done.stderr
