"""The stages of `scripts/gpu_check`, how the minutes are shared out, and how a stage is run so that its end is not that of the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_check_report import ABSENT_EXIT_CODE, Outcome, Report, Status

LEAST_SECONDS = 5.0  # a stage with less to go is not started: importing torch takes about that long
WRITE_SHARE = 0.02  # of the whole time, kept for the end
GRACE_SECONDS = 2.0  # a stage is told to end this much before it is made to
_LOG_CHARACTERS = 4000  # the end of what a stage printed, kept as its error when it left none


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`function` is "module:function" and takes a `gpu_check_context.Context`; `share` is its part of the whole time."""

    name: str
    function: str
    share: float


# Stages in the order of what they tell; the shares of all of them make up the time without WRITE_SHARE.
STAGES = (
    Stage(name="machine", function="gpu_check_machine:run", share=0.06),
    Stage(name="compile", function="gpu_check_compile:run", share=0.14),
    Stage(name="kernel_numbers", function="gpu_check_kernels:numbers", share=0.10),
    Stage(name="kernel_times", function="gpu_check_kernels:times", share=0.10),
    Stage(name="rollout", function="gpu_check_rollouts:run", share=0.25),
    Stage(name="driver", function="gpu_check_driver:run", share=0.08),
    Stage(name="speculation", function="gpu_check_speculation:run", share=0.18),
    Stage(name="tensorrt_rtx", function="gpu_check_rtx:run", share=0.07),
)

Runner = Callable[[Stage, float], Outcome]


def run_stages(
    stages: Sequence[Stage],
    report: Report,
    seconds: float,
    run: Runner,
    *,
    clock: Callable[[], float] = time.monotonic,
    started: float | None = None,
) -> bool:
    """Every stage once, each until its share of the time is over; whether none of them failed, was late or was left out.

    A stage's limit is the sum of the shares up to its own, less what is spent: time that one leaves goes to the next, and
    nothing that one does can make the whole run late.

    Args:
        stages: in their order.
        report: written after every stage.
        seconds: for all of them together.
        run: one stage within a number of seconds; must not raise.
        clock: seconds.
        started: its time when the seconds began to count; None for now.
    """
    begun = clock() if started is None else started
    usable, whole, share = seconds * (1 - WRITE_SHARE), sum(stage.share for stage in stages), 0.0
    for stage in stages:
        share += stage.share
        limit = usable * share / whole - (clock() - begun)
        if limit < LEAST_SECONDS:
            outcome = Outcome(status=Status.SKIPPED, seconds=0.0, limit_s=round(limit, 1), error=f"no time was left: {limit:.1f} s")
        else:
            print(f"[{clock() - begun:6.1f} s] {stage.name}: up to {limit:.0f} s", flush=True)
            outcome = run(stage, limit)
        report.add(stage.name, outcome)
        print(f"[{clock() - begun:6.1f} s] {stage.name}: {outcome.status}, {outcome.seconds:.1f} s", flush=True)
        if outcome.error:
            print(outcome.error, flush=True)
    return all(stage["status"] in (Status.DONE, Status.ABSENT) for stage in report.values["stages"].values())


@dataclass(frozen=True, kw_only=True)
class InAProcess:
    """Runs a stage in a process of its own: a fault of the GPU's context, a crash or a hang ends that stage alone.

    Args:
        settings: for `gpu_check_stage.py`, as JSON: device, sizes, carried.
        environment: added to that of the process.
        clock: seconds.
    """

    settings: Mapping[str, str]
    environment: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic

    def __call__(self, stage: Stage, limit: float) -> Outcome:
        begun = self.clock()
        with tempfile.TemporaryDirectory() as scratch:
            notes, log = Path(scratch) / "notes.json", Path(scratch) / "log"
            settings = json.dumps({**self.settings, "notes": str(notes), "seconds": limit - GRACE_SECONDS})
            command = [sys.executable, str(Path(__file__).with_name("gpu_check_stage.py")), stage.function, settings]
            with log.open("wb") as output:
                # A session of its own, so that compilers which the stage has started end with it.
                child = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **self.environment}, start_new_session=True
                )
                code, late = 0, False
                try:
                    code = child.wait(limit)
                except subprocess.TimeoutExpired:
                    late = True
                finally:
                    _end(child)
            seconds = round(self.clock() - begun, 1)
            noted = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {"result": {}, "error": None}
            if late:
                status, error = Status.LATE, f"stopped at its limit of {limit:.0f} s"
            elif code == 0:
                status, error = Status.DONE, None
            else:
                status = Status.ABSENT if code == ABSENT_EXIT_CODE and noted["error"] else Status.FAILED
                ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                printed = log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]
                error = "\n".join(part for part in (noted["error"] or ended, printed) if part).rstrip()
            return Outcome(status=status, seconds=seconds, limit_s=round(limit, 1), error=error, result=noted["result"])


def _end(child: subprocess.Popen[bytes]) -> None:
    """The process and all that it started; nothing to do for those that have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
