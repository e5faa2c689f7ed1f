"""Bytes and launches of a block's rollout, computed from shapes: what a GPU has to move, not what was measured.

    python -m domino_deploy.plugins.triton_traffic

prints the table of docs/kernels.md.  This module imports neither torch nor Triton.

Shape legend as in `triton_rollout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_H200_BYTES_PER_SECOND = 4.8e12  # NVIDIA's data sheet of the H200


class Variant(StrEnum):
    """How a step finds its token: the whole codebook; its int8 rows first; or the base logits' best, and a bound on all others."""

    FULL = "full"
    INT8 = "int8"
    POOL = "pool"


@dataclass(frozen=True, kw_only=True)
class RolloutShape:
    """Sizes of a rollout.

    weight_bytes: of one value of the embedding, the codebook, the GRU and the projection.
    prefix_len: leading proposals that are not corrected.
    pool_size: candidates per proposal; of the variant `pool` only.
    has_table: whether the embedding times W_ih is at hand.
    """

    vocab_size: int
    rank: int
    width: int
    units: int
    proposals: int
    weight_bytes: int
    batch: int = 1
    prefix_len: int = 0
    pool_size: int = 0
    has_table: bool = False

    @property
    def corrected(self) -> int:
        """Proposals that are corrected."""
        return max(0, self.proposals - self.prefix_len)

    @property
    def table_bytes(self) -> int:
        """Memory that the embedding times W_ih takes."""
        return self.vocab_size * 3 * self.units * self.weight_bytes


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one block.

    total_bytes: read from memory, if L2 keeps nothing from one launch to the next; stores and activations, some KB, are left out.
    launches: kernels in the block's CUDA graph.
    """

    total_bytes: int
    launches: int


def traffic(shape: RolloutShape, variant: Variant, contenders: int = 0) -> Traffic:
    """What a block reads and launches.

    Args:
        contenders: rows of the codebook per proposal that the bound does not rule out, which depends on the numbers; of `full` none.
    """
    row_bytes = shape.rank * shape.weight_bytes
    base_bytes = shape.batch * shape.vocab_size * 4
    per_correction = shape.rank * shape.units * shape.weight_bytes + base_bytes
    if variant is Variant.FULL:
        per_correction += shape.vocab_size * row_bytes
    else:
        per_correction += contenders * row_bytes + shape.vocab_size * 4  # and the error of each row
    if variant is Variant.INT8:
        per_correction += shape.vocab_size * (shape.rank + 4)  # and the scale of each row
    if variant is Variant.POOL:
        per_correction += shape.batch * shape.pool_size * row_bytes + base_bytes  # the choice of the pool reads the logits once more
    gates_of_input = shape.batch if shape.has_table else shape.width
    per_step = 3 * shape.units * (gates_of_input + shape.units) * shape.weight_bytes
    from_zero = 3 * shape.units * shape.units * shape.weight_bytes  # the first state is zero: W_hh is not read
    total = shape.proposals * per_step - from_zero + shape.corrected * per_correction
    total += min(shape.prefix_len, shape.proposals) * base_bytes
    return Traffic(total_bytes=total, launches=_launches(shape, variant))


def _launches(shape: RolloutShape, variant: Variant) -> int:
    """First and last kernel, argmax of the prefix, one GRU step per proposal; a projection and one or two corrections for most."""
    per_correction = 3 if variant is Variant.POOL else 2
    return 2 + (shape.prefix_len > 0) + shape.proposals + shape.corrected * per_correction


def main() -> None:
    """Print the table."""
    print("| variant | rows rescored | table | MB per block | launches | at 4.8 TB/s |\n| --- | ---: | --- | ---: | ---: | ---: |")
    for variant, contenders in ((Variant.FULL, 0), (Variant.INT8, 0), (Variant.INT8, 1024), (Variant.POOL, 0), (Variant.POOL, 1024)):
        for has_table in (False, True):
            shape = RolloutShape(
                vocab_size=151936, rank=256, width=2560, units=1024, proposals=15, weight_bytes=2, pool_size=256, has_table=has_table
            )
            block = traffic(shape, variant, contenders)
            limit_ms = 1e3 * block.total_bytes / _H200_BYTES_PER_SECOND
            print(
                f"| {variant} | {contenders if variant is not Variant.FULL else '-'} | {'yes' if has_table else 'no'}"
                f" | {block.total_bytes / 1e6:,.0f} | {block.launches} | {limit_ms:.3f} ms |"
            )


if __name__ == "__main__":
    main()
