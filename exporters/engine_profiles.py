"""Optimisation profiles of the engines: which sizes each symbolic dimension of `signature.py` may take, and which is tuned for.

Sequences of one batch have equally many rows: shorter ones are filled up.  So are cycles that draft fewer tokens: passes of one shape
alone are replayed as CUDA graphs, and TensorRT-RTX 1.7.1 builds no 16-bit attention over 1 to a few rows in more than one layer ("Graph
contains more than one op named ..."), but over a fixed number of rows, or over 1 to 128 and more.
"""

from __future__ import annotations

from collections.abc import Mapping

from domino_deploy.engine_checks import PROFILE_NAMES
from domino_deploy.engines import DRAFT_PROFILE, FIRST_DRAFT_PROFILE, PREFILL_PROFILE, VERIFY_PROFILE, Profile, ShapeRange
from domino_deploy.signature import GraphSignature

# Least and most of a dimension; TensorRT tunes for the most.
Range = tuple[int, int]
# By their place in the engine: name, and range per symbolic dimension.
Profiles = dict[int, tuple[str, dict[str, Range]]]


def engine_profiles(
    signatures: Mapping[str, GraphSignature], *, max_batch_size: int, num_speculative_tokens: int, prefill_rows: int, block_size: int
) -> dict[str, tuple[Profile, ...]]:
    """Profiles of "target", "backbone" and "head", in the order of `engines.VERIFY_PROFILE` and the others.

    Args:
        signatures: of the engines (`engine_signatures`).
        max_batch_size: sequences at once.
        num_speculative_tokens: drafted tokens; a verify pass has one row more, and a draft as many feature rows.
        prefill_rows: prompt tokens of a pass.
        block_size: of the drafter.
    """
    batch = {"batch": (1, max_batch_size)}
    cycle, prompt = (num_speculative_tokens + 1, num_speculative_tokens + 1), (1, prefill_rows)

    def features(rows: Range) -> dict[str, Range]:
        return {"feature_rows": rows, "context_rows": (rows[0] + block_size, rows[1] + block_size)}

    names = PROFILE_NAMES
    target: Profiles = {
        VERIFY_PROFILE: (names["target"][VERIFY_PROFILE], {"rows": cycle, "logit_rows": cycle}),
        PREFILL_PROFILE: (names["target"][PREFILL_PROFILE], {"rows": prompt, "logit_rows": (1, 1)}),
    }
    backbone: Profiles = {
        DRAFT_PROFILE: (names["backbone"][DRAFT_PROFILE], features(cycle)),
        FIRST_DRAFT_PROFILE: (names["backbone"][FIRST_DRAFT_PROFILE], features(prompt)),
    }
    sizes: dict[str, Profiles] = {"target": target, "backbone": backbone, "head": {0: (names["head"][0], {})}}
    return {
        graph: tuple(_profile(name, signatures[graph], batch | ranges) for _, (name, ranges) in sorted(profiles.items()))
        for graph, profiles in sizes.items()
    }


def _profile(name: str, signature: GraphSignature, ranges: Mapping[str, Range]) -> Profile:
    shapes = {}
    for spec in signature.inputs:
        if any(isinstance(size, str) for size in spec.shape):
            least, most = (tuple(ranges[size][end] if isinstance(size, str) else size for size in spec.shape) for end in (0, 1))
            shapes[spec.name] = ShapeRange(min=least, opt=most, max=most)
    return Profile(name=name, shapes=shapes)
