"""Tokenizer and chat template of a target checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from domino_deploy.errors import CheckpointError
from domino_deploy.strict_json import JsonObject, read_object

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"


def tokenizer_file(folder: Path) -> Path:
    """The folder's tokenizer.json.

    Raises:
        CheckpointError: there is none.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        others = sorted(file.name for file in folder.iterdir() if "token" in file.name or file.name == "vocab.json")
        raise CheckpointError(
            f"{folder.name}: expected {TOKENIZER}, found {', '.join(others) or 'no tokenizer file at all'}. Save the tokenizer in the "
            "fast format (transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)) beside the weights."
        )
    return path


def chat_template(folder: Path) -> str | None:
    """Source of the chat template: chat_template.jinja, else `chat_template` of tokenizer_config.json, else None.

    Raises:
        CheckpointError: a template of another form than text, or a file that is not JSON.
    """
    if (folder / CHAT_TEMPLATE).is_file():
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
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
    return read_object(path) if path.is_file() else {}
