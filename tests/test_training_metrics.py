"""metrics.jsonl across interruptions, and what is drawn from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from domino_deploy.errors import MissingDependencyError, TrainingError
from domino_deploy.training.metrics import MetricsLog, plot, read_metrics


def training_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {"lambda": 1 - step / 100, "learning_rate": 1e-3, "base_loss": 3.0, "final_loss": 2.5, "base_tau": 1.5, "final_tau": 2.0}
    return {"step": step, **line, "tokens_per_second": 900.0, **changes}


def written(path: Path, *steps: int) -> Path:
    log = MetricsLog(path)
    for step in steps:
        log.append(training_line(step))
    return path


def panels(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Draw `path`, and give the panels by title, the second scale of the schedule as "lambda"."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: (drawn.append(figure), save(figure, *args, **kwargs)))
    plot(path, path.with_suffix(".png"))
    return {axis.get_title() or "lambda": axis for axis in drawn[0].axes}


def curves(axis: Any) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axis.lines}


class TestLog:
    def test_a_line_is_in_the_file_when_append_returns(self, tmp_path: Path) -> None:
        log = MetricsLog(tmp_path / "metrics.jsonl")
        for step in (0, 20):
            log.append({"step": step, "loss": 1.5})
            assert log.path.read_text().endswith(json.dumps({"step": step, "loss": 1.5}) + "\n")
        assert [line["step"] for line in read_metrics(log.path)] == [0, 20]

    def test_a_number_that_is_not_finite_becomes_null(self, tmp_path: Path) -> None:
        log = MetricsLog(tmp_path / "metrics.jsonl")
        log.append({"step": 0, "loss": float("nan"), "final_tau": float("inf")})
        assert log.path.read_text() == '{"step": 0, "loss": null, "final_tau": null}\n'

    def test_a_full_disk_is_a_training_error(self) -> None:
        if not Path("/dev/full").exists():
            pytest.skip("needs /dev/full")
        with pytest.raises(TrainingError, match="No space left"):
            MetricsLog(Path("/dev/full")).append({"step": 0})


class TestResume:
    @pytest.mark.parametrize(
        ("step", "kept"), [(60, [0, 20, 40, 40]), (41, [0, 20, 40, 40]), (40, [0, 20]), (20, [0]), (0, []), (999, [0, 20, 40, 40, 60])]
    )
    def test_lines_from_the_step_on_are_cut(self, tmp_path: Path, step: int, kept: list[int]) -> None:
        path = written(tmp_path / "metrics.jsonl", 0, 20, 40, 40, 60)
        log = MetricsLog.resume(path, step)
        assert [line["step"] for line in read_metrics(path)] == kept
        log.append({"step": 1000})
        assert [line["step"] for line in read_metrics(path)] == [*kept, 1000]

    def test_an_interrupted_and_resumed_log_equals_an_uninterrupted_one(self, tmp_path: Path) -> None:
        whole = written(tmp_path / "whole.jsonl", *range(0, 100, 20))
        parts = written(tmp_path / "parts.jsonl", 0, 20, 40, 60)
        with parts.open("a") as file:
            file.write('{"step": 80, "lo')
        MetricsLog.resume(parts, 60)
        written(parts, 60, 80)
        assert parts.read_bytes() == whole.read_bytes()

    def test_a_torn_last_line_is_cut_even_at_the_end_of_the_run(self, tmp_path: Path) -> None:
        path = written(tmp_path / "metrics.jsonl", 0, 20)
        before = path.read_bytes()
        with path.open("ab") as file:
            file.write(b'{"step": 20')
        assert [line["step"] for line in read_metrics(path)] == [0, 20]
        MetricsLog.resume(path, 1000)
        assert path.read_bytes() == before

    @pytest.mark.parametrize("damage", ["{", "[1]", '{"loss": 1}', '{"step": "20"}', '{"step": true}', "\udcff"])
    def test_a_damaged_line_is_named_and_nothing_is_cut(self, tmp_path: Path, damage: str) -> None:
        path = written(tmp_path / "metrics.jsonl", 0)
        with path.open("ab") as file:
            file.write(os.fsencode(damage) + b"\n")
        before = path.read_bytes()
        with pytest.raises(TrainingError, match=r"metrics\.jsonl, line 2: expected a JSON object with an integer step"):
            MetricsLog.resume(path, 1000)
        assert path.read_bytes() == before

    def test_without_a_file_the_log_begins(self, tmp_path: Path) -> None:
        log = MetricsLog.resume(tmp_path / "work" / "metrics.jsonl", 40)
        log.append({"step": 41})
        assert read_metrics(log.path) == [{"step": 41}]


class TestPlot:
    def test_draws_every_series_of_a_domino_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "metrics.jsonl"
        log = MetricsLog(path)
        for step in (0, 20, 40):
            log.append(training_line(step, base_loss=3.0 - step / 40))
        log.append({"step": 40, "held_out_tau": 1.9, "held_out_base_tau": 1.4})
        found = panels(path, monkeypatch)
        assert curves(found["Loss"]) == {"base": [3.0, 2.5, 2.0], "final": [2.5] * 3}
        assert curves(found["Schedule"]) == {"learning rate": [1e-3] * 3}
        assert curves(found["lambda"]) == {"lambda": [1.0, 0.8, 0.6]}
        tau = curves(found["Accepted tokens per target pass"])
        assert tau.pop("base, held-out") == [1.4]
        assert tau.pop("final, held-out") == [1.9]
        assert tau == {"base, training blocks": [1.5] * 3, "final, training blocks": [2.0] * 3}
        assert curves(found["Throughput"]) == {"tokens per second": [900.0] * 3}
        assert all(axis.get_ylabel() for axis in found.values())
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert path.with_suffix(".png").stat().st_size < 200_000

    def test_a_dflash_run_has_no_lambda_and_no_corrected_loss(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "metrics.jsonl"
        log = MetricsLog(path)
        for step in (0, 20):
            log.append({"step": step, "learning_rate": 1e-3, "base_loss": 3.0, "base_tau": 1.5, "tokens_per_second": 900.0})
        found = panels(path, monkeypatch)
        assert "lambda" not in found
        assert curves(found["Loss"]) == {"base": [3.0, 3.0]}
        assert curves(found["Accepted tokens per target pass"]) == {"base, training blocks": [1.5, 1.5]}

    def test_a_long_run_is_drawn_under_its_running_mean(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "metrics.jsonl"
        log = MetricsLog(path)
        for index in range(100):
            log.append(training_line(20 * index, base_loss=4.0 + (-1) ** index))
        raw, mean = (list(line.get_ydata()) for line in panels(path, monkeypatch)["Loss"].lines[:2])
        assert raw[:2] == [5.0, 3.0]
        assert mean[0] == pytest.approx(sum(raw[:4]) / 4)
        assert mean[50] == pytest.approx(sum(raw[47:54]) / 7)

    def test_missing_numbers_are_left_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "metrics.jsonl"
        log = MetricsLog(path)
        log.append(training_line(0, base_tau=float("nan")))
        log.append(training_line(20))
        assert curves(panels(path, monkeypatch)["Accepted tokens per target pass"])["base, training blocks"] == [1.5]

    @pytest.mark.parametrize("content", ["", '{"step": 0, "lo'])
    def test_a_file_without_a_line_is_refused(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "metrics.jsonl").write_text(content)
        with pytest.raises(TrainingError, match=r"metrics\.jsonl: expected lines of training metrics, found none\."):
            plot(tmp_path / "metrics.jsonl", tmp_path / "metrics.png")
        assert not (tmp_path / "metrics.png").exists()

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TrainingError, match="No such file"):
            plot(tmp_path / "metrics.jsonl", tmp_path / "metrics.png")

    def test_an_image_that_cannot_be_written_is_a_training_error(self, tmp_path: Path) -> None:
        path = written(tmp_path / "metrics.jsonl", 0)
        with pytest.raises(TrainingError, match=r"metrics\.png: expected to write to it"):
            plot(path, tmp_path / "nowhere" / "metrics.png")

    def test_without_matplotlib_the_extra_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(MissingDependencyError, match=r"domino-deploy\[train\]"):
            plot(written(tmp_path / "metrics.jsonl", 0), tmp_path / "metrics.png")

    def test_writing_a_log_loads_neither_matplotlib_nor_torch(self) -> None:
        code = "import sys, domino_deploy.training.metrics; print(sorted({'matplotlib', 'torch'} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"
