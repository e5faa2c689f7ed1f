"""What TensorRT's plugins for the correction take, in one place for their Python forms; no TensorRT here."""

from __future__ import annotations

from collections.abc import Sequence

from domino_deploy.errors import ExportError, listed
from domino_deploy.plugins import op

# NumPy's words for TensorRT's.
TYPE_NAMES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}
CODEBOOK_TYPES = tuple(TYPE_NAMES.values())


def check_types(types: Sequence[str]) -> None:
    """Check the input types of a network's correction.

    Args:
        types: TensorRT's names, in the order of `op.INPUTS`.

    Raises:
        ExportError: all inputs of a type that the plugin does not take.
    """
    problems = []
    for name, found in zip(op.INPUTS, types, strict=True):
        expected = CODEBOOK_TYPES if name == "codebook" else CODEBOOK_TYPES[:1]
        if TYPE_NAMES.get(found) not in expected:
            problems.append(f"{name}: expected {_either(expected)}, found {TYPE_NAMES.get(found, found.lower())}")
    _refuse(problems)


def check_shapes(shapes: Sequence[Sequence[int | None]]) -> None:
    """Check the input shapes of a network's correction: base logits [B, V], z and s [B, R], codebook [V, R].

    Args:
        shapes: in the order of `op.INPUTS`; None for a size that is not known until the engine runs.  V and R of the codebook are.

    Raises:
        ExportError: everything that does not fit together.
    """
    problems = [
        f"{name}: expected 2 dimensions, found {len(shape)}" for name, shape in zip(op.INPUTS, shapes, strict=True) if len(shape) != 2
    ]
    _refuse(problems)
    vocab_size, rank = shapes[3]
    if not vocab_size or not rank:
        problems.append(f"codebook: expected a fixed number of rows and columns, found {_shown(shapes[3])}")
    rows = shapes[0][0]
    expected = ((rows, vocab_size), (rows, rank), (rows, rank))
    for name, shape, sizes in zip(op.INPUTS, shapes, expected, strict=False):
        if any(found not in (None, size) for found, size in zip(shape, sizes, strict=True) if size is not None):
            problems.append(f"{name}: expected {_shown(sizes)} beside a codebook of {_shown(shapes[3])}, found {_shown(shape)}")
    _refuse(problems)


def _either(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _shown(shape: Sequence[int | None]) -> str:
    return str(["?" if size is None else size for size in shape]).replace("'", "")


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ExportError(
            listed(
                f"{op.DOMAIN}::{op.NAME}: expected inputs that the plugin takes, found",
                problems,
                "Build from a head that domino-deploy exported.",
            )
        )
