"""What a drafter is trained on: prompts, and prompts with the target's own responses, as token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, chat template and generation prompt included; `kind` says where it comes from, for figures by kind."""

    ids: tuple[int, ...]
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt and its regenerated response."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    kind: str = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt_ids + self.response_ids


def digest(samples: Sequence[Sample]) -> str:
    """sha256 over the token ids, in order: tells whether something was made for these very samples."""
    return hashlib.sha256(json.dumps([sample.token_ids for sample in samples]).encode()).hexdigest()
