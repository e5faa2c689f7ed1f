"""Wrong flags and inputs: a message that says what was expected, found and what to do, an exit code, and nothing left behind."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import tokenizers
from click.testing import CliRunner, Result

from domino_deploy.cli import main
from domino_deploy.runtime.session import Session
from tests.support.bundles import contents
from tests.support.checkpoints import write_drafter, write_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Drafter and target that belong together."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target")
    return write_drafter(folder / "drafter", target), target


def run(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def check(done: Result, code: int, *fragments: str) -> None:
    """One message on stderr, no traceback, nothing on stdout."""
    assert done.exit_code == code, (done.exception, done.stderr)
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert [fragment for fragment in fragments if fragment not in done.stderr] == [], done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["exprot"], ["No such command", "exprot"]),
        (["generate", "b", "--temprature", "1"], ["No such option", "--temprature"]),
        (["export", "--ckpt", "d", "-o", "o"], ["Missing option", "--target"]),
        (["export", "--ckpt", "d", "--target", "t"], ["Missing option", "--output"]),
        (["export", "--ckpt", "d", "--target", "t", "-o", "o", "--num-speculative-tokens", "0"], ["--num-speculative-tokens", "0"]),
        (["verify"], ["Missing argument", "BUNDLE"]),
        (["verify", "a", "b"], ["unexpected extra argument", "b"]),
        (["--quiet", "--verbose", "inspect", "b"], ["--quiet", "--verbose"]),
        (["generate", "b", "--prompt", "x", "--max-new-tokens", "many"], ["--max-new-tokens", "many"]),
        (["generate", "b", "--prompt", "x", "--stop", ""], ["--stop", "empty"]),
        (["generate", "b", "--prompt", "x", "--backend", "openvino"], ["--backend", "openvino", "ort", "tensorrt", "eager"]),
        (["generate", "b", "--prompt", "x", "--provider", "rocm"], ["--provider", "rocm", "cpu", "cuda", "tensorrt"]),
        (["generate", "b", "--prompt", "x", "--backend", "eager", "--provider", "cuda"], ["provider", "found cuda for eager"]),
        (["generate", "b", "--prompt", "x", "--drafter", "eagle"], ["--drafter", "eagle", "prompt-lookup"]),
        (["generate", "b", "--prompt", "x", "--drafter", "none", "--no-speculation"], ["--drafter", "--no-speculation"]),
        (["generate", "b", "--prompt", "x", "--raw", "--system", "Be brief."], ["--raw", "--system"]),
        (["generate", "b", "--prompt", "  "], ["prompt", "white space"]),
    ],
    ids=lambda value: " ".join(value)[:70] if value and isinstance(value, list) else None,
)
def test_wrong_usage_is_refused_before_anything_is_opened(arguments: list[str], fragments: list[str]) -> None:
    check(run(*arguments), 2, *fragments)


OPTIONS = [
    (name, option) for name in main.list_commands(click.Context(main)) for option in main.get_command(click.Context(main), name).params
]
NUMBERS = [(name, option) for name, option in OPTIONS if isinstance(option.type, click.IntRange | click.FloatRange)]


def values_outside(of: click.IntRange | click.FloatRange) -> list[str]:
    """The nearest ones to each bound, which is itself outside where it is open; and what is no finite number."""
    is_whole = isinstance(of, click.IntRange)
    values = [] if is_whole else ["nan", "inf", "-inf"]
    for bound, is_open, away in ((of.min, of.min_open, -1), (of.max, of.max_open, 1)):
        if bound is not None:
            values.append(repr(bound if is_open else bound + away if is_whole else math.nextafter(bound, away * math.inf)))
    return values


def test_every_number_of_an_engine_or_a_request_has_a_range() -> None:
    """Or the settings behind it would refuse it, by the name of a field."""
    commands = ("serve", "generate", "bench", "regenerate")
    assert [(name, option.name) for name, option in OPTIONS if name in commands and option.type in (click.INT, click.FLOAT)] == []
    named = {(name, option.name) for name, option in NUMBERS}
    assert {("serve", "max_num_seqs"), ("serve", "request_timeout"), ("generate", "top_p"), ("bench", "timeout")} <= named


def test_bounds_are_tried_whether_open_or_closed() -> None:
    assert values_outside(click.IntRange(1, 4)) == ["0", "5"]
    assert values_outside(click.FloatRange(0, 1, min_open=True))[3:] == ["0", "1.0000000000000002"]


@pytest.mark.parametrize(("name", "option"), NUMBERS, ids=[f"{name} {option.name}" for name, option in NUMBERS])
def test_a_number_out_of_range_is_told_by_the_option_that_was_typed(name: str, option: click.Option) -> None:
    for value in values_outside(option.type):
        check(run(name, "b", option.opts[0], value), 2, f"Invalid value for '{option.opts[0]}")


def test_an_empty_standard_input_is_refused() -> None:
    check(run("generate", "b", stdin="\n"), 2, "prompt")


class TestGenerate:
    @pytest.mark.parametrize(
        ("flags", "code", "fragments"),
        [
            (["--num-speculative-tokens", "99"], 2, ["--num-speculative-tokens must lie in [0, 6] for this drafter, found 99"]),
            (
                ["--drafter", "none", "--num-speculative-tokens", "4"],
                2,
                ["--num-speculative-tokens must be 0, or left out, without a drafter, found 4", "choose another drafter"],
            ),
            (["--no-speculation", "--num-speculative-tokens", "1"], 2, ["without a drafter, found 1"]),
            (["--max-model-len", "1000000"], 2, ["--max-model-len must lie in", "1000000"]),
            (["--threads", "9999"], 2, ["--threads must lie in", "9999"]),
            (["--threads", "9999", "--max-model-len", "1000000"], 2, ["--threads must", "--max-model-len must"]),
            (["--max-model-len", "4"], 1, ["at most 3 tokens", "start with a larger --max-model-len"]),
        ],
        ids=lambda value: " ".join(value) if value and isinstance(value, list) else None,
    )
    def test_values_that_this_bundle_cannot_serve(self, flags: list[str], code: int, fragments: list[str], tiny_bundle: Path) -> None:
        check(run("generate", tiny_bundle, "--prompt", "Count to ten, then to twenty", *flags), code, *fragments)

    def test_a_prompt_as_long_as_the_model_length_is_one_token_too_long(self, tiny_bundle: Path) -> None:
        with Session.open(tiny_bundle) as session:
            length = len(session.prompt_ids("Count to ten"))
        flags = ("generate", tiny_bundle, "--prompt", "Count to ten", "--max-new-tokens", "1", "--max-model-len")
        check(run(*flags, str(length)), 1, f"at most {length - 1} tokens, the model length {length}", f"found {length}")
        assert run(*flags, str(length + 1)).exit_code == 0


class TestBundle:
    def test_a_folder_that_is_none(self, tmp_path: Path) -> None:
        for command in (["verify"], ["inspect"], ["generate", "--prompt", "x"]):
            check(run(*command, tmp_path / "nowhere"), 4, "nowhere")
        assert list(tmp_path.iterdir()) == []

    def test_a_file_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("hello")
        check(run("inspect", tmp_path / "notes.txt"), 4, "notes.txt", "expected")
        check(run("inspect", tmp_path / ("x" * 300)), 4, "nothing there")

    @pytest.mark.parametrize(
        ("place", "fragments"),
        [
            ("bundle/report.html", ["outside the bundle"]),
            ("bundle/manifest.json", ["ends in .html"]),
            ("nowhere/report.html", ["no folder", "nowhere"]),
        ],
    )
    def test_a_report_cannot_go_everywhere(self, place: str, fragments: list[str], tiny_bundle: Path, tmp_path: Path) -> None:
        bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
        before = contents(tmp_path)
        check(run("verify", bundle, "--report", tmp_path / place), 2, *fragments)
        assert contents(tmp_path) == before

    def test_a_report_that_cannot_be_written_costs_no_figures(self, tiny_bundle: Path, tmp_path: Path) -> None:
        done = run("verify", tiny_bundle, "--num-layers", "1", "--report", tmp_path / ("x" * 300 + ".html"))
        assert done.exit_code == 2
        assert "expected to write the report there, found: " in done.stderr
        assert "outputs within bounds" in done.stdout

    @pytest.mark.parametrize("name", ["target.onnx", "tokenizer.json", "drafter/model.safetensors"])
    def test_a_missing_file_is_named(self, name: str, tiny_bundle: Path, tmp_path: Path) -> None:
        bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
        (bundle / name).unlink()
        check(run("generate", bundle, "--prompt", "x"), 4, name)

    @pytest.mark.parametrize(
        ("change", "fragments"),
        [
            (lambda manifest: manifest | {"format_version": 99}, ["99", "format"]),
            (lambda manifest: {name: value for name, value in manifest.items() if name != "graphs"}, ["graphs"]),
            (lambda manifest: manifest | {"surprise": 1}, ["surprise"]),
            (lambda manifest: manifest | {"files": manifest["files"] | {"../secret": {"bytes": 1, "sha256": "0" * 64}}}, ["../secret"]),
        ],
        ids=["version", "missing key", "unknown key", "path outside"],
    )
    def test_a_manifest_that_is_not_ours(
        self, change: Callable[[dict[str, Any]], dict[str, Any]], fragments: list[str], tiny_bundle: Path, tmp_path: Path
    ) -> None:
        bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
        manifest = json.loads((bundle / "manifest.json").read_text())
        (bundle / "manifest.json").write_text(json.dumps(change(manifest)))
        check(run("inspect", bundle), 4, *fragments)


class TestExport:
    def refuse(self, drafter: Path, target: Path, folder: Path, code: int, *fragments: str, flags: tuple[str, ...] = ()) -> None:
        folder.mkdir(exist_ok=True)
        before = sorted(folder.rglob("*"))
        check(run("export", "--ckpt", drafter, "--target", target, "-o", folder / "bundle", *flags), code, *fragments)
        assert sorted(folder.rglob("*")) == before, "something was left behind"

    def test_a_drafter_that_is_not_there(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        self.refuse(tmp_path / "nowhere", pair[1], tmp_path / "out", 4, "nowhere")

    def test_an_output_that_exists(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        (tmp_path / "out" / "bundle").mkdir(parents=True)
        (tmp_path / "out" / "bundle" / "mine.txt").write_text("keep")
        self.refuse(*pair, tmp_path / "out", 4, "bundle", "--force")

    def test_a_pair_of_strangers_lists_every_difference(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        other = write_target(tmp_path / "other", vocab_size=310, num_hidden_layers=5)
        self.refuse(pair[0], other, tmp_path / "out", 4, "310", "300", "5", "4")

    @pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["export", "dry run"])
    @pytest.mark.parametrize(
        ("flags", "fragments"),
        [
            (("--num-speculative-tokens", "7"), ["from 1 to 6", "found 7"]),
            (("--candidate-pool", "301"), ["candidate pool", "300", "found 301"]),
            (("--certified-pool",), ["candidate pool", "found none"]),
            (("--num-layers", "4"), ["--num-layers from 1 to 3", "found 4"]),
            (("--num-layers", "1", "--skip-verification"), ["verification of 1 layers", "skipped"]),
            (("--asymmetric",), ["int8 or int4 only", "float32"]),
            (("--block-size", "64", "--dtype", "float16"), ["int8 or int4 only", "float16"]),
            (("--block-size", "256", "--dtype", "int8"), ["multiple of the block size 256", "32 inputs"]),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
    )
    def test_flags_that_do_not_fit_the_pair(
        self, flags: tuple[str, ...], fragments: list[str], dry: tuple[str, ...], pair: tuple[Path, Path], tmp_path: Path
    ) -> None:
        self.refuse(*pair, tmp_path / "out", 2, *fragments, flags=(*flags, *dry))

    @pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["export", "dry run"])
    @pytest.mark.parametrize(
        ("content", "fragments"),
        [("{}", ["does not parse"]), (None, ["ids below 300", "found 300", "'<one more>'"])],
        ids=["no tokenizer", "another model's"],
    )
    def test_a_tokenizer_that_is_not_the_targets(
        self, content: str | None, fragments: list[str], dry: tuple[str, ...], pair: tuple[Path, Path], tmp_path: Path
    ) -> None:
        target = shutil.copytree(pair[1], tmp_path / "target")
        tokenizer = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
        tokenizer.add_special_tokens(["<one more>"])
        (target / "tokenizer.json").write_text(tokenizer.to_str() if content is None else content)
        self.refuse(pair[0], target, tmp_path / "out", 4, "tokenizer.json", *fragments, flags=dry)

    def test_an_output_below_a_file(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("keep")
        for dry in ((), ("--dry-run",)):
            done = run("export", "--ckpt", pair[0], "--target", pair[1], "-o", tmp_path / "file" / "bundle", *dry)
            check(done, 4, "expected a folder", "file", "Choose another output folder")

    def test_target_and_drafter_swapped(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        self.refuse(pair[1], pair[0], tmp_path / "out", 4)

    def test_pickled_weights(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        drafter = shutil.copytree(pair[0], tmp_path / "drafter")
        (drafter / "model.safetensors").rename(drafter / "pytorch_model.bin")
        self.refuse(drafter, pair[1], tmp_path / "out", 4, "safetensors", "pytorch_model.bin")

    def test_torn_weights(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        drafter = shutil.copytree(pair[0], tmp_path / "drafter")
        content = (drafter / "model.safetensors").read_bytes()
        (drafter / "model.safetensors").write_bytes(content[: len(content) // 2])
        self.refuse(drafter, pair[1], tmp_path / "out", 4, "model.safetensors")

    @pytest.mark.parametrize(
        ("changes", "fragments"),
        [
            ({"projector_type": "causal_v3"}, ["projector_type", "causal_v3"]),
            ({"pure_draft_prefix_len": 6}, ["pure_draft_prefix_len", "6"]),
            ({"target_layer_ids": [1, 99]}, ["target_layer_ids", "99"]),
            ({"block_size": 1}, ["block_size", "1"]),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
    )
    def test_a_config_that_cannot_be_honoured(
        self, changes: dict[str, Any], fragments: list[str], pair: tuple[Path, Path], tmp_path: Path
    ) -> None:
        drafter = write_drafter(tmp_path / "drafter", pair[1], **changes)
        self.refuse(drafter, pair[1], tmp_path / "out", 4, *fragments)


class TestText:
    @pytest.mark.parametrize("option", ["--prompt", "--system", "--stop"])
    def test_an_option_that_is_not_utf8_is_refused(self, option: str, tiny_bundle: Path) -> None:
        arguments = ["--prompt", "x"] if option != "--prompt" else []
        check(run("generate", tiny_bundle, *arguments, option, "a\udcff"), 2, option, "UTF-8", "byte 1")

    def test_standard_input_that_is_not_utf8_is_refused(self, tiny_bundle: Path) -> None:
        done = CliRunner().invoke(main, ["generate", str(tiny_bundle)], input=b"caf\xe9")
        check(done, 2, "UTF-8", "standard input", "byte 3")

    def test_a_closed_standard_input_is_no_prompt(self, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("domino_deploy.cli.generate.sys", SimpleNamespace(stdin=None))
        check(run("generate", tiny_bundle), 2, "Expected a prompt, found none")


def test_training_values_out_of_range_are_wrong_usage(tmp_path: Path) -> None:
    flags = ["--target", "t", "--prompts", "p", "-o", str(tmp_path / "d"), "--work", str(tmp_path / "w")]
    check(run("train", *flags, "--steps", "0", "--seed", "-1"), 2, "steps must be at least 1, found 0", "seed must lie in")
    assert list(tmp_path.iterdir()) == []
