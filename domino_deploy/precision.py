"""How a bundle's weights are stored and its graphs compute: one choice each for target, drafter and LM head.

float32, float16 and bfloat16 are types of weights and activations alike; int8 and int4 are types of weights alone: matrices are
kept in blocks of integers with one scale each, activations stay float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from domino_deploy.errors import RequestError, listed

BLOCK_SIZES = (16, 32, 64, 128, 256)


class Dtype(StrEnum):
    """What `export --dtype` offers."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def is_quantised(self) -> bool:
        return self in (Dtype.INT8, Dtype.INT4)

    @property
    def bits(self) -> int:
        return {"float32": 32, "int8": 8, "int4": 4}.get(self, 16)

    @property
    def activations(self) -> Dtype:
        """The floating type that graphs with such weights compute in."""
        return Dtype.FLOAT32 if self.is_quantised else self


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A bundle's precision.

    Args:
        target: of the target's layers.
        drafter: of the backbone's layers; the head's small matrices are never quantised.
        lm_head: of the LM head, and of the embedding too where the target ties them.
        block_size: weights along the input axis that share one scale, for quantised parts.
        symmetric: no zero points: a block's integers stand for values around zero.

    Raises:
        RequestError: floating types that differ, or another block size.
    """

    target: Dtype = Dtype.FLOAT32
    drafter: Dtype = Dtype.FLOAT32
    lm_head: Dtype = Dtype.FLOAT32
    block_size: int = 32
    symmetric: bool = True

    def __post_init__(self) -> None:
        problems = []
        floats = {part.activations for part in (self.target, self.drafter, self.lm_head)}
        if len(floats) > 1:
            problems.append(
                f"target {self.target}, drafter {self.drafter} and LM head {self.lm_head} must compute in one floating type "
                f"(int8 and int4 compute in float32), found {', '.join(sorted(floats))}"
            )
        if self.block_size not in BLOCK_SIZES:
            problems.append(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, found {self.block_size}")
        if problems:
            raise RequestError(listed("Precision: values that do not go together", problems, "Correct them and export again."))

    @classmethod
    def of(
        cls, dtype: Dtype, *, drafter: Dtype | None = None, lm_head: Dtype | None = None, block_size: int = 32, symmetric: bool = True
    ) -> Precision:
        """`dtype` for all parts but those named; the LM head of an int4 pair is int8 by default, since tokens are chosen with it.

        Raises:
            RequestError: as the class, or a choice for blocks where no part has any.
        """
        default_head = Dtype.INT8 if dtype is Dtype.INT4 else dtype
        made = cls(target=dtype, drafter=drafter or dtype, lm_head=lm_head or default_head, block_size=block_size, symmetric=symmetric)
        if not made.is_quantised and (block_size, symmetric) != (cls.block_size, cls.symmetric):
            raise RequestError(
                f"Expected a block size or zero points for int8 or int4 only, found them for {made.name}. "
                "Leave them out, or choose one of these precisions for a part."
            )
        return made

    @property
    def activations(self) -> Dtype:
        """The floating type of caches, features and hidden states."""
        return self.target.activations

    @property
    def is_quantised(self) -> bool:
        return any(part.is_quantised for part in (self.target, self.drafter, self.lm_head))

    @property
    def name(self) -> str:
        """For tables and messages: "int4 (LM head int8)"."""
        others = [f"{part} {dtype}" for part, dtype in (("drafter", self.drafter), ("LM head", self.lm_head)) if dtype is not self.target]
        return f"{self.target} ({', '.join(others)})" if others else str(self.target)
