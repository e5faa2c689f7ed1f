"""engines.json is held against its bundle as a whole: edited ones are refused, every problem in one message, at no cost in their sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.engine_checks import PROFILE_NAMES
from domino_deploy.engine_choice import Host, open_engines
from domino_deploy.engines import ENGINES_FOLDER, Flavour, open_engine_set
from domino_deploy.errors import EngineError
from tests.support import bundles
from tests.support.engine_manifests import change_engines, write_engines

HOST = Host(flavours={Flavour.TENSORRT: "11.4.0"}, compute_capability="9.0")
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    folder = tmp_path / "bundle"
    folder.mkdir()
    bundles.fill(folder)
    return open_bundle(folder)


def refusal(bundle: Bundle, change: Change) -> str:
    folder = write_engines(bundle, "one")
    change_engines(folder, change)
    with pytest.raises(EngineError) as error:
        open_engine_set(folder, bundle)
    return str(error.value)


def value(**values: object) -> Change:
    return lambda content: content.update(values)


def shapes(content: dict[str, Any], graph: str, profile: int, name: str) -> dict[str, list[int]]:
    return content["graphs"][graph]["profiles"][profile]["shapes"][name]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_build_engine_writes_is_accepted(bundle, dtype: str) -> None:
    folder = write_engines(bundle, "one", dtype=dtype, max_batch_size=65535, max_model_len=512, num_speculative_tokens=6, prefill_rows=512)
    assert open_engine_set(folder, bundle).manifest.dtype == dtype


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        *((value(num_speculative_tokens=count), f"num_speculative_tokens: expected 1 to 6, found {count}") for count in (-1, 0, 7, 10**9)),
        *((value(max_model_len=length), f"max_model_len: expected 128 to 512, found {length}") for length in (-1, 0, 127, 513, 10**12)),
        *((value(max_batch_size=size), f"max_batch_size: expected 1 to 65535, found {size}") for size in (0, 65536)),
        *((value(prefill_rows=rows), f"prefill_rows: expected 128 to 160, found {rows}") for rows in (0, 127, 161)),
        (value(max_model_len=10**4000), f"max_model_len: expected 128 to 512, found 1{'0' * 39}\n"),
        (value(dtype="float64"), "dtype: expected float32, float16, bfloat16, found 'float64'"),
        (value(weights="int4"), "weights: expected float32 or float8_e4m3fn, found 'int4'"),
        (value(dtype="float16"), "graphs.backbone: inputs.features: expected float16 [batch, feature_rows, 64], found float32"),
        (value(max_model_len=200), "key_cache.0: expected float32 [batch, 2, 205, 16], found float32 [batch, 2, 165, 16]"),
        (value(num_speculative_tokens=3), "graphs.head: inputs.hidden: expected float32 [batch, 3, 32], found float32 [batch, 4, 32]"),
    ],
)
def test_values_that_no_engines_of_the_bundle_have_are_refused(bundle, change: Change, problem: str) -> None:
    message = refusal(bundle, change)
    assert problem in message
    assert message.endswith("domino-deploy build-engine.")
    assert len(message) < 10_000


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda head: head["inputs"].pop(0), "graphs.head: inputs.anchor_ids: missing"),
        (lambda head: head["inputs"].append({**head["inputs"][0], "name": "more"}), "graphs.head: inputs.more: unknown"),
        (lambda head: head["inputs"].append(head["inputs"][0]), "graphs.head: inputs: expected anchor_ids, hidden, base_logits, each once"),
        (lambda head: head["inputs"].reverse(), "graphs.head: inputs: expected anchor_ids, hidden, base_logits, each once"),
        (lambda head: head["outputs"][0].update(dtype="float8"), "outputs.draft_ids: expected int64 [batch, 4], found float8 [batch, 4]"),
        (lambda head: head["outputs"][0].update(shape=["batch", 10**9]), "draft_ids: expected int64 [batch, 4], found int64 [batch, 1000"),
    ],
)
def test_other_inputs_and_outputs_are_refused(bundle, change: Change, problem: str) -> None:
    assert problem in refusal(bundle, lambda content: change(content["graphs"]["head"]))


@pytest.mark.parametrize(
    "change",
    [
        {"min": [3, 1]},
        {"min": [0, 1]},
        {"opt": [2, 129]},
        {"max": [2, 10**9]},
        {"max": [3, 128]},
        {"max": [2]},
        {"min": [], "opt": [], "max": []},
    ],
)
def test_profiles_out_of_range_or_order_are_refused(bundle, change: dict[str, list[int]]) -> None:
    message = refusal(bundle, lambda content: shapes(content, "target", 1, "input_ids").update(change))
    assert "graphs.target: profiles.prefill.input_ids: expected min <= opt <= max between [1, 1] and [2, 128], found [" in message


def test_fixed_sizes_of_a_profile_are_those_of_the_graph(bundle) -> None:
    message = refusal(bundle, lambda content: shapes(content, "target", 0, "attention_mask").update(max=[2, 1, 5, 166]))
    assert "profiles.verify.attention_mask: expected min <= opt <= max between [1, 1, 1, 165] and [2, 1, 128, 165]" in message


@pytest.mark.parametrize("graph", PROFILE_NAMES)
def test_profiles_missing_or_of_other_names_are_refused(bundle, graph: str) -> None:
    message = refusal(bundle, lambda content: content["graphs"][graph].update(profiles=[]))
    assert f"graphs.{graph}: profiles: expected {', '.join(PROFILE_NAMES[graph])}, found none" in message


def test_inputs_of_a_profile_are_those_of_the_graph(bundle) -> None:
    def change(content: dict[str, Any]) -> None:
        named = content["graphs"]["head"]["profiles"][0]["shapes"]
        named["tokens"] = named.pop("anchor_ids")

    message = refusal(bundle, change)
    assert "profiles.rollout.anchor_ids: missing" in message
    assert "profiles.rollout.tokens: unknown" in message


def test_every_problem_is_in_one_message(bundle) -> None:
    def change(content: dict[str, Any]) -> None:
        content.update(num_speculative_tokens=10**9, dtype="float8", max_batch_size=0)
        content["graphs"]["head"]["file"] = "other.engine"

    message = refusal(bundle, change)
    for problem in ("num_speculative_tokens: ", "dtype: ", "max_batch_size: ", "graphs.head: expected head.engine", "and "):
        assert problem in message


def test_folders_of_builds_that_run_or_were_killed_are_no_candidates(bundle) -> None:
    kept = write_engines(bundle, "kept")
    write_engines(bundle, ".a-build-1234")
    assert open_engines(bundle, HOST).path == kept
    kept.rename(bundle.path / ENGINES_FOLDER / ".kept")
    with pytest.raises(EngineError, match="found none"):
        open_engines(bundle, HOST)
