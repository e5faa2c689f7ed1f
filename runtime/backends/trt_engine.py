"""Engines at work: deserialised, with one execution context per optimisation profile, their passes replayed as CUDA graphs."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from domino_deploy.engines import BUILD_AGAIN, EngineGraph
from domino_deploy.errors import CapacityError, DominoDeployError, EngineError, listed, shortened
from domino_deploy.runtime.backends.trt_memory import Shape, Stream
from domino_deploy.signature import updated

# TensorRT's names of the dtypes in `signature.py`.
_DTYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64", "bool": "BOOL"}
_MOST_PROBLEMS = 8


@cache
def _logger(module: ModuleType) -> Any:
    """One for all: TensorRT takes the first as the process's own, and goes on using it when what it was made for is gone."""
    return module.Logger(module.Logger.ERROR)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a stripped engine takes its weights from.

    Args:
        graph: that it was built from.
        folder: where the graph's external weights are found by their relative names; an absolute path.
    """

    graph: Path
    folder: Path


class Engine:
    """A deserialised engine.

    Args:
        module: the TensorRT that built it.
        file: the engine.
        graph: what it is, by the manifest.
        stream: on which its contexts run.
        weights: of a stripped engine; None for one that has them.

    Raises:
        EngineError: TensorRT refuses it, it has not the inputs and outputs of the manifest, or it takes no weights.
        CapacityError: the device has too little memory.
    """

    def __init__(self, module: ModuleType, file: Path, graph: EngineGraph, stream: Stream, weights: Weights | None = None) -> None:
        self.file = file
        self.stream = stream
        # A runtime must outlive its engines.
        self._runtime = module.Runtime(_logger(module))
        with _mapped(file) as content:
            self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise self._refusal("an engine that TensorRT can read here", graph.bytes)
        problems = list(_differences(self._engine, graph))
        if problems:
            raise EngineError(listed(f"{file}: the engine is not the one that its manifest describes", problems, BUILD_AGAIN))
        if weights is not None:
            self._refit(module, weights)
        self._fixed_shapes = _fixed_shapes_config(module, self._engine)

    def _refit(self, module: ModuleType, weights: Weights) -> None:
        if not self._engine.refittable:
            raise EngineError(f"{self.file}: expected an engine that can be refitted, found one that cannot. {BUILD_AGAIN}")
        refitter = module.Refitter(self._engine, _logger(module))
        parser = module.OnnxParserRefitter(refitter, _logger(module))  # holds the weights until they are in the engine
        with _mapped(weights.graph) as content:
            # Of the path TensorRT takes the folder, for what the graph does not hold itself.
            is_read = parser.refit_from_bytes(content, str(weights.folder / weights.graph.name))
        problems = []
        if not is_read:
            problems = [parser.get_error(index).desc() for index in range(parser.num_errors)] or ["no reason given (see above)"]
        elif not refitter.refit_cuda_engine():
            problems = [f"{name}: missing" for name in refitter.get_missing_weights()] or ["weights refused (see above)"]
        if problems:
            found = shortened(problems, _MOST_PROBLEMS)
            raise EngineError(listed(f"{self.file}: expected the weights of {weights.graph} to fit, found", found, BUILD_AGAIN))

    def context(self, profile: int, addresses: Mapping[str, int], shapes: Mapping[str, Shape] | None = None) -> Context:
        """A context of one profile.

        Args:
            profile: its place in the engine.
            addresses: of every input and output.
            shapes: of every input, where they never change.

        Raises:
            EngineError: TensorRT makes none, or does not take the shapes.
            CapacityError: the device has too little memory.
        """
        config = None if shapes is None else self._fixed_shapes
        context = self._engine.create_execution_context() if config is None else self._engine.create_execution_context(config)
        if context is None:
            raise self._refusal(f"an execution context of profile {profile}", self._engine.device_memory_size_v2)
        if not context.set_optimization_profile_async(profile, self.stream.handle):
            raise EngineError(f"{self.file}: expected an engine with a profile {profile}, found none (see above). {BUILD_AGAIN}")
        self.stream.synchronise()
        made = Context(self, context, addresses)
        made.set_shapes(shapes or {})
        return made

    def _refusal(self, expected: str, size: int) -> DominoDeployError:
        """Why TensorRT gave nothing: it tells its log alone, so too little memory is recognised by what is left."""
        free = self.stream.cuda.free_memory()
        if free < size:
            return CapacityError(
                f"{self.file}: expected {size / 2**20:.0f} MiB of free GPU memory, found {free / 2**20:.0f} MiB. "
                "Free some, or build the engines with a smaller --max-model-len."
            )
        return EngineError(f"{self.file}: expected {expected}, found none (see above). {BUILD_AGAIN}")


class Context:
    """One engine in one profile; made by `Engine.context`."""

    def __init__(self, engine: Engine, context: Any, addresses: Mapping[str, int]) -> None:
        self._engine = engine
        self._context = context
        self._shapes: dict[str, Shape] = {}
        for name, address in addresses.items():
            self._accepted(context.set_tensor_address(name, address), f"an address for {name}")

    def set_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Shapes of inputs for the passes to come.

        Raises:
            EngineError: one lies outside of the profile.
        """
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                self._accepted(self._context.set_input_shape(name, shape), f"the shape {list(shape)} of {name}")
                self._shapes[name] = shape

    def enqueue(self) -> None:
        """Put one pass on the stream.

        Raises:
            EngineError: TensorRT refuses.
        """
        self._accepted(self._context.execute_async_v3(self._engine.stream.handle), "a pass")

    @property
    def can_be_captured(self) -> bool:
        """TensorRT-RTX says whether a pass may become part of a CUDA graph; TensorRT's always may, behind a first one."""
        asked = getattr(self._context, "is_stream_capturable", None)
        return asked is None or bool(asked(self._engine.stream.handle))

    def _accepted(self, result: bool, what: str) -> None:
        if not result:
            raise EngineError(
                f"{self._engine.file}: expected an engine that takes {what}, found one that refuses (see above). {BUILD_AGAIN}"
            )


class Replay:
    """A pass that is the same every time, shapes and addresses: run as it is once, then captured, then replayed.

    The first one is plain because TensorRT allocates in it, which must not happen while a graph is captured.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._has_run = False
        self._graph: int | None = None

    def run(self, stream: Stream, work: Callable[[], None]) -> None:
        """Put `work`, the same in every call, on the stream."""
        if self._graph is not None:
            stream.cuda.launch(self._graph, stream.handle)
        elif self._has_run and self._context.can_be_captured:
            stream.cuda.begin_capture(stream.handle)
            try:
                work()
            except BaseException:
                stream.cuda.abandon_capture(stream.handle)
                raise
            self._graph = stream.cuda.end_capture(stream.handle)
            weakref.finalize(self, stream.cuda.destroy_graph, self._graph)
            stream.cuda.launch(self._graph, stream.handle)
        else:
            work()
            self._has_run = True


def _mapped(file: Path) -> mmap.mmap:
    """A file's content, of which the system keeps no more in memory than it likes: engines are as large as their weights."""
    try:
        with file.open("rb") as content:
            return mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: nothing in it
        raise EngineError(f"{file}: expected a file that can be read, found: {error}. {BUILD_AGAIN}") from error


def _fixed_shapes_config(module: ModuleType, engine: Any) -> Any:
    """What TensorRT-RTX makes a context with whose shapes never change; None for TensorRT.

    By default TensorRT-RTX compiles kernels for a shape while others run, and a graph captured meanwhile would keep those.
    """
    strategies = getattr(module, "DynamicShapesKernelSpecializationStrategy", None)
    if strategies is None:
        return None
    config = engine.create_runtime_config()
    config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
    return config


def _differences(engine: Any, graph: EngineGraph) -> Iterator[str]:
    """A line for each input or output that is missing, surplus, of another type or shape, or not where the backend has it."""
    present = frozenset(engine.get_tensor_name(index) for index in range(engine.num_io_tensors))
    names = set(present)
    for spec in (*graph.inputs, *graph.outputs):
        if spec.name not in names:
            yield f"{spec.name}: missing"
            continue
        names.discard(spec.name)
        expected = (_DTYPES[spec.dtype], [size if isinstance(size, int) else -1 for size in spec.shape])
        actual = (engine.get_tensor_dtype(spec.name).name, list(engine.get_tensor_shape(spec.name)))
        if actual != expected:
            yield f"{spec.name}: expected {expected[0]} {expected[1]}, found {actual[0]} {actual[1]}"
        if (place := engine.get_tensor_location(spec.name).name) != "DEVICE":
            yield f"{spec.name}: expected on the device, found on the {place.lower()}"
    for spec in graph.inputs:
        if updated(spec.name) in present and engine.get_aliased_input_tensor(updated(spec.name)) != spec.name:
            yield f"{updated(spec.name)}: expected in the memory of {spec.name}, found in its own"
    yield from (f"{name}: unknown" for name in sorted(names))
