"""What breaks `regenerate` and `train`: each ends with one message and an exit code, and leaves alone what is not its own."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from domino_deploy import aside
from domino_deploy.cli import main
from domino_deploy.cli.console import template_variables
from domino_deploy.errors import RequestError, TrainingError
from domino_deploy.training import pipeline, trainer
from domino_deploy.training.distributed import process_of_torchrun
from domino_deploy.training.memory import enough_memory
from domino_deploy.training.recipe import Recipe, read_recipe, recipe_from
from tests.support.checkpoints import write_drafter, write_target, write_tokenizer

RECIPE = {
    "num_layers": 1,
    "block_size": 4,
    "num_taps": 2,
    "emb_dim": 8,
    "gru_hidden_dim": 16,
    "mask_token_id": 3,
    "steps": 2,
    "sequences": 4,
    "anchors": 4,
    "frequent_tokens": 50,
    "random_tokens": 20,
    "held_out": 4,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target", num_hidden_layers=6)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Tell me about {'x' * (1 + i % 5)} number {i}."}) + "\n" for i in range(20)))
    return path


@pytest.fixture(scope="module")
def answered(target: Path, prompts: Path) -> Path:
    """A work folder with responses and features; copied, never written to."""
    work = prompts.parent / "work"
    done = answer(target, prompts, work)
    assert done.exit_code == 0, done.stderr
    return work


@pytest.fixture
def work(answered: Path, tmp_path: Path) -> Path:
    return shutil.copytree(answered, tmp_path / "work")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def answer(target: Path, prompts: Path, work: Path, num_taps: int = 2) -> Result:
    return run("regenerate", "--target", target, "--prompts", prompts, "-o", work, "--max-new-tokens", 16, "--num-taps", num_taps)


def train(target: Path, work: Path, output: Path, *more: object) -> Result:
    flags = [part for name, value in RECIPE.items() for part in (f"--{name.replace('_', '-')}", value)]
    return run("train", "--target", target, "--work", work, "-o", output, "--max-new-tokens", 16, *flags, *more)


def check(done: Result, code: int, *fragments: str) -> None:
    """One message, no traceback."""
    assert done.exit_code == code, (done.exception, done.stderr)
    assert "Error: " in done.stderr
    assert [fragment for fragment in fragments if fragment not in done.stderr] == [], done.stderr


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestPlaces:
    @pytest.mark.parametrize("inside", ["", "work", "deep/work"])
    def test_an_output_that_holds_the_work_folder_is_refused(self, target: Path, prompts: Path, tmp_path: Path, inside: str) -> None:
        output = tmp_path / "out"
        check(train(target, output / inside, output, "--prompts", prompts), 1, "does not hold the work folder")
        assert not output.exists()

    @pytest.mark.parametrize("name", ["checkpoint", "metrics.jsonl"])
    def test_an_output_that_is_the_runs_own_file_is_refused(self, target: Path, work: Path, name: str) -> None:
        before = files_of(work)
        check(train(target, work, work / name), 1, "the run's own files")
        assert files_of(work) == before

    @pytest.mark.parametrize("is_its_own", [True, False])
    def test_a_target_is_not_replaced(self, target: Path, work: Path, tmp_path: Path, is_its_own: bool) -> None:
        copy = shutil.copytree(target, tmp_path / "copy")
        before = files_of(copy)
        check(train(copy if is_its_own else target, work, copy, "--force"), 1, "expected a drafter to replace", "looks like a target")
        assert files_of(copy) == before

    def test_an_output_that_cannot_be_made_is_told_before_anything_is_computed(
        self, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        (tmp_path / "file").write_text("mine")
        monkeypatch.chdir(tmp_path)
        for output, message in {
            "dangling": "Expected a new folder",
            "file": "Expected a new folder",
            "file/drafter": "can be made",
            "n" * 250: "can be made",
            "n" * 300: "can be made",
            "new/..": "does not hold the work folder",
        }.items():
            check(train(target, tmp_path / "work", Path(output), "--prompts", prompts), 1, message)
        assert sorted(os.listdir()) == ["dangling", "file"]

    def test_a_drafter_that_cannot_be_written_is_told_and_its_state_is_kept(
        self, target: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(122, "Disk quota exceeded")

        monkeypatch.setattr("domino_deploy.training.trainer.shutil.copyfile", full)
        check(train(target, work, tmp_path / "out"), 1, "Disk quota exceeded", "its state is kept")
        monkeypatch.undo()
        assert (work / "checkpoint").exists()
        assert train(target, work, tmp_path / "out").exit_code == 0

    def test_a_second_training_in_the_same_work_folder_is_refused(self, target: Path, work: Path, tmp_path: Path) -> None:
        assert train(target, work, tmp_path / "first").exit_code == 0
        with (work / "training.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            check(train(target, work, tmp_path / "out"), 1, "no other run that trains in this folder")
        assert train(target, work, tmp_path / "out").exit_code == 0


class TestKilledWhileAStateWasReplaced:
    def test_the_state_before_comes_back(self, tmp_path: Path) -> None:
        place = tmp_path / "checkpoint"
        moved = tmp_path / ".checkpoint-00c0ffee-old" / "checkpoint"
        new, other = tmp_path / ".checkpoint-0badf00d", tmp_path / ".checkpoint-x"
        for folder in (moved, new, other):
            folder.mkdir(parents=True)
            (folder / "which").write_text(folder.name)
        aside.mend(place)
        assert (place / "which").read_text() == "checkpoint"
        assert sorted(os.listdir(tmp_path)) == [".checkpoint-x", "checkpoint"]

    def test_the_new_state_stays_where_it_was_in_place(self, tmp_path: Path) -> None:
        place, moved = tmp_path / "checkpoint", tmp_path / ".checkpoint-00c0ffee-old" / "checkpoint"
        place.mkdir()
        moved.mkdir(parents=True)
        (place / "which").write_text("new")
        aside.mend(place)
        assert sorted(os.listdir(tmp_path)) == ["checkpoint"]
        assert (place / "which").read_text() == "new"

    def test_a_training_goes_on_from_it(self, target: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trainer, "save_drafter", lambda *_, **__: (_ for _ in ()).throw(OSError("power cut")))
        check(train(target, work, tmp_path / "out"), 1, "power cut")
        monkeypatch.undo()
        (work / ".checkpoint-00c0ffee-old").mkdir()
        (work / "checkpoint").rename(work / ".checkpoint-00c0ffee-old" / "checkpoint")
        monkeypatch.setattr(trainer._Run, "step", lambda *_: pytest.fail("a finished step was made again"))
        assert train(target, work, tmp_path / "out").exit_code == 0


def _without_first_line(work: Path) -> None:
    path = work / "responses-0.jsonl"
    path.write_text("".join(path.read_text().splitlines(True)[1:]))


def _reversed_lines(work: Path) -> None:
    path = work / "responses-0.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(True))))


def _not_a_number(work: Path) -> None:
    path = work / "features-0.f16"
    np.full(path.stat().st_size // 2, np.nan, dtype=np.float16).tofile(path)


def _noted(tapped_layers: list[object], width: int) -> Callable[[Path], None]:
    def note(work: Path) -> None:
        (work / "features.json").write_text(json.dumps({"tapped_layers": tapped_layers, "width": width}))

    return note


class TestFeatures:
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            pytest.param(_without_first_line, "found others for sample", id="a line less"),
            pytest.param(_reversed_lines, "found others for sample", id="lines in another order"),
            pytest.param(_not_a_number, "found others for sample", id="not a number"),
            pytest.param(_noted([1, 3], 1), "found rows of 1", id="width 1"),
            pytest.param(_noted([1, 3], 63), "found rows of 63", id="width 63"),
            pytest.param(_noted([1, 3], 0), "expected tapped_layers and width", id="width 0"),
            pytest.param(_noted([3, 1], 64), "expected tapped_layers and width", id="falling layers"),
            pytest.param(_noted([1, 1], 64), "expected tapped_layers and width", id="a layer twice"),
            pytest.param(_noted([1, True], 64), "expected tapped_layers and width", id="no layer"),
        ],
    )
    def test_features_of_something_else_are_refused(
        self, target: Path, work: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
    ) -> None:
        damage(work)
        check(train(target, work, tmp_path / "out"), 1, message, "features-*.f16")
        (work / "features.json").unlink()  # what the message advises
        (work / "features-0.f16").unlink()
        assert train(target, work, tmp_path / "out").exit_code == 0

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_features_kept_in_another_precision_are_the_targets(self, target: Path, work: Path, tmp_path: Path, dtype: str) -> None:
        done = train(target, work, tmp_path / "out", "--dtype", dtype)
        assert done.exit_code == 0, done.stderr

    @pytest.mark.parametrize("damage", ["cut", "note torn", "note gone"])
    def test_damaged_features_of_an_earlier_training_are_made_again(self, target: Path, work: Path, tmp_path: Path, damage: str) -> None:
        (work / "features.json").unlink()
        assert train(target, work, tmp_path / "first").exit_code == 0
        made, note = work / "features-of-training.f16", work / "features-of-training.json"
        whole = made.read_bytes()
        if damage == "cut":
            os.truncate(made, 1000)
        elif damage == "note torn":
            note.write_text("{")
        else:
            note.unlink()
        assert train(target, work, tmp_path / "out").exit_code == 0
        assert made.read_bytes() == whole

    def test_a_folder_in_the_place_of_a_part_is_told(self, target: Path, prompts: Path, work: Path, tmp_path: Path) -> None:
        (work / "responses-1.jsonl").mkdir()
        check(answer(target, prompts, work), 1, "Is a directory")
        check(train(target, work, tmp_path / "out"), 1, "Is a directory")


class TestRecipe:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"learning_rate": 10**400}, "learning_rate must be positive, from 1e-30 to 1e+30"),
            ({"gamma": 1e-320}, "gamma must be positive, from 1e-30 to 1e+30"),
            ({"clip_norm": 10**400}, "clip_norm must be positive"),
            ({"weight_decay": float("inf")}, "weight_decay must be at least 0 and at most 1e+30"),
            ({"weight_decay": 10**400}, "weight_decay must be at least 0"),
            ({"steps": "5"}, "steps must be int or null, found '5'"),
            ({"steps": None, "epochs": 10**30}, "epochs must be at most"),
            *(
                ({name: 10**30}, f"{name} must be at most")
                for name, value in dataclasses.asdict(Recipe()).items()
                if type(value) is int and name not in ("seed", "pure_draft_prefix_len")  # which have messages of their own
            ),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_values_beyond_any_use_are_refused(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(TrainingError) as caught:
            recipe_from(values, "test")
        assert message in str(caught.value)

    @pytest.mark.parametrize("name", ["a" * 5000, "../recipes/qwen3-8b-domino-b16", "", "."], ids=lambda name: name[:40])
    def test_names_that_are_no_files_are_refused(self, name: str) -> None:
        with pytest.raises(TrainingError, match=r"expected a recipe\.json or one of qwen3"):
            read_recipe(name)

    def test_far_more_taps_than_the_target_has_layers_are_refused_at_once(self, target: Path, prompts: Path, tmp_path: Path) -> None:
        check(answer(target, prompts, tmp_path / "work", num_taps=10**12), 1, "Lower --num-taps")

    def test_a_start_of_another_vocabulary_is_refused_before_the_prompts_are_answered(
        self, target: Path, prompts: Path, tmp_path: Path
    ) -> None:
        start = write_drafter(tmp_path / "start", write_target(tmp_path / "other", num_hidden_layers=6, vocab_size=320))
        done = train(target, tmp_path / "work", tmp_path / "out", "--prompts", prompts, "--start", start)
        check(done, 1, "vocab_size must be 300, found 320")
        assert not (tmp_path / "work").exists()

    def test_a_plan_of_endless_data_is_refused(self, target: Path) -> None:
        check(run("train", "--dry-run", "--target", target, "--samples", 10**400, "--mean-tokens", 10), 2, "--samples")


class TestMemory:
    def test_too_large_a_run_is_told_with_what_to_lower(
        self, target: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pipeline, "train", lambda *_, **__: torch.empty(2**58))
        check(train(target, work, tmp_path / "out"), 1, "Expected memory for this run", "--anchors")

    def test_other_errors_stay_what_they_are(self) -> None:
        with pytest.raises(RuntimeError, match="a bug"), enough_memory("this", "Lower that."):
            raise RuntimeError("a bug")


class TestTokenizer:
    @pytest.fixture
    def copy(self, target: Path, tmp_path: Path) -> Path:
        return shutil.copytree(target, tmp_path / "copy")

    def test_a_tokenizer_with_more_tokens_than_the_target_is_refused(self, copy: Path, tmp_path: Path) -> None:
        write_tokenizer(copy, 400)
        (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "What is <|mask|>?"}))
        check(answer(copy, tmp_path / "p.jsonl", tmp_path / "work"), 1, "token ids below 300", "found 399")
        assert not (tmp_path / "work").exists()

    def test_a_template_that_renders_nothing_is_refused(self, copy: Path, prompts: Path, tmp_path: Path) -> None:
        (copy / "chat_template.jinja").write_text("{% if false %}never{% endif %}")
        check(answer(copy, prompts, tmp_path / "work"), 1, "p.jsonl, line 1: the chat template makes no text of it")


class TestEnvironment:
    @pytest.mark.parametrize(
        ("rank", "size"), [("x", "2"), ("-1", "2"), ("2", "2"), ("0", "0"), ("1" * 5000, "1" * 5001), ("\u0660", "2")], ids=lambda v: v[:5]
    )
    def test_ranks_that_torchrun_does_not_give_are_refused(self, monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(TrainingError, match="RANK and WORLD_SIZE"):
            process_of_torchrun()

    @pytest.mark.parametrize(
        "variables",
        [
            {},
            {"MASTER_ADDR": "127.0.0.1"},
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
            {"MASTER_ADDR": "x", "MASTER_PORT": "99999"},
        ],
        ids=str,
    )
    def test_processes_that_cannot_find_each_other_are_told(
        self, target: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
    ) -> None:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", **variables}.items():
            monkeypatch.setenv(name, value)
        check(train(target, work, tmp_path / "out"), 1, "Expected 2 processes that find each other", "torchrun")

    @pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "[1]", "{", "1" * 100_000], ids=lambda text: text[:10])
    def test_template_variables_that_are_no_object_are_refused_in_a_few_words(self, text: str) -> None:
        with pytest.raises(RequestError, match="--chat-template-kwargs") as caught:
            template_variables(text)
        assert len(str(caught.value)) < 400
