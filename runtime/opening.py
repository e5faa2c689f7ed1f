"""What opening a bundle takes, for a session and for the engine alike: its checks, its backend's module, and its drafter."""

from __future__ import annotations

import importlib
import os
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from domino_deploy.backends import BACKENDS, Backend, check_precision
from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.errors import MissingDependencyError, OutOfRangeError, RequestError
from domino_deploy.runtime.backends.ort_provider import Provider
from domino_deploy.runtime.prompt_lookup import PromptLookupDrafter
from domino_deploy.runtime.protocols import Drafter, SlotPair
from domino_deploy.runtime.single_slot import SingleSlot
from domino_deploy.runtime.text import Tokenizer, bundle_tokenizer

# Longer only when asked for: drafters are trained on some 3000 tokens and accept little beyond (docs/architecture.md), and
# a target's own maximum, mostly far above, would promise more memory than a machine may have.
DEFAULT_MAX_MODEL_LEN = 4096


class DrafterChoice(StrEnum):
    """Where proposals come from: the bundle's drafter, the context itself, or nowhere (plain decoding)."""

    BUNDLE = "bundle"
    PROMPT_LOOKUP = "prompt-lookup"
    NONE = "none"


def serves_together(backend: Backend, provider: Provider) -> bool:
    """Whether several requests are decoded together: by ONNX Runtime on the CPU alone."""
    return backend is Backend.ORT and provider is Provider.CPU


def open_slots(
    bundle: str | Path,
    *,
    num_slots: int,
    backend: Backend = Backend.ORT,
    provider: Provider = Provider.CPU,
    drafter: DrafterChoice = DrafterChoice.BUNDLE,
    max_model_len: int | None = None,
    threads: int | None = None,
) -> tuple[Bundle, Tokenizer, SlotPair]:
    """Open a bundle for several sequences at a time.

    What `serves_together` says runs in `num_slots` slots, everything else one after the other, in a single slot.

    Args and errors otherwise as `Session.open`.
    """
    opened, tokenizer, asked = checked_bundle(bundle, backend, provider, drafter, max_model_len, threads)
    module = backend_module(backend)  # also where it is not called: it names the package that is missing
    if serves_together(backend, provider):
        from domino_deploy.runtime.backends import ort_slots

        del asked["provider"]
        lookup = drafter is DrafterChoice.PROMPT_LOOKUP
        return opened, tokenizer, ort_slots.open_slots(opened, num_slots=num_slots, prompt_lookup=lookup, **asked)
    target, loaded = module.open_pair(opened, **asked)
    return opened, tokenizer, SingleSlot(target, chosen_drafter(drafter, loaded))


def checked_bundle(
    bundle: str | Path, backend: Backend, provider: Provider, drafter: DrafterChoice, max_model_len: int | None, threads: int | None
) -> tuple[Bundle, Tokenizer, dict[str, Any]]:
    """A bundle, checked, its tokenizer, and the arguments of its backend's `open_pair`; arguments and errors as `Session.open`."""
    check_provider(backend, provider)
    opened = open_bundle(bundle)
    capacity = checked_capacity(opened, backend, max_model_len, threads)
    tokenizer = bundle_tokenizer(opened)
    asked: dict[str, Any] = {"capacity": capacity, "threads": threads, "with_drafter": drafter is DrafterChoice.BUNDLE}
    if backend is Backend.ORT:
        asked["provider"] = provider
    if backend is Backend.TENSORRT and max_model_len is None:
        asked["capacity"] = None
    return opened, tokenizer, asked


def chosen_drafter(choice: DrafterChoice, loaded: Drafter | None) -> Drafter | None:
    """Prompt lookup if it was chosen, else what the backend loaded."""
    return PromptLookupDrafter() if choice is DrafterChoice.PROMPT_LOOKUP else loaded


def check_provider(backend: Backend, provider: Provider) -> None:
    """Hold a provider against the backend.

    Raises:
        RequestError: the backend has no use for it.
    """
    if backend is not Backend.ORT and provider is not Provider.CPU:
        raise RequestError(f"Expected a provider for the backend ort only, found {provider} for {backend}. Leave it out.")


def checked_capacity(bundle: Bundle, backend: Backend, max_model_len: int | None, threads: int | None) -> int:
    """Tokens of the longest sequence, once it is certain that these choices suit the bundle and this machine; nothing is loaded.

    Arguments and errors as `Session.open`; engines of TensorRT may be built for another length.
    """
    check_precision(backend, bundle.precision, bundle.path)
    most = bundle.target.max_position_embeddings
    problems = {}
    if max_model_len is not None and not 1 <= max_model_len <= most:
        problems["max_model_len"] = f"must lie in [1, {most}], the positions of this target, found {max_model_len}"
    processors = os.cpu_count() or 1
    # More than processors only wait for each other, and thousands hang the machine.
    if threads is not None and not 1 <= threads <= processors:
        problems["threads"] = f"must lie in [1, {processors}], the processors of this machine, found {threads}"
    if problems:
        raise OutOfRangeError(problems, "Correct them and open the bundle again.")
    return min(most, DEFAULT_MAX_MODEL_LEN) if max_model_len is None else max_model_len


def backend_module(backend: Backend) -> ModuleType:
    """The backend's module, imported when chosen.

    Raises:
        MissingDependencyError: the backend's package is not installed.
    """
    needs = BACKENDS[backend]
    try:
        return importlib.import_module(f"domino_deploy.runtime.backends.{needs.module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != needs.imported:
            raise
        raise MissingDependencyError(
            f"Expected the package {needs.package} for the backend {backend}, found none. Run: pip install '{needs.install}'"
        ) from error
