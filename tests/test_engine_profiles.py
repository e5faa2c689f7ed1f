"""Sizes that engines fix, and the ranges that stay free, for the tiny pair of `tests/support/bundles.py`."""

from __future__ import annotations

import pytest

from domino_deploy.config import DrafterKind
from domino_deploy.engine_signatures import engine_signatures
from domino_deploy.engines import DRAFT_PROFILE, FIRST_DRAFT_PROFILE, PREFILL_PROFILE, VERIFY_PROFILE
from domino_deploy.exporters.engine_options import EngineOptions
from domino_deploy.exporters.engine_profiles import engine_profiles
from domino_deploy.runtime.decode import PREFILL_ROWS
from domino_deploy.runtime.session import DEFAULT_MAX_MODEL_LEN
from domino_deploy.signature import GREEDY_IDS, LOGITS, GraphForm
from tests.support.bundles import DRAFTER, TARGET
from tests.support.tiny_models import drafter_config, target_config

SIGNATURES = engine_signatures(TARGET, DRAFTER, GraphForm(), max_model_len=100, num_speculative_tokens=3)
PROFILES = engine_profiles(SIGNATURES, max_batch_size=4, num_speculative_tokens=3, prefill_rows=128, block_size=DRAFTER.block_size)


def shapes(graph: str, profile: int, name: str) -> tuple[tuple[int, ...], ...]:
    found = PROFILES[graph][profile].shapes[name]
    return found.min, found.opt, found.max


def test_caches_have_room_for_a_pass_behind_the_last_token() -> None:
    sizes = {graph: {spec.shape[2] for spec in SIGNATURES[graph].inputs if "cache" in spec.name} for graph in ("target", "backbone")}
    assert sizes == {"target": {100 + 3 + 1}, "backbone": {100 + 3 + 1 + DRAFTER.block_size}}


def test_the_greedy_tokens_follow_the_logits() -> None:
    outputs = SIGNATURES["target"].outputs
    assert [spec.name for spec in outputs[:2]] == [LOGITS, GREEDY_IDS]
    assert (outputs[1].dtype, outputs[1].shape) == ("int64", ("batch", "logit_rows"))


def test_proposals_are_fixed_from_the_backbone_to_the_tokens() -> None:
    assert [spec.shape for spec in SIGNATURES["backbone"].outputs[:2]] == [("batch", 3, 32), ("batch", 3, 300)]
    assert [spec.shape for spec in SIGNATURES["head"].inputs] == [("batch",), ("batch", 3, 32), ("batch", 3, 300)]
    assert [spec.shape for spec in SIGNATURES["head"].outputs] == [("batch", 3)]


def test_nothing_but_batch_and_rows_is_free() -> None:
    free = {size for signature in SIGNATURES.values() for spec in (*signature.inputs, *signature.outputs) for size in spec.shape}
    assert {size for size in free if isinstance(size, str)} == {"batch", "rows", "logit_rows", "feature_rows", "context_rows"}


def test_a_verify_pass_is_of_one_size_and_a_prefill_of_any_up_to_its_rows() -> None:
    assert shapes("target", VERIFY_PROFILE, "input_ids") == ((1, 4), (4, 4), (4, 4))
    assert shapes("target", VERIFY_PROFILE, "logit_index") == ((1, 4), (4, 4), (4, 4))
    assert shapes("target", PREFILL_PROFILE, "attention_mask") == ((1, 1, 1, 104), (4, 1, 128, 104), (4, 1, 128, 104))
    assert shapes("target", PREFILL_PROFILE, "logit_index") == ((1, 1), (4, 1), (4, 1))


def test_a_draft_takes_one_cycles_features_and_the_first_one_a_prefills() -> None:
    assert shapes("backbone", DRAFT_PROFILE, "features") == ((1, 4, 64), (4, 4, 64), (4, 4, 64))
    assert shapes("backbone", FIRST_DRAFT_PROFILE, "features") == ((1, 1, 64), (4, 128, 64), (4, 128, 64))
    assert shapes("backbone", FIRST_DRAFT_PROFILE, "position_ids") == ((1, 1 + 6), (4, 128 + 6), (4, 128 + 6))


def test_inputs_of_fixed_size_are_in_no_profile() -> None:
    assert all(
        any(isinstance(size, str) for size in spec.shape) == (spec.name in profile.shapes)
        for graph, signature in SIGNATURES.items()
        for spec in signature.inputs
        for profile in PROFILES[graph]
    )


@pytest.mark.parametrize("kind", list(DrafterKind))
def test_every_kind_of_drafter_has_one_profile_for_its_head(kind: DrafterKind) -> None:
    drafter = drafter_config(kind)
    signatures = engine_signatures(target_config(), drafter, GraphForm(), max_model_len=64, num_speculative_tokens=2)
    profiles = engine_profiles(signatures, max_batch_size=1, num_speculative_tokens=2, prefill_rows=128, block_size=drafter.block_size)
    assert len(profiles["head"]) == 1
    assert profiles["head"][0].shapes["base_logits"].max == (1, 2, drafter.vocab_size)


def test_defaults_are_those_of_sessions() -> None:
    from domino_deploy.exporters import engine_options

    assert EngineOptions().prefill_rows == PREFILL_ROWS
    assert engine_options.DEFAULT_MAX_MODEL_LEN == DEFAULT_MAX_MODEL_LEN
