"""`domino-deploy export` with what it may choose: all options at once, a plan only, options that do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from domino_deploy.bundle import DRAFT_VOCAB, REPORT, open_bundle
from domino_deploy.cli import main
from domino_deploy.precision import Dtype
from domino_deploy.runtime.session import GenerationParams, Session
from tests.support.checkpoints import EOS_ID, write_drafter, write_target

TEXT = "The quick brown fox jumps over the lazy dog. Count to ten: one, two, three. A drafter proposes tokens.\n"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, ...]:
    """The options that name a pair."""
    target = write_target(tmp_path / "source" / "target", family="qwen3", dtype="bfloat16")
    drafter = write_drafter(tmp_path / "source" / "drafter", target, dtype="bfloat16")
    (tmp_path / "source" / "text.txt").write_text(TEXT * 3)
    return "--ckpt", str(drafter), "--target", str(target)


def export(pair: tuple[str, ...], folder: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["export", *pair, "-o", str(folder), *flags])


def test_int4_with_certified_pool_and_draft_vocabulary_is_verified_and_lossless(pair: tuple[str, ...], tmp_path: Path) -> None:
    vocab = ("--draft-vocab", "30", "--draft-vocab-from", str(tmp_path / "source" / "text.txt"))
    pool = ("--candidate-pool", "8", "--certified-pool")
    done = export(pair, tmp_path / "bundle", "--dtype", "int4", "--block-size", "16", *pool, *vocab)
    assert done.exit_code == 0, done.output
    assert "int4 (LM head int8)" in done.stdout
    bundle = open_bundle(tmp_path / "bundle", check_hashes=True)
    assert (bundle.form.draft_vocab_size, bundle.form.candidate_pool, bundle.manifest.certified_pool) == (30, 8, True)
    assert bundle.precision.lm_head is Dtype.INT8
    assert bundle.manifest.verification is not None
    assert bundle.manifest.verification["passed"] is True
    assert {f"drafter/{DRAFT_VOCAB}", REPORT} <= bundle.manifest.files.keys()
    assert "<html" in (bundle.path / REPORT).read_text(encoding="utf-8")
    with Session.open(bundle.path) as session:
        ids = session.tokenizer.encode("The quick brown fox")
        texts = []
        for count in (0, None):
            params = GenerationParams(max_new_tokens=24, ignore_eos=True, num_speculative_tokens=count)
            texts.append([token for step in session.steps(ids, params) for token in step.token_ids])
        assert texts[0] == texts[1]


def test_a_list_of_token_ids_is_a_draft_vocabulary(pair: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text(f"[9, {EOS_ID}, 40]")
    done = export(pair, tmp_path / "bundle", "--draft-vocab-from", str(file), "--skip-verification")
    assert done.exit_code == 0, done.output
    assert open_bundle(tmp_path / "bundle").form.draft_vocab_size == 3


def test_a_plan_says_what_would_be_linked_and_writes_nothing(pair: tuple[str, ...], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = export(pair, tmp_path / "bundle", "--dtype", "bfloat16", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "linked to the checkpoints' files" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (("--draft-vocab", "30"), "Expected --draft-vocab-from beside --draft-vocab"),
        (("--draft-vocab", "30", "--draft-vocab-from", "nowhere.txt"), "nowhere.txt"),
        (("--candidate-pool", "1000"), "300"),
        (("--certified-pool",), "candidate"),
        (("--dtype", "float16", "--drafter-dtype", "int8"), "one floating type"),
        (("--dtype", "int8", "--block-size", "128"), "multiple of the block size 128"),
        (("--num-layers", "9"), "layers"),
    ],
)
def test_options_that_do_not_fit_are_refused_and_leave_nothing(
    flags: tuple[str, ...], fragment: str, pair: tuple[str, ...], tmp_path: Path
) -> None:
    done = export(pair, tmp_path / "bundle", *flags)
    assert done.exit_code == 2, done.output
    assert fragment in done.stderr
    assert "Traceback" not in done.output
    assert sorted(item.name for item in tmp_path.iterdir()) == ["source"]
