"""Variables of the chat template: those that a drafter was trained with stand in its config.json, for drafts are poor behind others.

Qwen3's template, for one, ends prompts otherwise with `enable_thinking` false than with true (z-lab/dflash#60 tells what that costs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from domino_deploy.bundle import CONFIG, DRAFTER_FOLDER, Bundle
from domino_deploy.errors import BundleError, listed
from domino_deploy.strict_json import read_object

# Under vLLM's and transformers' name for such variables; public drafters do not have it yet, `train` and `export` write it.
TRAINED_WITH = "chat_template_kwargs"
# What whoever renders a conversation gives to the template, and the template itself.
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "chat_template")
_MOST = 32


def variable_problems(found: object) -> list[str]:
    """What keeps a JSON value from being a drafter's variables: names, each with true, false, a number or a text."""
    if not isinstance(found, Mapping):
        return [f"expected an object of names and values, found {type(found).__name__}"]
    if len(found) > _MOST:
        return [f"expected at most {_MOST} names, found {len(found)}"]
    problems = [f"{name}: not a variable of the model's template, it is set by whoever renders" for name in found if name in OWN_VARIABLES]
    return problems + [
        f"{name}: expected true, false, a number or a text, found {type(value).__name__}"
        for name, value in found.items()
        if not isinstance(value, bool | int | float | str)
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
    """The variables that a request has otherwise than the drafter was trained with, in words; none where it does not say."""
    return [
        f"{name} is {_shown(given[name])}, the drafter was trained with {_shown(value)}"
        for name, value in trained.items()
        if name in given and given[name] != value
    ]


def shown(variables: Mapping[str, Any]) -> str:
    """Variables for people."""
    return ", ".join(f"{name} {_shown(value)}" for name, value in variables.items())


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
