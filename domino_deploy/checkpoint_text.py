"""Tokenizer and chat template of a target checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path

from domino_deploy.errors import CheckpointError

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
        found = ", ".join(sorted(p.name for p in folder.iterdir() if "token" in p.name or p.name == "vocab.json")) or "no tokenizer file at all"
        raise CheckpointError(
            f"{folder.name}: expected {TOKENIZER}, found {found}. Save the tokenizer in the fast format "
            "(transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)) beside the weights."
        )
    return path


def chat_template(folder: Path) -> str | None:
    """Source of the chat template: chat_template.jinja, else `chat_template` of tokenizer_config.json, else None.

    Raises:
        CheckpointError: a template of another form than text, or a file that is not JSON.
    """
    if (folder / CHAT_TEMPLATE).is_file():
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    if not (folder / _TOKENIZER_CONFIG).is_file():
        return None
    try:
        template = json.loads((folder / _TOKENIZER_CONFIG).read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder.name}/{_TOKENIZER_CONFIG}: expected a JSON object, found {error}. Repair the file.") from error
    if isinstance(template, list):  # several named templates; the one called "default" is the chat's
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder.name}/{_TOKENIZER_CONFIG}: expected chat_template to be text, found {type(template).__name__}. Repair the file.")
    return template


def special_tokens(folder: Path) -> dict[str, str | None]:
    """The tokens that a chat template may name, from tokenizer_config.json: their text, or None where there is none.

    Raises:
        CheckpointError: a file that is not JSON.
    """
    path = folder / _TOKENIZER_CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        tokens = {name: content.get(name) for name in ("bos_token", "eos_token")}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder.name}/{_TOKENIZER_CONFIG}: expected a JSON object, found {error}. Repair the file.") from error
    # Older files write a token as an object, with its text under "content".
    return {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
