"""What TensorRT's Python interface is asked for, against stand-ins that write it down: full TensorRT installs on no machine of ours."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from domino_deploy import tensorrt_libraries as libraries
from domino_deploy.engines import Flavour, PluginForm, Profile, ShapeRange
from domino_deploy.errors import ExportError
from domino_deploy.exporters import trt_api
from domino_deploy.exporters.trt_api import BuildJob

PROFILES = tuple(Profile(name=name, shapes={"x": ShapeRange(min=(1, 4), opt=(2, 4), max=(size, 4))}) for name, size in (("a", 2), ("b", 8)))


class Enumeration(SimpleNamespace):
    """Members whose value is their name, as an enumeration has them."""

    @classmethod
    def of(cls, *names: str) -> Enumeration:
        return cls(**{name: name for name in names}, __members__={name: name for name in names})


class Attention:
    decomposable = False


class Layer:
    def __init__(self, kind: str) -> None:
        self.type = SimpleNamespace(name=kind)
        self.attention = Attention()


class AttentionLayer(Layer):
    """The class under which a layer has its attention."""


class Config:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.progress_monitor: Any = None
        self.builder_optimization_level = -1
        self.num_compute_capabilities = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, *arguments, *keywords.items()))
            return SimpleNamespace(serialize=lambda: b"new timings") if name == "get_timing_cache" else arguments

        return call


class Network:
    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.layers = [Layer("SHUFFLE"), AttentionLayer("ATTENTION_INPUT"), Layer("SHUFFLE")]
        self.num_layers, self.num_inputs, self.num_outputs = 3, 1, 1

    def get_layer(self, index: int) -> Layer:
        return self.layers[index]

    def get_input(self, index: int) -> Any:
        return SimpleNamespace(name="x", dtype=SimpleNamespace(name="HALF"), shape=(-1, 4))

    get_output = get_input


class FakeTensorRT:
    """The module `tensorrt`, as far as building uses it; `engine` is what the builder makes."""

    __version__ = "11.4.0"
    ILogger = type("ILogger", (), {"ERROR": 1, "INTERNAL_ERROR": 0})
    IProgressMonitor = type("IProgressMonitor", (), {})
    IAttentionInputLayer = AttentionLayer
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    MemoryPoolType = Enumeration.of("WORKSPACE")
    BuilderFlag = Enumeration.of("STRIP_PLAN", "REFIT_IDENTICAL")
    ComputeCapability = Enumeration.of("NONE", "CURRENT", "SM89", "SM120")

    def __init__(self, engine: bytes | None = b"the engine", errors: tuple[str, ...] = ()) -> None:
        self.engine, self.errors = engine, errors
        self.config, self.networks, self.shapes = Config(), [], []
        self.registry = SimpleNamespace(load_library=self.load_library)
        self.library: object | None = object()

    def load_library(self, path: str) -> object | None:
        self.config.calls.append(("load_library", path))
        return self.library

    def get_plugin_registry(self) -> Any:
        return self.registry

    def Builder(self, log: Any) -> Any:
        def create_network(flags: int) -> Network:
            self.networks.append(Network(flags))
            return self.networks[-1]

        def build(network: Network, config: Config) -> bytes | None:
            config.progress_monitor.phase_start("Tactics", None, 2)
            config.progress_monitor.phase_start("Timing", "Tactics", 9)
            assert config.progress_monitor.step_complete("Timing", 0)
            assert config.progress_monitor.step_complete("Tactics", 0)
            config.progress_monitor.phase_finish("Tactics")
            for error in self.errors:
                log.log(1, error)
            log.log(3, "only a warning")
            return self.engine

        def create_optimization_profile() -> Any:
            shapes: list[tuple[Any, ...]] = []
            self.shapes.append(shapes)
            return SimpleNamespace(set_shape=lambda *sizes: shapes.append(sizes))

        return SimpleNamespace(
            create_network=create_network,
            create_builder_config=lambda: self.config,
            create_optimization_profile=create_optimization_profile,
            build_serialized_network=build,
        )

    def OnnxParser(self, network: Network, log: Any) -> Any:
        return SimpleNamespace(parse_from_file=lambda file: True)


@pytest.fixture
def fake(monkeypatch) -> FakeTensorRT:
    fake = FakeTensorRT()
    monkeypatch.setattr(libraries, "load", lambda flavour: fake)
    return fake


def job(folder: Path, **changes: Any) -> BuildJob:
    values: dict[str, Any] = {
        "flavour": Flavour.TENSORRT,
        "graph": "target",
        "onnx_file": "target.onnx",
        "engine_file": str(folder / "target.engine"),
        "profiles": PROFILES,
        "workspace": 2**30,
        "opt_level": 4,
    }
    return BuildJob(**(values | changes))


def calls(fake: FakeTensorRT, name: str) -> list[tuple[Any, ...]]:
    return [call[1:] for call in fake.config.calls if call[0] == name]


def test_the_engine_is_written_and_described(fake, tmp_path) -> None:
    built = trt_api.build(job(tmp_path), lambda step: None)
    assert (tmp_path / "target.engine").read_bytes() == b"the engine"
    assert (built.flavour_version, built.num_layers, built.layer_types) == ("11.4.0", 3, {"ATTENTION_INPUT": 1, "SHUFFLE": 2})
    assert (built.inputs[0].name, built.inputs[0].dtype, built.inputs[0].shape) == ("x", "half", (-1, 4))


def test_the_network_is_strongly_typed_and_its_attention_may_be_decomposed(fake, tmp_path) -> None:
    trt_api.build(job(tmp_path), lambda step: None)
    (network,) = fake.networks
    assert network.flags == 1 << 1
    assert [layer.attention.decomposable for layer in network.layers] == [False, True, False]


def test_profiles_workspace_and_level_are_passed_on_in_order(fake, tmp_path) -> None:
    trt_api.build(job(tmp_path), lambda step: None)
    assert fake.shapes == [[("x", (1, 4), (2, 4), (2, 4))], [("x", (1, 4), (2, 4), (8, 4))]]
    assert len(calls(fake, "add_optimization_profile")) == 2
    assert calls(fake, "set_memory_pool_limit") == [("WORKSPACE", 2**30)]
    assert fake.config.builder_optimization_level == 4


def test_tensorrt_is_told_no_compute_capability_and_rtx_all_that_are_asked_for(fake, tmp_path) -> None:
    trt_api.build(job(tmp_path, compute_capabilities=("9.0",)), lambda step: None)
    assert calls(fake, "set_compute_capability") == []
    trt_api.build(job(tmp_path, flavour=Flavour.TENSORRT_RTX, compute_capabilities=("8.9", "12.0")), lambda step: None)
    assert calls(fake, "set_compute_capability") == [("SM89", 0), ("SM120", 1)]
    assert fake.config.num_compute_capabilities == 2


def test_stripped_engines_can_be_refitted(fake, tmp_path) -> None:
    trt_api.build(job(tmp_path), lambda step: None)
    assert calls(fake, "set_flag") == []
    trt_api.build(job(tmp_path, is_stripped=True), lambda step: None)
    assert calls(fake, "set_flag") == [("STRIP_PLAN",), ("REFIT_IDENTICAL",)]


def test_timings_are_read_and_written_back(fake, tmp_path) -> None:
    file = tmp_path / "cache" / "timings"
    trt_api.build(job(tmp_path, timing_cache=str(file)), lambda step: None)
    assert file.read_bytes() == b"new timings"
    file.write_bytes(b"old timings")
    trt_api.build(job(tmp_path, timing_cache=str(file)), lambda step: None)
    assert calls(fake, "create_timing_cache") == [(b"",), (b"old timings",)]
    assert [item.name for item in file.parent.iterdir()] == ["timings"]


@pytest.mark.parametrize("answer", [("create_timing_cache", None), ("set_timing_cache", False)])
def test_a_file_that_holds_no_timings_of_this_gpu_is_left_alone(fake, tmp_path, answer) -> None:
    name, result = answer
    setattr(fake.config, name, lambda *arguments, **keywords: result)
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ExportError, match=r"notes\.txt: expected a timing cache of this TensorRT and GPU, found something else"):
        trt_api.build(job(tmp_path, timing_cache=str(file)), lambda step: None)
    assert file.read_text() == "mine"


def test_only_outermost_phases_are_told(fake, tmp_path) -> None:
    steps: list[str] = []
    trt_api.build(job(tmp_path), steps.append)
    assert steps == ["Parsing the target graph", "Building the target engine", "Building the target engine: Tactics, step 1 of 2"]


def test_a_compiled_plugin_is_loaded_before_the_graph_is_parsed(fake, tmp_path) -> None:
    trt_api.build(job(tmp_path, plugin=PluginForm.CPP, plugin_library="/opt/libdomino.so"), lambda step: None)
    assert fake.config.calls[0] == ("load_library", "/opt/libdomino.so")


def test_a_library_that_does_not_load_is_refused_by_name(fake, tmp_path) -> None:
    fake.library = None
    with pytest.raises(ExportError, match=r"/opt/other\.so: expected a plugin library that tensorrt 11\.4\.0 loads"):
        trt_api.build(job(tmp_path, plugin=PluginForm.CPP, plugin_library="/opt/other.so"), lambda step: None)


def test_what_the_builder_reports_is_the_error(fake, tmp_path) -> None:
    fake.engine, fake.errors = None, ("Could not find any implementation for node {ForeignNode}.", "  ", "Out of memory")
    with pytest.raises(ExportError) as error:
        trt_api.build(job(tmp_path), lambda step: None)
    message = str(error.value)
    assert message.startswith("target: expected an engine of tensorrt 11.4.0, found\n  - Could not find any implementation")
    assert "  - Out of memory\n" in message
    assert "only a warning" not in message
    assert not (tmp_path / "target.engine").exists()
