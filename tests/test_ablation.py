"""The ablation's script: its statistics against slow ones, and a whole small comparison."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from domino_deploy.training.samples import Sample
from domino_deploy.training.store import SampleStore
from tests.support.checkpoints import write_target
from tests.support.scripts import loaded_script


@pytest.fixture(scope="module")
def ablation():
    return loaded_script("ablation")


def counts(tokens, passes):
    return {"tokens": tokens, "passes": passes}


def test_the_interval_is_that_of_a_slow_bootstrap(ablation):
    rng = np.random.default_rng(3)
    passes = rng.integers(10, 40, size=30).tolist()
    tokens = [round(count * factor) for count, factor in zip(passes, rng.uniform(1, 3, size=30), strict=True)]
    low, high = ablation.interval(tokens, passes)
    assert low < sum(tokens) / sum(passes) < high
    taus = []
    for _ in range(4000):
        chosen = rng.integers(30, size=30)
        taus.append(sum(tokens[index] for index in chosen) / sum(passes[index] for index in chosen))
    assert (low, high) == pytest.approx(np.quantile(taus, (0.025, 0.975)), rel=0.02)


def test_samples_that_agree_have_an_interval_without_width(ablation):
    assert ablation.interval([20, 40, 60], [10, 20, 30]) == (2.0, 2.0)


def test_a_gain_compares_the_same_samples(ablation):
    base = [counts([10, 30, 90], [10, 15, 30])]
    better = [counts([10, 30, 90], [5, 7.5, 15])]
    # Twice as good on each sample: whatever is drawn, the gain is one.
    assert ablation.gain_interval(better, base) == (1.0, 1.0, 1.0)
    gain, low, high = ablation.gain_interval([counts([10, 30, 90], [10, 15, 45])], base)
    assert gain == pytest.approx((130 / 70) / (130 / 55) - 1)
    assert low < gain < high <= 0.0


def test_the_summary_gives_kinds_and_seeds_apart(ablation):
    runs = {
        "dflash": [counts([10, 20, 30], [10, 10, 10]), counts([10, 20, 30], [10, 20, 10])],
        "other": [counts([10, 20, 30], [5, 10, 10]), counts([10, 20, 30], [5, 10, 10])],
    }
    dflash, other = ablation.summary(runs, ["code", "chat", "code"])
    assert dflash["tau"]["all"]["tau"] == pytest.approx(120 / 70, abs=1e-4)
    assert dflash["tau"]["all"]["by_seed"] == [2.0, 1.5]
    assert dflash["tau"]["code"] == {"samples": 2, "tau": 2.0, "low": 1.0, "high": 3.0, "by_seed": [2.0, 2.0]}
    assert dflash["tau"]["chat"]["samples"] == 1
    assert other["gain_over_dflash"]["gain"] == pytest.approx((120 / 50) / (120 / 70) - 1, abs=1e-4)
    table = ablation.markdown([dflash, other]).splitlines()
    assert table[0] == "| variant | all | chat | code | over DFlash |"
    assert "+40.0%" in table[3]


def test_a_comparison_runs_is_written_and_goes_on(ablation, tmp_path):
    target = write_target(tmp_path / "target", num_hidden_layers=6)
    work = tmp_path / "work"
    store = SampleStore.open(work, claim={})
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            prompt_ids=tuple(rng.integers(5, 200, 4).tolist()),
            response_ids=tuple(rng.integers(5, 200, 12).tolist()),
            kind="code" if number % 2 else "",
        )
        for number in range(12)
    ]
    store.append(samples, None)
    recipe = {"steps": 2, "held_out": 4, "num_layers": 1, "block_size": 4, "num_taps": 2, "emb_dim": 4, "gru_hidden_dim": 8}
    recipe |= {"mask_token_id": 3, "sequences": 2, "anchors": 2, "frequent_tokens": 50, "random_tokens": 9}
    arguments = [str(target), str(work), str(tmp_path / "out.json"), "--recipe", json.dumps(recipe)]
    first = CliRunner().invoke(ablation.main, [*arguments, "--seeds", "1"], catch_exceptions=False)
    assert first.exit_code == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["variant"] for row in report["rows"]] == [*ablation.VARIANTS, ablation.HEAD_OFF]
    assert report["training_samples"] == 8
    assert set(report["kinds"]) <= {"code", "unnamed"}
    # A second seed: only its runs are made.
    second = CliRunner().invoke(ablation.main, [*arguments, "--seeds", "2"], catch_exceptions=False)
    assert second.stderr.count("-1\n") == len(ablation.VARIANTS)
    assert second.stderr.count("-0\n") == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert all(row["seeds"] == 2 for row in rows)
    assert rows[0]["tau"]["all"]["by_seed"][0] == report["rows"][0]["tau"]["all"]["tau"]
    # One variant beside the baseline.
    CliRunner().invoke(ablation.main, [*arguments, "--seeds", "1", "--only", "domino, teacher forcing"], catch_exceptions=False)
    alone = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["variant"] for row in alone] == ["dflash", "domino, teacher forcing"]
    # Another recipe takes none of these results, and leaves them.
    other = CliRunner().invoke(ablation.main, [*arguments[:-1], json.dumps(recipe | {"steps": 3}), "--seeds", "1"], catch_exceptions=False)
    assert other.stderr.count("-0\n") == len(ablation.VARIANTS)
    assert json.loads((tmp_path / "out.json").read_text())["recipe"]["steps"] == 3
    again = CliRunner().invoke(ablation.main, [*arguments, "--seeds", "2"], catch_exceptions=False)
    assert again.stderr == ""
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == rows
