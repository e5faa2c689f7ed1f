"""The work folder: what comes back is what was put in, whatever interrupts a run, and nothing else is taken for it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_deploy.checkpoint import open_target
from domino_deploy.errors import TrainingError
from domino_deploy.training.fingerprint import fingerprint
from domino_deploy.training.samples import Sample
from domino_deploy.training.store import SampleStore, StoredSamples, read_stored
from tests.support.checkpoints import write_target

CLAIM = {"target": "abc", "max_new_tokens": 8, "sampling": "greedy"}
LAYERS, WIDTH = (1, 3), 6


def samples_of(count: int, first: int = 10) -> list[Sample]:
    return [
        Sample(prompt_ids=(first + i, 5), response_ids=tuple(range(20, 22 + i % 3)), kind="chat" if i % 2 else "") for i in range(count)
    ]


def features_of(samples: list[Sample]) -> list[np.ndarray]:
    return [
        np.random.default_rng(sample.prompt_ids[0]).standard_normal((len(sample.token_ids), WIDTH)).astype(np.float16) for sample in samples
    ]


def open_store(folder: Path, part: int = 0) -> SampleStore:
    return SampleStore.open(folder, claim=CLAIM, tapped_layers=LAYERS, width=WIDTH, part=part)


def open_plain(folder: Path, part: int = 0) -> SampleStore:
    return SampleStore.open(folder, claim=CLAIM, part=part)


def check(stored: StoredSamples, expected: list[Sample]) -> None:
    """Samples and their features, in any order."""
    assert sorted(stored.samples, key=str) == sorted(expected, key=str)
    for index, sample in enumerate(stored.samples):
        np.testing.assert_array_equal(stored.rows(index), features_of([sample])[0])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail, after a part of them has been written: a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_samples_kinds_and_features_come_back_as_they_were(tmp_path: Path) -> None:
    samples = samples_of(7)
    store = open_store(tmp_path)
    store.append(samples[:3], features_of(samples[:3]))
    store.append(samples[3:], features_of(samples[3:]))
    stored = open_store(tmp_path).read()
    assert stored.samples == samples
    assert (stored.has_features, stored.tapped_layers) == (True, LAYERS)
    check(stored, samples)
    assert store.answered() == {sample.prompt_ids for sample in samples}
    assert store.size_bytes() == sum(path.stat().st_size for path in tmp_path.glob("*-0.*"))


def test_a_store_without_features_has_none(tmp_path: Path) -> None:
    open_plain(tmp_path).append(samples_of(3), None)
    stored = open_plain(tmp_path).read()
    assert (stored.samples, stored.has_features, stored.tapped_layers) == (samples_of(3), False, ())
    assert sorted(contents(tmp_path)) == ["made-for.json", "responses-0.jsonl"]


def test_an_empty_store_reads_as_no_samples(tmp_path: Path) -> None:
    stored = open_store(tmp_path).read()
    assert (stored.samples, stored.features, stored.has_features) == ([], (), True)


def test_parts_are_read_together_and_a_prompt_counts_once(tmp_path: Path) -> None:
    samples = samples_of(9)
    for part, share in enumerate((samples[:4], samples[3:5], samples[5:])):
        open_store(tmp_path, part).append(share, features_of(share))
    store = open_store(tmp_path, 7)
    assert store.answered() == {sample.prompt_ids for sample in samples}
    check(store.read(), samples)


def test_foreign_files_in_the_folder_are_no_parts(tmp_path: Path) -> None:
    store = open_plain(tmp_path)
    store.append(samples_of(2), None)
    for name in ("responses-x.jsonl", "responses-01.jsonl", "responses-1.jsonl.bak"):
        (tmp_path / name).write_text("not ours")
    assert store.read().samples == samples_of(2)


def test_a_run_interrupted_at_any_byte_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    samples = samples_of(4)
    whole = tmp_path / "whole"
    store = open_store(whole)
    for sample in samples:
        store.append([sample], features_of([sample]))
    expected, first = contents(whole), features_of(samples[:2])
    lines = expected["responses-0.jsonl"]
    two = sum(map(len, lines.splitlines(keepends=True)[:2]))
    rows = len(first[0].tobytes()) + len(first[1].tobytes())
    # Features are written before their line: a cut inside the third sample's features has no byte of its line.
    cuts = [(two, size) for size in range(rows, rows + len(features_of(samples)[2].tobytes()))]
    cuts += [(end, len(expected["features-0.f16"])) for end in range(two, two + len(lines.splitlines(keepends=True)[2]) + 1)]
    for number, (line_bytes, feature_bytes) in enumerate(cuts):
        torn = tmp_path / str(number)
        shutil.copytree(whole, torn)
        os.truncate(torn / "responses-0.jsonl", line_bytes)
        os.truncate(torn / "features-0.f16", feature_bytes)
        again = open_store(torn)
        missing = [sample for sample in samples if sample.prompt_ids not in again.answered()]
        again.append(missing, features_of(missing))
        assert contents(torn) == expected, (line_bytes, feature_bytes)


def test_features_without_any_line_are_dropped(tmp_path: Path) -> None:
    open_store(tmp_path)
    (tmp_path / "features-0.f16").write_bytes(b"12345")
    store = open_store(tmp_path)
    store.append(samples_of(2), features_of(samples_of(2)))
    check(store.read(), samples_of(2))


def test_a_torn_line_of_another_running_part_is_left_alone(tmp_path: Path) -> None:
    open_plain(tmp_path, 1).append(samples_of(2), None)
    with (tmp_path / "responses-1.jsonl").open("ab") as file:
        file.write(b'{"prompt_ids": [1, 2')
    before = contents(tmp_path)["responses-1.jsonl"]
    store = open_plain(tmp_path)
    assert store.read().samples == samples_of(2)
    assert contents(tmp_path)["responses-1.jsonl"] == before


@pytest.mark.parametrize("limit", [1, 100, 107, 300, 1000])
def test_a_full_disk_leaves_whole_samples_and_says_so(tmp_path: Path, limit: int) -> None:
    first, more = samples_of(1), samples_of(40, first=100)
    store = open_store(tmp_path)
    store.append(first, features_of(first))
    before = contents(tmp_path)
    with largest_file(max(map(len, before.values())) + limit), pytest.raises(TrainingError, match=r"Free some space .* samples are kept"):
        store.append(more, features_of(more))
    assert contents(tmp_path) == before
    store.append(more, features_of(more))
    check(open_store(tmp_path).read(), first + more)


def test_a_full_disk_while_lines_are_written_takes_their_features_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    store.append(samples_of(2), features_of(samples_of(2)))
    before, more = contents(tmp_path), samples_of(2, first=50)
    monkeypatch.setattr("domino_deploy.training.store.line_of", lambda sample: b"x" * 10_000)
    with largest_file(5_000), pytest.raises(TrainingError):
        store.append(more, features_of(more))
    assert contents(tmp_path) == before


def test_an_interrupt_leaves_whole_samples(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.append(samples_of(1), features_of(samples_of(1)))
    before, more = contents(tmp_path), samples_of(2, first=50)
    store._append_features = Interrupted()  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        store.append(more, features_of(more))
    assert contents(tmp_path) == before


class Interrupted:
    """Takes the place of writing features."""

    def __call__(self, features: object) -> int:
        raise KeyboardInterrupt


def test_two_processes_on_one_part_are_told_apart(tmp_path: Path) -> None:
    one, other = open_plain(tmp_path), open_plain(tmp_path)
    one.append(samples_of(1), None)
    with pytest.raises(TrainingError, match="Another process writes the same part"):
        other.append(samples_of(1, first=50), None)
    assert one.read().samples == samples_of(1)


def test_features_of_another_shape_are_refused(tmp_path: Path) -> None:
    samples = samples_of(2)
    with pytest.raises(ValueError, match="shapes"):
        open_store(tmp_path).append(samples, [rows[:-1] for rows in features_of(samples)])
    with pytest.raises(ValueError, match="shapes"):
        open_store(tmp_path).append(samples, None)
    with pytest.raises(ValueError, match="shapes"):
        open_plain(tmp_path / "plain").append(samples, features_of(samples))


def test_a_folder_made_for_something_else_is_refused_with_every_difference(tmp_path: Path) -> None:
    open_plain(tmp_path)
    with pytest.raises(TrainingError) as found:
        SampleStore.open(tmp_path, claim=CLAIM | {"target": "xyz", "max_new_tokens": 9})
    for fragment in ('target: expected "xyz", found "abc"', "max_new_tokens: expected 9, found 8", "Name another folder"):
        assert fragment in str(found.value)
    assert "sampling" not in str(found.value)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1, "a": 2}'])
def test_a_damaged_note_is_named(tmp_path: Path, content: str) -> None:
    open_plain(tmp_path)
    (tmp_path / "made-for.json").write_text(content)
    with pytest.raises(TrainingError, match=r"made-for\.json"):
        open_plain(tmp_path)


@pytest.mark.parametrize(("layers", "width"), [((), 0), ((1, 2), 6), ((1, 3), 8)])
def test_other_features_than_the_folders_are_refused(tmp_path: Path, layers: tuple[int, ...], width: int) -> None:
    open_store(tmp_path).append(samples_of(1), features_of(samples_of(1)))
    with pytest.raises(TrainingError, match=r"found responses with features of layers \[1, 3\]"):
        SampleStore.open(tmp_path, claim=CLAIM, tapped_layers=layers, width=width)


def test_a_folder_of_bare_responses_takes_no_features(tmp_path: Path) -> None:
    open_plain(tmp_path).append(samples_of(1), None)
    with pytest.raises(TrainingError, match="found responses with no features"):
        open_store(tmp_path)


def test_a_folder_without_samples_may_change_its_features(tmp_path: Path) -> None:
    open_store(tmp_path)
    open_plain(tmp_path)
    store = open_store(tmp_path)
    store.append(samples_of(2), features_of(samples_of(2)))
    check(store.read(), samples_of(2))


def test_reading_takes_what_the_folder_has_whatever_it_was_made_for(tmp_path: Path) -> None:
    open_store(tmp_path / "features").append(samples_of(3), features_of(samples_of(3)))
    check(read_stored(tmp_path / "features"), samples_of(3))
    open_plain(tmp_path / "plain").append(samples_of(3), None)
    stored = read_stored(tmp_path / "plain")
    assert (stored.samples, stored.has_features) == (samples_of(3), False)


def test_reading_a_folder_without_responses_is_an_error(tmp_path: Path) -> None:
    open_plain(tmp_path / "new")
    for name in ("new", "nowhere"):
        with pytest.raises(TrainingError, match=name):
            read_stored(tmp_path / name)


@pytest.mark.parametrize("note", ['{"tapped_layers": [1.5], "width": 6}', '{"tapped_layers": [1]}', '{"tapped_layers": [], "width": 0}'])
def test_a_damaged_note_of_features_is_named(tmp_path: Path, note: str) -> None:
    open_store(tmp_path)
    (tmp_path / "features.json").write_text(note)
    with pytest.raises(TrainingError, match=r"features\.json: expected tapped_layers and width"):
        open_store(tmp_path)


@pytest.mark.parametrize("part", [0, 1])
def test_lost_feature_rows_are_an_error_and_cost_no_response(tmp_path: Path, part: int) -> None:
    open_store(tmp_path, part).append(samples_of(3), features_of(samples_of(3)))
    path = tmp_path / f"features-{part}.f16"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(TrainingError, match=r"a row for each token .* the responses are kept"):
        open_store(tmp_path).read()
    for name in ("features.json", path.name):
        (tmp_path / name).unlink()
    assert open_plain(tmp_path).read().samples == samples_of(3)


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"",
        b"[1, 2]",
        b'{"prompt_ids": [1]}',
        b'{"prompt_ids": [1], "response_ids": []}',
        b'{"prompt_ids": "12", "response_ids": [2]}',
        b'{"prompt_ids": [1], "response_ids": [true]}',
        b'{"prompt_ids": [1], "response_ids": [2.0]}',
        b'{"prompt_ids": [1], "response_ids": [NaN]}',
        b'{"prompt_ids": [-1], "response_ids": [2]}',
        b'{"prompt_ids": [1], "response_ids": [2147483648]}',
        b'{"prompt_ids": [1], "response_ids": [2], "kind": 3}',
        b'{"prompt_ids": [1], "response_ids": [2], "text": "x"}',
        b'{"prompt_ids": [1], "response_ids": [2], "kind": "\xff"}',
        b"[" * 100_000,
        b"\x00" * 40,
    ],
    ids=lambda line: line[:60].decode("latin-1") or "empty",
)
def test_a_line_that_is_no_sample_is_named_by_file_and_line(tmp_path: Path, line: bytes) -> None:
    open_plain(tmp_path, 2).append(samples_of(2), None)
    with (tmp_path / "responses-2.jsonl").open("ab") as file:
        file.write(line + b"\n" + line + b"\n")
    before = contents(tmp_path)
    for part in (0, 2):
        with pytest.raises(TrainingError, match=r"(?s)responses-2\.jsonl: .*line 3: .*line 4: "):
            open_plain(tmp_path, part).read()
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrainingError, match="expected a work folder that can be written to"):
        open_plain(tmp_path / "file")


def test_the_fingerprint_is_the_targets_not_the_folders(tmp_path: Path) -> None:
    one = write_target(tmp_path / "one")
    shutil.copytree(one, tmp_path / "copy")
    assert fingerprint(open_target(one)) == fingerprint(open_target(tmp_path / "copy"))


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.v_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_one_trained_tensor_in_the_same_folder_gives_another_fingerprint(tmp_path: Path, name: str) -> None:
    folder = write_target(tmp_path / "target", shards=1)
    before = fingerprint(open_target(folder))
    tensors = load_file(folder / "model.safetensors")
    tensors[name] += 1e-3 * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(open_target(folder)) != before


def test_another_configuration_gives_another_fingerprint(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    before = fingerprint(open_target(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    assert fingerprint(open_target(folder)) != before
