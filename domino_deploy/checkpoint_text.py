"""Tokenizer and chat template of a target checkpoint folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from domino_deploy.checkpoint_source import file_in
from domino_deploy.errors import CheckpointError, MissingDependencyError
from domino_deploy.strict_json import JsonObject, read_object

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MAX_TEMPLATE_BYTES = 2**20  # those of public targets have some 10 kB


def tokenizer_file(folder: Path) -> Path:
    """The folder's tokenizer.json.

    Raises:
        CheckpointError: there is none, or it is a link that leaves the checkpoint.
    """
    path = folder / TOKENIZER
    if not os.path.lexists(path):
        others = sorted(file.name for file in folder.iterdir() if "token" in file.name or file.name == "vocab.json")
        raise CheckpointError(
            f"{folder.name}: expected {TOKENIZER}, found {', '.join(others) or 'no tokenizer file at all'}. Save the tokenizer in the "
            "fast format (transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)) beside the weights."
        )
    return file_in(folder, TOKENIZER)


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Check that the folder's tokenizer parses and knows no token that a model of `vocab_size` has no row for.

    Raises:
        CheckpointError: there is none, it does not parse, or it is another model's.
        MissingDependencyError: the package tokenizers is not installed.
    """
    path = tokenizer_file(folder)
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDependencyError("Expected the package tokenizers, found it not installed. Run: pip install domino-deploy") from error
    try:
        ids = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises no type of its own
        raise CheckpointError(
            f"{path}: expected a tokenizer, found one that does not parse: {error}. Fetch the checkpoint again."
        ) from error
    misfit = misfit_of(ids, vocab_size)
    if misfit is not None:
        raise CheckpointError(
            f"{path}: expected token ids below {vocab_size}, the vocab_size of config.json, found {misfit}. Use the target's own tokenizer."
        )


def misfit_of(ids: Mapping[str, int], vocab_size: int) -> str | None:
    """What shows that a tokenizer is not of a model of `vocab_size`: its largest id, or that it has none; None where it may be.

    Args:
        ids: of all tokens, added ones included.
        vocab_size: rows of the model's embedding, often more than tokens.
    """
    token = max(ids, key=lambda token: ids[token], default=None)
    if token is None:
        return "none"
    return f"{ids[token]} ({token!r:.40})" if ids[token] >= vocab_size else None


def chat_template(folder: Path) -> str | None:
    """Source of the chat template: chat_template.jinja, else `chat_template` of tokenizer_config.json, else None.

    Raises:
        CheckpointError: a template of another form than UTF-8 text, a file that is not JSON, or a link that leaves the checkpoint.
    """
    if (folder / CHAT_TEMPLATE).is_file():
        return _text(file_in(folder, CHAT_TEMPLATE))
    template = _tokenizer_config(folder).get("chat_template")
    if isinstance(template, list):  # several named templates; the one called "default" is the chat's
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get("default")
    if template is not None and not isinstance(template, str):
        found = type(template).__name__
        raise CheckpointError(f"{folder.name}/{_TOKENIZER_CONFIG}: expected chat_template to be text, found {found}. Repair the file.")
    return template


def special_tokens(folder: Path) -> dict[str, str | None]:
    """Special tokens that chat templates name (`bos_token`, `eos_token`, ...), as tokenizer_config.json spells them."""
    tokens: dict[str, str | None] = {}
    for name, value in _tokenizer_config(folder).items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _tokenizer_config(folder: Path) -> JsonObject:
    path = folder / _TOKENIZER_CONFIG
    return read_object(file_in(folder, _TOKENIZER_CONFIG)) if path.is_file() else {}


def _text(path: Path) -> str:
    size = path.stat().st_size
    if size > _MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{path}: expected at most {_MAX_TEMPLATE_BYTES} bytes, found {size}. Use the target's own template.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected UTF-8 text, found: {error}. Save the template as UTF-8.") from error
