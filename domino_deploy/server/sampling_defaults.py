"""How tokens are chosen where a request does not say: as the target's generation_config.json has it, which is what vLLM does too, or
as the operator has it; else as OpenAI has it, at temperature 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from domino_deploy.bundle import TARGET_FOLDER, Bundle
from domino_deploy.checkpoint import GENERATION_CONFIG
from domino_deploy.config_fields import shown_key
from domino_deploy.errors import CheckpointError, OutOfRangeError, RequestError, listed, shortened
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.strict_json import read_object

OPENAI = SamplingParams(temperature=1.0)
# The fields of a generation_config.json that are taken; requests have them by the same names.  Not `do_sample` (transformers' switch
# between greedy decoding and the rest), and no limits of lengths.
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_INSIDE = f"{TARGET_FOLDER}/{GENERATION_CONFIG}"
_MOST_UNKNOWN = 10
_WITHOUT = "Start with --generation-config none, and say by --override-generation-config what it should have said."


class GenerationConfig(StrEnum):
    """Whose sampling counts where a request does not say: the model's own, or OpenAI's for every model."""

    AUTO = "auto"
    NONE = "none"


def sampling_defaults(bundle: Bundle, source: GenerationConfig, override: Mapping[str, Any]) -> SamplingParams:
    """What counts where a request leaves a field out.

    Args:
        bundle: it has its target's generation_config.json, if there was one.
        source: whether that file counts.
        override: fields of the operator's (`checked_override`), above those of the file.

    Raises:
        CheckpointError: the file says what cannot be done.
    """
    defaults = OPENAI
    if source is GenerationConfig.AUTO and _INSIDE in bundle.manifest.files:
        path = bundle.path / _INSIDE
        found = read_object(path)
        try:
            defaults = _with({name: found[name] for name in NAMES if name in found}, defaults)
        except OutOfRangeError as error:
            raise CheckpointError(listed(f"{path} cannot be used for sampling", _lines(error), _WITHOUT)) from error
    return _with(override, defaults)


def checked_override(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of the operator's as they are.

    Raises:
        RequestError: they say what cannot be done, or are not defaults of sampling.
    """
    unknown = [f"{shown_key(name)}: not one of {', '.join(NAMES)}" for name in found if name not in NAMES]
    problems = shortened(unknown, most=_MOST_UNKNOWN)
    try:
        _with({name: value for name, value in found.items() if name in NAMES}, OPENAI)
    except OutOfRangeError as error:
        problems += _lines(error)
    if problems:
        raise RequestError(listed("--override-generation-config cannot be used", problems, "Correct or leave out these fields."))
    return found


def described(defaults: SamplingParams) -> str:
    """For people: what is not as OpenAI has it, and the temperature in any case."""
    changed = [
        f"{name} {getattr(defaults, name):g}" for name in NAMES if name == "temperature" or getattr(defaults, name) != getattr(OPENAI, name)
    ]
    return ", ".join(changed)


def _lines(error: OutOfRangeError) -> list[str]:
    return [f"{name} {problem}" for name, problem in error.problems.items()]


def _with(given: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """The defaults with what is given in their place; as in requests, null is as good as left out, and `top_k` of -1 is all.

    Raises:
        OutOfRangeError: a value that cannot be used.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return replace(defaults, **values)
