"""The prepared check on a GPU, at tiny size on the CPU: budget, stages apart, report, tables, and every stage that a CPU can do."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.source_copy import ROOT
from tests.support.tiny_models import VOCAB, tiny_drafter, tiny_target

SCRIPTS = ROOT / "scripts"
PAGE = ROOT / "docs" / "gpu.md"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def stages(*shares):
    from gpu_check_plan import Stage

    return [Stage(name=f"stage{number}", function="", share=share) for number, share in enumerate(shares)]


def run_with(folder, shares, spent, seconds=100.0):
    """Stages that take `spent` seconds each; the limits that they were given, and the report."""
    from gpu_check_plan import run_stages
    from gpu_check_report import Outcome, Report, Status

    clock, limits = Clock(), []
    report = Report(folder / "gpu_check.json", started="now", minutes=1.0, device="cpu", sizes="tiny")

    def run(stage, limit):
        limits.append(round(limit, 6))
        taken = min(spent[len(limits) - 1], limit)
        clock.now += taken
        return Outcome(status=Status.DONE, seconds=taken, limit_s=limit)

    is_done = run_stages(stages(*shares), report, seconds, run, clock=clock)
    return limits, is_done, json.loads((folder / "gpu_check.json").read_text())


def test_a_stage_may_run_until_its_share_and_those_before_it_are_over(tmp_path):
    limits, is_done, _ = run_with(tmp_path, (0.2, 0.3, 0.5), (5, 1000, 1))
    # 98 of 100 s are shared out. The first leaves 14.6 s to the second, whose end no delay of its own moves.
    assert limits == [19.6, 44.0, 49.0]
    assert is_done


def test_a_stage_without_time_is_left_out_and_said_to_be(tmp_path):
    limits, is_done, report = run_with(tmp_path, (0.96, 0.02, 0.02), (1000, 0, 1000))
    assert limits == [94.08]
    assert not is_done
    assert [stage["status"] for stage in report["stages"].values()] == ["done", "skipped", "skipped"]


def test_the_stages_are_named_once_and_their_functions_exist():
    from gpu_check_plan import STAGES, WRITE_SHARE

    assert len({stage.name for stage in STAGES}) == len(STAGES)
    assert sum(stage.share for stage in STAGES) == pytest.approx(1 - WRITE_SHARE)
    for stage in STAGES:
        module, _, function = stage.function.partition(":")
        assert f"\ndef {function}(context: Context) -> None:" in (SCRIPTS / f"{module}.py").read_text()


STAGE_MODULE = """
import os, signal, subprocess, sys, time
from gpu_check_context import NotHereError

def good(context):
    context.note(sizes=context.sizes.name)

def bad(context):
    context.note(half=1)
    raise ValueError("seven is odd")

def crash(context):
    context.note(half=1)
    os.kill(os.getpid(), signal.SIGSEGV)

def absent(context):
    raise NotHereError("expected a GPU, found none")

def hang(context):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    context.note(child=child.pid)
    time.sleep(600)
"""


@pytest.fixture
def outcome_of(tmp_path):
    """Runs a function of STAGE_MODULE as a stage in its own process."""
    from gpu_check_plan import InAProcess, Stage

    (tmp_path / "stage_module.py").write_text(STAGE_MODULE)
    settings = {"device": "cpu", "sizes": "tiny", "carried": str(tmp_path)}
    run = InAProcess(settings=settings, environment={"PYTHONPATH": str(tmp_path)})
    return lambda function, limit=60.0: run(Stage(name=function, function=f"stage_module:{function}", share=1), limit)


def test_a_stage_that_ends_well_gives_its_notes(outcome_of):
    outcome = outcome_of("good")
    assert (outcome.status, outcome.error, outcome.result) == ("done", None, {"sizes": "tiny"})


def test_a_failing_stage_keeps_its_notes_and_its_error(outcome_of):
    outcome = outcome_of("bad")
    assert (outcome.status, outcome.result) == ("failed", {"half": 1})
    assert "ValueError: seven is odd" in outcome.error


def test_a_crash_ends_one_stage_only_and_names_the_signal(outcome_of):
    outcome = outcome_of("crash")
    assert (outcome.status, outcome.result) == ("failed", {"half": 1})
    assert outcome.error.startswith("signal SIGSEGV")


def test_a_machine_that_lacks_something_is_no_failure(outcome_of):
    outcome = outcome_of("absent")
    assert (outcome.status, outcome.error) == ("absent", "expected a GPU, found none")


def test_a_stage_that_hangs_is_ended_at_its_limit_with_what_it_started(outcome_of):
    outcome = outcome_of("hang", 3.0)
    assert (outcome.status, outcome.error) == ("late", "stopped at its limit of 3 s")
    # The signal is sent; the system may take its time to carry it out.
    deadline = time.monotonic() + 60
    while is_alive(outcome.result["child"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(outcome.result["child"])


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def a_report(**stages):
    whole = {
        name: {"status": "done", "seconds": 1.0, "limit_s": 2.0, "error": None, "result": {}} | stage for name, stage in stages.items()
    }
    return {
        "format_version": 1,
        "created_by": "scripts/gpu_check",
        "started": "2026-11-30T08:00:00+00:00",
        "minutes": 8.0,
        "device": "cuda",
        "sizes": "qwen3-4b",
        "stages": whole,
    }


def test_what_keeps_a_file_from_being_a_report_is_named(tmp_path):
    from gpu_check_report import ReportError, read_report

    wrong = a_report(machine={"status": "well", "seconds": "1"}) | {"format_version": 2, "extra": 0}
    del wrong["device"]
    path = tmp_path / "gpu_check.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(ReportError) as raised:
        read_report(path)
    for named in ("format_version 2", "extra: unknown", "device: missing", "stages.machine.status: 'well'", "stages.machine.seconds: str"):
        assert named in str(raised.value)
    path.write_text("{")
    with pytest.raises(ReportError, match=r"Give the gpu_check\.json of a run"):
        read_report(path)


def test_reports_of_several_calls_are_put_together():
    from gpu_check_report import merged

    first = a_report(machine={"seconds": 1.0}, driver={"status": "failed"}, rollout={})
    second = a_report(machine={"seconds": 2.0}, driver={}, rollout={"status": "late"}, tensorrt_rtx={"status": "failed"})
    found = merged([first, second])["stages"]
    assert {name: (stage["status"], stage["seconds"]) for name, stage in found.items()} == {
        "machine": ("done", 2.0),
        "driver": ("done", 1.0),
        "rollout": ("done", 1.0),
        "tensorrt_rtx": ("failed", 1.0),
    }
    assert first["stages"]["driver"]["status"] == "failed"


def test_the_page_says_what_was_measured_and_nothing_else():
    import gpu_check_render as rendering
    from gpu_check_report import read_report

    text = PAGE.read_text(encoding="utf-8")
    kept = PAGE.with_suffix(".json")
    tables = rendering.markdown(read_report(kept)) if kept.exists() else rendering.NOT_RUN
    assert rendering.replaced(text, tables, PAGE) == text


def test_every_field_of_a_report_is_documented():
    from gpu_check_plan import STAGES
    from gpu_check_report import Status

    text = PAGE.read_text(encoding="utf-8")
    names = [*a_report(), *a_report(machine={})["stages"]["machine"], *Status, *(stage.name for stage in STAGES)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_rendering_keeps_the_reports_and_replaces_what_stood_between_the_markers(tmp_path):
    import gpu_check_render as rendering

    page, report = tmp_path / "gpu.md", tmp_path / "gpu_check.json"
    page.write_text(f"before\n{rendering.BEGIN}\nold\n{rendering.END}\nbehind\n")
    failed = {"status": "failed", "error": "Traceback\nValueError: a | b", "result": {"machine": {"gpu": "H | 200"}}}
    report.write_text(json.dumps(a_report(machine=failed)))
    rendering.render([report], page, tmp_path / "gpu.json")
    text = page.read_text()
    assert text.startswith(f"before\n{rendering.BEGIN}\n")
    assert text.endswith(f"{rendering.END}\nbehind\n")
    assert "old" not in text
    assert "| gpu | H \\| 200 |" in text
    assert "**failed** after 1 s: `ValueError: a | b`" in text
    assert "Not part of this run." in text
    assert json.loads((tmp_path / "gpu.json").read_text()) == a_report(machine=failed)


def test_a_page_without_markers_is_refused(tmp_path):
    import gpu_check_render as rendering
    from gpu_check_report import ReportError

    with pytest.raises(ReportError, match="found no begin"):
        rendering.replaced("text", "tables", tmp_path)


def a_wheel(path, files):
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


def test_wheels_are_packed_into_pieces_and_unpacked_whole(tmp_path, monkeypatch):
    import gpu_check_pack as packing
    import gpu_train_demo_pieces as pieces

    # The real dictionary of 256 MiB takes 2.7 GB of memory to pack.
    monkeypatch.setattr(packing, "FILTERS", [packing.FILTERS[0], {"id": packing.FILTERS[1]["id"], "preset": 1}])
    noise = os.urandom(200_000)
    wheels = [
        a_wheel(tmp_path / "libs.whl", {"tensorrt_rtx_libs/lib.so.1": noise, "tensorrt_rtx_libs-1.dist-info/WHEEL": "x"}),
        a_wheel(tmp_path / "bindings.whl", {"tensorrt_rtx_bindings/__init__.py": "y = 2"}),
    ]
    folders = packing.pack_wheels(wheels, tmp_path / "packed", 150_000)
    assert [folder.name for folder in folders] == ["carry-0", "carry-1"]
    site = packing.unpack(tmp_path / "packed", tmp_path / "site")
    found = sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file())
    assert found == ["tensorrt_rtx_bindings/__init__.py", "tensorrt_rtx_libs/lib.so.1"]
    assert (site / "tensorrt_rtx_libs" / "lib.so.1").read_bytes() == noise
    (folders[1] / f"{packing.NAME}.1").unlink()
    with pytest.raises(pieces.PiecesError, match=r"tensorrt-rtx\.1"):
        packing.unpack(tmp_path / "packed", tmp_path / "again")


def test_the_calls_carry_every_piece_and_leave_the_last_stage_for_the_last():
    import gpu_check_pack as packing

    lines = packing.calls([ROOT / "build" / "gpu-rtx" / f"carry-{number}" for number in range(3)])
    assert all(f'carry ["build/gpu-rtx/carry-{number}"]' in line for number, line in enumerate(lines[:3]))
    commands = [re.search('command "([^"]*)"', line)[1] for line in lines[:3]]
    assert commands == [
        "bash scripts/gpu_check --carried build/gpu-rtx --out $OUT",
        "true",
        "bash scripts/gpu_check --carried build/gpu-rtx --out $OUT --stages machine,tensorrt_rtx --minutes 2",
    ]


class Timer:
    """Says that every run took 100 microseconds, after running each action once."""

    def times(self, actions):
        from gpu_check_context import Time

        for action in actions.values():
            action()
        return {name: Time(median_us=100.0, p10_us=90.0, p90_us=110.0, runs=7) for name in actions}


@pytest.fixture
def context(tmp_path):
    from gpu_check_context import TINY, Context, Deadline

    noted = {}
    made = Context(device="cpu", sizes=TINY, carried=tmp_path, deadline=Deadline(600), timer=Timer(), note=noted.update)
    return made, noted


def test_bandwidth_counts_bytes_read_and_written(context):
    import gpu_check_machine

    made, noted = context
    gpu_check_machine.run(made)
    assert noted["bandwidth"]["copy_gb_per_s"] == pytest.approx(2 * 2**20 / 1e5, abs=0.1)
    assert noted["bandwidth"]["read_gb_per_s"] == pytest.approx(2**20 / 1e5, abs=0.1)
    assert noted["versions"]["torch"] == torch.__version__


def test_a_time_is_the_median_and_the_outer_tenths():
    from gpu_check_context import Time, summary

    assert summary([float(value) for value in range(1, 100)]) == Time(median_us=50.0, p10_us=10.0, p90_us=90.0, runs=99)
    assert summary([4.0]) == Time(median_us=4.0, p10_us=4.0, p90_us=4.0, runs=1)


def rollout_weights(drafter, target):
    from domino_deploy.plugins.triton_rollout import RolloutWeights

    head = drafter.head
    return RolloutWeights(
        embedding=target.model.embed_tokens.weight.detach(),
        w_ih=head.prefix_gru.weight_ih_l0.detach(),
        w_hh=head.prefix_gru.weight_hh_l0.detach(),
        state_projection=head.embed_proj[0].weight.detach()[:, head.width :],
        codebook=head.codebook_VR.detach(),
    )


def block_of(seed=0, batch=2):
    """Hidden states [batch, 5, width] and base logits [batch, 5, vocabulary]."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 5, 24, generator=random), torch.randn(batch, 5, VOCAB, generator=random)


def test_the_plain_rollout_is_the_drafters():
    from gpu_check_plain import PlainRollout, logit_lost

    target, drafter = tiny_target(), tiny_drafter()
    hidden, base = block_of()
    anchors, z = torch.tensor([3, 40]), drafter.head.project_hidden(hidden).detach()
    weights = rollout_weights(drafter, target)
    found = PlainRollout(weights, 2, 5, drafter.head.prefix_len)(anchors, z, base)
    expected = drafter.draft(target.model.embed_tokens, anchors, hidden, base)
    assert torch.equal(found, expected)
    assert len(set(found.flatten().tolist())) > 3
    assert logit_lost(weights, anchors, z, base, found, drafter.head.prefix_len) < 1e-5


def test_a_worse_token_is_seen_by_the_logit_that_it_loses():
    from gpu_check_plain import PlainRollout, logit_lost, next_state

    target, drafter = tiny_target(), tiny_drafter()
    hidden, base = block_of(seed=1, batch=1)
    anchors, z = torch.tensor([3]), drafter.head.project_hidden(hidden).detach()
    weights = rollout_weights(drafter, target)
    drafts = PlainRollout(weights, 1, 5, 1)(anchors, z, base).clone()
    state = torch.zeros(1, 10)
    for token in (3, *drafts[0, :4].tolist()):
        state = next_state(weights.embedding[[token]], state, weights.w_ih, weights.w_hh)
    logits = base[0, 4] + weights.codebook @ F.silu(z[0, 4] + weights.state_projection @ state[0])
    worse = int(logits.topk(3).indices[2])
    drafts[0, 4] = worse
    assert logit_lost(weights, anchors, z, base, drafts, 1) == pytest.approx(float(logits.max() - logits[worse]), abs=1e-4)


def test_the_loop_drafts_and_commits_as_the_reference_does():
    from gpu_check_loop import Loop
    from gpu_check_plain import PlainRollout

    from domino_deploy.model.spec_generate import reference_target, spec_generate

    target, drafter = tiny_target(), tiny_drafter()
    head = PlainRollout(rollout_weights(drafter, target), 1, 5, drafter.head.prefix_len)
    loop = Loop(target, drafter, slots=90, widths=(6,))
    prompt = [7, 21, 3, 44, 5]
    expected = [
        (list(cycle.drafts), list(cycle.token_ids)) for cycle in spec_generate(reference_target(target), drafter, prompt, max_new_tokens=60)
    ]
    found = list(loop.generate(prompt, head, 20))
    assert found == expected[: len(found)]
    assert len(found) == 21
    assert max(len(committed) for _, committed in found) > 1, "no draft was ever accepted: the cache behind one is not tested"
    text = [token for _, committed in found for token in committed]
    assert list(loop.decode(prompt, len(text))) == text


def test_the_loop_ends_where_the_slots_are_used_up():
    from gpu_check_loop import Loop
    from gpu_check_plain import PlainRollout

    target, drafter = tiny_target(), tiny_drafter()
    head = PlainRollout(rollout_weights(drafter, target), 1, 5, 1)
    loop = Loop(target, drafter, slots=12, widths=(6,))
    found = list(loop.generate([7, 21, 3, 44, 5], head, 20))
    assert 1 < len(found) < 9
    assert 5 + sum(len(committed) for _, committed in found) <= 13


class Libcuda:
    """Takes the driver's calls and keeps what a launch was given."""

    def __init__(self, refused=None):
        self.launched = []
        self.refused = refused

    def __getattr__(self, name):
        def call(*arguments):
            if name == "cuModuleGetFunction":
                arguments[0]._obj.value = 77
            if name == "cuLaunchKernel":
                function, *numbers, _, slots, _ = arguments
                read = [ctypes.cast(slot, ctypes.POINTER(ctypes.c_uint64)).contents.value for slot in slots]
                self.launched.append((function.value, [number.value for number in numbers], read))
            return 1 if name == self.refused else 0

        return call


def test_the_driver_is_given_inputs_scalars_outputs_and_two_nulls():
    from gpu_check_driver import Driver

    from domino_deploy.plugins.trt_plugin_kernels import tiles_ptx

    library = Libcuda()
    driver = Driver(library)
    ptx = tiles_ptx("bfloat16", 256, 90)
    inputs, outputs = torch.zeros(4, 8), torch.zeros(2, 8)
    values = [*inputs, 151_936, 256, *outputs]
    driver.launch(driver.load(ptx), ptx, (1187, 2), values, 0)
    ((function, numbers, read),) = library.launched
    assert function == 77
    assert numbers == [1187, 2, 1, 32 * ptx.num_warps, 1, 1, ptx.shared_bytes]
    pointers = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
    # An int32 has four bytes; what lies behind them is not its own.
    assert [value if place not in (4, 5) else value & 0xFFFFFFFF for place, value in enumerate(read)] == (
        [*pointers[:4], 151_936, 256, *pointers[4:], 0, 0]
    )
    assert len(read) == len(re.findall(r"\.param [^\n]*_param_\d+", ptx.text.partition(".entry")[2].partition(")")[0]))


def test_the_drivers_ptx_is_that_of_an_engine_for_this_gpu(monkeypatch):
    """Of a Hopper it is that for 8.9: Triton's for 9.0 would run on no later GPU."""
    from gpu_check_corrections import Correction
    from gpu_check_driver import plugin_ptx

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    inputs = Correction(base=torch.zeros(1, 130), z=torch.zeros(1, 16), s=torch.zeros(1, 16), codebook=torch.zeros(130, 16))
    assert all(".target sm_89\n" in ptx.text for ptx in plugin_ptx(inputs, 1))


def test_a_call_that_the_driver_refuses_is_named():
    from gpu_check_driver import Driver, DriverError

    with pytest.raises(DriverError, match="expected cuInit to succeed, found error 1"):
        Driver(Libcuda(refused="cuInit"))


def test_what_is_compiled_beforehand_are_the_cases_of_the_stages():
    import gpu_check_compile
    from gpu_check_context import QWEN3_4B
    from gpu_check_corrections import DTYPES

    from domino_deploy.plugins.trt_plugin_kernels import TACTICS

    tasks = gpu_check_compile.tasks("qwen3-4b")
    assert len(set(tasks)) == len(tasks)
    assert ("rollouts", "bfloat16", 151_936, 32) in tasks
    assert {(dtype, tactic) for what, dtype, _, tactic in tasks if what == "tactics"} == set(product(DTYPES, TACTICS))
    for vocab_size in (QWEN3_4B.vocab_size, *QWEN3_4B.odd_vocab_sizes):
        assert {dtype for what, dtype, vocab, _ in tasks if (what, vocab) == ("forms", vocab_size)} == {"float32", "float16", "bfloat16"}


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
