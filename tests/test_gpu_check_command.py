"""The prepared check on a GPU as a command: every stage that a CPU can do, at tiny size."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.source_copy import ROOT

pytestmark = pytest.mark.usefixtures("gpu_check_scripts")
SCRIPTS = ROOT / "scripts"


def test_an_unknown_stage_is_refused():
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--stages", "machine,dance"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected some of machine, compile" in done.stderr
    assert "found dance" in done.stderr


def test_a_bare_checkout_is_enough():
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from gpu_check_context import make_importable; make_importable(); "
        "import domino_deploy.exporters, domino_deploy.plugins.op, domino_deploy.runtime.backends as found; print(found.__file__)"
    )
    # Without site-packages, where an installed copy would be.
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert done.stdout.strip() == str(ROOT / "runtime" / "backends" / "__init__.py"), done.stderr


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The command as it is called on a GPU, but on the CPU."""
    out = tmp_path_factory.mktemp("gpu-check")
    command = ["bash", str(SCRIPTS / "gpu_check"), "--device", "cpu", "--sizes", "tiny", "--minutes", "30", "--out", str(out)]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=out)
    assert (out / "gpu_check.json").exists(), done.stderr
    return done, json.loads((out / "gpu_check.json").read_text())


@pytest.mark.slow
def test_every_stage_runs_on_the_cpu_or_says_why_not(whole_run):
    from gpu_check_plan import STAGES
    from gpu_check_report import problems

    done, report = whole_run
    assert problems(report) == []
    found = {name: (stage["status"], stage["error"]) for name, stage in report["stages"].items()}
    assert list(found) == [stage.name for stage in STAGES]
    assert done.returncode == 0, found
    assert {name for name, (status, _) in found.items() if status == "absent"} == {"compile", "driver", "tensorrt_rtx"}
    assert all(error.startswith("expected ") for status, error in found.values() if status == "absent")


@pytest.mark.slow
def test_the_kernels_numbers_are_those_of_pytorch(whole_run):
    result = whole_run[1]["stages"]["kernel_numbers"]["result"]
    assert {(row["dtype"], row["form"]) for row in result["corrections"]} == {
        (dtype, form) for dtype in ("float32", "float16", "bfloat16") for form in ("tiles", "fused", "certified", "pooled", "top_k")
    }
    assert {row["vocab_size"] for row in result["corrections"]} == {130, 127, 1}
    assert all(row["error_of_allowed"] <= 1 and row["ids_that_differ"] == 0 for row in result["corrections"])
    assert all(right for dtype in ("float32", "bfloat16") for form in result[f"special_{dtype}"].values() for right in form.values())


@pytest.mark.slow
def test_every_variant_of_the_rollout_is_compared_with_plain_and_compiled_pytorch(whole_run):
    result = whole_run[1]["stages"]["rollout"]["result"]
    for case in result["cases"]:
        rollouts = case["rollouts"]
        assert {"plain eager", "plain graph", "full", "int8", "pool", "full, table", "int8, table", "pool, table"} < rollouts.keys()
        for name in ("full", "int8", "pool"):
            found = rollouts[name]
            assert found["replay_equals_eager"]
            assert found["faster_than_plain"] == pytest.approx(
                rollouts["plain graph"]["time"]["median_us"] / found["time"]["median_us"], abs=0.01
            )
            assert found["limit_us"] == pytest.approx(found["bytes"] / result["bandwidth"]["copy_gb_per_s"] / 1e3, abs=0.01)
    assert [(row["batch"], set(row["times"])) for row in result["compiled"]] == [
        (batch, {"compiled graph", "plain graph", "full"}) for batch in (1, 2)
    ]


@pytest.mark.slow
def test_the_terms_of_a_speculative_step_are_all_there(whole_run):
    result = whole_run[1]["stages"]["speculation"]["result"]
    assert result["terms"]["verify_us"].keys() == {"1", "3"}
    assert result["terms"]["head_us"].keys() == {"plain", "full", "int8", "pool"}
    assert result["same_tokens"] == result["compared_tokens"] == 4
    assert result["break_even_tau"] == pytest.approx(result["cycle_us"] / result["plain_token_us"], rel=0.01)


@pytest.mark.slow
def test_a_whole_report_is_rendered_with_all_its_figures(whole_run):
    import gpu_check_render as rendering

    text = rendering.markdown(whole_run[1])
    for part in (
        "| bfloat16 | certified |",
        "| int8, table |",
        "| compiled graph |",
        "| T_verify, 3 rows |",
        "A cycle pays when",
        "**absent**",
    ):
        assert part in text
    assert "nan" not in text.lower().replace("ties, nan", "")
