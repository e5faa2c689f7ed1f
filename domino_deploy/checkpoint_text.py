"""Tokenizer and chat template of a target checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from domino_deploy.checkpoint_source import file_in
from domino_deploy.errors import CheckpointError
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
    if not path.is_file():
        others = sorted(file.name for file in folder.iterdir() if "token" in file.name or file.name == "vocab.json")
        raise CheckpointError(
            f"{folder.name}: expected {TOKENIZER}, found {', '.join(others) or 'no tokenizer file at all'}. Save the tokenizer in the "
            "fast format (transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)) beside the weights."
        )
    return file_in(folder, TOKENIZER)


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
