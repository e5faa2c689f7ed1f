"""A drafter is paired with the target it belongs to, and with no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import PairingError
from domino_deploy.pairing import check_pairing
from tests.support.checkpoints import target_config, write_drafter, write_target


def pair(folder: Path, drafter_for: dict[str, Any] | None = None, **drafter_fields: Any) -> tuple[TargetConfig, DrafterConfig]:
    """The tiny target, and a drafter for a target with the fields `drafter_for`."""
    target = open_target(write_target(folder / "target"))
    drafter = open_drafter(write_drafter(folder / "drafter", target_config(**(drafter_for or {})), **drafter_fields))
    return target.config, drafter.config


@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_a_pair_that_belongs_together_gives_the_facts_that_tie_it(tmp_path: Path, kind: str) -> None:
    target, drafter = pair(tmp_path, kind=kind, max_position_embeddings=256)
    assert check_pairing(target, drafter) == {
        "vocab_size": 300,
        "hidden_size": 32,
        "num_target_layers": 4,
        "target_layer_ids": [0, 2],
        "feature_size": 64,
        "mask_token_id": 299,
        "max_position_embeddings": 256,
    }


def test_rotary_settings_and_head_widths_are_the_drafters_own(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, rope_theta=1e6, head_dim=8, num_attention_heads=2, num_key_value_heads=1)
    check_pairing(target, drafter)


@pytest.mark.parametrize(
    ("drafter_for", "fields", "mismatches"),
    [
        pytest.param({"vocab_size": 310}, {}, ["vocab_size: drafter 310, target 300", "mask_token_id: 309"], id="vocabulary"),
        pytest.param({"vocab_size": 290}, {}, ["vocab_size: drafter 290, target 300"], id="smaller vocabulary"),
        pytest.param({"hidden_size": 64}, {}, ["hidden_size: drafter 64, target 32"], id="width"),
        pytest.param({"num_hidden_layers": 3}, {}, ["num_target_layers: drafter was trained on 3, target has 4"], id="shallower"),
        pytest.param(
            {"num_hidden_layers": 8},
            {"target_layer_ids": [1, 4, 7]},
            ["num_target_layers: drafter was trained on 8, target has 4", "target_layer_ids: [4, 7] lie outside the target's layers 0..3"],
            id="deeper",
        ),
        pytest.param(
            {"vocab_size": 310, "hidden_size": 64, "num_hidden_layers": 8},
            {"target_layer_ids": [1, 7]},
            ["vocab_size", "hidden_size", "num_target_layers", "target_layer_ids", "mask_token_id"],
            id="all at once",
        ),
    ],
)
def test_every_mismatch_is_named(tmp_path: Path, drafter_for: dict[str, Any], fields: dict[str, Any], mismatches: list[str]) -> None:
    target, drafter = pair(tmp_path, drafter_for, **fields)
    with pytest.raises(PairingError) as caught:
        check_pairing(target, drafter)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert [mismatch for mismatch in mismatches if mismatch not in message] == []
    assert f"{len(mismatches)} mismatch(es)" in message
