"""A whole run: from prompts to a drafter, interrupted and resumed, in parts and in several processes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.errors import RequestError, TrainingError
from domino_deploy.model.loading import load_target
from domino_deploy.training import trainer
from domino_deploy.training.answer_options import Answering
from domino_deploy.training.batches import Drawer, assemble
from domino_deploy.training.features import corpus_of
from domino_deploy.training.initialise import drafter_config, started_drafter
from domino_deploy.training.objective import DraftLoss, total_weight
from domino_deploy.training.pipeline import train_from_prompts, usable
from domino_deploy.training.prompt_file import read_conversations
from domino_deploy.training.recipe import Recipe
from domino_deploy.training.samples import Sample
from domino_deploy.training.store import CLAIM, SampleStore, read_stored
from tests.support.checkpoints import write_target

RECIPE = Recipe(
    num_layers=1,
    block_size=4,
    num_taps=2,
    emb_dim=8,
    gru_hidden_dim=16,
    mask_token_id=3,
    steps=24,
    sequences=4,
    anchors=4,
    frequent_tokens=50,
    random_tokens=20,
    held_out=4,
    evaluate_every=10,
    checkpoint_every=8,
    learning_rate=5e-3,
    save_dtype="float32",
)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target") / "target", num_hidden_layers=6)


@pytest.fixture(scope="module")
def answered(target_folder, tmp_path_factory):
    """A work folder with 28 responses and their features; copied, never written to."""
    work = tmp_path_factory.mktemp("answered") / "work"
    prompts = write_prompts(work.parent / "prompts.jsonl")
    with pytest.raises(TrainingError, match="hold out fewer"):  # enough to answer, not enough to train
        run(target_folder, work.parent / "out", work, dataclasses.replace(RECIPE, held_out=1000), prompts=prompts)
    return work


@pytest.fixture
def work(answered, tmp_path):
    return shutil.copytree(answered, tmp_path / "work")


def write_prompts(path, count=28):
    words = ["red", "green", "blue", "fast", "slow", "old"]
    path.write_text("".join(json.dumps({"prompt": f"Tell me about {words[i % 6]} thing number {i}."}) + "\n" for i in range(count)))
    return path


def run(target_folder, output, work, recipe=RECIPE, *, prompts=None, variables=None, **options):
    conversations = read_conversations(prompts) if prompts else []
    answering = Answering(max_new_tokens=16, batch_size=8, template_variables=variables or {})
    return train_from_prompts(target_folder, conversations, output, work=work, recipe=recipe, answering=answering, device="cpu", **options)


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_close(folder, other, rtol=2e-4, atol=2e-5):
    found, expected = tensors_of(folder), tensors_of(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


class Interrupt(Exception):
    pass


def interrupt_at(step):
    def tell(progress):
        if progress.phase == "training" and progress.done > step:
            raise Interrupt

    return tell


def test_a_run_learns_and_writes_everything(target_folder, tmp_path):
    prompts, recipe = write_prompts(tmp_path / "p.jsonl"), dataclasses.replace(RECIPE, steps=150)
    found = run(target_folder, tmp_path / "out", tmp_path / "work", recipe, prompts=prompts)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "metrics.jsonl", "metrics.png", "model.safetensors", "recipe.json",
    ]  # fmt: skip
    lines = metrics_of(tmp_path / "out")
    losses = [line["final_loss"] for line in lines if "final_loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    assert {"step", "seconds", "lambda", "learning_rate", "loss", "base_loss", "base_tau", "final_tau", "tokens_per_second"} <= lines[
        0
    ].keys()
    assert (round(found.final_tau, 4), round(found.base_tau, 4)) == (lines[-1]["held_out_tau"], lines[-1]["held_out_base_tau"])
    assert json.loads((tmp_path / "out" / "recipe.json").read_text()) == dataclasses.asdict(recipe)
    assert open_drafter(tmp_path / "out").config == drafter_config(open_target(target_folder).config, recipe)
    assert not (tmp_path / "work" / trainer.CHECKPOINT).exists()  # nothing to go on with


def test_dflash_is_trained_without_a_head(target_folder, tmp_path, work):
    found = run(target_folder, tmp_path / "out", work, dataclasses.replace(RECIPE, kind="dflash"))
    assert found.final == found.base
    assert not [name for name in tensors_of(tmp_path / "out") if name.startswith(("prefix_gru", "embed_proj"))]
    assert "final_tau" not in metrics_of(tmp_path / "out")[0]


@pytest.mark.parametrize("parts", [{}, {"soft_labels": 0.5}, {"features": "live"}, {"causal_encoding": "training-time-test"}], ids=str)
def test_an_interrupted_run_gives_bit_for_bit_what_an_uninterrupted_one_gives(target_folder, tmp_path, work, parts):
    recipe = dataclasses.replace(RECIPE, **parts)
    run(target_folder, tmp_path / "whole", work, recipe)
    for step in (0, 19):  # before the first state; between two of them
        with pytest.raises(Interrupt):
            run(target_folder, tmp_path / "out", work, recipe, on_progress=interrupt_at(step))
    assert not (tmp_path / "out").exists()
    run(target_folder, tmp_path / "out", work, recipe)
    whole, resumed = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "out")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    drop = ("seconds", "tokens_per_second")
    lines = [[{k: v for k, v in line.items() if k not in drop} for line in metrics_of(tmp_path / name)] for name in ("whole", "out")]
    assert lines[0] == lines[1]


def test_a_run_interrupted_behind_its_last_step_is_finished(target_folder, tmp_path, work, monkeypatch):
    def full(*_, **__):
        raise TrainingError("no room")

    whole = run(target_folder, tmp_path / "whole", work)
    monkeypatch.setattr(trainer, "save_drafter", full)
    with pytest.raises(TrainingError, match="no room"):
        run(target_folder, tmp_path / "out", work)
    monkeypatch.undo()
    assert run(target_folder, tmp_path / "out", work) == whole
    assert all(torch.equal(tensors_of(tmp_path / "out")[name], tensor) for name, tensor in tensors_of(tmp_path / "whole").items())


def test_a_state_of_another_run_is_refused_by_name_and_kept(target_folder, tmp_path, work):
    with pytest.raises(Interrupt):
        run(target_folder, tmp_path / "out", work, on_progress=interrupt_at(19))
    with pytest.raises(TrainingError, match=r"gamma: expected 9\.0, found 4\.0(.|\n)*--restart"):
        run(target_folder, tmp_path / "out", work, dataclasses.replace(RECIPE, gamma=9.0))
    assert (work / trainer.CHECKPOINT).exists()
    run(target_folder, tmp_path / "out", work, dataclasses.replace(RECIPE, gamma=9.0), restart=True)


@pytest.mark.parametrize("damage", ["state.json", "state.safetensors"])
def test_a_damaged_state_is_refused(target_folder, tmp_path, work, damage):
    with pytest.raises(Interrupt):
        run(target_folder, tmp_path / "out", work, on_progress=interrupt_at(19))
    path = work / trainer.CHECKPOINT / damage
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TrainingError, match="--restart"):
        run(target_folder, tmp_path / "out", work)


def test_a_state_that_cannot_be_written_leaves_the_one_before(target_folder, tmp_path, work, monkeypatch):
    calls = []

    def full(tensors, path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    run(target_folder, tmp_path / "whole", work)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(TrainingError, match="No space left"):
        run(target_folder, tmp_path / "out", work)
    monkeypatch.undo()
    assert json.loads((work / trainer.CHECKPOINT / "state.json").read_text())["steps"] == 8
    run(target_folder, tmp_path / "out", work)
    assert all(torch.equal(tensors_of(tmp_path / "out")[name], tensor) for name, tensor in tensors_of(tmp_path / "whole").items())


@pytest.mark.parametrize("parts", [{}, {"soft_labels": 0.5, "accept_until_fail": True}], ids=str)
def test_micro_batches_give_what_one_pass_gives(target_folder, tmp_path, work, parts):
    recipe = dataclasses.replace(RECIPE, steps=12, **parts)
    run(target_folder, tmp_path / "one", work, recipe)
    run(target_folder, tmp_path / "four", work, dataclasses.replace(recipe, micro_batch=1))
    assert_close(tmp_path / "four", tmp_path / "one")


def torchrun(target_folder, output, work, processes, recipe, *options, check=True):
    """`train` in several processes, as torchrun starts them: its environment, without its agent (which is slow to start)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (work.parent / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    command = [sys.executable, "-m", "domino_deploy.cli", "train", "--target", target_folder, "--work", work, "-o", output]
    command += ["--recipe", work.parent / "recipe.json", "--device", "cpu", "--max-new-tokens", "16", *options]
    common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            list(map(str, command)),
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    results = [(process.communicate(timeout=240), process.returncode) for process in started]
    if check:
        assert [code for _, code in results] == [0] * processes, results
    return results


def test_two_processes_give_what_one_gives(target_folder, tmp_path, work):
    recipe = dataclasses.replace(RECIPE, steps=12, evaluate_every=6, checkpoint_every=5)
    one = run(target_folder, tmp_path / "one", work, recipe)
    results = torchrun(target_folder, tmp_path / "two", work, 2, recipe)
    assert_close(tmp_path / "two", tmp_path / "one")
    # One of them speaks, and measures what both walked.
    assert [bool(out) for (out, _), _ in results] == [True, False]
    last = metrics_of(tmp_path / "two")[-1]
    assert last["held_out_tau"] == pytest.approx(one.final_tau, abs=0.05)
    for found, expected in zip(metrics_of(tmp_path / "two"), metrics_of(tmp_path / "one"), strict=True):
        assert found["step"] == expected["step"]
        assert found.get("loss", 0) == pytest.approx(expected.get("loss", 0), rel=1e-3)


def test_two_processes_answer_the_prompts_together_and_resume(target_folder, tmp_path, work):
    prompts = write_prompts(tmp_path / "p.jsonl")
    recipe = dataclasses.replace(RECIPE, steps=12, micro_batch=1)
    torchrun(target_folder, tmp_path / "out", tmp_path / "new", 2, recipe, "--prompts", prompts)
    assert sorted(path.name for path in (tmp_path / "new").glob("*-*.*")) == [
        "features-0.f16", "features-1.f16", "made-for.json", "responses-0.jsonl", "responses-1.jsonl",
    ]  # fmt: skip
    alone = {sample.prompt_ids: sample.response_ids for sample in read_stored(work).samples}
    assert {sample.prompt_ids: sample.response_ids for sample in read_stored(tmp_path / "new").samples} == alone
    # Each took two passes a step and exchanged gradients at the last of them only: the same as one pass of one process.
    run(target_folder, tmp_path / "one", tmp_path / "new", dataclasses.replace(recipe, micro_batch=0))
    assert_close(tmp_path / "out", tmp_path / "one")
    # An interrupted run of one process goes on in two.
    with pytest.raises(Interrupt):
        run(target_folder, tmp_path / "resumed", work, RECIPE, on_progress=interrupt_at(19))
    torchrun(target_folder, tmp_path / "resumed", work, 2, RECIPE)
    run(target_folder, tmp_path / "whole", work, RECIPE)
    assert_close(tmp_path / "resumed", tmp_path / "whole")


def test_processes_that_cannot_share_a_step_are_refused(target_folder, tmp_path, work):
    results = torchrun(target_folder, tmp_path / "out", work, 2, dataclasses.replace(RECIPE, sequences=3), check=False)
    assert [code for _, code in results] == [1, 1]
    assert "multiple of the processes (2)" in results[0][0][1]


def test_a_run_goes_on_from_a_trained_drafter(target_folder, tmp_path, work):
    run(target_folder, tmp_path / "first", work, dataclasses.replace(RECIPE, steps=150))
    run(target_folder, tmp_path / "more", work, dataclasses.replace(RECIPE, steps=2, learning_rate=1e-9), start=tmp_path / "first")
    assert_close(tmp_path / "more", tmp_path / "first", rtol=1e-3, atol=1e-5)


def test_a_start_of_another_shape_is_refused_by_field(target_folder, tmp_path, work):
    run(target_folder, tmp_path / "first", work)
    with pytest.raises(TrainingError, match="emb_dim must be 12, found 8"):
        run(target_folder, tmp_path / "more", work, dataclasses.replace(RECIPE, emb_dim=12), start=tmp_path / "first")
    assert not (tmp_path / "more").exists()


def test_the_same_seed_gives_the_same_drafter_and_another_one_another(target_folder, tmp_path, work):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(target_folder, tmp_path / name, work, dataclasses.replace(RECIPE, seed=seed))
    first, second, other = (tensors_of(tmp_path / name) for name in "abc")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_an_existing_output_is_kept_unless_forced(target_folder, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(TrainingError, match="--force"):
        run(target_folder, tmp_path / "out", tmp_path / "work", prompts=write_prompts(tmp_path / "p.jsonl"))
    assert not (tmp_path / "work").exists()


def test_only_a_drafter_is_replaced(target_folder, tmp_path, work):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(TrainingError, match="expected a drafter to replace"):
        run(target_folder, tmp_path / "out", work, overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").exists()


def test_a_forced_run_replaces_the_whole_drafter(target_folder, tmp_path, work):
    run(target_folder, tmp_path / "out", work, dataclasses.replace(RECIPE, steps=1))
    (tmp_path / "out" / "stray.txt").write_text("of the old one")
    run(target_folder, tmp_path / "out", work, dataclasses.replace(RECIPE, steps=2), overwrite=True)
    assert not (tmp_path / "out" / "stray.txt").exists()
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["steps"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "work"]


def test_responses_of_another_target_are_not_taken(target_folder, tmp_path, work):
    other = write_target(tmp_path / "other", num_hidden_layers=6, seed=5)
    with pytest.raises(TrainingError, match="other weights"):
        run(other, tmp_path / "out", work)
    with pytest.raises(TrainingError, match="made for something else"):
        run(other, tmp_path / "out", work, prompts=write_prompts(tmp_path / "p.jsonl"))
    assert not (tmp_path / "out").exists()


def test_a_drafter_says_what_its_prompts_were_rendered_with(target_folder, tmp_path):
    work, prompts, short = tmp_path / "work", write_prompts(tmp_path / "p.jsonl"), dataclasses.replace(RECIPE, steps=2)
    calm = {"enable_thinking": False}
    for bad in ({"tools": 1}, {"enable_thinking": None}):
        with pytest.raises(RequestError, match=next(iter(bad))):
            Answering(template_variables=bad)
    run(target_folder, tmp_path / "first", work, short, prompts=prompts, variables=calm)
    run(target_folder, tmp_path / "second", work, short)  # the work folder notes it
    for name in ("first", "second"):
        assert json.loads((tmp_path / name / "config.json").read_text())["chat_template_kwargs"] == calm
    with pytest.raises(TrainingError, match=r"chat_template_kwargs: expected \{\}, found"):
        run(target_folder, tmp_path / "third", work, short, prompts=prompts)
    with pytest.raises(TrainingError, match=r"template variables .*false}, which its prompts"):
        run(target_folder, tmp_path / "third", work, short, variables={"enable_thinking": True})
    note = work / CLAIM
    note.write_text(json.dumps({name: value for name, value in json.loads(note.read_text()).items() if name != "chat_template_kwargs"}))
    run(target_folder, tmp_path / "third", work, short, variables=calm)  # a note of an earlier version: it is the caller who knows
    run(target_folder, tmp_path / "fourth", work, short, prompts=prompts, variables=calm)  # from here on it is noted
    with pytest.raises(TrainingError, match=r"chat_template_kwargs: expected \{\}, found"):
        run(target_folder, tmp_path / "fifth", work, short, prompts=prompts)
    for name in ("third", "fourth"):
        assert json.loads((tmp_path / name / "config.json").read_text())["chat_template_kwargs"] == calm


def test_samples_with_the_mask_token_or_foreign_tokens_are_named(target_folder, tmp_path, work):
    samples = read_stored(work).samples
    masked = samples[5].response_ids[3]
    with pytest.raises(TrainingError, match=rf"sample 5: token {masked}, which is to stand for MASK"):
        run(target_folder, tmp_path / "out", work, dataclasses.replace(RECIPE, mask_token_id=masked))
    path = work / "responses-0.jsonl"
    path.write_text(path.read_text().replace(f" {masked},", " 999999,"))
    with pytest.raises(TrainingError, match="token 999999, outside the target's vocabulary"):
        run(target_folder, tmp_path / "out", work)


def test_a_work_folder_without_responses_is_refused(target_folder, tmp_path):
    with pytest.raises(TrainingError, match="domino-deploy regenerate"):
        run(target_folder, tmp_path / "out", tmp_path / "nowhere")
    SampleStore.open(tmp_path / "empty", claim={})
    with pytest.raises(TrainingError, match="domino-deploy regenerate"):
        run(target_folder, tmp_path / "out", tmp_path / "empty")


def test_samples_without_a_label_and_too_long_ones_are_left_out():
    lengths = [1, 2, 9, 30, 31]
    samples = [Sample(prompt_ids=(7, number), response_ids=tuple(range(length))) for number, length in enumerate(lengths)]
    recipe = dataclasses.replace(RECIPE, held_out=1, max_length=32)
    assert sorted(usable(samples, recipe)) == [1, 2, 3]
    assert usable(samples, recipe) == usable(samples, recipe)
    with pytest.raises(TrainingError, match="found 3 of 5"):
        usable(samples, dataclasses.replace(recipe, held_out=3))


def test_gradients_that_are_not_finite_stop_the_run_and_keep_the_last_state(target_folder, tmp_path, work, monkeypatch):
    real = trainer.learning_rate
    monkeypatch.setattr(trainer, "learning_rate", lambda step, steps, recipe: 1e30 if step == 10 else real(step, steps, recipe))
    with pytest.raises(TrainingError, match="finite gradients"):
        run(target_folder, tmp_path / "out", work)
    assert json.loads((work / trainer.CHECKPOINT / "state.json").read_text())["steps"] == 8
    assert not (tmp_path / "out").exists()


def test_a_bfloat16_run_keeps_fp32_masters(target_folder, tmp_path, work):
    recipe = dataclasses.replace(RECIPE, dtype="bfloat16", features="live", steps=40)
    with pytest.raises(Interrupt):
        run(target_folder, tmp_path / "out", work, recipe, on_progress=interrupt_at(19))
    state = load_file(work / trainer.CHECKPOINT / "state.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    fc = state["drafter.fc.weight/parameter"]
    assert not torch.equal(fc, fc.to(torch.bfloat16).float())


def test_soft_labels_pull_towards_the_targets_own_distribution(target_folder, tmp_path, work):
    """With the target's distribution as the only label, a drafter ends nearer to it than with the tokens as labels."""
    recipe = dataclasses.replace(RECIPE, steps=60, soft_labels=1.0, frequent_tokens=0)
    target, stored = load_target(open_target(target_folder), (1, 3, 5)).requires_grad_(False), read_stored(work)
    corpus = corpus_of(
        target, stored, usable(stored.samples, recipe), (1, 3), with_outputs=True, live=True, dtype=torch.float32, path=tmp_path / "unused"
    )
    draw = Drawer(corpus.samples, range(20), sequences=20, anchors=4, seed=9).at(0)
    config, ends = drafter_config(target.config, recipe), (target.model.embed_tokens, target.lm_head)
    weight = total_weight(corpus.samples, draw, config.num_proposals, recipe.gamma)

    def cross_entropy(share):
        folder = tmp_path / str(share)
        run(target_folder, folder, work, dataclasses.replace(recipe, soft_labels=share))
        drafter = started_drafter(open_drafter(folder), config, corpus.scales)
        batch = assemble(corpus, draw, config, torch.device("cpu"), with_outputs=True)
        with torch.no_grad():
            _, final, *_ = DraftLoss(drafter, recipe)(batch, torch.arange(config.vocab_size), *ends, 0.0, weight).sums.tolist()
        return final

    hard, soft = cross_entropy(0.0), cross_entropy(1.0)
    assert soft < hard
