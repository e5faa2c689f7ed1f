"""Bytes and launches of a rollout, by hand and as the documentation has them; and block sizes that the kernels can take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from domino_deploy.plugins import triton_traffic, triton_tuning
from domino_deploy.plugins.triton_traffic import RolloutShape, Variant, traffic

SMALL = {"vocab_size": 100, "rank": 8, "width": 16, "units": 4, "proposals": 3, "weight_bytes": 2, "pool_size": 10}
# Per step: W_ih; after the first: W_hh; per correction: W1's columns for the state, and the base logits.
W_IH, W_HH, PROJECTION, BASE = 3 * 4 * 16 * 2, 3 * 4 * 4 * 2, 8 * 4 * 2, 100 * 4


@pytest.mark.parametrize(
    ("variant", "changed", "contenders", "total_bytes", "launches"),
    [
        ("full", {}, 0, 3 * (W_IH + PROJECTION + BASE + 100 * 8 * 2) + 2 * W_HH, 2 + 3 * 3),
        ("full", {"prefix_len": 1}, 0, 3 * W_IH + 2 * (PROJECTION + BASE + 100 * 8 * 2) + 2 * W_HH + BASE, 2 + 1 + 3 + 2 * 2),
        ("full", {"prefix_len": 9}, 0, 3 * W_IH + 2 * W_HH + 3 * BASE, 2 + 1 + 3),
        ("full", {"has_table": True}, 0, 3 * (3 * 4 * 2 + PROJECTION + BASE + 100 * 8 * 2) + 2 * W_HH, 2 + 3 * 3),
        ("full", {"batch": 2}, 0, 3 * (W_IH + PROJECTION + 2 * BASE + 100 * 8 * 2) + 2 * W_HH, 2 + 3 * 3),
        ("int8", {}, 5, 3 * (W_IH + PROJECTION + BASE + 100 * (8 + 4 + 4) + 5 * 8 * 2) + 2 * W_HH, 2 + 3 * 3),
        ("pool", {}, 5, 3 * (W_IH + PROJECTION + 2 * BASE + 100 * 4 + (10 + 5) * 8 * 2) + 2 * W_HH, 2 + 3 * 4),
    ],
)
def test_traffic_by_hand(variant, changed, contenders, total_bytes, launches):
    block = traffic(RolloutShape(**{**SMALL, **changed}), Variant(variant), contenders)
    assert (block.total_bytes, block.launches) == (total_bytes, launches)


def test_documentation_has_the_table_that_the_command_prints(capsys):
    triton_traffic.main()
    assert capsys.readouterr().out in (Path(__file__).parents[1] / "docs" / "kernels.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tuning", [triton_tuning.ONE, triton_tuning.MANY])
def test_block_sizes_are_what_the_kernels_can_take(tuning):
    for blocks in (tuning.correction, tuning.cell, tuning.projection):
        for size in (blocks.rows, blocks.columns, blocks.warps):
            assert size == triton_tuning.power_of_two(size)
    assert tuning.cell.rows % 4 == 0  # three gates and an empty one


@pytest.mark.parametrize(("batch", "block"), [(1, 1), (2, 16), (16, 16), (17, 32), (32, 32)])
def test_block_of_the_batch(batch, block):
    assert triton_tuning.batch_block(batch) == block


def test_contenders_of_a_pair_are_counted(tiny_bundle):
    script = Path(__file__).parents[1] / "scripts" / "bench_contenders.py"
    checkpoints = [str(tiny_bundle.parent / name) for name in ("drafter", "target")]
    flags = ["--prompts-per-kind", "1", "--max-new-tokens", "6"]
    done = subprocess.run([sys.executable, str(script), *checkpoints, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["int8"]["corrections"] == found["pool"]["corrections"] > 0
    for way in ("int8", "pool"):
        assert 1 <= found[way]["median"] <= found[way]["most"] <= found["vocabulary"]
    assert found["int8"]["mean"] < found["pool"]["mean"]
