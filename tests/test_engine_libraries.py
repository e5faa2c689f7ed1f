"""Which TensorRT and which driver are here, against stand-ins: the tests' machine has TensorRT-RTX at most, and no driver."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from domino_deploy import tensorrt_libraries as libraries
from domino_deploy.engines import Flavour
from domino_deploy.errors import MissingDependencyError
from domino_deploy.tensorrt_libraries import Gpu


class FakeDriver:
    """libcuda with two GPUs; `code` is what its initialisation returns."""

    GPUS = (("NVIDIA H200", (9, 0), 150 * 10**9), ("NVIDIA L4", (8, 9), 24 * 10**9))

    def __init__(self, code: int = 0, count: int = 2) -> None:
        self.code, self.count = code, count

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13020
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: int) -> int:
        name.value = self.GPUS[device][0].encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: int) -> int:
        memory._obj.value = self.GPUS[device][2]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = self.GPUS[device][1][{75: 0, 76: 1}[attribute]]
        return 0


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None) -> None:
    def load(name: str) -> FakeDriver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(libraries.ctypes, "CDLL", load)


def test_a_driver_tells_its_cuda_version_and_gpus(monkeypatch) -> None:
    with_driver(monkeypatch, FakeDriver())
    found = libraries.driver()
    assert found is not None
    assert found.cuda_version == "13.2"
    assert found.gpus == (
        Gpu(name="NVIDIA H200", compute_capability="9.0", memory_bytes=150 * 10**9),
        Gpu(name="NVIDIA L4", compute_capability="8.9", memory_bytes=24 * 10**9),
    )
    assert libraries.require_gpu(Flavour.TENSORRT) == found.gpus[0]


@pytest.mark.parametrize("driver", [None, FakeDriver(code=100)], ids=["no library", "no start"])
def test_without_a_driver_that_starts_there_is_none(monkeypatch, driver: FakeDriver | None) -> None:
    with_driver(monkeypatch, driver)
    assert libraries.driver() is None
    with pytest.raises(MissingDependencyError, match="tensorrt: expected an NVIDIA driver and a GPU, found no driver"):
        libraries.require_gpu(Flavour.TENSORRT)


def test_a_driver_without_gpus_is_told_apart(monkeypatch) -> None:
    with_driver(monkeypatch, FakeDriver(count=0))
    with pytest.raises(MissingDependencyError, match=r"found a driver for CUDA 13\.2 and no GPU"):
        libraries.require_gpu(Flavour.TENSORRT_RTX)


def with_packages(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: object() if name in versions else None)
    monkeypatch.setattr(libraries.importlib.metadata, "version", lambda name: versions[name.replace("-", "_")])


def test_installed_products_are_told_with_their_versions(monkeypatch) -> None:
    with_packages(monkeypatch, tensorrt_rtx="1.7.1.116")
    assert libraries.installed() == {Flavour.TENSORRT_RTX: "1.7.1.116"}


@pytest.mark.parametrize(("version", "is_new_enough"), [("10.14.1.48", False), ("10.15.1.29", True), ("11.4.0.106", True)])
def test_versions_compare_as_numbers(monkeypatch, version: str, is_new_enough: bool) -> None:
    with_packages(monkeypatch, tensorrt=version)
    if is_new_enough:
        assert libraries.check_installed(Flavour.TENSORRT) == version
        return
    with pytest.raises(MissingDependencyError, match=r"Expected tensorrt 10\.15 or newer, found 10\.14"):
        libraries.check_installed(Flavour.TENSORRT)


def test_libraries_that_do_not_load_are_named(monkeypatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("libnvonnxparser.so.11: cannot open shared object file")

    with_packages(monkeypatch, tensorrt="11.4.0.106")
    monkeypatch.setattr(libraries.importlib, "import_module", fail)
    with pytest.raises(MissingDependencyError, match=r"Expected the libraries of tensorrt 11\.4\.0\.106, found: libnvonnxparser"):
        libraries.load(Flavour.TENSORRT)


def test_the_rtx_library_is_the_wheels_versioned_one(monkeypatch, tmp_path) -> None:
    for name in ("libtensorrt_onnxparser_rtx.so.1", "libtensorrt_rtx.so.1"):
        (tmp_path / name).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: spec)
    assert libraries.rtx_library() == tmp_path / "libtensorrt_rtx.so.1"
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    assert libraries.rtx_library() is None


def test_the_stand_in_driver_is_called_as_the_real_one_would_be() -> None:
    # `ctypes.byref` objects carry what they point to as `_obj`, which the stand-in writes to.
    value = ctypes.c_int()
    FakeDriver().cuDriverGetVersion(ctypes.byref(value))
    assert value.value == 13020
