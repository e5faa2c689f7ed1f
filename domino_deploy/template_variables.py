"""Variables of the chat template: those that a drafter was trained with stand in its config.json, for drafts are poor behind others.

Qwen3's template, for one, ends prompts otherwise with `enable_thinking` false than with true (z-lab/dflash#60 tells what that costs).
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from domino_deploy.bundle import CONFIG, DRAFTER_FOLDER, Bundle
from domino_deploy.config_fields import shown_key
from domino_deploy.errors import BundleError, listed
from domino_deploy.strict_json import read_object

# Under vLLM's and transformers' name for such variables; public drafters do not have it yet, `train` and `export` write it.
TRAINED_WITH = "chat_template_kwargs"
# What whoever renders a conversation gives to the template, and the template itself.
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "chat_template")
_SPECIAL = re.compile(r"\w+_token", re.ASCII)  # bos_token and its like, which come from the tokenizer
_NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_MOST = 32
_LONGEST = 1000
_SHOWN = 40  # characters


def variable_problems(found: object) -> list[str]:
    """What keeps a JSON value from being a drafter's variables: names, each with true, false, a finite number or a short text."""
    if not isinstance(found, Mapping):
        return [f"expected an object of names and values, found {type(found).__name__}"]
    if len(found) > _MOST:
        return [f"expected at most {_MOST} names, found {len(found)}"]
    problems = [f"{shown_key(name)}: expected a name of letters, digits and _" for name in found if not _NAME.fullmatch(name)]
    own = [name for name in found if name in OWN_VARIABLES or _SPECIAL.fullmatch(name)]
    problems += [f"{name}: not a variable of the model's template, it is set by whoever renders" for name in own]
    return problems + [
        f"{shown_key(name)}: expected true, false, a finite number or a text of at most {_LONGEST} characters, found {_shown(value)}"
        for name, value in found.items()
        if not _is_plain(value)
    ]


def trained_with(bundle: Bundle) -> dict[str, Any]:
    """The variables that the bundle's drafter was trained with, as far as its config.json says.

    Raises:
        BundleError: it does not say it in the form above.
    """
    file = bundle.path / DRAFTER_FOLDER / CONFIG
    found = read_object(file).get(TRAINED_WITH)
    if found is None:
        return {}
    problems = variable_problems(found)
    if problems:
        raise BundleError(listed(f"{file}: {TRAINED_WITH} cannot be used", problems, "Export the bundle again."))
    return dict(found)


def differing(trained: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The variables of a drafter that a request has otherwise, in words; none where it does not say, none of which the drafter does not."""
    return [
        f"{name} is {_shown(given[name])}, the drafter was trained with {_shown(value)}"
        for name, value in trained.items()
        if name in given and not _is_same(given[name], value)
    ]


def shown(variables: Mapping[str, Any]) -> str:
    """Variables for people."""
    return ", ".join(f"{name} {_shown(value)}" for name, value in variables.items())


def _is_same(one: object, other: object) -> bool:
    # For Python, true is 1.
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _shown(value: object) -> str:
    if isinstance(value, list | dict):  # a client's, of whatever size
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value[:_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST
    if isinstance(value, int):  # bool is one
        return abs(value) <= sys.maxsize
    return isinstance(value, float) and math.isfinite(value)
