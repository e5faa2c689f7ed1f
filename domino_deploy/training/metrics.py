"""metrics.jsonl of a training run: written line by line, cut back when the run is resumed, and drawn as metrics.png.

What lives here: the file.  What does not: which numbers go into a line (`trainer.py`).  A line is a JSON object with an integer
`step`; steps do not fall from line to line, and several lines may have the same one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_deploy.errors import MissingDependencyError, TrainingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = Sequence[Mapping[str, Any]]

# One colour per meaning in every panel: base is the backbone alone, final the corrected logits.
_BASE, _FINAL, _OTHER = "#5b7083", "#d1495b", "#3b7a57"
_MANY_POINTS = 60  # a curve of more is drawn pale, under its running mean


@dataclass(frozen=True)
class MetricsLog:
    """Appends lines to `path`; each is in the file when `append` returns, and no file stays open in between."""

    path: Path

    @classmethod
    def resume(cls, path: Path, step: int) -> MetricsLog:
        """The log of a run that goes on at `step`: lines from that step on, and a last line that was torn, are cut off.

        Args:
            path: made empty if it does not exist, its folder too.
            step: the first that is still to be done, counted from 0: as many are finished.

        Raises:
            TrainingError: a damaged line, or a file that cannot be written to.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise _unwritable(path, error) from error
        kept = 0
        for end, line in _lines(path):
            if line["step"] >= step:
                break
            kept = end
        try:
            with path.open("r+b") as file:
                file.truncate(kept)
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path)

    def append(self, line: Mapping[str, float | None]) -> None:
        """Write one line; a number that is not finite becomes null, since JSON has none.

        Raises:
            TrainingError: the file cannot be written to.
        """
        values = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values, allow_nan=False) + "\n")
        except OSError as error:
            raise _unwritable(self.path, error) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a last line that was torn is left out.

    Raises:
        TrainingError: no such file, or a damaged line.
    """
    return [line for _, line in _lines(path)]


def plot(metrics: Path, output: Path) -> None:
    """Draw a metrics.jsonl: losses, lambda and learning rate, tau, tokens per second.  What a run has no numbers for is left out.

    Args:
        metrics: of a run that is over or still going.
        output: the image; its ending says which format (png, svg, pdf).

    Raises:
        TrainingError: no lines to draw, a damaged one, or an image that cannot be written.
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "Drawing the metrics needs matplotlib, which is not installed. Run: pip install 'domino-deploy[train]'"
        ) from error
    lines = read_metrics(metrics)
    if not lines:
        raise TrainingError(f"{metrics}: expected lines of training metrics, found none. Name the metrics.jsonl of a run that has begun.")
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)  # no window system, and no state outside this figure
    axes = figure.subplots(2, 2, sharex=True)
    _draw_losses(axes[0, 0], lines)
    _draw_schedule(axes[0, 1], lines)
    _draw_tau(axes[1, 0], lines)
    _draw_curve(axes[1, 1], lines, "tokens_per_second", "tokens per second", _OTHER)
    axes[1, 1].set(title="Throughput", ylabel="tokens/s")
    axes[1, 1].set_ylim(bottom=0)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[1]:
        axis.set_xlabel("step")
    try:
        figure.savefig(output, dpi=90)
    except OSError as error:
        raise _unwritable(output, error) from error


def _draw_losses(axis: Axes, lines: Lines) -> None:
    _draw_curve(axis, lines, "base_loss", "base", _BASE)
    _draw_curve(axis, lines, "final_loss", "final", _FINAL)
    axis.set(title="Loss", ylabel="cross-entropy")
    _legend(axis)


def _draw_schedule(axis: Axes, lines: Lines) -> None:
    axis.plot(*_points(lines, "learning_rate"), color=_OTHER, label="learning rate")
    axis.set(title="Schedule", ylabel="learning rate")
    axis.set_ylim(bottom=0)
    axis.ticklabel_format(axis="y", scilimits=(-3, 3))
    steps, weights = _points(lines, "lambda")
    if steps:
        twin = axis.twinx()
        twin.plot(steps, weights, color=_BASE, linestyle="--", label="lambda")
        twin.set_ylabel("lambda (weight of the base loss)")
        twin.set_ylim(-0.02, 1.05)
        twin.spines["top"].set_visible(False)
        axis.legend(handles=[*axis.lines, *twin.lines], frameon=False)


def _draw_tau(axis: Axes, lines: Lines) -> None:
    _draw_curve(axis, lines, "base_tau", "base, training blocks", _BASE)
    _draw_curve(axis, lines, "final_tau", "final, training blocks", _FINAL)
    for name, label, colour in (("held_out_base_tau", "base, held-out", _BASE), ("held_out_tau", "final, held-out", _FINAL)):
        steps, values = _points(lines, name)
        if steps:
            axis.plot(steps, values, "o", color=colour, markeredgecolor="white", markersize=8, label=label)
    axis.set(title="Accepted tokens per target pass", ylabel="tau")
    _legend(axis)


def _draw_curve(axis: Axes, lines: Lines, name: str, label: str, colour: str) -> None:
    steps, values = _points(lines, name)
    if not steps:
        return
    if len(steps) <= _MANY_POINTS:
        axis.plot(steps, values, color=colour, label=label)
        return
    axis.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axis.plot(steps, _running_mean(values, len(values) // 30), color=colour, label=label)


def _points(lines: Lines, name: str) -> tuple[list[int], list[float]]:
    """The steps at which `name` has a number, and the numbers."""
    found = [line for line in lines if isinstance(line.get(name), int | float)]
    return [line["step"] for line in found], [line[name] for line in found]


def _running_mean(values: Sequence[float], reach: int) -> list[float]:
    """The mean over each value and up to `reach` on either side of it; fewer at the ends."""
    windows = [values[max(0, index - reach) : index + reach + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _legend(axis: Axes) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The end of each whole line in bytes, and what it says."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TrainingError(f"{path}: expected the metrics of a training run, found: {error.strerror}. Check the path.") from error
    end = 0
    for number, text in enumerate(content.splitlines(keepends=True), start=1):
        if not text.endswith(b"\n"):
            return  # torn: an interrupted write
        end += len(text)
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            raise TrainingError(
                f"{path}, line {number}: expected a JSON object with an integer step, found {text[:80]!r}. "
                "Remove the line, or move the file away."
            )
        yield end, line


def _unwritable(path: Path, error: OSError) -> TrainingError:
    return TrainingError(f"{path}: expected to write to it, found: {error.strerror or error}. Make room, or name another folder.")
