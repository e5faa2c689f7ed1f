"""What the TensorRT backend, and ONNX Runtime's providers, refuse: each with one error that says what to do."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from domino_deploy import tensorrt_libraries
from domino_deploy.bundle import Bundle
from domino_deploy.cli import main
from domino_deploy.engines import ENGINES_FOLDER, MANIFEST, Flavour
from domino_deploy.errors import CapacityError, DominoDeployError, EngineError, MissingDependencyError, RequestError
from domino_deploy.plugins import op, trt_plugin_v3
from domino_deploy.runtime.backends import ort, ort_binding, trt, trt_cuda
from domino_deploy.runtime.backends.ort_provider import Provider
from domino_deploy.runtime.backends.trt_memory import Cuda
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.session import Backend, Session
from domino_deploy.tensorrt_libraries import Driver, Gpu
from tests.support import tensorrt_stand_in
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_engines import with_engines
from tests.support.fake_tensorrt import FakeEngine, FakeRefitter, FakeTensorRT

GPU = Gpu(name="H200", compute_capability="9.0", memory_bytes=2**37)
has_driver = tensorrt_libraries.driver() is not None


@pytest.fixture(scope="module")
def domino(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return with_engines(tiny_bundle, tmp_path_factory.mktemp("domino") / "bundle")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    """One with TensorRT and a GPU; both are stand-ins."""
    cuda = FakeCuda()
    tensorrt = FakeTensorRT(cuda)
    monkeypatch.setattr(tensorrt_libraries, "installed", lambda: {Flavour.TENSORRT: tensorrt.__version__})
    monkeypatch.setattr(tensorrt_libraries, "driver", lambda: Driver(cuda_version="13.0", gpus=(GPU,)))
    monkeypatch.setattr(tensorrt_libraries, "load", lambda flavour: tensorrt)
    monkeypatch.setattr(trt, "Cuda", lambda: cuda)
    return tensorrt


def changed(bundle: Bundle, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The bundle with another engines.json."""
    folder = shutil.copytree(bundle.path, tmp_path / "bundle")
    [file] = (folder / ENGINES_FOLDER).glob(f"*/{MANIFEST}")
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return folder


def refusal(error: type[DominoDeployError], bundle: Path, **options: Any) -> str:
    with pytest.raises(error) as caught:
        Session.open(bundle, **{"backend": Backend.TENSORRT, **options})
    return str(caught.value)


class TestMachine:
    def test_without_a_driver_nothing_of_tensorrt_is_touched(self, machine, domino, monkeypatch) -> None:
        monkeypatch.setattr(tensorrt_libraries, "driver", lambda: None)
        monkeypatch.setattr(tensorrt_libraries, "load", None)  # a call would be a TypeError
        text = refusal(MissingDependencyError, domino.path)
        assert "expected an NVIDIA driver and a GPU, found no driver" in text

    def test_without_a_gpu(self, machine, domino, monkeypatch) -> None:
        monkeypatch.setattr(tensorrt_libraries, "driver", lambda: Driver(cuda_version="13.0", gpus=()))
        assert "no GPU" in refusal(MissingDependencyError, domino.path)

    def test_without_tensorrt(self, machine, domino, monkeypatch) -> None:
        monkeypatch.setattr(tensorrt_libraries, "installed", dict)
        text = refusal(MissingDependencyError, domino.path)
        assert "found neither" in text
        assert "pip install 'domino-deploy[tensorrt]'" in text

    def test_without_cuda_bindings(self, domino, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        for module in [name for name in sys.modules if name.startswith("domino_deploy.runtime.backends.trt")]:
            monkeypatch.delitem(sys.modules, module)
        text = refusal(MissingDependencyError, domino.path)
        assert "package cuda-bindings for the backend tensorrt, found none. Run: pip install 'domino-deploy[tensorrt]'" in text

    @pytest.mark.skipif(has_driver, reason="this machine has a driver")
    def test_a_driver_too_old_for_cuda_bindings(self) -> None:
        with pytest.raises(MissingDependencyError, match=r"cuda-bindings \d+.*cudaErrorInsufficientDriver.*newer driver"):
            trt_cuda.Cuda()

    @pytest.mark.skipif(has_driver, reason="this machine has a driver")
    def test_a_cuda_call_that_fails_names_itself(self) -> None:
        cuda = object.__new__(trt_cuda.Cuda)
        with pytest.raises(RuntimeError, match=r"cudaStreamCreateWithFlags: cudaErrorInsufficientDriver \(.+\)"):
            cuda.create_stream()

    @pytest.mark.skipif(has_driver, reason="this machine has a driver")
    def test_what_cannot_be_given_back_adds_no_error_of_its_own(self) -> None:
        """Behind an illegal access every call fails, in finalisers of many objects; and a failed capture must not hide its reason."""
        cuda = object.__new__(trt_cuda.Cuda)
        for give_back in (cuda.free, cuda.destroy_stream, cuda.destroy_event, cuda.destroy_graph, cuda.abandon_capture):
            give_back(1)

    def test_the_command_says_it_in_one_line(self, machine, domino, monkeypatch, capsys) -> None:
        monkeypatch.setattr(tensorrt_libraries, "driver", lambda: None)
        with pytest.raises(SystemExit) as ended:
            main(["generate", str(domino.path), "--prompt", "x", "--backend", "tensorrt"], prog_name="domino-deploy")
        assert ended.value.code == 3
        assert capsys.readouterr().err.startswith("Error: ")


class TestEngines:
    def test_none_says_how_to_build_them(self, machine, tiny_bundle) -> None:
        assert "domino-deploy build-engine" in refusal(EngineError, tiny_bundle)

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            (lambda content: content.update(compute_capabilities=["8.9"]), "built for compute capability 8.9, this GPU has 9.0"),
            (lambda content: content.update(flavour_version="10.15.0"), "built by tensorrt 10.15.0, here is 11.4.0"),
            (lambda content: content.update(flavour="tensorrt-rtx"), "built by tensorrt-rtx 11.4.0, which is not installed"),
            (lambda content: content.update(bundle_sha256="0" * 64), "stale"),
            (lambda content: content.update(has_weights=False), "head.onnx: missing, and needed to refit stripped engines"),
        ],
    )
    def test_foreign_and_stale_ones_are_refused_by_name(self, machine, domino, tmp_path, change, found) -> None:
        text = refusal(EngineError, changed(domino, tmp_path, change))
        assert "tensorrt-sm90-float32" in text
        assert found in text

    def test_a_model_length_beyond_the_engines(self, machine, domino) -> None:
        text = refusal(EngineError, domino.path, max_model_len=401)
        assert "built for max_model_len up to 400, asked for 401" in text
        with Session.open(domino.path, backend=Backend.TENSORRT) as session:
            assert session.target.capacity == 400
        with Session.open(domino.path, backend=Backend.TENSORRT, max_model_len=50) as session:
            assert session.target.capacity == 50
            with pytest.raises(CapacityError, match="at most 49 tokens"):
                session.steps([5] * 50, GenerationParams())

    def test_one_that_tensorrt_refuses_is_named(self, machine, domino, tmp_path) -> None:
        folder = changed(domino, tmp_path, lambda content: None)
        [file] = (folder / ENGINES_FOLDER).glob("*/backbone.engine")
        file.write_bytes(b"x" * file.stat().st_size)
        assert "backbone.engine: expected an engine that TensorRT can read here" in refusal(EngineError, folder)

    def test_one_without_content(self, machine, domino, tmp_path) -> None:
        folder = changed(domino, tmp_path, lambda content: content["graphs"]["target"].update(bytes=0))
        [file] = (folder / ENGINES_FOLDER).glob("*/target.engine")
        file.write_bytes(b"")
        assert "target.engine: expected a file that can be read, found: cannot mmap an empty file" in refusal(EngineError, folder)

    def test_stripped_ones_whose_weights_cannot_be_had(self, machine, tiny_bundle, tmp_path, monkeypatch) -> None:
        folder = with_engines(tiny_bundle, tmp_path / "bundle", is_stripped=True).path
        machine.missing_weights = [f"layer.{index}" for index in range(11)]
        text = refusal(EngineError, folder)
        assert "target.engine: expected the weights of " in text
        assert "layer.7: missing\n  - and 3 more" in text
        machine.missing_weights = []
        with monkeypatch.context() as change:
            change.setattr(FakeRefitter, "refit_cuda_engine", lambda refitter: False)
            assert "weights refused (see above)" in refusal(EngineError, folder)
        [engines] = (folder / ENGINES_FOLDER).iterdir()
        graph = (engines / "target.onnx").read_bytes()
        (engines / "target.onnx").write_bytes(graph[:-100])
        text = refusal(EngineError, folder)
        assert "target.onnx to fit, found\n  - Error parsing message" in text  # in the parser's own words
        assert "domino-deploy build-engine" in text
        (engines / "target.onnx").unlink()
        assert "target.onnx: missing, and needed to refit stripped engines" in refusal(EngineError, folder)

    def test_stripped_ones_that_were_built_with_weights(self, machine, tiny_bundle, tmp_path) -> None:
        folder = with_engines(tiny_bundle, tmp_path / "bundle", is_stripped=True).path
        for file in (folder / ENGINES_FOLDER).glob("*/*.engine"):
            file.write_text(file.read_text().replace('"has_weights": false', '"has_weights":  true'))
        assert "target.engine: expected an engine that can be refitted, found one that cannot" in refusal(EngineError, folder)

    def test_one_that_is_not_what_its_manifest_says(self, machine, domino, monkeypatch) -> None:
        name_of, shape_of = FakeEngine.get_tensor_name, FakeEngine.get_tensor_shape
        monkeypatch.setattr(FakeEngine, "get_tensor_name", lambda self, index: name_of(self, index).replace("input_ids", "tokens"))
        monkeypatch.setattr(FakeEngine, "get_tensor_shape", lambda self, name: [-1, -1, 400] if name == "logits" else shape_of(self, name))
        text = refusal(EngineError, domino.path)
        assert "target.engine: the engine is not the one" in text
        assert "logits: expected FLOAT [-1, -1, 300], found FLOAT [-1, -1, 400]" in text
        assert "input_ids: missing" in text
        assert "tokens: unknown" in text

    def test_edited_manifests_are_refused_before_an_engine_is_mapped(self, machine, domino, tmp_path) -> None:
        def change(content: dict[str, Any]) -> None:
            content["num_speculative_tokens"] = 10**9
            content["graphs"]["target"]["inputs"][0]["dtype"] = "float8"

        text = refusal(EngineError, changed(domino, tmp_path, change))
        assert "found 1000000000" in text
        assert "graphs.target: inputs.input_ids: expected int64 [batch, rows], found float8 [batch, rows]" in text
        assert not machine.contents

    def test_a_compiled_plugin_is_looked_for_beside_them(self, machine, domino, tmp_path) -> None:
        library = b"a library"
        plugin = {"form": "cpp", "name": "x", "version": op.VERSION, "library": "libx.so", "sha256": hashlib.sha256(library).hexdigest()}
        folder = changed(domino, tmp_path, lambda content: content.update(plugin=plugin))
        assert "the plugin library libx.so" in refusal(EngineError, folder)
        [engines] = (folder / ENGINES_FOLDER).iterdir()
        (engines / "libx.so").write_bytes(library)
        assert "libx.so: expected a plugin that loads" in refusal(EngineError, folder)
        loaded = []
        machine.load_library = lambda path: loaded.append(path) or 1
        copy = shutil.copytree(folder, tmp_path / "copy")
        for bundle in (folder, copy):  # TensorRT refuses a library whose plugins it knows already
            Session.open(bundle, backend=Backend.TENSORRT).close()
        assert loaded == [str(engines / "libx.so")]

    def test_a_plugin_in_python_is_registered_before_they_are_read(self, machine, domino, tmp_path, monkeypatch) -> None:
        registered = []
        monkeypatch.setattr(trt_plugin_v3, "register", lambda module, capabilities: registered.append((module, capabilities)))
        plugin = {"form": "v3", "name": "x", "version": op.VERSION}
        folder = changed(domino, tmp_path, lambda content: content["plugin"].update(plugin))
        for _ in range(2):
            Session.open(folder, backend=Backend.TENSORRT).close()
        assert registered == [(machine, ["9.0"])]

    def test_too_little_memory_leaves_nothing_behind(self, machine, domino, monkeypatch) -> None:
        def refuse(size: int) -> int:
            raise CapacityError("Expected 9 MiB of free GPU memory, found 1 of 2 MiB.")

        monkeypatch.setattr(machine.cuda, "allocate", refuse)
        refusal(CapacityError, domino.path)

    def test_too_little_memory_for_tensorrt_itself_is_told_from_an_engine_that_it_refuses(self, machine, domino) -> None:
        machine.makes_contexts = False
        assert "target.engine: expected an execution context of profile 0" in refusal(EngineError, domino.path)
        machine.cuda.left = 2**20
        text = refusal(CapacityError, domino.path)
        assert "target.engine: expected 1024 MiB of free GPU memory, found 1 MiB" in text

    def test_tensors_that_lie_elsewhere(self, machine, domino, monkeypatch) -> None:
        """A cache whose update has memory of its own would be read while it is written; a shape tensor wants a host's address."""
        monkeypatch.setattr(FakeEngine, "get_aliased_input_tensor", lambda engine, name: None)
        monkeypatch.setattr(FakeEngine, "get_tensor_location", lambda engine, name: SimpleNamespace(name="HOST"))
        text = refusal(EngineError, domino.path)
        assert "expected in the memory of key_cache.0, found in its own" in text
        assert "write_index: expected on the device, found on the host" in text


class TestRequest:
    def test_threads_are_refused(self, machine, domino) -> None:
        assert "no number of threads for the backend tensorrt, found 1" in refusal(RequestError, domino.path, threads=1)

    @pytest.mark.parametrize("backend", [Backend.TENSORRT, Backend.EAGER])
    def test_a_provider_is_for_onnx_runtime_alone(self, tiny_bundle, backend) -> None:
        text = refusal(RequestError, tiny_bundle, backend=backend, provider=Provider.CUDA)
        assert f"a provider for the backend ort only, found cuda for {backend}" in text


class TestProvider:
    @pytest.mark.parametrize(
        ("provider", "missing"),
        [(Provider.CUDA, "CUDAExecutionProvider"), (Provider.TENSORRT, "TensorrtExecutionProvider and CUDAExecutionProvider")],
    )
    def test_one_that_this_onnx_runtime_lacks_is_no_fall_back_to_the_cpu(self, tiny_bundle, monkeypatch, provider, missing) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["AzureExecutionProvider", "CPUExecutionProvider"])
        text = refusal(MissingDependencyError, tiny_bundle, backend=Backend.ORT, provider=provider)
        assert f"an ONNX Runtime with {missing} for the provider {provider}" in text
        assert "onnxruntime-gpu" in text

    @pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this ONNX Runtime has the provider")
    @pytest.mark.filterwarnings("ignore:Specified provider")
    def test_one_that_does_not_start_is_no_fall_back_to_the_cpu(self, tiny_bundle, monkeypatch) -> None:
        names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
        text = refusal(MissingDependencyError, tiny_bundle, backend=Backend.ORT, provider=Provider.CUDA)
        assert "ONNX Runtime to start CUDAExecutionProvider" in text

    def test_caches_in_device_memory_give_the_same_tokens(self, tiny_bundle, monkeypatch) -> None:
        """The path of a GPU, with the CPU as the device: caches are ONNX Runtime's own values, the longest at once, and stay."""
        from domino_deploy.bundle import open_bundle

        bundle = open_bundle(tiny_bundle)
        prompt = np.random.default_rng(0).integers(3, 290, 40).tolist()

        def tokens(target: ort.OrtTarget, drafter: ort.OrtDrafter | None) -> list[list[tuple[int, ...]]]:
            runs = [
                generate(target, drafter, prompt[:length], GenerationParams(max_new_tokens=40), num_speculative_tokens=5)
                for length in (40, 9)
            ]
            return [[step.token_ids for step in steps] for steps in runs]

        expected = tokens(*ort.open_pair(bundle, capacity=200, threads=1))
        monkeypatch.setattr(Provider, "execution_providers", ["CPUExecutionProvider"])
        monkeypatch.setattr(ort_binding, "_DEVICE", "cpu")
        target, drafter = ort.open_pair(bundle, capacity=200, threads=1, provider=Provider.CUDA)
        assert tokens(target, drafter) == expected
        assert {tuple(value.shape()) for value in target._passes.graph._device_caches.values()} == {(1, 2, 200, 16)}
        assert not target._passes.graph._caches


class TestStandIns:
    def test_the_calls_of_cuda_are_those_that_the_stand_in_offers(self) -> None:
        methods = {name: inspect.signature(method) for name, method in inspect.getmembers(Cuda, inspect.isfunction) if name[0] != "_"}
        assert len(methods) > 15
        for name, signature in methods.items():
            for implementation in (trt_cuda.Cuda, FakeCuda):
                assert inspect.signature(getattr(implementation, name)) == signature, (implementation, name)

    @pytest.mark.parametrize("module", ["tensorrt", "tensorrt_rtx"])
    def test_the_calls_of_tensorrt_are_those_that_nvidias_bindings_offer(self, module: str, tmp_path: Path) -> None:
        """In a process of its own, since the library may end it."""
        environment = tensorrt_stand_in.environment(tmp_path) if module == "tensorrt" else dict(os.environ)
        code = (
            f"import {module} as trt\n"
            "for kind, names in ((trt.Runtime, 'deserialize_cuda_engine'), (trt.Logger, 'ERROR'),\n"
            "    (trt.ICudaEngine, 'num_io_tensors get_tensor_name get_tensor_dtype get_tensor_shape create_execution_context'),\n"
            "    (trt.ICudaEngine, 'get_tensor_location get_aliased_input_tensor device_memory_size_v2 create_runtime_config'),\n"
            "    (trt.ICudaEngine, 'refittable'), (trt.Refitter, 'refit_cuda_engine get_missing_weights'), (trt.ParserError, 'desc'),\n"
            "    (trt.OnnxParserRefitter, 'refit_from_bytes num_errors get_error'),\n"
            "    (trt.IExecutionContext, 'set_optimization_profile_async set_tensor_address set_input_shape execute_async_v3')):\n"
            "    for name in names.split():\n"
            "        assert hasattr(kind, name), (kind, name)\n"
            "for kind, arguments in ((trt.Refitter, 'engine logger'), (trt.OnnxParserRefitter, 'refitter logger')):\n"
            "    assert [word.split(':')[0] for word in kind.__init__.__doc__.split(', ')[1:]] == arguments.split(), kind\n"
            "assert 'serialized_engine: typing_extensions.Buffer' in trt.Runtime.deserialize_cuda_engine.__doc__\n"
            "assert 'model: typing_extensions.Buffer, path: str' in trt.OnnxParserRefitter.refit_from_bytes.__doc__\n"
            "for name in 'FLOAT HALF BF16 INT64 BOOL'.split():\n"
            "    assert getattr(trt.DataType, name).name == name\n"
            "assert trt.TensorLocation.DEVICE.name == 'DEVICE'\n"
            "is_rtx = trt.__name__ == 'tensorrt_rtx'\n"
            "assert is_rtx == hasattr(trt, 'DynamicShapesKernelSpecializationStrategy')\n"
            "assert is_rtx == hasattr(trt.IExecutionContext, 'is_stream_capturable')\n"
            "if is_rtx:\n"
            "    assert trt.DynamicShapesKernelSpecializationStrategy.EAGER\n"
            "    assert trt.IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy.fset\n"
            "print('all there', flush=True)\n"
            "import os\n"
            "os._exit(0)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment | {"PYTHONWARNINGS": ""}
        )
        assert done.stdout.strip() == "all there", done.stderr
