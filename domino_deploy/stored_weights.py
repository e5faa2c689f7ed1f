"""How a bundle stores each weight: the type by its name, the bytes by type and shape, and the part of the pair that it belongs to.

Arithmetic on names and shapes alone; the conversion itself is `exporters/weights.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from domino_deploy.checkpoint_tensors import EMBEDDING, LM_HEAD
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import RequestError, listed
from domino_deploy.precision import Dtype, Precision

# Names of safetensors.
DTYPES: Mapping[str, Dtype] = {"F32": Dtype.FLOAT32, "F16": Dtype.FLOAT16, "BF16": Dtype.BFLOAT16}
SAFETENSORS: Mapping[Dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# What int8 and int4 apply to: the matrices of the layers, and the drafter's feature projection.
_MATRIX = re.compile(r"(model\.)?layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight|fc\.weight")
_SCALE_BYTES = 4  # float32

# Parts of a pair, in the order in which they are told.
EMBEDDING_PART, LM_HEAD_PART, TARGET_LAYERS = "embedding", "LM head", "target layers"
TIED_PART = "embedding and LM head"
BACKBONE, HEAD, CODEBOOK, DRAFT_VOCABULARY = "drafter backbone", "head", "head codebook", "draft vocabulary"
PARTS = (EMBEDDING_PART, LM_HEAD_PART, TIED_PART, TARGET_LAYERS, BACKBONE, HEAD, CODEBOOK, DRAFT_VOCABULARY)


class Blocks(NamedTuple):
    """Layout of a quantised matrix: blocks of one output, bytes of a block, bytes of one output's zero points."""

    number: int
    block_bytes: int
    zero_bytes: int


def blocks_of(inputs: int, bits: int, block_size: int) -> Blocks:
    """The layout of an input axis that is a whole number of blocks; four-bit zero points lie two in a byte."""
    count = inputs // block_size
    return Blocks(count, block_size * bits // 8, (count * bits + 7) // 8)


def check_whole_blocks(inputs: Mapping[str, int], block_size: int) -> None:
    """Check that the input axes of matrices are whole numbers of blocks.

    Args:
        inputs: length of the input axis of each matrix that is to be quantised, by its name.
        block_size: inputs of a block.

    Raises:
        RequestError: some are not; all of them are named.
    """
    problems = [f"{name}: {length} inputs" for name, length in inputs.items() if length % block_size]
    if problems:
        raise RequestError(
            listed(
                f"Expected matrices whose inputs are a multiple of the block size {block_size}, found",
                problems,
                "Choose a smaller block size, or another precision for that part.",
            )
        )


def stored_bytes(shape: tuple[int, ...], dtype: Dtype, precision: Precision) -> int:
    """Bytes of a tensor in a bundle, scales and zero points included."""
    if not dtype.is_quantised:
        return math.prod(shape) * dtype.bits // 8
    outputs, inputs = shape
    blocks = blocks_of(inputs, dtype.bits, precision.block_size)
    return outputs * (blocks.number * (blocks.block_bytes + _SCALE_BYTES) + (0 if precision.symmetric else blocks.zero_bytes))


def wanted_dtype(name: str, source: Dtype, config: TargetConfig | DrafterConfig, precision: Precision) -> Dtype:
    """The type in which a bundle stores a tensor that a checkpoint has in `source`.

    Floating precisions apply to every tensor.  Integer ones apply to matrices; norms, biases, the drafter's head and the embedding
    of a target that does not tie it keep the type they have.
    """
    if isinstance(config, TargetConfig) and name == (EMBEDDING if config.tie_word_embeddings else LM_HEAD):
        return precision.lm_head
    part = precision.target if isinstance(config, TargetConfig) else precision.drafter
    if not part.is_quantised:
        return part
    return part if _MATRIX.fullmatch(name) else source


def part_of(name: str, config: TargetConfig | DrafterConfig) -> str:
    """The part that a tensor belongs to: one of `PARTS`.

    Args:
        name: canonical, or what a bundle makes of it (`NAME.int4`, `NAME.scales`).
        config: of the model whose tensor it is.
    """
    if isinstance(config, DrafterConfig):
        if name.startswith("embed_proj.2."):
            return CODEBOOK
        return HEAD if name.startswith(("prefix_gru.", "embed_proj.")) else BACKBONE
    if name.startswith(EMBEDDING):
        return TIED_PART if config.tie_word_embeddings else EMBEDDING_PART
    return LM_HEAD_PART if name.startswith(LM_HEAD) else TARGET_LAYERS
