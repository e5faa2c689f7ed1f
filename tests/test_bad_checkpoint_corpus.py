"""Every bad pair of the corpus gives one clear error, within seconds and bounded memory, from Python and from the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from domino_deploy.checkpoint_text import chat_template, tokenizer_file
from domino_deploy.errors import CheckpointError
from tests.support import bad_checkpoints
from tests.support.bad_checkpoints import GOOD, Bad, write, write_good_pairs
from tests.support.bad_configs import CONFIGS
from tests.support.bad_files import FILES

CASES = {case.name: case for case in (*FILES, *CONFIGS)}
KINDS = {case.kind: case for case in reversed(CASES.values())}  # one case of each

MAX_SECONDS = 30.0  # of the processor; most take milliseconds, a header of 16 MiB some two seconds
MAX_MESSAGE = 20_000
ADVICE = re.compile(r"\b(Correct|Use|Fetch|fetch|Copy|Do not use|Name|Check|Convert|Remove|Pass)\b.*\.$")


@dataclass(frozen=True)
class Refusal:
    """What opening a pair gave: the class of the error and its message, both empty if it was accepted; processor time."""

    error: str
    message: str
    seconds: float


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_good_pairs(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def refusals(good: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal]:
    """All of the corpus and the good pairs, opened in one process that has no room for what the bad ones declare."""
    folder = tmp_path_factory.mktemp("corpus")
    names = {f"{number:03d}": name for number, name in enumerate(CASES)}
    for number, name in names.items():
        write(CASES[name], good, folder / number)
    for name in GOOD:
        shutil.copytree(good / name, folder / f"good {name}")
    command = [sys.executable, "-m", bad_checkpoints.__name__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(folder)  # pytest would keep its gigabyte
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        number, *rest = json.loads(line)
        found[names.get(number, number)] = Refusal(*rest)
    return found


def test_the_corpus_has_every_class() -> None:
    counts = Counter(case.kind for case in CASES.values())
    assert counts.keys() == {"truncated", "header", "dtype", "path", "huge", "layers", "rope", "vocabulary", "mask", "places", "json"}
    assert min(counts.values()) >= 20
    assert len(CASES) == len(FILES) + len(CONFIGS), "two cases of one name"


@pytest.mark.parametrize("name", GOOD)
def test_the_pairs_that_the_corpus_is_made_of_are_good(refusals: dict[str, Refusal], name: str) -> None:
    assert refusals[f"good {name}"].message == ""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_bad_pair_gives_one_clear_error(refusals: dict[str, Refusal], case: Bad) -> None:
    refusal = refusals[case.name]
    message = refusal.message
    assert refusal.error == case.error, message[:2000]
    missing = [item for item in case.items if item not in message]
    assert not missing, f"{missing} not in:\n{message[:2000]}"
    assert len(message) <= MAX_MESSAGE
    assert all(line.isprintable() for line in message.splitlines())
    last = message.splitlines()[-1]
    assert ADVICE.search(last), f"no advice in: {last}"
    assert refusal.seconds < MAX_SECONDS


@pytest.mark.slow
def test_the_command_line_says_it_in_one_error_and_leaves_nothing(good: Path, tmp_path: Path) -> None:
    def export(kind: str) -> tuple[str, subprocess.CompletedProcess[str]]:
        place = tmp_path / kind
        write(KINDS[kind], good, place / "pair")
        (place / "output").mkdir()
        roles = "--draft", str(place / "pair" / "drafter"), "--target", str(place / "pair" / "target")
        command = [sys.executable, "-m", "domino_deploy.cli", "export", *roles, "--output", str(place / "output" / "bundle")]
        return kind, subprocess.run(command, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(2) as pool:
        for kind, done in pool.map(export, KINDS):
            assert done.returncode == 4, (kind, done.stderr)
            assert done.stderr.count("Error:") == 1, (kind, done.stderr)
            assert "Traceback" not in done.stderr
            assert [item for item in KINDS[kind].items if item not in done.stderr] == [], (kind, done.stderr)
            assert done.stdout == ""
            assert os.listdir(tmp_path / kind / "output") == []


# Text files of a target, which an export copies into the bundle.


@pytest.mark.parametrize(("name", "read"), [("tokenizer.json", tokenizer_file), ("chat_template.jinja", chat_template)])
def test_a_text_file_that_links_out_of_the_checkpoint_is_refused(good: Path, tmp_path: Path, name: str, read: object) -> None:
    folder, secret = tmp_path / "target", tmp_path / "secret"
    shutil.copytree(good / "plain" / "target", folder)
    secret.write_text("secret")
    (folder / name).unlink()
    (folder / name).symlink_to(secret)
    assert callable(read)
    with pytest.raises(CheckpointError, match="found a link to"):
        read(folder)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff{{ messages }}", "expected UTF-8 text"), (b"{{ messages }}" * 2**17, "expected at most 1048576 bytes")]
)
def test_a_chat_template_that_is_none_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        chat_template(tmp_path)
