"""`export`, `verify` and `generate` from the command line, on a tiny pair."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.cli import main
from domino_deploy.exporters.options import ExportOptions
from domino_deploy.exporters.placement import Placement
from domino_deploy.precision import Dtype, Precision
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.session import Session
from tests.support.checkpoints import write_drafter, write_target

PROMPT = "Count to ten: one, two,"
SAMPLED = ("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01", "--seed", "7")


def run(*arguments: str | Path, stdin: str | None = None) -> Result:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def generate(bundle: Path, *flags: str) -> Result:
    done = run("generate", bundle, "--prompt", PROMPT, "--max-new-tokens", "24", *flags)
    assert done.exit_code == 0, done.stderr
    return done


def test_generate_prints_the_sessions_text(tiny_bundle: Path) -> None:
    with Session.open(tiny_bundle) as session:
        chunks = session.generate(session.prompt_ids(PROMPT), GenerationParams(max_new_tokens=24))
        expected = "".join(chunk.text for chunk in chunks)
    assert expected
    assert generate(tiny_bundle).stdout == expected + "\n"


@pytest.mark.parametrize("flags", [(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "other", [("--no-speculation",), ("--drafter", "prompt-lookup"), ("--num-speculative-tokens", "2"), ("--backend", "eager")]
)
def test_generate_gives_the_same_text_however_it_is_sped_up(tiny_bundle: Path, flags: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert generate(tiny_bundle, *flags, *other).stdout == generate(tiny_bundle, *flags).stdout


def test_generate_reads_standard_input(tiny_bundle: Path) -> None:
    piped = run("generate", tiny_bundle, "--max-new-tokens", "24", stdin=PROMPT)
    assert piped.stdout == generate(tiny_bundle).stdout


def test_generate_closes_with_what_speculation_did(tiny_bundle: Path) -> None:
    line = generate(tiny_bundle, "--raw").stderr
    found = re.fullmatch(r"(\d+) tokens; prefill \d+ ms, then [\d.]+ tok/s; tau ([\d.]+), (\d+)% of (\d+) drafted tokens accepted\n", line)
    assert found, line
    with Session.open(tiny_bundle) as session:
        prefill, *cycles = session.steps(session.prompt_ids(PROMPT, chat=False), GenerationParams(max_new_tokens=24))
    assert int(found[1]) == len(prefill.token_ids) + sum(len(step.token_ids) for step in cycles)
    assert float(found[2]) == pytest.approx(np.mean([len(step.token_ids) for step in cycles]), abs=0.005)
    assert int(found[4]) == sum(step.proposed for step in cycles)
    assert "tau" not in generate(tiny_bundle, "--no-speculation").stderr


def test_generate_stops_before_a_stop_string(tiny_bundle: Path) -> None:
    text = generate(tiny_bundle).stdout.rstrip("\n")
    stop = text[len(text) // 2 :][:2]
    assert generate(tiny_bundle, "--stop", stop).stdout == text[: text.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        (("--top-p", "0.5"), "--top-p"),
        (("--top-p", "0.5", "--min-p", "0.1", "--top-k", "3"), "--top-k, --top-p, --min-p"),
        (("--top-p", "0.5", "--temperature", "1", "--seed", "1"), None),
        (("--top-p", "1", "--top-k", "0", "--seed", "1"), None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_generate_warns_of_options_without_effect_where_it_is_greedy(tiny_bundle: Path, flags: tuple[str, ...], idle: str | None) -> None:
    warned = [line for line in generate(tiny_bundle, *flags).stderr.splitlines() if line.startswith("Warning: ")]
    assert len(warned) == (idle is not None)
    assert all(f" for {idle} to have an effect, found 0" in line for line in warned)


def test_generate_takes_the_other_name_of_the_longest_answer(tiny_bundle: Path) -> None:
    short = run("generate", tiny_bundle, "--prompt", PROMPT, "--max-tokens", "5")
    assert short.stderr.startswith("5 tokens; ")


def test_quiet_generate_does_not_warn(tiny_bundle: Path) -> None:
    done = run("--quiet", "generate", tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", "2", "--top-p", "0.5")
    assert (done.exit_code, "Warning" in done.stderr) == (0, False)


def test_verify_passes_line_by_line(tiny_bundle: Path) -> None:
    done = run("verify", tiny_bundle)
    assert done.exit_code == 0, done.stderr
    header, *lines, verdict = [line for line in done.stdout.splitlines() if not line.startswith("prompt ")]
    assert header.startswith("graph\toutput\tcase")
    assert {line.split("\t")[-1] for line in lines} == {"ok"}
    assert {line.split("\t")[0] for line in lines} == {"target", "backbone", "head", "generation"}
    assert verdict == f"passed: {len(lines)} of {len(lines)} outputs within bounds"
    steps = ["Comparing the target graph", "Comparing the backbone graph", "Comparing the head graph", "Comparing speculative generation"]
    assert done.stderr.splitlines() == [f"{step} ..." for step in ("Checking the bundle's files", "Loading the PyTorch models", *steps)]


def test_verify_fails_on_weights_that_are_not_those_of_the_checkpoint(tiny_bundle: Path, tmp_path: Path) -> None:
    from domino_deploy.checkpoint import open_drafter

    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    entry = open_drafter(bundle / "drafter").tensors["fc.weight"]
    with entry.file.open("r+b") as file:
        file.seek(entry.offset)
        file.write(np.zeros(entry.nbytes // 4, dtype=np.float32).tobytes())
    done = run("verify", bundle)
    # The hash tells before any number does.
    assert done.exit_code == 4
    assert "drafter/model.safetensors" in done.stderr


def test_verify_reports_as_json(tiny_bundle: Path) -> None:
    report = json.loads(run("verify", tiny_bundle, "--json").stdout)
    assert report["passed"] is True
    assert all(line["max_abs_error"] <= line["bound"] for line in report["lines"])


def test_export_passes_every_flag_on_and_says_where_the_bundle_is(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, calls = open_bundle(tiny_bundle), []

    def recorded(*arguments: object, progress: object, **options: object) -> Bundle:
        calls.append((arguments, options))
        return bundle

    monkeypatch.setattr("domino_deploy.exporters.export.export_bundle", recorded)
    precision = ("--dtype", "int4", "--drafter-dtype", "int8", "--lm-head-dtype", "float32", "--block-size", "64", "--asymmetric")
    form = ("--weights", "copy", "--candidate-pool", "99", "--certified-pool", "--num-speculative-tokens", "5")
    flags = ("--revision", "a1", "--target-revision", "b2", "--num-layers", "2", "--force", *precision, *form)
    done = run("export", "--draft", "d", "--target", "t", "-o", "out", *flags)
    assert done.exit_code == 0, done.stderr
    ((arguments, options),) = calls
    assert arguments == (
        "d",
        "t",
        Path("out"),
        ExportOptions(
            precision=Precision(target=Dtype.INT4, drafter=Dtype.INT8, lm_head=Dtype.FLOAT32, block_size=64, symmetric=False),
            placement=Placement.COPY,
            num_speculative_tokens=5,
            candidate_pool=99,
            certified_pool=True,
        ),
    )
    expected = {"drafter_revision": "a1", "target_revision": "b2", "num_layers": 2, "verify": True, "overwrite": True}
    assert options == expected
    assert re.fullmatch(rf"{re.escape(str(tiny_bundle))}: float32, [\d.]+ KB.*, verified against PyTorch\n", done.stdout), done.stdout


def test_export_without_verification_says_so_everywhere(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", family="qwen3")
    drafter = write_drafter(tmp_path / "drafter", target, kind="dflash")
    done = run("export", "--ckpt", drafter, "--target", target, "-o", tmp_path / "out" / "bundle", "--skip-verification")
    assert done.exit_code == 0, done.stderr
    assert "not verified (--skip-verification)" in done.stdout
    assert "Exporting the target graph ..." in done.stderr.splitlines()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bundle"]
    assert open_bundle(tmp_path / "out" / "bundle", check_hashes=True).manifest.verification is None
    assert "verification: none (exported with --skip-verification)" in run("inspect", tmp_path / "out" / "bundle").stdout
