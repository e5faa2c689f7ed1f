"""`domino-deploy regenerate` as a user calls it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from domino_deploy.checkpoint import open_target
from domino_deploy.cli import main
from domino_deploy.model.loading import load_target
from domino_deploy.training.store import SampleStore
from tests.support.checkpoints import write_target
from tests.support.regeneration import FP16, write_lines


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target", num_hidden_layers=6)


class TestCommand:
    @pytest.fixture
    def prompts(self, tmp_path: Path) -> Path:
        records = [{"prompt": f"Say {word}.", "kind": "say"} for word in ("one", "two", "three", "one")]
        return write_lines(tmp_path / "prompts.jsonl", *records, {"prompt": "too long " * 60})

    def run(self, target: Path, work: Path, *arguments: str | Path, verbosity: str | None = None) -> Result:
        words = ["regenerate", "--target", target, "-o", work, "--max-new-tokens", "8", "--batch-size", "2", "--num-taps", "2", *arguments]
        return CliRunner().invoke(main, [*((verbosity,) if verbosity else ()), *map(str, words)])

    def samples(self, work: Path) -> list[dict[str, object]]:
        return [json.loads(line) for path in sorted(work.glob("responses-*.jsonl")) for line in path.read_text().splitlines()]

    def test_it_states_what_is_to_do_does_it_and_sums_up_in_one_line(self, target_folder: Path, prompts: Path, tmp_path: Path) -> None:
        work = tmp_path / "work"
        done = self.run(target_folder, work, "--prompts", prompts, "--kind", "short-chat:2", "--max-prompt-tokens", "90")
        assert done.exit_code == 0, done.stderr
        samples = self.samples(work)
        assert sorted(str(sample["kind"]) for sample in samples) == ["say", "say", "say", "short-chat", "short-chat"]
        assert (
            "5 prompts, 0 answered already; left out: 1 longer than 90 tokens or the target's room, 1 that were there twice" in done.stderr
        )
        most = sum(len(sample["prompt_ids"]) + 8 for sample in samples) * 2 * 32 * 2  # type: ignore[arg-type]
        assert f"features take at most {most:,} bytes, " in done.stderr
        [line] = done.stdout.splitlines()
        tokens = sum(len(sample["response_ids"]) for sample in samples)  # type: ignore[arg-type]
        assert line.startswith(f"{work}: 5 samples, {tokens} response tokens, ")
        assert json.loads((work / "features.json").read_text()) == {"tapped_layers": [1, 3], "width": 64}

        again = self.run(target_folder, work, "--prompts", prompts, "--json", verbosity="--quiet")
        assert again.stderr == ""
        result = json.loads(again.stdout)
        assert (result["samples"], result["added_samples"], result["answered_before"]) == (5, 0, 3)
        assert result["bytes"] == sum(path.stat().st_size for path in work.glob("*-0.*"))

    def test_soft_labels_keep_the_last_layers_normed_output(self, target_folder: Path, prompts: Path, tmp_path: Path) -> None:
        assert self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--soft-labels").exit_code == 0
        target = open_target(target_folder)
        assert json.loads((tmp_path / "w" / "features.json").read_text()) == {"tapped_layers": [1, 3, 5], "width": 96}
        stored = SampleStore.open(
            tmp_path / "w", claim=json.loads((tmp_path / "w" / "made-for.json").read_text()), tapped_layers=(1, 3, 5), width=96
        ).read()
        hidden, features = load_target(target, (1, 3)).requires_grad_(False).hidden_states(torch.tensor([stored.samples[0].token_ids]))
        expected = torch.cat([features, hidden], dim=-1)[0, :-1].numpy()
        np.testing.assert_allclose(stored.rows(0)[:-1].astype(np.float32), expected, **FP16)

    def test_no_features_keeps_lines_alone(self, target_folder: Path, prompts: Path, tmp_path: Path) -> None:
        done = self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--no-features", "--temperature", "0.9", "--seed", "3")
        assert done.exit_code == 0, done.stderr
        assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["made-for.json", "responses-0.jsonl"]
        assert json.loads((tmp_path / "w" / "made-for.json").read_text())["sampling"]["seed"] == 3

    @pytest.mark.parametrize("torchrun", [False, True])
    def test_parts_are_the_whole(
        self, target_folder: Path, prompts: Path, tmp_path: Path, torchrun: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.run(target_folder, tmp_path / "whole", "--prompts", prompts, "--kind", "short-chat:4").exit_code == 0
        for part in range(3):
            if torchrun:
                for name, value in (("RANK", part), ("WORLD_SIZE", 3), ("LOCAL_WORLD_SIZE", 3)):
                    monkeypatch.setenv(name, str(value))
            flags = [] if torchrun else ["--part", f"{part}/3"]
            done = self.run(target_folder, tmp_path / "parts", "--prompts", prompts, "--kind", "short-chat:4", *flags, "--json")
            assert done.exit_code == 0, done.stderr
            assert (json.loads(done.stdout)["part"], json.loads(done.stdout)["parts"]) == (part, 3)
        assert len(list((tmp_path / "parts").glob("responses-*.jsonl"))) == 3
        assert sorted(map(str, self.samples(tmp_path / "parts"))) == sorted(map(str, self.samples(tmp_path / "whole")))

    @pytest.mark.parametrize("part", ["", "1", "1/", "/2", "2/2", "0/0", "-1/2", "a/b", "1/2/3", "0.5/2", "1 / 2", "٠/2"])
    def test_parts_that_are_none_are_refused(self, target_folder: Path, prompts: Path, tmp_path: Path, part: str) -> None:
        done = self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--part", part)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "Expected --part I/N with I from 0 to N-1" in done.stderr
        assert not (tmp_path / "w").exists()

    def test_a_part_is_not_chosen_twice(self, target_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        done = self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--part", "0/2")
        assert done.exit_code == 2
        assert "Expected no --part under torchrun" in done.stderr

    def test_features_that_do_not_fit_the_disk_are_refused_before_the_weights_are_loaded(
        self, target_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))  # type: ignore[attr-defined]
        monkeypatch.setattr("domino_deploy.training.answering.load_target", None)
        done = self.run(target_folder, tmp_path / "w", "--prompts", prompts)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "100 free" in done.stderr
        assert "--no-features" in done.stderr
        monkeypatch.undo()
        assert self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--no-features").exit_code == 0

    def test_a_target_trained_on_in_place_is_another_target(self, target_folder: Path, prompts: Path, tmp_path: Path) -> None:
        folder = tmp_path / "target"
        shutil.copytree(target_folder, folder)
        assert self.run(folder, tmp_path / "w", "--prompts", prompts).exit_code == 0
        before = self.samples(tmp_path / "w")
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.3.mlp.up_proj.weight"] *= 1.001
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        done = self.run(folder, tmp_path / "w", "--prompts", prompts)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "made for something else" in done.stderr
        assert "target: expected" in done.stderr
        assert self.samples(tmp_path / "w") == before

    @pytest.mark.parametrize(
        ("flags", "code", "fragments"),
        [
            ([], 2, ["--prompts or --kind"]),
            (["--kind", "poems"], 2, ["templated-code", "'poems'"]),
            (["--kind", "short-chat:0"], 2, ["short-chat:COUNT", "'0'"]),
            (["--kind", "short-chat:2", "--top-p", "2"], 2, ["--top-p", "2.0"]),
            (["--kind", "short-chat:2", "--seed", "-3"], 2, ["seed", "-3"]),
            (["--kind", "short-chat:2", "--soft-labels", "--no-features"], 2, ["--soft-labels", "--no-features"]),
            (["--kind", "short-chat:2", "--max-prompt-tokens", "3"], 1, ["at most 3 tokens", "--max-prompt-tokens"]),
            (["--kind", "short-chat:2", "--max-new-tokens", "512"], 1, ["512 positions", "--max-new-tokens"]),
            (["--kind", "short-chat:2", "--num-taps", "6"], 1, ["target of 6", "--num-taps"]),
            (["--prompts", "nowhere.jsonl"], 1, ["nowhere.jsonl", "JSONL"]),
        ],
    )
    def test_wrong_usage_is_named(self, target_folder: Path, tmp_path: Path, flags: list[str], code: int, fragments: list[str]) -> None:
        done = self.run(target_folder, tmp_path / "w", *flags)
        assert (done.exit_code, done.stdout) == (code, ""), done.stderr
        assert [fragment for fragment in fragments if fragment not in done.stderr] == []
        assert not (tmp_path / "w").exists()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_that_is_not_there_is_refused(self, target_folder: Path, prompts: Path, tmp_path: Path) -> None:
        done = self.run(target_folder, tmp_path / "w", "--prompts", prompts, "--device", "cuda")
        assert done.exit_code != 0
        assert "--device cpu" in done.stderr

    def test_prompts_that_the_template_refuses_are_named(self, target_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "target"
        shutil.copytree(target_folder, folder)
        template = folder / "chat_template.jinja"
        template.write_text(
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + template.read_text()
        )
        chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
        path = write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"messages": chat}, {"messages": chat})
        done = self.run(folder, tmp_path / "w", "--prompts", path)
        assert done.exit_code == 1
        assert [line in done.stderr for line in ("p.jsonl, line 2:", "p.jsonl, line 3:", "no system role")] == [True] * 3
