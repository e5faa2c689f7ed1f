"""What a benchmark run is asked to do; the command line's defaults are these."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from domino_deploy.errors import OutOfRangeError
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.runtime.session import Backend, DrafterChoice, Provider


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values of one run.

    Args:
        kinds: kinds of prompts; empty for all that are there.
        prompts_per_kind: the first so many of each.
        max_new_tokens: longest response; the first token is the prefill's, so at least 2.
        num_speculative_tokens: tokens drafted per cycle; None for all that the drafter offers.
        temperature: 0 is greedy.
        seed: of the sampling; the same in every mode, so responses compare at any temperature.
        drafter: where proposals of the measured mode come from.
        has_prompt_lookup: also measure prompt lookup.
        is_raw: prompts without the chat template.
        backend: what runs the graphs.
        provider: what ONNX Runtime computes on.
        max_model_len: as the session's.
        threads: as the session's.
    """

    kinds: tuple[str, ...] = ()
    prompts_per_kind: int = 5
    max_new_tokens: int = 64
    num_speculative_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    drafter: DrafterChoice = DrafterChoice.BUNDLE
    has_prompt_lookup: bool = True
    is_raw: bool = False
    backend: Backend = Backend.ORT
    provider: Provider = Provider.CPU
    max_model_len: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        problems = {}
        if self.prompts_per_kind < 1:
            problems["prompts_per_kind"] = f"must be at least 1, found {self.prompts_per_kind}"
        if self.max_new_tokens < 2:
            problems["max_new_tokens"] = f"must be at least 2, since the first is the prefill's, found {self.max_new_tokens}"
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            problems["num_speculative_tokens"] = f"must be at least 1, found {self.num_speculative_tokens}"
        if problems:
            raise OutOfRangeError(problems, "Correct them and run again.")
        SamplingParams(temperature=self.temperature, seed=self.seed)

    @property
    def generation(self) -> GenerationParams:
        """The measured mode's request."""
        sampling = SamplingParams(temperature=self.temperature, seed=self.seed)
        return GenerationParams(sampling=sampling, max_new_tokens=self.max_new_tokens, num_speculative_tokens=self.num_speculative_tokens)

    @property
    def plain_generation(self) -> GenerationParams:
        """The same without speculation."""
        return replace(self.generation, num_speculative_tokens=0)

    def to_dict(self) -> dict[str, object]:
        """As JSON values."""
        return asdict(self)
