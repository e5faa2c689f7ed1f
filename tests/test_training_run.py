"""Regeneration, features, evaluation, saving and a whole small run."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.config import RopeConfig, RopeType
from domino_deploy.errors import CheckpointError, TrainingError
from domino_deploy.model.loading import load_drafter, load_target
from domino_deploy.model.spec_generate import reference_target, spec_generate
from domino_deploy.training.evaluate import acceptance
from domino_deploy.training.features import corpus_of
from domino_deploy.training.initialise import drafter_config, new_drafter
from domino_deploy.training.pipeline import train_from_prompts
from domino_deploy.training.prompt_file import read_messages
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.regenerate import Sample, decode_batch, read_samples, regenerate
from domino_deploy.training.save import save_drafter
from tests.support.checkpoints import write_target

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13, 14), (15,)]
RECIPE = Recipe(
    num_layers=1,
    block_size=4,
    num_taps=2,
    emb_dim=8,
    gru_hidden_dim=16,
    mask_token_id=3,
    steps=40,
    sequences=2,
    anchors=4,
    frequent_tokens=50,
    random_tokens=20,
    held_out=2,
    evaluate_every=40,
    learning_rate=5e-3,
)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target") / "target", num_hidden_layers=6)


@pytest.fixture(scope="module")
def target(target_folder):
    return load_target(open_target(target_folder), (1, 3)).requires_grad_(False)


def plain_greedy(target, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        hidden, _ = target.hidden_states(torch.tensor([tokens]))
        tokens.append(int(target.lm_head(hidden[0, -1]).argmax()))
        if tokens[-1] in target.config.eos_token_ids:
            break
    return tokens[len(prompt) :]


def test_batched_responses_equal_greedy_decoding_one_by_one(target):
    for prompt, response in zip(PROMPTS, decode_batch(target, PROMPTS, 20), strict=True):
        assert response == plain_greedy(target, prompt, 20)[: len(response)]
        assert len(response) == 20 or response[-1] in target.config.eos_token_ids


def test_rows_that_finish_early_do_not_disturb_the_others(target):
    responses = decode_batch(target, PROMPTS, 20)
    # Calling one of the drawn tokens an end-of-text token makes rows end at different steps.
    stopping = dataclasses.replace(target.config, eos_token_ids=(*target.config.eos_token_ids, max(responses, key=len)[2]))
    whole, target.config = target.config, stopping
    try:
        stopped = decode_batch(target, PROMPTS, 20)
    finally:
        target.config = whole
    assert sorted(map(len, stopped)) != sorted(map(len, responses))
    for full, short in zip(responses, stopped, strict=True):
        assert short == full[: len(short)]


def test_a_response_that_loops_is_cut(target, monkeypatch):
    monkeypatch.setattr("domino_deploy.training.regenerate._forward", lambda *_: torch.tensor([9]))
    assert len(decode_batch(target, [(4, 5)], 200)[0]) == 32


def test_regeneration_resumes_where_it_stopped(target, tmp_path):
    output = tmp_path / "responses.jsonl"
    first = regenerate(target, PROMPTS[:2], output, max_new_tokens=6, batch_size=2)
    second = regenerate(target, PROMPTS, output, max_new_tokens=6, batch_size=2)
    samples = read_samples(output)
    assert sorted(sample.prompt_ids for sample in samples) == sorted(PROMPTS)
    assert first + second == sum(len(sample.response_ids) for sample in samples)
    assert regenerate(target, PROMPTS, output, max_new_tokens=6, batch_size=2) == 0


def test_a_damaged_line_of_samples_is_named(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"prompt_ids": [1], "response_ids": [2]}\n{"prompt_ids": [1], "resp')
    with pytest.raises(TrainingError, match="line 2"):
        read_samples(path)


def samples_of(target, count=8, length=24):
    prompts = [(5 + i, 7 + i, 20 + i) for i in range(count)]
    responses = decode_batch(target, prompts, length)
    return [Sample(prompt_ids=p, response_ids=tuple(r)) for p, r in zip(prompts, responses, strict=True)]


def test_cached_features_are_the_targets_and_are_computed_once(target, tmp_path):
    samples = samples_of(target, 4)
    path = tmp_path / "features.f16"
    corpus = corpus_of(target, samples, path, dtype=torch.float32)
    for index, sample in enumerate(samples):
        _, features = target.hidden_states(torch.tensor([sample.token_ids]))
        np.testing.assert_allclose(corpus.features(index), features[0].numpy(), rtol=2e-3, atol=2e-3)
    assert not path.with_suffix(".part").exists()
    rows: list[int] = []
    corpus_of(target, samples, path, dtype=torch.float32, on_rows=rows.append)
    assert rows == []


def test_features_of_the_same_samples_in_another_order_are_computed_again(target, tmp_path):
    samples, path = samples_of(target, 4), tmp_path / "features.f16"
    corpus_of(target, samples, path, dtype=torch.float32)
    corpus = corpus_of(target, samples[::-1], path, dtype=torch.float32)
    _, features = target.hidden_states(torch.tensor([samples[-1].token_ids]))
    np.testing.assert_allclose(corpus.features(0), features[0].numpy(), rtol=2e-3, atol=2e-3)


def test_tap_scales_are_the_rms_of_each_tap(target, tmp_path):
    samples = samples_of(target, 4)
    corpus = corpus_of(target, samples, tmp_path / "features.f16", dtype=torch.float32)
    per_tap = np.asarray(corpus.rows, dtype=np.float32).reshape(len(corpus.rows), 2, -1)
    # torch's median of an even number of values is the lower one.
    expected = torch.from_numpy(np.sqrt((per_tap**2).mean(-1))).median(dim=0).values
    torch.testing.assert_close(corpus.scales, expected)


def test_offline_tau_equals_the_real_speculative_loop(target, tmp_path):
    samples = samples_of(target)
    config = drafter_config(target.config, RECIPE)
    drafter = new_drafter(target, config, torch.tensor([samples[0].token_ids])).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        drafter.head.codebook_VR.normal_(std=0.5)
    corpus = corpus_of(target, samples, tmp_path / "features.f16", dtype=torch.float32)
    found = acceptance(drafter, target, corpus, range(len(samples)))

    save_drafter(drafter, corpus.scales, tmp_path / "drafter", dtype=torch.float32)
    saved = load_drafter(open_drafter(tmp_path / "drafter"))
    tokens = passes = 0
    for sample in samples:
        limit = len(sample.response_ids)
        eos = target.config.eos_token_ids
        cycles = list(spec_generate(reference_target(target), saved, sample.prompt_ids, max_new_tokens=limit, stop_token_ids=eos))
        assert tuple(t for cycle in cycles for t in cycle.token_ids) == sample.response_ids
        tokens += sum(len(cycle.token_ids) for cycle in cycles[1:])
        passes += len(cycles) - 1
    assert found.final_tau == pytest.approx(tokens / passes)


@pytest.mark.parametrize(("count", "layers", "expected"), [(5, 36, (1, 9, 17, 25, 33)), (1, 36, (18,))])
def test_taps_follow_the_published_formula(target, count, layers, expected):
    deep = dataclasses.replace(target.config, num_layers=layers)
    assert drafter_config(deep, dataclasses.replace(RECIPE, num_taps=count)).target_layer_ids == expected


def test_more_taps_than_the_target_has_room_for_are_refused(target):
    with pytest.raises(TrainingError, match="num_taps"):
        drafter_config(target.config, dataclasses.replace(RECIPE, num_taps=5))


def test_a_saved_drafter_has_the_public_layout_and_opens_again(target, tmp_path):
    config = drafter_config(target.config, RECIPE)
    drafter = new_drafter(target, config, torch.tensor([[5, 6, 7, 8]]))
    save_drafter(drafter, torch.tensor([3.0, 0.5]), tmp_path / "drafter")
    reopened = open_drafter(tmp_path / "drafter")
    assert reopened.config == config
    written = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert written["dflash_config"].keys() == {
        "mask_token_id", "target_layer_ids", "shift_label", "projector_type", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim",
    }  # fmt: skip
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert tensors.keys() == drafter.state_dict().keys()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=5e5, type=RopeType.LINEAR, factor=2.0),
        RopeConfig(
            theta=5e5, type=RopeType.LLAMA3, factor=8.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_position_embeddings=128
        ),
        RopeConfig(
            theta=5e5,
            type=RopeType.YARN,
            factor=4.0,
            beta_fast=30.0,
            beta_slow=2.0,
            attention_factor=1.2,
            original_max_position_embeddings=128,
        ),
    ],
)
def test_rope_scaling_and_sliding_layers_survive_saving(target, tmp_path, rope):
    config = dataclasses.replace(drafter_config(target.config, RECIPE), rope=rope, sliding_layers=(True,), sliding_window=16)
    drafter = new_drafter(target, config, torch.tensor([[5, 6, 7, 8]]))
    save_drafter(drafter, torch.ones(2), tmp_path / "drafter")
    assert open_drafter(tmp_path / "drafter").config == config


def test_folding_the_tap_scales_changes_no_hidden_state(target, tmp_path):
    config = drafter_config(target.config, RECIPE)
    drafter = new_drafter(target, config, torch.tensor([[5, 6, 7, 8]])).eval()
    scales = torch.tensor([3.0, 0.5])
    save_drafter(drafter, scales, tmp_path / "drafter", dtype=torch.float32)
    saved = load_drafter(open_drafter(tmp_path / "drafter"))
    torch.manual_seed(0)
    features, block = torch.randn(1, 6, config.feature_size), target.model.embed_tokens(drafter.block_ids(torch.tensor([9])))
    positions, mask = torch.arange(10)[None], torch.ones(1, 1, 1, 10, dtype=torch.bool)
    with torch.no_grad():
        expected = drafter(block, features / scales.repeat_interleave(config.hidden_size), positions, mask)
        torch.testing.assert_close(saved(block, features, positions, mask), expected, rtol=1e-4, atol=1e-4)


def test_a_tensor_dropped_from_a_saved_drafter_is_noticed(target, tmp_path):
    drafter = new_drafter(target, drafter_config(target.config, RECIPE), torch.tensor([[5, 6, 7, 8]]))
    save_drafter(drafter, torch.ones(2), tmp_path / "drafter")
    file = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(file)
    del tensors["prefix_gru.weight_hh_l0"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"prefix_gru\.weight_hh_l0"):
        open_drafter(tmp_path / "drafter")


def write_prompts(path, count=24):
    words = ["red", "green", "blue", "fast", "slow", "old"]
    path.write_text("".join(json.dumps({"prompt": f"Tell me about {words[i % 6]} thing number {i}."}) + "\n" for i in range(count)))
    return path


def run(target_folder, prompts, output, work, recipe=RECIPE, **options):
    options = {"max_prompt_tokens": 200, "max_new_tokens": 12, "batch_size": 8} | options
    return train_from_prompts(target_folder, prompts, output, work=work, recipe=recipe, **options)


def test_a_small_run_learns_and_writes_everything(target_folder, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    recipe = dataclasses.replace(RECIPE, steps=150, evaluate_every=1000)
    found = run(target_folder, prompts, tmp_path / "out", tmp_path / "work", recipe, max_new_tokens=24)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["final_loss"] for line in lines if "final_loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    assert (round(found.final_tau, 4), round(found.base_tau, 4)) == (lines[-1]["held_out_tau"], lines[-1]["held_out_base_tau"])
    assert json.loads((tmp_path / "out" / "recipe.json").read_text()) == dataclasses.asdict(recipe)
    assert open_drafter(tmp_path / "out").config.block_size == 4


def test_a_run_goes_on_from_a_trained_drafter(target_folder, tmp_path):
    prompts, numbers = write_prompts(tmp_path / "prompts.jsonl"), {"max_prompt_tokens": 200, "max_new_tokens": 24, "batch_size": 8}
    first = dataclasses.replace(RECIPE, steps=150, evaluate_every=1000)
    train_from_prompts(target_folder, prompts, tmp_path / "first", work=tmp_path / "work", recipe=first, **numbers)
    more = dataclasses.replace(RECIPE, steps=2, learning_rate=1e-9)
    train_from_prompts(target_folder, prompts, tmp_path / "more", work=tmp_path / "work", recipe=more, start=tmp_path / "first", **numbers)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "more"))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=4e-3, atol=1e-4, msg=name)


def test_a_start_of_another_shape_is_refused_by_field(target_folder, tmp_path):
    prompts, numbers = write_prompts(tmp_path / "prompts.jsonl"), {"max_prompt_tokens": 200, "max_new_tokens": 8, "batch_size": 8}
    train_from_prompts(target_folder, prompts, tmp_path / "first", work=tmp_path / "work", recipe=RECIPE, **numbers)
    wider = dataclasses.replace(RECIPE, emb_dim=12)
    with pytest.raises(TrainingError, match="emb_dim must be 12, found 8"):
        train_from_prompts(
            target_folder, prompts, tmp_path / "more", work=tmp_path / "work", recipe=wider, start=tmp_path / "first", **numbers
        )
    assert not (tmp_path / "more").exists()


def test_the_same_seed_gives_the_same_drafter(target_folder, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    for name in ("a", "b"):
        run(target_folder, prompts, tmp_path / name, tmp_path / "work")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_existing_output_is_kept_unless_forced(target_folder, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(TrainingError, match="--force"):
        run(target_folder, write_prompts(tmp_path / "p.jsonl"), tmp_path / "out", tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_only_a_drafter_is_replaced(target_folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(TrainingError, match="expected a drafter to replace"):
        run(target_folder, write_prompts(tmp_path / "p.jsonl"), tmp_path / "out", tmp_path / "work", overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").exists()


def test_a_forced_run_replaces_the_whole_drafter(target_folder, tmp_path):
    prompts, recipe = write_prompts(tmp_path / "p.jsonl"), dataclasses.replace(RECIPE, steps=1, evaluate_every=1)
    run(target_folder, prompts, tmp_path / "out", tmp_path / "work", recipe)
    (tmp_path / "out" / "stray.txt").write_text("of the old one")
    run(target_folder, prompts, tmp_path / "out", tmp_path / "work", dataclasses.replace(recipe, steps=2), overwrite=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "recipe.json",
    ]
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["steps"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "p.jsonl", "work"]


def test_responses_of_another_target_are_not_taken(target_folder, tmp_path):
    prompts, recipe = write_prompts(tmp_path / "p.jsonl"), dataclasses.replace(RECIPE, steps=1, evaluate_every=1)
    run(target_folder, prompts, tmp_path / "a", tmp_path / "work", recipe)
    other = write_target(tmp_path / "other", num_hidden_layers=6)
    with pytest.raises(TrainingError, match="made for"):
        run(other, prompts, tmp_path / "b", tmp_path / "work", recipe)
    assert not (tmp_path / "b").exists()


def test_too_few_samples_are_refused(target_folder, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", count=2)
    with pytest.raises(TrainingError, match="more than 2 samples"):
        run(target_folder, prompts, tmp_path / "out", tmp_path / "work", max_new_tokens=4)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "at least one prompt"),
        ("not json\n", "line 1"),
        ('{"prompt": ""}\n', "line 1"),
        ('{"text": "hello"}\n', "line 1"),
        ('["hello"]\n', "line 1"),
        ('{"prompt": "a"}\n{"turns": [1]}\n', "line 2"),
        ('{"messages": [{"role": "robot", "content": "hi"}]}\n', "line 1"),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}\n', "last message"),
    ],
)
def test_prompt_files_that_cannot_be_used_are_named(tmp_path, text, found):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(TrainingError, match=found):
        read_messages(path)


def test_a_line_separator_inside_a_prompt_does_not_end_its_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
    assert read_messages(path) == [[{"role": "user", "content": "one\u2028two"}]]


@pytest.mark.parametrize(
    ("content", "found"),
    [(None, "No such file"), (b"\xff\n", "utf-8"), (b"[" * 100_000, "line 1: .*recursion")],
    ids=["missing", "not UTF-8", "nested"],
)
def test_a_prompt_file_that_cannot_be_read_is_refused(tmp_path, content, found):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TrainingError, match=found):
        read_messages(path)
