"""Reduced draft vocabularies: which tokens are chosen, which rows are written, and that nothing but proposals changes."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_deploy.bundle import BACKBONE_GRAPH, HEAD_GRAPH, open_bundle
from domino_deploy.checkpoint import Checkpoint, load_tensors, open_drafter, open_target
from domino_deploy.checkpoint_tensors import EMBEDDING, LM_HEAD
from domino_deploy.errors import CheckpointError, RequestError
from domino_deploy.exporters.draft_vocab import rank_tokens, read_draft_vocab, write_draft_vocab
from domino_deploy.exporters.onnx_from_backbone import onnx_from_backbone
from domino_deploy.exporters.onnx_from_head import onnx_from_head
from domino_deploy.model.draft_vocab import draft_vocab_of, selected
from domino_deploy.model.loading import load_drafter, load_target
from domino_deploy.precision import Dtype
from domino_deploy.runtime.backends.ort import OrtDrafter, OrtTarget
from domino_deploy.runtime.backends.ort_passes import DraftPasses, TargetPasses
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.protocols import Drafter, FloatArray, Proposal
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.signature import GraphForm
from tests.support.checkpoints import write_drafter, write_target

VOCAB = 300
IDS = [1, 2, *range(30, 290, 4)]


class LetterTokenizer:
    """a is 10, b is 11, ..."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [10 + ord(letter) - ord("a") for letter in text if letter.isalpha()]


def ranked(file: Path, size: int, keep: tuple[int, ...] = ()) -> list[int]:
    return rank_tokens(file, LetterTokenizer(), size, keep, VOCAB)  # type: ignore[arg-type]  # all that is used of it


def written(folder: Path, name: str, *lines: object) -> Path:
    file = folder / name
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8")
    return file


class TestRanking:
    def test_takes_the_most_frequent_ties_to_the_lowest_id(self, tmp_path: Path) -> None:
        text = written(tmp_path, "text.txt", "ccc dd bb", "d e a")
        assert ranked(text, 2) == [12, 13]  # c and d three times each
        assert ranked(text, 3) == [11, 12, 13]
        assert ranked(text, 4) == [10, 11, 12, 13]  # a before e

    def test_keeps_what_must_be_kept_within_the_size(self, tmp_path: Path) -> None:
        assert ranked(written(tmp_path, "text.txt", "cccddb"), 3, keep=(2, 1)) == [1, 2, 12]

    def test_reads_every_form_of_line(self, tmp_path: Path) -> None:
        file = written(
            tmp_path,
            "lines.jsonl",
            {"prompt": "a", "response": "b", "kind": "zzzzzz"},
            {"text": "c"},
            {"messages": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]},
            {"prompt_ids": [50, 51], "response_ids": [60, 61]},
        )
        assert ranked(file, 7) == [10, 11, 12, 13, 14, 60, 61]

    def test_reads_all_parts_of_a_work_folder(self, tmp_path: Path) -> None:
        for part, ids in enumerate(([20, 20, 21], [21, 21, 22])):
            written(tmp_path, f"responses-{part}.jsonl", {"prompt_ids": [1], "response_ids": ids})
        written(tmp_path, "made-for.json", {"text": "aaaaaaaa"})
        assert ranked(tmp_path, 1) == [21]
        assert ranked(tmp_path, 3) == [20, 21, 22]

    @pytest.mark.parametrize(
        ("name", "lines", "size", "message"),
        [
            ("few.txt", ("abc",), 4, "at least 4 different tokens, found 3"),
            ("small.txt", ("abc",), 0, "found 0"),
            ("large.txt", ("abc",), VOCAB + 1, f"to {VOCAB} tokens"),
            ("foreign.jsonl", ({"response_ids": [1, 2, 400, -3]},), 2, "- -3\n  - 400"),
            ("other.jsonl", ({"question": "?"}, {"text": "a"}, "not json"), 1, "line 1: found .*\n  - line 3:"),
        ],
    )
    def test_refuses(self, name: str, lines: tuple[object, ...], size: int, message: str, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match=message):
            ranked(written(tmp_path, name, *lines), size)

    def test_refuses_what_is_not_there_or_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
        (tmp_path / "empty").mkdir()
        for name in ("nowhere.txt", "binary.txt", "empty", "x" * 300):
            with pytest.raises(RequestError, match=name):
                ranked(tmp_path / name, 1)


class TestFiles:
    """What no text file is, and texts that would not fit into memory."""

    READERS = (lambda file: ranked(file, 1), lambda file: read_draft_vocab(file, VOCAB))

    @pytest.mark.parametrize("read", READERS, ids=["text", "list"])
    def test_what_is_no_regular_file_is_refused_and_not_waited_for(self, read: Callable[[Path], object], tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.txt")
        writer = os.open(tmp_path / "pipe.txt", os.O_RDWR)  # with one that is open, a reader does not wait for ever
        os.write(writer, b"[1]\n")
        try:
            for file in (tmp_path / "pipe.txt", Path(os.devnull)):
                with pytest.raises(RequestError, match=rf"{file}: expected a regular file, found something else\. Write"):
                    read(file)
        finally:
            os.close(writer)

    def test_a_pipe_in_a_work_folder_is_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "responses-0.jsonl")
        os.close(os.open(tmp_path / "responses-0.jsonl", os.O_RDWR))
        with pytest.raises(RequestError, match=r"responses-0\.jsonl: expected a regular file"):
            ranked(tmp_path, 1)

    @pytest.mark.parametrize("read", READERS, ids=["text", "list"])
    def test_a_line_without_an_end_is_not_read_into_memory(self, read: Callable[[Path], object], tmp_path: Path) -> None:
        file = written(tmp_path, "text.txt", "a")
        os.truncate(file, 2**34)  # zeros that take no room on the disk
        tracemalloc.start()
        try:
            with pytest.raises(RequestError, match=r"text\.txt: expected lines of at most 16777216 characters, found .* line 2\. Break"):
                read(file)
            assert tracemalloc.get_traced_memory()[1] < 2**28
        finally:
            tracemalloc.stop()

    def test_the_longest_line_is_still_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("domino_deploy.exporters.draft_vocab._LONGEST_LINE", 5)
        assert ranked(written(tmp_path, "text.txt", "aaab", "cc"), 2) == [10, 12]
        with pytest.raises(RequestError, match="line 2"):
            ranked(written(tmp_path, "text.txt", "cc", "aaaab"), 2)
        assert read_draft_vocab(written(tmp_path, "ids.json", "[1", "]"), VOCAB) == [1]
        with pytest.raises(RequestError, match="at most 5 characters, found more"):
            read_draft_vocab(written(tmp_path, "ids.json", "[1", ",2]"), VOCAB)


class TestReading:
    def test_a_list_is_sorted(self, tmp_path: Path) -> None:
        assert read_draft_vocab(written(tmp_path, "ids.json", [5, 3, 299, 0]), VOCAB) == [0, 3, 5, 299]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([1, 300, -1], "- -1\n  - 300"),
            ([4, 7, 4, 7, 1], "- 4\n  - 7"),
            ([10**4000], "- 10{39}\n"),
            ([], "found \\[\\]"),
            ([1, True], "JSON list of token ids"),
            ({"ids": [1]}, "JSON list of token ids"),
            ("{", "no JSON"),
        ],
    )
    def test_refuses(self, content: object, message: str, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match=message):
            read_draft_vocab(written(tmp_path, "ids.json", content), VOCAB)


def pair(folder: Path, *, kind: str = "domino", tied: bool = True, dtype: str = "float32") -> tuple[Checkpoint, Checkpoint]:
    """Target and drafter."""
    target = write_target(folder / "target", family="qwen3", tied=tied, dtype=dtype, shards=2)
    return open_target(target), open_drafter(write_drafter(folder / "drafter", target, kind=kind, dtype=dtype, shards=2))


class TestWriting:
    @pytest.mark.parametrize(
        ("tied", "stored", "asked"), [(True, "float32", "float32"), (False, "bfloat16", "bfloat16"), (True, "float32", "float16")]
    )
    @pytest.mark.parametrize("kind", ["domino", "dflash"])
    def test_rows_are_the_selected_ones(
        self, kind: str, tied: bool, stored: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("domino_deploy.exporters.draft_vocab.PIECE_VALUES", 32 * 7)  # several pieces
        target, drafter = pair(tmp_path, kind=kind, tied=tied, dtype=stored)
        write_draft_vocab(target, drafter, IDS, tmp_path / "vocab.safetensors", Dtype(asked))
        found = load_file(tmp_path / "vocab.safetensors")
        dtype = getattr(torch, asked)
        weights = dict(load_tensors(target, dtype)) | dict(load_tensors(drafter, dtype))
        expected = {"token_ids": torch.tensor(IDS), "lm_head.weight": weights[EMBEDDING if tied else LM_HEAD][IDS]}
        if kind == "domino":
            expected["codebook"] = weights["embed_proj.2.weight"][IDS]
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)

    def test_what_is_not_finite_in_the_type_is_refused(self, tmp_path: Path) -> None:
        target, drafter = pair(tmp_path)
        entry = drafter.tensors["embed_proj.2.weight"]
        tensors = load_file(entry.file)
        tensors[entry.name][IDS[3], 0] = 1e6
        save_file(tensors, entry.file)
        drafter = open_drafter(drafter.folder)
        write_draft_vocab(target, drafter, IDS, tmp_path / "float32.safetensors", Dtype.FLOAT32)
        with pytest.raises(CheckpointError, match=r"float16, found NaN or infinity in\n  - .*embed_proj\.2"):
            write_draft_vocab(target, drafter, IDS, tmp_path / "float16.safetensors", Dtype.FLOAT16)

    def test_a_quantised_type_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="found int4"):
            write_draft_vocab(*pair(tmp_path), IDS, tmp_path / "vocab.safetensors", Dtype.INT4)


class Recorded:
    """A drafter and all that it proposes."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.proposals: list[list[int]] = []

    @property
    def max_proposals(self) -> int:
        return self.inner.max_proposals

    def reset(self) -> None:
        self.inner.reset()

    def propose(self, token_ids: list[int], features: FloatArray, count: int) -> Proposal:
        proposal = self.inner.propose(token_ids, features, count)
        self.proposals.append(proposal.token_ids.tolist())
        return proposal


@pytest.mark.parametrize(("kind", "pool"), [("domino", 0), ("domino", 20), ("dflash", 0)])
def test_text_is_that_of_plain_decoding_and_drafts_are_of_the_selection(kind: str, pool: int, tiny_bundle: Path, tmp_path: Path) -> None:
    """The tiny bundle's target graph, with a drafter whose graphs know the selected tokens only, on ONNX Runtime."""
    bundle = open_bundle(tiny_bundle)
    target_source = open_target(tiny_bundle.parent / "target")
    drafter_source = open_drafter(write_drafter(tmp_path / "drafter", tiny_bundle.parent / "target", kind=kind))
    write_draft_vocab(target_source, drafter_source, IDS, tmp_path / "vocab.safetensors", Dtype.FLOAT32)
    tensors = {f"draft_vocab.{name}": tensor for name, tensor in load_file(tmp_path / "vocab.safetensors").items()}
    for owner, source in (("target", target_source), ("drafter", drafter_source)):
        tensors |= {f"{owner}.{name}": tensor for name, tensor in load_tensors(source, torch.float32)}
    # The exporter may call a tied matrix by either name.
    tensors.setdefault("target.lm_head.weight", tensors["target.model.embed_tokens.weight"])
    config, form = drafter_source.config, GraphForm(draft_vocab_size=len(IDS), candidate_pool=pool)
    graphs = {
        BACKBONE_GRAPH: onnx_from_backbone(config, target_source.config, form),
        HEAD_GRAPH: onnx_from_head(config, target_source.config, form, pool > 0),
    }
    used = set()
    for name, graph in graphs.items():
        for initializer in graph.graph.initializers.values():
            if initializer.const_value is None:
                used.add(initializer.name)
                initializer.const_value = ir.tensor(tensors[initializer.name].numpy(), name=initializer.name)
        ir.save(graph, tmp_path / name)
    assert {name for name in tensors if name.startswith("draft_vocab")} <= used
    assert "drafter.embed_proj.2.weight" not in used

    target = OrtTarget(TargetPasses(tiny_bundle / "target.onnx", bundle.target, config.feature_size, 1), 200)
    drafter = Recorded(OrtDrafter(DraftPasses(tmp_path / BACKBONE_GRAPH, tmp_path / HEAD_GRAPH, config, 1, form), 200))
    vocab = draft_vocab_of(load_file(tmp_path / "vocab.safetensors"))
    reference = load_drafter(drafter_source), load_target(target_source)
    for seed in range(3):
        prompt = np.random.default_rng(seed).integers(3, 290, 9).tolist()
        params = GenerationParams(max_new_tokens=60)
        plain = list(generate(target, None, prompt, params, num_speculative_tokens=0))
        steps = list(generate(target, drafter, prompt, params, num_speculative_tokens=drafter.max_proposals))
        assert sum((step.token_ids for step in steps), ()) == sum((step.token_ids for step in plain), ())
        assert (sum(step.pooled for step in steps) > 0) == (pool > 0)
    drafted = {token for proposal in drafter.proposals for token in proposal}
    assert drafted <= set(IDS)
    assert len(drafted) > 5
    _same_draft_as_pytorch(target, drafter.inner, reference, vocab)


def _same_draft_as_pytorch(target: OrtTarget, drafter: Drafter, reference: tuple, vocab: object) -> None:
    """One block behind a prompt: the graphs' proposal is that of the models with the selected rows."""
    drafter_model, target_model = reference
    prompt = np.random.default_rng(9).integers(3, 290, 12).tolist()
    target.reset()
    drafter.reset()
    features = target.forward(prompt[:-1], 1).features.copy()
    proposal = drafter.propose(prompt, features, drafter.max_proposals)
    embed = target_model.model.embed_tokens
    with torch.inference_mode():
        anchor, block = torch.tensor(prompt[-1:]), drafter_model.config.block_size
        keys, values = drafter_model.empty_caches(1, len(prompt) - 1 + block)
        out = drafter_model.cached(
            embed(drafter_model.block_ids(anchor)),
            torch.from_numpy(features)[None],
            torch.arange(len(prompt) - 1 + block)[None],
            torch.ones(1, 1, block, len(prompt) - 1 + block, dtype=torch.bool),
            torch.tensor([0]),
            keys,
            values,
            None,
        )
        hidden = drafter_model.proposal_rows(out.hidden)
        expected = drafter_model.rollout(embed, anchor, hidden, vocab.lm_head(hidden), vocab=vocab)
    assert proposal.token_ids.tolist() == expected.token_ids[0].tolist()


def test_selected_rows_are_a_draft_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    lm_head, codebook = torch.randn(20, 6, generator=generator), torch.randn(20, 3, generator=generator)
    vocab = selected(torch.tensor([2, 5, 19]), lm_head, codebook)
    hidden = torch.randn(4, 6, generator=generator)
    torch.testing.assert_close(vocab.lm_head(hidden), (hidden @ lm_head.T)[:, [2, 5, 19]])
    assert vocab.codebook is not None
    assert torch.equal(vocab.codebook, codebook[[2, 5, 19]])
    assert selected(torch.tensor([1]), lm_head, None).codebook is None
