"""How an engine shares its time and memory; where its models come from is said to `Engine.open`."""

from __future__ import annotations

from dataclasses import dataclass

from domino_deploy.errors import OutOfRangeError
from domino_deploy.runtime.sampling import is_integer

# Far above what one machine decodes together; a slip of the keyboard must not fill the memory with slots.
MAX_SEQUENCES = 1024


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an operator may choose.

    Args:
        max_sequences: requests that run at a time, at most `MAX_SEQUENCES`; each has caches of its own.
        max_queued: requests that wait for a slot at most; others are refused.
        prefill_rows: tokens of a prompt that run between two cycles of the others at most.
        num_speculative_tokens: tokens to draft per cycle at most; None for the bundle's number.
        adaptive: draft fewer, or none, where that is faster.
    """

    max_sequences: int = 8
    max_queued: int = 64
    prefill_rows: int = 128
    num_speculative_tokens: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        problems = {}
        for name, least in (("max_sequences", 1), ("max_queued", 0), ("prefill_rows", 1)):
            value = getattr(self, name)
            if not is_integer(value) or value < least:
                problems[name] = f"must be an integer, at least {least}, found {value!r}"
        if is_integer(self.max_sequences) and self.max_sequences > MAX_SEQUENCES:
            problems["max_sequences"] = f"must be at most {MAX_SEQUENCES}, found {self.max_sequences}"
        count = self.num_speculative_tokens
        if count is not None and (not is_integer(count) or count < 0):
            problems["num_speculative_tokens"] = f"must be an integer, 0 (plain decoding) or above, found {count!r}"
        if not isinstance(self.adaptive, bool):
            problems["adaptive"] = f"must be True or False, found {self.adaptive!r}"
        if problems:
            raise OutOfRangeError(problems, "Correct them and open the engine again.")
