"""Block sizes of the Triton kernels: every number that a measurement may change, and no other.

They were chosen from arithmetic for an H200 (132 processors, 4.8 TB/s, about 1 us from a load to its data, so that some 40 KB per
processor have to be on their way), not measured.  All are powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How a kernel that multiplies a matrix with the batch's vectors is cut up.

    rows: of the matrix, per program.
    columns: of the matrix, per step of a program's loop; rows * columns values are loaded at once.
    warps: per program.
    """

    rows: int
    columns: int
    warps: int = 4


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Blocks of the kernels for one kind of batch.

    correction: the codebook's; every form of the correction uses the same, so that all of them add up in the same order.
    cell: four times the GRU's units, as a program takes the three gates of a unit together and a power of two is needed.
    projection: the state projection's.
    """

    correction: Blocks
    cell: Blocks
    projection: Blocks


# Sums of products.  A codebook of 151,936 rows is 1,187 programs with 16 KB each on the way; the GRU's 1,024 units are 256 programs with
# 24 KB each, two on a processor; the projection's 256 rows are 64 programs that load all they need at once.
ONE = Tuning(
    correction=Blocks(rows=128, columns=64),
    cell=Blocks(rows=16, columns=1024),
    projection=Blocks(rows=4, columns=1024),
)
# Matrix products on tensor cores, which take 16 rows at least.  Of 128 rows of the codebook and 32 of the batch, the certified kernel
# would keep more than the 255 registers of a thread (ptxas -v, sm_90a).
MANY = Tuning(
    correction=Blocks(rows=64, columns=64),
    cell=Blocks(rows=16, columns=128),
    projection=Blocks(rows=16, columns=128),
)
# Rows of the batch that one program takes: tensor cores take 16 at least.
MOST_ROWS = 32

ARGMAX_COLUMNS = 4096  # base logits per program of a plain argmax
POOL_CANDIDATES = 32  # candidates per program
REDUCED_TILES = 1024  # tiles that the reduction looks at, at a time
MERGED_KEYS = 2048  # keys that one program of the top-k merge sorts


def tuning(batch: int) -> Tuning:
    """For `batch` rows."""
    return ONE if batch == 1 else MANY


def batch_block(batch: int) -> int:
    """BLOCK_B for `batch` rows: 1, or what tensor cores take."""
    return 1 if batch == 1 else max(16, power_of_two(batch))


def power_of_two(number: int) -> int:
    """The least power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


def blocks(number: int, size: int) -> int:
    """How many blocks of `size` hold `number`."""
    return -(-number // size)
