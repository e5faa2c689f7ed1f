"""A reduced draft vocabulary (FR-Spec, arXiv 2502.14856): which tokens are in it, and their rows of LM head and codebook as a file.

Most of what a model says comes from few tokens, so a drafter may rank the most frequent ones only.  Shorter matrices are read
for each block; text is unchanged, since the target verifies with its whole LM head.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from domino_deploy.checkpoint import Checkpoint, open_target
from domino_deploy.checkpoint_tensors import EMBEDDING
from domino_deploy.checkpoint_tensors import LM_HEAD as TARGET_LM_HEAD
from domino_deploy.checkpoint_text import tokenizer_file
from domino_deploy.config import DrafterConfig, DrafterKind, TargetConfig
from domino_deploy.errors import CheckpointError, RequestError, listed, shortened
from domino_deploy.exporters.stored import PIECE_VALUES, TORCH_DTYPES
from domino_deploy.model.draft_vocab import CODEBOOK, LM_HEAD, TOKEN_IDS
from domino_deploy.precision import Dtype
from domino_deploy.runtime.text import Tokenizer
from domino_deploy.safetensors_header import TensorEntry, header_for
from domino_deploy.stored_weights import SAFETENSORS

# Characters: far above an answer, or a list of all token ids of a vocabulary (some 8 characters each).
_LONGEST_LINE = 2**24
_DRAFTER_CODEBOOK = "embed_proj.2.weight"
_FORM = 'an object with "prompt", "response" or "text" (strings), "messages" (objects with "content"), or "response_ids" (token ids)'


def rank_tokens(source: Path, tokenizer: Tokenizer, size: int, keep: Iterable[int], vocab_size: int) -> list[int]:
    """The `size` most frequent tokens of a text.

    Args:
        source: a text file; a `.jsonl` file of objects with "prompt", "response", "text" or "messages", or with the
            "response_ids" that `domino-deploy regenerate` writes; or the work folder of that command.
        tokenizer: the target's.
        size: tokens wanted, those of `keep` among them.
        keep: tokens that are in it in any case: end of sequence, beginning of sequence.
        vocab_size: the target's.

    Returns:
        Token ids, rising.  Of two that are equally frequent the lower id goes first.

    Raises:
        RequestError: a file of another form, or with a line of more than 16 Mi characters; tokens outside the vocabulary, or fewer
            different tokens than wanted.
    """
    kept = sorted(set(keep))
    if not max(1, len(kept)) <= size <= vocab_size:
        raise RequestError(
            f"Expected a draft vocabulary of {max(1, len(kept))} (the tokens that are always kept) to {vocab_size} tokens, found {size}. "
            "Choose a size in that range; FR-Spec takes a quarter of the vocabulary."
        )
    counts: Counter[int] = Counter()
    for file in _files(source):
        for ids in _token_runs(file, tokenizer):
            counts.update(ids)
    _check_range([*counts, *kept], vocab_size, source)
    ranked = sorted(counts.keys() - set(kept), key=lambda token: (-counts[token], token))
    if len(ranked) + len(kept) < size:
        raise RequestError(
            f"{source}: expected at least {size} different tokens, found {len(ranked) + len(kept)}. "
            "Give more text of the kind that will be generated, or choose a smaller draft vocabulary."
        )
    return sorted([*kept, *ranked[: size - len(kept)]])


def read_draft_vocab(file: Path, vocab_size: int) -> list[int]:
    """Token ids out of a JSON list, rising.

    Raises:
        RequestError: not a list of different token ids of the vocabulary, an empty one, or one of more than 16 Mi characters.
    """
    try:
        ids = json.loads(_short_text(file))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file}: expected a JSON list of token ids, found no JSON: {error}. Correct the file.") from error
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise RequestError(f"{file}: expected a JSON list of token ids, found {json.dumps(ids):.60}. Correct the file.")
    _check_range(ids, vocab_size, file)
    twice = [str(token) for token, count in sorted(Counter(ids).items()) if count > 1]
    if twice:
        raise RequestError(listed(f"{file}: expected each token once, found more often", shortened(twice, most=20), "Correct the file."))
    return sorted(ids)


def draft_vocab_of(target: str | Path, revision: str | None, size: int | None, source: Path | None) -> tuple[int, ...] | None:
    """The draft vocabulary that `export --draft-vocab SIZE --draft-vocab-from FILE` asks for; None without a file.

    Raises:
        RequestError: a size without a file, or a file that does not give that many tokens.
        CheckpointError: the target cannot be used.
    """
    if source is None:
        if size is not None:
            raise RequestError("Expected --draft-vocab-from beside --draft-vocab, found none. Name a text to count tokens in.")
        return None
    checkpoint = open_target(target, revision=revision)
    config = checkpoint.config
    if size is None:
        return tuple(read_draft_vocab(source, config.vocab_size))
    keep = [*config.eos_token_ids, *(() if config.bos_token_id is None else (config.bos_token_id,))]
    return tuple(rank_tokens(source, Tokenizer(tokenizer_file(checkpoint.folder)), size, keep, config.vocab_size))


def write_draft_vocab(
    target: Checkpoint[TargetConfig], drafter: Checkpoint[DrafterConfig], ids: Sequence[int], file: Path, dtype: Dtype
) -> None:
    """The selected rows as a safetensors file: token_ids int64 [D], lm_head.weight [D, M] and, for Domino, codebook [D, R].

    Rows are read and written piece by piece; no whole matrix is ever in memory.

    Args:
        target: gives the LM head, which may be its embedding.
        drafter: gives the codebook.
        ids: rising, of the target's vocabulary (`rank_tokens`, `read_draft_vocab`).
        file: to write.
        dtype: of the rows: float32, float16 or bfloat16.

    Raises:
        CheckpointError: a row that is not finite in `dtype`.
        RequestError: a quantised `dtype`.
    """
    if dtype not in SAFETENSORS:
        raise RequestError(
            f"Expected float32, float16 or bfloat16 for a draft vocabulary, found {dtype}. Its rows are few: store them in one of these."
        )
    matrices = {LM_HEAD: target.tensors[EMBEDDING if target.config.tie_word_embeddings else TARGET_LM_HEAD]}
    if drafter.config.kind is DrafterKind.DOMINO:
        matrices[CODEBOOK] = drafter.tensors[_DRAFTER_CODEBOOK]
    kind, problems = SAFETENSORS[dtype], []
    # The integers go first, so that everything behind them is aligned.
    layout = {TOKEN_IDS: ("I64", (len(ids),)), **{name: (kind, (len(ids), entry.shape[1])) for name, entry in matrices.items()}}
    with file.open("xb") as output:  # never into a file that is linked to the checkpoint's
        output.write(header_for(layout)[0])
        output.write(struct.pack(f"<{len(ids)}q", *ids))
        for entry in matrices.values():
            if not _write_rows(output, entry, ids, TORCH_DTYPES[kind]):
                problems.append(f"{entry.name} in {entry.file.name}")
    if problems:
        advice = "The checkpoint is damaged, or its weights need a wider type."
        raise CheckpointError(listed(f"Expected finite weights in {dtype}, found NaN or infinity in", problems, advice))


def _write_rows(output: BinaryIO, entry: TensorEntry, ids: Sequence[int], dtype: torch.dtype) -> bool:
    """Append the rows `ids` of a matrix; whether all of them are finite."""
    width, source = entry.shape[1], TORCH_DTYPES[entry.dtype]
    row_bytes, is_finite = width * source.itemsize, True
    rows_per_piece = max(1, PIECE_VALUES // width)
    with entry.file.open("rb") as file:
        for start in range(0, len(ids), rows_per_piece):
            piece = ids[start : start + rows_per_piece]
            content = bytearray(len(piece) * row_bytes)
            view = memoryview(content)
            for place, token in enumerate(piece):
                file.seek(entry.offset + token * row_bytes)
                file.readinto(view[place * row_bytes : (place + 1) * row_bytes])
            rows = torch.frombuffer(content, dtype=source).reshape(len(piece), width).to(dtype)
            is_finite = is_finite and bool(torch.isfinite(rows).all())
            output.write(rows.view(torch.uint8).numpy().data)
    return is_finite


def _files(source: Path) -> list[Path]:
    if not os.path.isdir(source):
        return [source]
    files = sorted(source.glob("responses-*.jsonl"))
    if not files:
        raise RequestError(
            f"{source}: expected a work folder of domino-deploy regenerate, with responses-*.jsonl, found none of these. "
            "Name that folder, a .jsonl file or a text file."
        )
    return files


def _token_runs(file: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of each line."""
    is_jsonl = file.suffix == ".jsonl"
    problems: list[str] = []
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        if not is_jsonl:
            yield tokenizer.encode(line, add_special_tokens=False)
            continue
        try:
            for text_or_ids in _contents(json.loads(line)):
                yield tokenizer.encode(text_or_ids, add_special_tokens=False) if isinstance(text_or_ids, str) else text_or_ids
        except (ValueError, RecursionError, RequestError) as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise RequestError(listed(f"{file}: expected {_FORM} in every line, found", shortened(problems, most=20), "Correct these lines."))


def _contents(record: object) -> Iterator[str | list[int]]:
    """Texts, or token ids, of a line; of a line with answered tokens only these, which are what a drafter has to say."""
    if isinstance(record, dict):
        ids = record.get("response_ids")
        if isinstance(ids, list) and all(type(token) is int for token in ids):
            yield ids
            return
        messages = record.get("messages")
        texts = [record.get(name) for name in ("prompt", "response", "text")]
        texts += [message.get("content") for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
        found = [text for text in texts if isinstance(text, str)]
        if found:
            yield from found
            return
    raise ValueError(f"found {json.dumps(record):.60}")


def _lines(file: Path) -> Iterator[str]:
    """Lines with their ends, which are tokens too; read one at a time, none of them longer than `_LONGEST_LINE`."""
    try:
        if file.exists() and not file.is_file():  # opening a pipe waits for whoever writes into it
            raise RequestError(f"{file}: expected a regular file, found something else. Write the text to a file and name that.")
        with file.open(encoding="utf-8", newline="\n") as text:
            for number in itertools.count(1):
                line = text.readline(_LONGEST_LINE + 1)
                if not line:
                    return
                if len(line) > _LONGEST_LINE:
                    raise RequestError(
                        f"{file}: expected lines of at most {_LONGEST_LINE} characters, found a longer one, line {number}. Break it up."
                    )
                yield line
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: expected a text or JSONL file in UTF-8, found none ({error}). Check the path.") from error


def _short_text(file: Path) -> str:
    """All of a file that is no longer than a line may be, which is long for a list of tokens."""
    text = ""
    for line in _lines(file):
        text += line
        if len(text) > _LONGEST_LINE:
            raise RequestError(f"{file}: expected at most {_LONGEST_LINE} characters, found more. Is it a list of token ids?")
    return text


def _check_range(ids: Iterable[int], vocab_size: int, where: Path) -> None:
    foreign = [f"{token!s:.40}" for token in sorted({token for token in ids if not 0 <= token < vocab_size})]
    if foreign:
        advice = "Use token ids of this target's tokenizer."
        raise RequestError(listed(f"{where}: expected token ids in [0, {vocab_size}), found", shortened(foreign, most=20), advice))
