"""How a target answers training prompts; imported by the command line before anything heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from domino_deploy.errors import RequestError, listed
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.template_variables import variable_problems

_GREEDY = SamplingParams(seed=0)


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How prompts are answered and what is kept.

    max_prompt_tokens: longer prompts are left out; max_new_tokens: longest response; batch_size: rows decoded together.
    template_variables: what the chat template gets beside the messages, such as Qwen3's `enable_thinking`.
    num_taps: layers whose features are kept, 0 for no features; soft_labels: the last layer's normed output too.
    part of parts: this process's share of the prompts; parts_here: how many of the parts write to this disk.

    Raises:
        RequestError: template variables that a drafter's config.json could not state.
    """

    max_prompt_tokens: int = 200
    max_new_tokens: int = 176
    batch_size: int = 128
    dtype: Literal["float32", "bfloat16"] = "float32"
    sampling: SamplingParams = _GREEDY
    template_variables: Mapping[str, object] = field(default_factory=dict)
    num_taps: int = 5
    soft_labels: bool = False
    part: int = 0
    parts: int = 1
    parts_here: int = 1

    def __post_init__(self) -> None:
        problems = variable_problems(self.template_variables)
        if problems:
            raise RequestError(listed("Variables of the chat template cannot be these", problems, "Correct or leave them out."))
