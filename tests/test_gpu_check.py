"""The prepared check on a GPU: its budget, and stages in processes of their own."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.support.source_copy import ROOT

pytestmark = pytest.mark.usefixtures("gpu_check_scripts")
SCRIPTS = ROOT / "scripts"


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
