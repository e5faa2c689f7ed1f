"""What engines.json may say of engines for a bundle: sizes that `build-engine` allows, the bundle's inputs and outputs, and profiles.

Numbers and names only are compared: nothing is made, mapped or read in the sizes that a manifest claims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from domino_deploy.backends import BACKENDS, Backend
from domino_deploy.bundle import Bundle
from domino_deploy.engine_signatures import engine_signatures
from domino_deploy.errors import shortened
from domino_deploy.signature import GraphSignature, TensorSpec

if TYPE_CHECKING:
    from domino_deploy.engines import EngineGraph, EngineManifest, Profile, ShapeRange

# What engines compute in.
DTYPES = BACKENDS[Backend.TENSORRT].precisions
FLOAT8 = "float8_e4m3fn"
# See exporters/engine_profiles.py.
LEAST_PREFILL_ROWS = 128
# Rows of a batch are the second dimension of the plugin's grids, of which CUDA allows no more.
MOST_BATCH_SIZE = 65535
# In the order of `engines.VERIFY_PROFILE` and the others.
PROFILE_NAMES = {"target": ("verify", "prefill"), "backbone": ("draft", "first draft"), "head": ("rollout",)}

# Of one graph: one size that differs shows in every cache of every layer.
_MOST_PROBLEMS = 12


def positions(bundle: Bundle) -> int:
    """Tokens that both models have positions for, with room for a block."""
    return min(bundle.target.max_position_embeddings, bundle.drafter.max_position_embeddings)


def problems_with_manifest(manifest: EngineManifest, bundle: Bundle) -> Iterator[str]:
    """A line for each value of engines.json that engines for this bundle cannot have."""
    most_tokens = positions(bundle)
    limits = {
        "max_batch_size": (1, MOST_BATCH_SIZE),
        # Models of fewer positions are built for what they have.
        "max_model_len": (min(LEAST_PREFILL_ROWS, most_tokens), most_tokens),
        "num_speculative_tokens": (1, bundle.drafter.num_proposals),
        "prefill_rows": (min(LEAST_PREFILL_ROWS, manifest.max_model_len), manifest.max_model_len),
    }
    for name, (least, most) in limits.items():
        value = getattr(manifest, name)
        if not max(least, 1) <= value <= most:
            yield f"{name}: expected {least} to {_cut(most)}, found {_cut(value)}"
    is_known = manifest.dtype in list(DTYPES)
    if not is_known:
        yield f"dtype: expected {', '.join(DTYPES)}, found {manifest.dtype!r:.40}"
    elif manifest.weights not in (manifest.dtype, FLOAT8):
        yield f"weights: expected {manifest.dtype} or {FLOAT8}, found {manifest.weights!r:.40}"
    signatures = engine_signatures(
        bundle.target,
        bundle.drafter,
        # Of an unknown type nothing is expected: the graphs are then held against the bundle's own.
        dataclasses.replace(bundle.form, dtype=manifest.dtype) if is_known else bundle.form,
        max_model_len=manifest.max_model_len,
        num_speculative_tokens=manifest.num_speculative_tokens,
    )
    for name, signature in signatures.items():
        graph = manifest.graphs.get(name)
        if graph is not None:  # that one is missing, `open_engine_set` says
            problems = [*_tensors(graph, signature), *_profiles(graph.profiles, PROFILE_NAMES[name], signature, manifest, bundle)]
            yield from (f"graphs.{name}: {problem}" for problem in shortened(problems, _MOST_PROBLEMS))


def _tensors(graph: EngineGraph, signature: GraphSignature) -> Iterator[str]:
    for kind, found, expected in (("inputs", graph.inputs, signature.inputs), ("outputs", graph.outputs, signature.outputs)):
        names, wanted = [spec.name for spec in found], [spec.name for spec in expected]
        if names != wanted:
            missing, unknown = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
            yield from (f"{kind}.{name}: missing" for name in missing)
            yield from (f"{kind}.{name:.80}: unknown" for name in unknown)
            if not missing and not unknown:
                yield f"{kind}: expected {', '.join(wanted)}, each once and in this order, found {', '.join(names):.200}"
        by_name = {spec.name: spec for spec in expected}
        for spec in found:
            want = by_name.get(spec.name)
            if want is not None and (spec.dtype, spec.shape) != (want.dtype, want.shape):
                yield f"{kind}.{spec.name}: expected {_described(want)}, found {_described(spec)}"


def _described(spec: TensorSpec) -> str:
    return f"{spec.dtype:.40} [{', '.join(map(_cut, spec.shape))}]"


def _profiles(
    profiles: Sequence[Profile], names: Sequence[str], signature: GraphSignature, manifest: EngineManifest, bundle: Bundle
) -> Iterator[str]:
    found = [profile.name for profile in profiles]
    if found != list(names):
        yield f"profiles: expected {', '.join(names)}, found {(', '.join(found) or 'none'):.200}"
    rows = max(manifest.prefill_rows, manifest.num_speculative_tokens + 1)
    most = {
        "batch": manifest.max_batch_size,
        "rows": rows,
        "logit_rows": rows,
        "feature_rows": rows,
        "context_rows": rows + bundle.drafter.block_size,
    }
    wanted = {spec.name: spec for spec in signature.inputs if any(isinstance(size, str) for size in spec.shape)}
    for profile in profiles:
        where = f"profiles.{profile.name:.40}"
        yield from (f"{where}.{name}: missing" for name in wanted if name not in profile.shapes)
        for name, shapes in profile.shapes.items():
            spec = wanted.get(name)
            if spec is None:
                yield f"{where}.{name:.80}: unknown"
                continue
            lows = [1 if isinstance(size, str) else size for size in spec.shape]
            highs = [most[size] if isinstance(size, str) else size for size in spec.shape]
            if not _fits(shapes, lows, highs):
                yield (
                    f"{where}.{name}: expected min <= opt <= max between {_listed(lows)} and {_listed(highs)}, found "
                    f"{_listed(shapes.min)}, {_listed(shapes.opt)}, {_listed(shapes.max)}"
                )


def _fits(shapes: ShapeRange, lows: Sequence[int], highs: Sequence[int]) -> bool:
    if not len(shapes.min) == len(shapes.opt) == len(shapes.max) == len(lows):
        return False
    sizes = zip(lows, shapes.min, shapes.opt, shapes.max, highs, strict=True)
    return all(low <= least <= tuned <= most <= high for low, least, tuned, most, high in sizes)


def _listed(sizes: Sequence[int]) -> str:
    return f"[{', '.join(map(_cut, sizes[:8]))}{', ...' if len(sizes) > 8 else ''}]"


def _cut(value: int | str) -> str:
    """A number or name of a file, which may be longer than a message should be."""
    return f"{value!s:.40}"
