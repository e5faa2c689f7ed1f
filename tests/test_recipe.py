"""Recipes: what is shipped, what a file may state, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from domino_deploy.checkpoint_config import target_config
from domino_deploy.config import DrafterKind
from domino_deploy.errors import TrainingError
from domino_deploy.training.initialise import drafter_config
from domino_deploy.training.recipe import SHIPPED, Recipe, read_recipe, recipe_from, shipped_recipes
from tests.support.public_targets import PUBLIC

FIELDS = {field.name for field in dataclasses.fields(Recipe)}


def write(folder: Path, **values: Any) -> Path:
    path = folder / "recipe.json"
    path.write_text(json.dumps(values))
    return path


def test_two_recipes_are_shipped() -> None:
    assert shipped_recipes() == ["qwen3-4b-domino-b16", "qwen3-8b-domino-b16"]


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_states_every_field(name: str) -> None:
    assert json.loads((SHIPPED / f"{name}.json").read_text()).keys() == FIELDS


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_is_the_papers_course(name: str) -> None:
    # arXiv 2605.29707, appendix; gamma and the anchors, on which it is silent, from SpecForge's public recipe.
    found = read_recipe(name)
    assert (found.learning_rate, found.weight_decay, found.clip_norm, found.warmup_ratio) == (6e-4, 0.0, 1.0, 0.04)
    assert (found.beta1, found.beta2) == (0.9, 0.999)
    assert (found.epochs, found.steps, found.sequences, found.micro_batch, found.max_length) == (3, None, 16, 2, 3072)
    assert (found.lambda_start, found.lambda_decay_ratio, found.causal_encoding) == (1.0, 1.0, "teacher-forced")
    assert (found.gamma, found.anchors) == (7.0, 256)
    assert (found.accept_until_fail, found.soft_labels, found.frequent_tokens) == (False, 0.0, 0)
    assert (found.dtype, found.save_dtype, found.features) == ("bfloat16", "bfloat16", "live")


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_gives_the_public_drafters_shape(name: str) -> None:
    config = drafter_config(target_config(PUBLIC[name], name), read_recipe(name))
    assert (config.kind, config.num_layers, config.block_size, config.num_proposals) == (DrafterKind.DOMINO, 5, 16, 16)
    assert (config.target_layer_ids, config.mask_token_id) == ((1, 9, 17, 25, 33), 151669)
    assert (config.emb_dim, config.gru_hidden_dim, config.pure_draft_prefix_len, config.shift_label) == (256, 1024, 1, True)
    assert (config.hidden_size, config.intermediate_size) == (PUBLIC[name]["hidden_size"], PUBLIC[name]["intermediate_size"])


def test_fields_that_a_file_leaves_out_have_the_defaults(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, block_size=6)) == Recipe(block_size=6)


def test_changes_win_over_the_file(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, block_size=6, anchors=3), anchors=5) == Recipe(block_size=6, anchors=5)
    assert read_recipe("qwen3-8b-domino-b16", steps=100, epochs=None).total_steps(10**6) == 100


def test_a_written_recipe_reads_back_the_same(tmp_path: Path) -> None:
    recipe = Recipe(steps=None, epochs=2, lambda_start=0.25, kind="dflash")
    assert read_recipe(write(tmp_path, **recipe.to_dict())) == recipe


@pytest.mark.parametrize(("epochs", "samples", "expected"), [(3, 100, 75), (3, 101, 75), (1, 3, 1), (2, 6, 3)])
def test_epochs_run_on_into_one_another(epochs: int, samples: int, expected: int) -> None:
    # Three epochs of 101 samples are 303 samples: 75 steps of four, and three samples are left.
    assert Recipe(steps=None, epochs=epochs, sequences=4).total_steps(samples) == expected


def test_an_unknown_name_names_the_shipped_ones() -> None:
    with pytest.raises(TrainingError, match=r"qwen3-9b: expected a recipe\.json or one of qwen3-4b-domino-b16, qwen3-8b-domino-b16"):
        read_recipe("qwen3-9b")


@pytest.mark.parametrize("name", ["../recipe", "recipes/qwen3-8b-domino-b16", ""])
def test_a_name_never_leaves_the_folder_of_shipped_recipes(name: str) -> None:
    with pytest.raises(TrainingError, match="found neither"):
        read_recipe(name)


def test_unknown_fields_are_refused_together() -> None:
    with pytest.raises(TrainingError) as found:
        recipe_from({"lr": 1e-3, "batch": 2, "gamma": 7.0}, "mine.json")
    assert "mine.json: 2 unknown recipe field(s)" in str(found.value)
    assert re.findall(r"^  - (\w+)$", str(found.value), re.MULTILINE) == ["batch", "lr"]


@pytest.mark.parametrize(("text", "message"), [("[]", "expected a JSON object"), ("{", "valid JSON"), ('{"gamma": NaN}', "NaN")])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(TrainingError, match=message):
        read_recipe(tmp_path / "recipe.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "eagle"}, "kind must be one of domino, dflash, found 'eagle'"),
        ({"anchors": 2.0}, "anchors must be int, found 2.0"),
        ({"anchors": True}, "anchors must be int, found True"),
        ({"shift_label": 1}, "shift_label must be bool, found 1"),
        ({"epochs": 3}, "exactly one of steps and epochs must be given, found steps 4000 and epochs 3"),
        ({"steps": None}, "exactly one of steps and epochs must be given, found steps None and epochs None"),
        ({"steps": 0}, "steps must be at least 1, found 0"),
        ({"sequences": 4, "micro_batch": 3}, "micro_batch must divide sequences"),
        ({"pure_draft_prefix_len": 8}, r"pure_draft_prefix_len must lie in \[0, 8\), found 8"),
        ({"pure_draft_prefix_len": 7, "shift_label": False}, r"pure_draft_prefix_len must lie in \[0, 7\), found 7"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0"),
        ({"soft_labels": 1.5}, r"soft_labels must lie in \[0, 1\], found 1.5"),
        ({"beta2": 1.0}, r"beta2 must lie in \[0, 1\), found 1.0"),
        ({"seed": -1}, "seed must lie in"),
    ],
)
def test_values_that_cannot_be_used_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        Recipe(**values)


def test_every_value_that_is_out_of_range_is_named() -> None:
    with pytest.raises(TrainingError) as found:
        Recipe(num_layers=0, gamma=0.0, block_size=1)
    assert {"num_layers", "gamma", "block_size"} <= set(re.findall(r"^  - (\w+) must", str(found.value), re.MULTILINE))


def test_a_whole_number_may_stand_for_a_float() -> None:
    assert Recipe(gamma=7).gamma == 7  # JSON writers drop the fraction
