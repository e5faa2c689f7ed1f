"""kill -9 at ten random moments of an export: no bundle appears, the next export succeeds, and nothing stray remains after it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from domino_deploy.bundle import open_bundle
from tests.support.checkpoints import write_drafter, write_target

MOMENTS = 10
LANES = 2  # exports at once, each with an output of its own

# Exports argv[1] and argv[2] to argv[3] and counts what it does to files beside the output; before number argv[4] it kills itself.
# Most of an export computes, so a moment by the clock rarely falls between two files; these do.
_EXPORT = """
import os, signal, sys
from pathlib import Path
from domino_deploy.exporters.export import export_bundle

drafter, target, output, last = sys.argv[1:]
parent, changes = str(Path(output).parent), 0

def count(event, arguments):
    global changes
    if event not in ("open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir", "os.truncate"):
        return
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
        return
    if str(arguments[0]).startswith(parent):
        changes += 1
        if changes == int(last):
            os.kill(os.getpid(), signal.SIGKILL)

print("begins", flush=True)
sys.addaudithook(count)
export_bundle(drafter, target, output, verify=False)
print(changes)
"""


@dataclass(frozen=True)
class Pair:
    drafter: Path
    target: Path


@dataclass(frozen=True)
class Moment:
    """When to kill: after `seconds` of exporting, or before change number `change` to a file."""

    seconds: float | None = None
    change: int = 0


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    target = write_target(tmp_path / "target", num_hidden_layers=1)
    return Pair(write_drafter(tmp_path / "drafter", target, num_hidden_layers=1, target_layer_ids=[0]), target)


def start(pair: Pair, output: Path, moment: Moment | None = None) -> subprocess.Popen[str]:
    """An export that has just begun; what it loads before takes its time too, but changes nothing."""
    command = [sys.executable, "-c", _EXPORT, *map(str, (pair.drafter, pair.target, output, moment.change if moment else 0))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


def export(pair: Pair, output: Path) -> tuple[float, int]:
    """A whole export: how many seconds it took and how many changes to files."""
    with start(pair, output) as process:
        begin = time.monotonic()
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return time.monotonic() - begin, int(printed)


def kill(pair: Pair, output: Path, moment: Moment) -> bool:
    """Whether the export was killed before it was finished."""
    with start(pair, output, moment) as process:
        try:
            process.wait(timeout=moment.seconds or 300)
        except subprocess.TimeoutExpired:
            process.kill()
        printed, _ = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0)
    return not printed


def kill_and_look(pair: Pair, output: Path, moments: list[Moment]) -> int:
    """How many of the exports were killed while they wrote; each of them is looked after, and what it left stays for the next."""
    killed = 0
    for moment in moments:
        killed += kill(pair, output, moment)
        if output.exists():  # finished all the same, or killed after that: then it is whole
            open_bundle(output, check_hashes=True)
            assert moment.seconds is not None
            shutil.rmtree(output)
        # Whatever lies there is hidden, and of one export: those before it are cleared up.
        assert [name for name in os.listdir(output.parent) if not name.startswith(".bundle-")] == []
        assert len(os.listdir(output.parent)) <= 1
    return killed


@pytest.mark.slow
def test_an_export_killed_at_any_moment_leaves_nothing_that_the_next_one_does_not_clear_up(pair: Pair, tmp_path: Path) -> None:
    seconds, changes = export(pair, tmp_path / "whole" / "bundle")
    assert changes > MOMENTS
    dice = random.Random(4)
    by_clock = [Moment(seconds=seconds * (part + dice.random()) / (MOMENTS // 2)) for part in range(MOMENTS // 2)]
    by_change = [Moment(change=change) for change in dice.sample(range(1, changes + 1), MOMENTS - len(by_clock))]
    outputs = [tmp_path / f"lane-{lane}" / "bundle" for lane in range(LANES)]
    for output in outputs:
        output.parent.mkdir()
    moments = dice.sample([*by_clock, *by_change], MOMENTS)
    with ThreadPoolExecutor(LANES) as pool:
        killed = sum(pool.map(lambda lane: kill_and_look(pair, outputs[lane], moments[lane::LANES]), range(LANES)))
        assert killed >= len(by_change)
        assert any(os.listdir(output.parent) for output in outputs), "nothing left to clear up: the test shows nothing"
        list(pool.map(lambda output: export(pair, output), outputs))
    for output in outputs:
        open_bundle(output, check_hashes=True)
        assert os.listdir(output.parent) == ["bundle"]
