"""A stand-in for the module `tensorrt` at run time: an "engine" is an ONNX graph that ONNX Runtime runs on the addresses bound.

It holds its caller to TensorRT's rules: every address and shape set, shapes inside the profile and set outside of a capture,
a first pass before the capture, one context per profile, aligned addresses, a cache's output where its input is, weights before
a context; to TensorRT-RTX's: nothing captured while kernels for its shapes may yet be compiled.
"""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from domino_deploy.signature import updated
from tests.support.fake_cuda import ALIGNMENT, FakeCuda

Outputs = dict[str, NDArray[Any]]
_DTYPES = {"tensor(float)": ("FLOAT", np.float32), "tensor(float16)": ("HALF", np.float16), "tensor(int64)": ("INT64", np.int64)}
_DTYPES["tensor(bool)"] = ("BOOL", np.bool_)


@dataclass(eq=False)
class FakeTensorRT:
    """What `import tensorrt` gives; `after[file stem]` may change an engine's outputs."""

    cuda: FakeCuda
    after: dict[str, Callable[[Outputs], None]] = field(default_factory=dict)
    __version__: str = "11.4.0"
    can_capture: bool | None = None  # what TensorRT-RTX says of a context; TensorRT's has no such method
    load_library: Callable[[str], object] = lambda path: None
    loggers: list[object] = field(default_factory=list)  # of the runtimes made
    contents: list[mmap.mmap] = field(default_factory=list)  # that engines were read from
    refitted: list[Path] = field(default_factory=list)  # where engines were told that their graphs are
    missing_weights: list[str] = field(default_factory=list)  # that no graph has
    makes_contexts: bool = True
    refuses: str = ""  # the engine, by its file's stem, whose passes cannot be captured
    passes: list[tuple[str, int]] = field(default_factory=list)  # engine and profile of each pass that was run

    class Logger:
        ERROR = 1

        def __init__(self, severity: int) -> None:
            assert severity == self.ERROR

    def get_plugin_registry(self) -> SimpleNamespace:
        return SimpleNamespace(load_library=self.load_library)

    @property
    def DynamicShapesKernelSpecializationStrategy(self) -> SimpleNamespace:
        if self.can_capture is None:
            raise AttributeError("TensorRT has none")
        return SimpleNamespace(LAZY="lazy", EAGER="eager")

    def Runtime(self, logger: object) -> SimpleNamespace:
        self.loggers.append(logger)
        return SimpleNamespace(deserialize_cuda_engine=lambda content: FakeEngine.read(self, content))

    def Refitter(self, engine: FakeEngine, logger: object) -> FakeRefitter:
        assert logger in self.loggers
        return FakeRefitter(engine)

    def OnnxParserRefitter(self, refitter: FakeRefitter, logger: object) -> FakeParserRefitter:
        assert logger in self.loggers
        return FakeParserRefitter(refitter)


def write_fake_engine(file: Path, graph: Path, profiles: list[Mapping[str, Any]], *, has_weights: bool = True) -> None:
    """An engine file: the graph's path and the profiles' shapes."""
    file.write_text(json.dumps({"graph": str(graph), "profiles": profiles, "has_weights": has_weights}))


def _session(graph: Path | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


class FakeEngine:
    def __init__(self, module: FakeTensorRT, graph: Path, profiles: list[dict[str, dict[str, list[int]]]], *, has_weights: bool) -> None:
        self.module = module
        self.name = graph.stem
        described = _session(graph)
        self.session = described if has_weights else None
        self.refittable = not has_weights
        self.profiles = profiles
        self.inputs = {node.name: node for node in described.get_inputs()}
        self.tensors = self.inputs | {node.name: node for node in described.get_outputs()}
        self.taken: set[int] = set()

    @classmethod
    def read(cls, module: FakeTensorRT, content: mmap.mmap) -> FakeEngine | None:
        module.contents.append(content)
        try:
            described = json.loads(bytes(content))
        except ValueError:
            return None
        return cls(module, Path(described["graph"]), described["profiles"], has_weights=described["has_weights"])

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=_DTYPES[self.tensors[name].type][0])

    def get_tensor_shape(self, name: str) -> list[int]:
        return [size if isinstance(size, int) else -1 for size in self.tensors[name].shape]

    def get_tensor_location(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name="DEVICE")

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return next((cache for cache in self.inputs if updated(cache) == name), None)

    device_memory_size_v2 = 2**30

    def create_runtime_config(self) -> SimpleNamespace:
        return SimpleNamespace(dynamic_shapes_kernel_specialization_strategy="lazy")

    def create_execution_context(self, config: SimpleNamespace | None = None) -> FakeContext | None:
        assert self.session is not None, "a context of an engine without weights"
        chosen = self.create_runtime_config() if config is None else config
        return FakeContext(self, chosen.dynamic_shapes_kernel_specialization_strategy) if self.module.makes_contexts else None


@dataclass(eq=False)
class FakeRefitter:
    engine: FakeEngine
    session: onnxruntime.InferenceSession | None = None  # with the weights that the parser read

    def refit_cuda_engine(self) -> bool:
        assert self.engine.refittable
        self.engine.session = self.session
        return not self.engine.module.missing_weights

    def get_missing_weights(self) -> list[str]:
        return self.engine.module.missing_weights


@dataclass(eq=False)
class FakeParserRefitter:
    refitter: FakeRefitter
    error: str = ""

    @property
    def num_errors(self) -> int:
        return bool(self.error)

    def get_error(self, index: int) -> SimpleNamespace:
        assert index == 0
        return SimpleNamespace(desc=lambda: self.error)

    def refit_from_bytes(self, content: mmap.mmap, path: str) -> bool:
        self.refitter.engine.module.refitted.append(Path(path))
        try:
            model = ir.from_proto(onnx.load_model_from_string(bytes(content)))
            ir.external_data.set_base_dir(model.graph, Path(path).parent)
            ir.external_data.load_to_model(model)
            self.refitter.session = _session(ir.to_proto(model).SerializeToString())
        except Exception as error:
            self.error = str(error)
        return not self.error


class FakeContext:
    def __init__(self, engine: FakeEngine, specialisation: str) -> None:
        self.engine = engine
        self.specialisation = specialisation
        self.cuda = engine.module.cuda
        self.profile: int | None = None
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        if engine.module.can_capture is not None:
            self.is_stream_capturable = lambda stream: engine.module.can_capture
        self.is_prepared = False  # a first pass with these shapes has allocated what it needs

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert profile not in self.engine.taken, "two contexts of one profile"
        self.engine.taken.add(profile)
        self.profile = profile
        return profile < len(self.engine.profiles)

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % ALIGNMENT == 0, f"{name}: {address:#x} is not aligned"
        assert self.cuda.recording is None, "sets an address during capture"
        self.addresses[name] = address
        return name in self.engine.tensors

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.cuda.recording is None, "sets a shape during capture"
        assert self.profile is not None, "sets a shape before the profile"
        limits = self.engine.profiles[self.profile].get(name)
        declared = self.engine.get_tensor_shape(name)
        if limits is None:
            return list(shape) == declared
        self.shapes[name], self.is_prepared = shape, False
        return all(low <= size <= high for low, size, high in zip(limits["min"], shape, limits["max"], strict=True))

    def execute_async_v3(self, stream: int) -> bool:
        engine = self.engine
        assert self.profile is not None, "runs without a profile"
        missing = engine.tensors.keys() - self.addresses.keys()
        assert not missing, f"{engine.name}: no address for {missing}"
        unshaped = engine.profiles[self.profile].keys() - self.shapes.keys()
        assert not unshaped, f"{engine.name}: no shape for {unshaped}"
        for name in engine.inputs.keys() & {name for name in engine.inputs if updated(name) in engine.tensors}:
            assert self.addresses[name] == self.addresses[updated(name)], f"{name} is not updated in its place"
        assert self.is_prepared or self.cuda.recording is None, "captures a pass that was not run before: TensorRT would allocate"
        is_rtx = engine.module.can_capture is not None
        assert self.cuda.recording is None or not is_rtx or self.specialisation == "eager", "captures kernels that will be replaced"
        if self.cuda.recording is not None and engine.name == engine.module.refuses:
            return False
        self.is_prepared = True
        addresses, shapes, profile = dict(self.addresses), dict(self.shapes), self.profile
        self.cuda.submit(stream, lambda: self._run(addresses, shapes, profile))
        return True

    def _run(self, addresses: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], profile: int) -> None:
        engine = self.engine
        engine.module.passes.append((engine.name, profile))

        def memory(name: str, shape: tuple[int, ...]) -> NDArray[Any]:
            dtype = np.dtype(_DTYPES[engine.tensors[name].type][1])
            size = int(np.prod(shape)) * dtype.itemsize
            raw = (ctypes.c_uint8 * size).from_address(self.cuda.checked(addresses[name], size))
            return np.frombuffer(raw, dtype).reshape(shape)

        feeds = {name: memory(name, shapes.get(name) or tuple(node.shape)) for name, node in engine.inputs.items()}
        names = [name for name in engine.tensors if name not in engine.inputs]
        assert engine.session is not None, "weights were there when the context was made"
        outputs = dict(zip(names, engine.session.run(names, feeds), strict=True))
        engine.module.after.get(engine.name, lambda outputs: None)(outputs)
        for name, value in outputs.items():
            memory(name, value.shape)[...] = value
