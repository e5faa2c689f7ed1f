"""Engine folders: what is written is read, and engines that do not fit are refused by name, without TensorRT and without a GPU."""

from __future__ import annotations

import dataclasses
from hashlib import sha256
from pathlib import Path

import pytest

from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.engine_choice import Host, open_engines
from domino_deploy.engines import FILES, MANIFEST, Calibration, Flavour, Plugin, PluginForm, ProductRange, open_engine_set
from domino_deploy.errors import EngineError
from domino_deploy.plugins import op
from tests.support import bundles
from tests.support.engine_manifests import change_engines, write_engines

HOST = Host(flavours={Flavour.TENSORRT: "11.4.0"}, compute_capability="9.0")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    folder = tmp_path / "bundle"
    folder.mkdir()
    bundles.fill(folder)
    return open_bundle(folder)


def refusal(bundle: Bundle, host: Host = HOST, **wanted) -> str:
    with pytest.raises(EngineError) as error:
        open_engines(bundle, host, **wanted)
    return str(error.value)


def test_what_is_written_is_read(bundle) -> None:
    calibration = Calibration(source="built-in", sha256="0" * 64, tokens=4096, products={"target.w": ProductRange(input=2.5, weight=0.5)})
    plugin = Plugin(form=PluginForm.CPP, name=op.NAME, version=op.VERSION, library="libdomino.so", sha256="1" * 64)
    folder = write_engines(bundle, "one", calibration=calibration, plugin=plugin, refittable=True)
    manifest = open_engine_set(folder, bundle, check_hashes=True).manifest
    assert (manifest.calibration, manifest.plugin, manifest.refittable) == (calibration, plugin, True)
    assert manifest.graphs["target"].profiles[0].shapes["input_ids"].max == (2, 5)
    assert manifest.graphs["head"].inputs[1].shape == ("batch", 4, 32)


def test_engines_that_fit_are_opened(bundle) -> None:
    folder = write_engines(bundle, "one")
    found = open_engines(bundle, HOST, batch=2, max_model_len=160, num_speculative_tokens=4, check_hashes=True)
    assert (found.path, found.file("head")) == (folder, folder / "head.engine")


def test_of_several_the_smallest_that_suffice_are_opened(bundle) -> None:
    for length in (512, 128, 256):
        write_engines(bundle, f"for-{length}", max_model_len=length)
    write_engines(bundle, "a-batch", max_model_len=200, max_batch_size=8)
    assert open_engines(bundle, HOST, max_model_len=200).path.name == "for-256"
    assert open_engines(bundle, HOST, max_model_len=100, batch=8).path.name == "a-batch"


def test_the_form_is_the_engines(bundle) -> None:
    write_engines(bundle, "half", dtype="float16")
    form = open_engines(bundle, HOST).form(bundle)
    assert form == dataclasses.replace(bundle.form, dtype="float16")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compute_capabilities": ("8.0", "8.9")}, "one: built for compute capability 8.0, 8.9, this GPU has 9.0"),
        ({"flavour_version": "10.16.1"}, "one: built by tensorrt 10.16.1, here is 11.4.0"),
        ({"flavour": Flavour.TENSORRT_RTX}, "one: built by tensorrt-rtx 11.4.0, which is not installed"),
        ({"bundle_sha256": "0" * 64}, "stale: built from another state of the bundle"),
        (
            {"plugin": Plugin(form=PluginForm.AOT, name=op.TILES_NAME, version="0")},
            "one: built with version 0 of the plugin, this is version 1",
        ),
        (
            {"plugin": Plugin(form=PluginForm.CPP, name=op.NAME, version=op.VERSION, library="libdomino.so", sha256="ab")},
            "one: built with the plugin library libdomino.so (sha256 ab), found none beside the engines",
        ),
    ],
)
def test_engines_from_elsewhere_are_refused_by_name(bundle, changes, reason: str) -> None:
    write_engines(bundle, "one", **changes)
    message = refusal(bundle)
    assert reason in message
    assert "domino-deploy build-engine" in message


def test_another_plugin_library_of_the_same_name_is_refused(bundle) -> None:
    """Each folder has its own: that of another does not count."""
    plugin = Plugin(form=PluginForm.CPP, name=op.NAME, version=op.VERSION, library="libdomino.so", sha256=sha256(b"new").hexdigest())
    old, new = (write_engines(bundle, name, plugin=plugin) for name in ("a-old", "new"))
    (old / "libdomino.so").write_bytes(b"old")
    assert f"found another one (sha256 {sha256(b'old').hexdigest()})" in refusal(bundle)
    (new / "libdomino.so").write_bytes(b"new")
    assert open_engines(bundle, HOST).path == new


def with_library(library: str | None, form: PluginForm = PluginForm.CPP) -> Plugin:
    return Plugin(form=form, name=op.NAME, version=op.VERSION, library=library, sha256=sha256(b"code").hexdigest())


@pytest.mark.parametrize(
    "library",
    [
        "../libdomino.so",
        "/tmp/libdomino.so",
        "~/libdomino.so/..",
        "sub/libdomino.so",
        "./libdomino.so",
        "libdomino.so/",
        "..\\libdomino.so",
        "C:libdomino.so",
        "\\\\host\\share\\libdomino.so",
        "libdomino.so\0.txt",
        "libdomino.so\n",
        "..",
        ".",
        "",
    ],
)
def test_a_plugin_library_outside_the_folder_is_refused(bundle, library: str) -> None:
    """On any system, whichever the engines were built on."""
    write_engines(bundle, "one", plugin=with_library(library))
    assert "plugin.library: expected the name of a file beside the engines" in refusal(bundle)


def test_links_to_other_files_are_refused(bundle, tmp_path) -> None:
    """Of what runs as code, a folder holds the files themselves."""
    folder = write_engines(bundle, "one", plugin=with_library("libdomino.so"))
    for name, content in (("libdomino.so", b"code"), ("head.engine", (folder / "head.engine").read_bytes())):
        (tmp_path / name).write_bytes(content)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / name)
    message = refusal(bundle)
    assert "plugin.library: expected a file, found a link" in message
    assert "head.engine: expected a file, found a link" in message


@pytest.mark.parametrize("plugin", [with_library(None), with_library("libdomino.so", PluginForm.V3)])
def test_a_library_belongs_to_the_compiled_form_and_to_no_other(bundle, plugin: Plugin) -> None:
    write_engines(bundle, "one", plugin=plugin)
    assert f"plugin.library: expected for the form cpp and for no other, found {plugin.library!r} for {plugin.form}" in refusal(bundle)


def test_stripped_engines_need_their_graphs(bundle) -> None:
    folder = write_engines(bundle, "one", has_weights=False)
    (folder / "head.onnx").touch()
    message = refusal(bundle)
    assert "target.onnx: missing, and needed to refit stripped engines" in message
    assert "head.onnx" not in message
    for graph in ("target", "backbone"):
        (folder / f"{graph}.onnx").touch()
    found = open_engines(bundle, HOST)
    assert found.weights_graph("head") == folder / "head.onnx"
    assert open_engine_set(write_engines(bundle, "whole"), bundle).weights_graph("head") is None


def test_engines_for_all_gpus_of_a_product_fit_each(bundle) -> None:
    write_engines(bundle, "all", flavour=Flavour.TENSORRT_RTX, flavour_version="1.7.1", compute_capabilities=())
    for capability in ("8.6", "12.0"):
        open_engines(bundle, Host(flavours={Flavour.TENSORRT_RTX: "1.7.1"}, compute_capability=capability))


def test_requests_that_are_too_large_are_told_every_limit(bundle) -> None:
    write_engines(bundle, "one")
    message = refusal(bundle, batch=3, max_model_len=161, num_speculative_tokens=5)
    for limit in ("batch up to 2, asked for 3", "max_model_len up to 160, asked for 161", "num_speculative_tokens up to 4, asked for 5"):
        assert limit in message


def test_every_folder_that_does_not_fit_is_named(bundle) -> None:
    write_engines(bundle, "old", flavour_version="10.15.1")
    write_engines(bundle, "other", compute_capabilities=("8.0",))
    message = refusal(bundle)
    assert "old: built by" in message
    assert "other: built for" in message


def test_an_exported_again_bundle_makes_engines_stale(bundle) -> None:
    write_engines(bundle, "one")
    bundles.change_manifest(bundle.path, lambda content: content.update(created_by="another export"))
    assert "stale" in refusal(open_bundle(bundle.path))


def test_a_bundle_without_engines_says_how_to_make_them(bundle) -> None:
    assert "found none. Build some: domino-deploy build-engine" in refusal(bundle)


def test_a_folder_named_is_the_only_one_looked_at(bundle, tmp_path) -> None:
    write_engines(bundle, "one")
    assert "no-such: " in refusal(bundle, folder=tmp_path / "no-such")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / FILES["target"]).unlink(), "target.engine: missing"),
        (lambda folder: (folder / FILES["target"]).write_text("short"), "target.engine: altered"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "expected a JSON object"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "expected an object"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff"), "expected a JSON object"),
        (lambda folder: change_engines(folder, lambda content: content.update(format_version=99)), "expected format_version 1, found 99"),
        (lambda folder: change_engines(folder, lambda content: content.update(colour="red")), "colour: unknown key"),
        (lambda folder: change_engines(folder, lambda content: content.pop("plugin")), "plugin: missing"),
        (lambda folder: change_engines(folder, lambda content: content["graphs"].pop("head")), "graphs.head: missing"),
        (
            lambda folder: change_engines(folder, lambda content: content["graphs"]["head"].update(file="../../../secret")),
            "graphs.head: expected head.engine",
        ),
    ],
)
def test_damaged_engines_are_refused(bundle, damage, problem: str) -> None:
    damage(write_engines(bundle, "one"))
    assert problem in refusal(bundle)


def test_altered_bytes_are_found_on_request(bundle) -> None:
    folder = write_engines(bundle, "one")
    file = folder / FILES["backbone"]
    file.write_bytes(file.read_bytes()[::-1])
    assert "backbone.engine: altered: expected sha256" in refusal(bundle, check_hashes=True)
