"""Calibration for float8: what it finds, and text that it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.cli import build_engine, main
from domino_deploy.config_json import from_json, to_json
from domino_deploy.engines import Calibration
from domino_deploy.errors import ExportError, RequestError
from domino_deploy.exporters import fp8_calibration
from domino_deploy.exporters.fp8 import CalibrationText, quantise_fp8
from domino_deploy.exporters.fp8_calibration import built_in_text, calibrate
from domino_deploy.exporters.stored import StoredTensor, load_stored, read_tensor, stored_tensors
from domino_deploy.model.spec_generate import propose, reference_target
from domino_deploy.runtime.text import Tokenizer

PROMPTS = [[3 + (7 * token) % 290 for token in range(40)], [5, 250, 17, 99, 4, 4, 120, 31]]
TEXT = CalibrationText(source="test", prompts=PROMPTS)
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def bundle(tiny_float16_bundle: Path) -> Bundle:
    return open_bundle(tiny_float16_bundle)


@pytest.fixture(scope="module")
def calibration(bundle: Bundle) -> Calibration:
    return calibrate(bundle, TEXT)


def test_calibration_finds_what_the_whole_models_see(bundle: Bundle, calibration: Calibration) -> None:
    target, _ = load_stored(bundle)
    seen: dict[str, float] = {}
    for name, linear in target.named_modules():
        if isinstance(linear, nn.Linear):
            linear.register_forward_pre_hook(
                lambda _, inputs, full=f"target.{name}.weight": seen.update({full: float(inputs[0].abs().max())})  # type: ignore[misc]
            )
    with torch.inference_mode():
        target.hidden_states(torch.tensor([[*PROMPTS[0], *PROMPTS[1]]]))
    own = {name: found for name, found in calibration.products.items() if name.startswith("target.")}
    assert {name: found.input for name, found in own.items()} == pytest.approx(seen, rel=1e-5)
    assert calibration.tokens == len(PROMPTS[0]) + len(PROMPTS[1])


def test_the_drafter_sees_what_it_sees_when_it_drafts(tiny_dflash_bundle: Path) -> None:
    """With a sliding layer, and over the contexts that calibration drafts behind: a quarter, half and three quarters of a sequence."""
    opened = open_bundle(tiny_dflash_bundle)
    found = calibrate(opened, TEXT).products
    target, drafter = load_stored(opened)
    seen: dict[str, float] = {}
    for name, module in drafter.layers.named_modules():  # type: ignore[attr-defined]  # it is a ModuleList
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, full=f"drafter.layers.{name}.weight": seen.update(  # type: ignore[misc]
                    {full: max(seen.get(full, 0.0), float(inputs[0].abs().max()))}
                )
            )
    ids = [*PROMPTS[0], *PROMPTS[1]]
    reference = reference_target(target)
    with torch.inference_mode():
        features = reference.forward(torch.tensor([ids]))[1][0]
        for context in (12, 24, 36):
            propose(reference, drafter, ids[context], features[:context], 2)
    assert {name: product.input for name, product in found.items() if name.startswith("drafter.")} == pytest.approx(seen, rel=1e-5)


def test_calibration_knows_the_matrices_of_both_models_as_they_are_stored(bundle: Bundle, calibration: Calibration) -> None:
    target = {f"target.model.layers.{layer}.{part}.weight" for layer in range(4) for part in PARTS}
    drafter = {f"drafter.layers.{layer}.{part}.weight" for layer in range(2) for part in PARTS}
    assert calibration.products.keys() == target | drafter
    for folder in ("target", "drafter"):
        for name, tensor in stored_tensors(bundle.path / folder).items():
            if f"{folder}.{name}" in calibration.products:
                assert calibration.products[f"{folder}.{name}"].weight == float(read_tensor(tensor).abs().max())


def test_the_drafters_inputs_depend_on_the_text(bundle: Bundle, calibration: Calibration) -> None:
    other = calibrate(bundle, dataclasses.replace(TEXT, prompts=[PROMPTS[0][::-1]]))
    name = "drafter.layers.1.mlp.down_proj.weight"
    assert 0 < other.products[name].input != calibration.products[name].input > 0
    assert other.sha256 != calibration.sha256


def test_the_same_text_gives_the_same_scales(bundle: Bundle, calibration: Calibration) -> None:
    assert calibrate(bundle, TEXT) == calibration


def test_long_text_is_cut_into_sequences_and_ends_at_a_limit(bundle: Bundle) -> None:
    steps: list[str] = []
    found = calibrate(bundle, CalibrationText(source="prompts.jsonl", prompts=[PROMPTS[0]] * 200), progress=steps.append)
    assert (found.tokens, found.source) == (4096, "prompts.jsonl")
    assert steps == [f"Calibrating layer {layer} of 4" for layer in (1, 2, 3, 4)] + ["Calibrating the drafter"]


def test_a_value_that_is_no_number_is_kept_for_the_pass_to_refuse(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(tensor: StoredTensor) -> Tensor:
        values = read_tensor(tensor)
        if values.dim() == 1:
            values[0] = math.nan
        return values

    monkeypatch.setattr(fp8_calibration, "read_tensor", poisoned)
    found = calibrate(bundle, TEXT)
    with pytest.raises(ExportError, match=r"target\.model\.layers\.3\.mlp\.down_proj\.weight: nan"):
        quantise_fp8(ir.load(bundle.path / "target.onnx"), found.products)


@pytest.mark.parametrize(
    ("prompts", "message"), [([], "at least 16 tokens"), ([[1] * 15], "found 15"), ([[1] * 15 + [300]], r"from 0 to 299, found \[300\]")]
)
def test_text_that_cannot_be_used_is_refused(bundle: Bundle, prompts: list[list[int]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        calibrate(bundle, dataclasses.replace(TEXT, prompts=prompts))


def test_the_built_in_text_is_put_into_the_chat_template_if_there_is_one(bundle: Bundle) -> None:
    file = bundle.path / "tokenizer.json"
    plain = built_in_text(Tokenizer(file)).prompts
    chat = built_in_text(Tokenizer(file, chat_template=(bundle.path / "chat_template.jinja").read_text(encoding="utf-8"))).prompts
    decode = Tokenizer(file).decode
    assert len(plain) == len(chat) == 8
    assert decode(plain[2]).startswith("Why does ice float on water?\n\nMost substances")
    assert decode(chat[2]).startswith("user\nWhy does ice float on water?\nassistant\nMost substances")


def test_a_calibration_survives_the_manifest(calibration: Calibration) -> None:
    assert from_json(Calibration, json.loads(json.dumps(to_json(calibration))), "engines.json") == calibration


class TestCommand:
    def test_a_files_prompts_are_put_into_the_chat_template(self, bundle: Bundle, tmp_path: Path) -> None:
        file = tmp_path / "own.jsonl"
        file.write_text('{"prompt": "Count to ten."}\n{"turns": ["Say more.", "And more."]}\n', encoding="utf-8")
        text = build_engine._calibration_text(bundle, file)
        decode = Tokenizer(bundle.path / "tokenizer.json").decode
        assert text.source == "own.jsonl"
        assert [decode(prompt) for prompt in text.prompts] == [f"user\n{words}\nassistant\n" for words in ("Count to ten.", "Say more.")]

    def test_calibration_without_float8_is_refused(self, bundle: Bundle, tmp_path: Path) -> None:
        file = tmp_path / "own.jsonl"
        file.write_text('{"prompt": "Count to ten."}\n', encoding="utf-8")
        found = CliRunner().invoke(main, ["build-engine", str(bundle.path), "--fp16", "--calibration", str(file), "--dry-run"])
        assert found.exit_code == 2
        assert "calibration: expected it with float8 only" in found.output

    def test_a_file_that_is_not_there_is_named(self, bundle: Bundle, tmp_path: Path) -> None:
        found = CliRunner().invoke(main, ["build-engine", str(bundle.path), "--fp8", "--calibration", str(tmp_path / "none.jsonl")])
        assert found.exit_code == 1
        assert "none.jsonl: expected a JSONL file of prompts" in found.output
