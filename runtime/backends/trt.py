"""The TensorRT backend: the engines that `build-engine` made of a bundle, on an NVIDIA GPU.

trt.py         opens engines that fit this machine, and puts target and drafter together
trt_pair.py    target and drafter as the decode loop knows them, and the pair that waits for the device once per cycle
trt_target.py  trt_draft.py     passes of the engines: what the host says of each, and where everything lies
trt_engine.py  trt_tensors.py   TensorRT's engines and contexts, CUDA graphs; shapes, caches
trt_memory.py  trt_cuda.py      memory and stream; the calls of the CUDA runtime
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

from domino_deploy import tensorrt_libraries as libraries
from domino_deploy.bundle import Bundle
from domino_deploy.config import DrafterKind
from domino_deploy.engine_choice import Host, open_engines
from domino_deploy.engine_signatures import capacity_of
from domino_deploy.engines import BUILD_AGAIN, EngineSet, PluginForm
from domino_deploy.errors import EngineError, MissingDependencyError, RequestError
from domino_deploy.runtime.backends.trt_cuda import Cuda
from domino_deploy.runtime.backends.trt_draft import DraftPasses
from domino_deploy.runtime.backends.trt_engine import Engine, Weights
from domino_deploy.runtime.backends.trt_memory import Block, Layout, Stream
from domino_deploy.runtime.backends.trt_pair import TrtDrafter, TrtTarget
from domino_deploy.runtime.backends.trt_target import TargetPasses
from domino_deploy.signature import DRAFT_IDS, GREEDY_IDS, UNCERTIFIED


def open_pair(
    bundle: Bundle, *, capacity: int | None, threads: int | None = None, with_drafter: bool = True
) -> tuple[TrtTarget, TrtDrafter | None]:
    """Target and drafter of a bundle.

    Args:
        bundle: an opened bundle.
        capacity: tokens of the longest sequence; None for what its engines were built for.
        threads: None; engines have none.
        with_drafter: False leaves backbone and head unread.

    Raises:
        RequestError: threads asked for.
        MissingDependencyError: no TensorRT, no driver, or no GPU.
        EngineError: no engines that fit this machine and capacity, or damaged ones.
        CapacityError: the GPU has too little memory.
    """
    if threads is not None:
        raise RequestError(f"Expected no number of threads for the backend tensorrt, found {threads}. Leave it out.")
    installed = libraries.installed()
    if not installed:
        raise MissingDependencyError(
            "Expected TensorRT or TensorRT-RTX for the backend tensorrt, found neither. "
            "Run: pip install 'domino-deploy[tensorrt]' (or 'domino-deploy[tensorrt-rtx]')"
        )
    # Before anything of TensorRT: without a driver its Runtime object is null, and the first use of it ends the process.
    gpu = libraries.require_gpu(next(iter(installed)))
    host = Host(flavours=installed, compute_capability=gpu.compute_capability)
    engines = open_engines(bundle, host, max_model_len=capacity)
    module = libraries.load(engines.manifest.flavour)
    _register_plugin(module, engines, gpu.compute_capability)
    return _load(module, engines, bundle, capacity, with_drafter=with_drafter)


def _register_plugin(module: ModuleType, engines: EngineSet, compute_capability: str) -> None:
    """Make known what the engines call by name; a plugin that was compiled ahead of time is part of them."""
    plugin = engines.manifest.plugin
    if plugin.form is PluginForm.V3:
        _register_python_plugin(module, compute_capability)
    if plugin.form is PluginForm.CPP and plugin.library is not None:
        _load_compiled_plugin(module, _Library(engines.path / plugin.library, plugin.sha256))


@dataclass(frozen=True)
class _Library:
    """A compiled plugin: the same wherever it lies, as TensorRT refuses to load one twice."""

    file: Path = field(compare=False)
    sha256: str | None


# TensorRT's registry lives as long as the process and does not keep what is registered: what these return is kept here.


@cache
def _register_python_plugin(module: ModuleType, compute_capability: str) -> object:
    from domino_deploy.plugins import trt_plugin_v3

    return trt_plugin_v3.register(module, [compute_capability])


@cache
def _load_compiled_plugin(module: ModuleType, library: _Library) -> object:
    loaded = module.get_plugin_registry().load_library(str(library.file))
    if loaded is None:
        raise EngineError(
            f"{library.file}: expected a plugin that loads, found one that does not (see above), or this process has another form of it. "
            f"Use one form in a process. {BUILD_AGAIN}"
        )
    return loaded


def _load(
    module: ModuleType, engines: EngineSet, bundle: Bundle, capacity: int | None, *, with_drafter: bool
) -> tuple[TrtTarget, TrtDrafter | None]:
    manifest = engines.manifest
    stream = Stream(Cuda())
    count = manifest.num_speculative_tokens
    results = Block(
        stream,
        {
            DRAFT_IDS: Layout(dtype="int64", shape=(1, count)),
            UNCERTIFIED: Layout(dtype="int64", shape=(1,)),
            GREEDY_IDS: Layout(dtype="int64", shape=(1, count + 1)),
        },
    )

    def engine(graph: str) -> Engine:
        source = engines.weights_graph(graph)
        weights = None if source is None else Weights(graph=source, folder=bundle.path.absolute())
        return Engine(module, engines.file(graph), manifest.graphs[graph], stream, weights)

    longest = manifest.max_model_len if capacity is None else capacity
    target = TrtTarget(TargetPasses(engine("target"), manifest, results), results, longest)
    if not with_drafter:
        return target, None
    config, form = bundle.drafter, engines.form(bundle)
    is_pooled = config.kind is DrafterKind.DOMINO and form.candidate_pool > 0
    drafter = TrtDrafter(
        DraftPasses(engine("backbone"), engine("head"), manifest, config, results),
        results,
        max_proposals=count,
        pooled=max(0, count - config.pure_draft_prefix_len) if is_pooled else 0,
        most_rows=capacity_of(manifest.max_model_len, count),
    )
    return target, drafter
