"""What TensorRT and TensorRT-RTX do differently when engines are built, and everything of their Python interface that building uses.

`build` runs in a process of its own (`engine_worker.py`): a C++ exception in NVIDIA's parser ends the process that it happens in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from domino_deploy import tensorrt_libraries as libraries
from domino_deploy.engines import Flavour, PluginForm, Profile
from domino_deploy.errors import ExportError, listed
from domino_deploy.plugins import op

Progress = Callable[[str], None]

# The parser loads TensorRT-RTX by this name when it meets a plugin; the wheel has it under a versioned one alone.
RTX_LINK = "libtensorrt_rtx.so"
_MOST_PROBLEMS = 8


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """One engine to build; everything a worker process is told.

    Args:
        flavour: by which product.
        graph: "target", "backbone" or "head".
        onnx_file: the private copy.
        engine_file: where the engine goes; None to parse only.
        profiles: in order.
        compute_capabilities: for TensorRT-RTX; empty for all that it supports.
        workspace: bytes that a layer may use.
        opt_level: 0 to 5.
        plugin: what computes the logit correction.
        plugin_library: of the C++ plugin.
        is_stripped: leave the weights out and make the engine refittable.
        timing_cache: read before, and replaced after; None for none.
    """

    flavour: Flavour
    graph: str
    onnx_file: str
    engine_file: str | None
    profiles: tuple[Profile, ...]
    compute_capabilities: tuple[str, ...] = ()
    workspace: int
    opt_level: int
    plugin: PluginForm = PluginForm.NONE
    plugin_library: str | None = None
    is_stripped: bool = False
    timing_cache: str | None = None


@dataclass(frozen=True, kw_only=True)
class BuiltTensor:
    """An input or output as TensorRT sees it; a size of -1 is free."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """What became of a job: TensorRT's version, the network that it parsed, and the seconds that parsing and building took."""

    flavour_version: str
    num_layers: int
    layer_types: Mapping[str, int]
    inputs: tuple[BuiltTensor, ...]
    outputs: tuple[BuiltTensor, ...]
    seconds: float


def build(job: BuildJob, progress: Progress) -> BuiltEngine:
    """Parse a graph and build its engine.

    Raises:
        MissingDependencyError: the flavour is not installed.
        ExportError: TensorRT refuses the graph or cannot build it; the message has its own words and the nodes' names.
    """
    started = time.perf_counter()
    trt = libraries.load(job.flavour)
    log = _logger(trt)
    keep_alive = _register_plugin(trt, job, log)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    progress(f"Parsing the {job.graph} graph")
    _parse(trt, network, log, job)
    _allow_decomposed_attention(trt, network)
    if job.engine_file is not None:
        progress(f"Building the {job.graph} engine")
        config = _configure(trt, builder, job, progress)
        log.errors.clear()
        engine = builder.build_serialized_network(network, config)
        if engine is None:
            raise ExportError(_refusal(f"{job.graph}: expected an engine of {job.flavour} {trt.__version__}, found", log.errors))
        with Path(job.engine_file).open("wb") as file:
            file.write(engine)
        _write_timing_cache(config, job)
    del keep_alive
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    return BuiltEngine(
        flavour_version=trt.__version__,
        num_layers=len(layers),
        layer_types=dict(sorted(Counter(layer.type.name for layer in layers).items())),
        inputs=tuple(_described(network.get_input(index)) for index in range(network.num_inputs)),
        outputs=tuple(_described(network.get_output(index)) for index in range(network.num_outputs)),
        seconds=time.perf_counter() - started,
    )


def _logger(trt: ModuleType) -> Any:
    class Logger(trt.ILogger):  # type: ignore[name-defined]  # a module that mypy does not see
        """Keeps the errors; everything else is of no use to a user."""

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    return Logger()


def _register_plugin(trt: ModuleType, job: BuildJob, log: Any) -> object:
    """What must stay alive for as long as the registry is used."""
    if job.plugin is PluginForm.CPP:
        library = trt.get_plugin_registry().load_library(job.plugin_library)
        if library is None:
            raise ExportError(
                f"{job.plugin_library}: expected a plugin library that {job.flavour} {trt.__version__} loads, found one that it refuses. "
                "Build it against this version (plugins/csrc), or use --plugin none."
            )
        return library
    if job.plugin is PluginForm.V3:
        from domino_deploy.plugins import trt_plugin_v3

        return trt_plugin_v3.register(trt, job.compute_capabilities, log)
    if job.plugin is PluginForm.AOT:
        from domino_deploy.plugins import trt_plugin

        trt_plugin.register(job.compute_capabilities)
    return None


def _parse(trt: ModuleType, network: Any, log: Any, job: BuildJob) -> None:
    parser = trt.OnnxParser(network, log)
    if parser.parse_from_file(job.onnx_file):
        return
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    problems = [f"{error.node_name() or 'graph'} ({error.node_operator() or error.code().name}): {error.desc()}" for error in errors]
    # What a plugin refuses, it tells the log and not the parser.
    own = [error for error in log.errors if error.startswith(f"{op.DOMAIN}::")]
    expected = f"{job.graph}: expected a graph that {job.flavour} {trt.__version__} parses, found"
    raise ExportError(_refusal(expected, own or problems or log.errors))


def _refusal(expected: str, problems: list[str]) -> str:
    lines = [" ".join(problem.split())[:500] for problem in problems if problem.strip()]
    advice = (
        "Try another precision (--fp16, --bf16, --fp32), --plugin none, a smaller --max-batch-size and --max-model-len, or another "
        "version; docs/tensorrt.md lists what goes together."
    )
    return listed(expected, list(dict.fromkeys(lines))[:_MOST_PROBLEMS] or ["no reason given"], advice)


def _allow_decomposed_attention(trt: ModuleType, network: Any) -> None:
    """Attention without a kernel of its own, such as that in float32, is built from other layers."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type.name == "ATTENTION_INPUT":
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _configure(trt: ModuleType, builder: Any, job: BuildJob, progress: Progress) -> Any:
    config = builder.create_builder_config()
    config.builder_optimization_level = job.opt_level
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace)
    config.progress_monitor = _monitor(trt, job.graph, progress)
    if job.flavour is Flavour.TENSORRT_RTX and job.compute_capabilities:
        config.num_compute_capabilities = len(job.compute_capabilities)
        for index, capability in enumerate(job.compute_capabilities):
            config.set_compute_capability(_capability(trt, capability), index)
    if job.is_stripped:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)  # the bundle's own weights, whose values kernels may be chosen by
    if job.timing_cache is not None:
        _set_timing_cache(config, Path(job.timing_cache))
    for profile in job.profiles:
        shapes = builder.create_optimization_profile()
        for name, sizes in profile.shapes.items():
            shapes.set_shape(name, sizes.min, sizes.opt, sizes.max)
        config.add_optimization_profile(shapes)
    return config


def _capability(trt: ModuleType, capability: str) -> Any:
    """The enumeration's member of "8.9".

    Raises:
        ExportError: the product has none.
    """
    known = trt.ComputeCapability.__members__
    member = known.get(f"SM{capability.replace('.', '')}")
    if member is None:
        offered = ", ".join(f"{name[2:-1]}.{name[-1]}" for name in known if name.startswith("SM"))
        raise ExportError(
            f"Expected a compute capability that this product builds for ({offered}), found {capability}. "
            "Choose one of these, or use --backend tensorrt on a machine with such a GPU."
        )
    return member


def _set_timing_cache(config: Any, file: Path) -> None:
    """Begin with the timings in a file.

    Raises:
        ExportError: it holds something else, which writing the new timings would replace.
    """
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise ExportError(
            f"{file}: expected a timing cache of this TensorRT and GPU, found something else. Remove it, or name another (--timing-cache)."
        )


def _write_timing_cache(config: Any, job: BuildJob) -> None:
    if job.timing_cache is None:
        return
    file = Path(job.timing_cache)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}-{time.time_ns():x}")
    new.write_bytes(config.get_timing_cache().serialize())
    new.replace(file)


def _described(tensor: Any) -> BuiltTensor:
    return BuiltTensor(name=tensor.name, dtype=tensor.dtype.name.lower(), shape=tuple(tensor.shape))


def _monitor(trt: ModuleType, graph: str, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]  # a module that mypy does not see
        """Tells each of the builder's outermost phases how far it is."""

        def __init__(self) -> None:
            super().__init__()
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._steps:
                progress(f"Building the {graph} engine: {phase_name}, step {step + 1} of {self._steps[phase_name]}")
            return True  # go on

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()
