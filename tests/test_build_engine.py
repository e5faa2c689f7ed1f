"""`domino-deploy build-engine`: what it refuses before anything is built, what it plans, and that engines appear whole or not at all."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result

from domino_deploy import tensorrt_libraries as libraries
from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.cli import main
from domino_deploy.engines import ENGINES_FOLDER, MANIFEST, Flavour, PluginForm, open_engine_set
from domino_deploy.errors import ExportError, MissingDependencyError, RequestError
from domino_deploy.exporters import engine_from_onnx, engine_options, engine_plan
from domino_deploy.exporters.engine_from_onnx import build_engines, check_built
from domino_deploy.exporters.engine_options import EngineOptions, engine_settings
from domino_deploy.exporters.trt_api import BuildJob, BuiltEngine, BuiltTensor
from domino_deploy.plugins import op
from domino_deploy.precision import Dtype, Precision
from domino_deploy.signature import head_signature
from domino_deploy.tensorrt_libraries import Driver, Gpu
from tests.support.bundles import contents

H200 = Gpu(name="NVIDIA H200", compute_capability="9.0", memory_bytes=141 * 10**9)
VERSIONS = {Flavour.TENSORRT: "11.4.0.106", Flavour.TENSORRT_RTX: "1.7.1.116"}


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Path:
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


@pytest.fixture
def machine(monkeypatch) -> Callable[..., None]:
    """Makes this machine one with these products and GPU."""

    def made(*flavours: Flavour, gpu: Gpu | None = None) -> None:
        monkeypatch.setattr(libraries, "_version", lambda flavour: VERSIONS[flavour] if flavour in flavours else None)
        driver = None if gpu is None else Driver(cuda_version="13.0", gpus=(gpu,))
        monkeypatch.setattr(libraries, "driver", lambda: driver)

    made(Flavour.TENSORRT_RTX)
    return made


@pytest.fixture
def worker(monkeypatch) -> list[BuildJob]:
    """Takes the place of the worker processes: engines are text, and as the graphs' signatures say."""
    jobs: list[BuildJob] = []

    def run(job: BuildJob, folder: Path, progress: Any) -> BuiltEngine:
        jobs.append(job)
        assert Path(job.onnx_file).is_file()
        assert job.engine_file is not None
        Path(job.engine_file).write_text(f"engine of {job.graph}")
        return BuiltEngine(flavour_version="1.7.1.116", num_layers=7, layer_types={}, inputs=(), outputs=(), seconds=1.0)

    monkeypatch.setattr(engine_from_onnx, "run_job", run)
    monkeypatch.setattr(engine_from_onnx, "check_built", lambda *arguments: None)
    return jobs


def command(bundle: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["build-engine", str(bundle), *arguments])


def settings(bundle: Path, **options: Any) -> Any:
    return engine_settings(open_bundle(bundle), EngineOptions(**options))


def refusal(bundle: Path | Bundle, **options: Any) -> str:
    opened = open_bundle(bundle) if isinstance(bundle, Path) else bundle
    with pytest.raises(RequestError) as error:
        engine_settings(opened, EngineOptions(**options))
    return str(error.value)


# What is asked for.


def test_a_dry_run_says_what_would_be_built_and_writes_nothing(bundle, machine) -> None:
    before = contents(bundle)
    done = command(bundle, "--dry-run", "--bf16", "--compute-capability", "8.9", "--max-batch-size", "2", "--max-model-len", "200")
    assert done.exit_code == 0, done.output
    for words in (
        f"{bundle}/engines/tensorrt-rtx-sm89-bfloat16",
        "tensorrt-rtx 1.7.1.116, for compute capability 8.9",
        "bfloat16, converted first",
        "2 sequence(s) of 200 tokens, 6 drafted per cycle, 200 prompt tokens per pass",
        f"v3: {op.NAME} version {op.VERSION}",
    ):
        assert words in done.output
    assert contents(bundle) == before


def test_without_a_type_engines_have_the_bundles_own(bundle, machine) -> None:
    found = settings(bundle)
    assert (found.dtype, found.is_converted, found.output.name) == (Dtype.FLOAT32, False, "tensorrt-rtx-float32")


def test_float8_stands_between_16_bit_values(bundle, machine) -> None:
    found = settings(bundle, is_float8=True, compute_capabilities=("8.9",))
    assert (found.dtype, found.weights, found.output.name) == (Dtype.BFLOAT16, "float8_e4m3fn", "tensorrt-rtx-sm89-fp8")


def test_tensorrt_is_preferred_and_builds_for_the_gpu_at_hand(bundle, machine, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    machine(*Flavour, gpu=H200)
    found = settings(bundle)
    assert (found.flavour, found.compute_capabilities, found.output.name) == (Flavour.TENSORRT, ("9.0",), "tensorrt-sm90-float32")
    assert found.plugin.form is PluginForm.AOT
    assert found.plugin.name == op.TILES_NAME
    assert str(found.timing_cache) == "/cache/domino-deploy/tensorrt-11.4.0.106-sm90-nvidia-h200.timings"


def test_rtx_needs_no_gpu_and_measures_nothing(bundle, machine) -> None:
    found = settings(bundle)
    assert (found.gpu, found.timing_cache, found.compute_capabilities) == (None, None, ())


def test_limits_default_to_the_bundles_and_the_models(bundle, machine) -> None:
    found = settings(bundle)
    opened = open_bundle(bundle)
    assert found.num_speculative_tokens == opened.manifest.num_speculative_tokens
    assert found.max_model_len == opened.target.max_position_embeddings
    assert found.prefill_rows == 256


def test_no_prefill_pass_is_longer_than_the_caches(bundle, machine) -> None:
    assert settings(bundle, max_model_len=200).prefill_rows == 200


def test_a_compiled_plugin_is_known_by_its_bytes(bundle, machine, tmp_path) -> None:
    library = tmp_path / "libdomino.so"
    library.write_bytes(b"code")
    found = settings(bundle, plugin=str(library))
    assert (found.plugin.form, found.plugin.library, found.plugin_library) == (PluginForm.CPP, "libdomino.so", library)
    assert found.plugin.sha256 == "5694d08a2e53ffcae0c3103e5ad6f6076abd960eb1f8a56577040bc1028f702b"


def test_a_drafter_without_a_correction_gets_no_plugin(tiny_dflash_bundle, machine) -> None:
    assert settings(tiny_dflash_bundle).plugin.form is PluginForm.NONE
    assert "a DFlash drafter's, which is an argmax" in refusal(tiny_dflash_bundle, plugin="v3")


# What is refused, with one clear error each.


def test_everything_that_is_out_of_range_is_told_at_once(bundle, machine) -> None:
    most = open_bundle(bundle).target.max_position_embeddings
    message = refusal(
        bundle,
        max_batch_size=0,
        max_model_len=most + 1,
        num_speculative_tokens=7,
        prefill_rows=127,
        workspace=0,
        opt_level=6,
        dtype=Dtype.INT8,
    )
    for problem in (
        "max_batch_size: expected 1 to 65535, found 0",
        f"max_model_len: expected 128 to {most}, found {most + 1}",
        "num_speculative_tokens: expected 1 to 6, found 7",
        "prefill_rows: expected 128 or more, found 127",
        f"workspace: expected 1 to {2**63 - 1}, found 0",
        "opt_level: expected 0 to 5, found 6",
        "dtype: expected float32, float16, bfloat16, found int8",
    ):
        assert problem in message


def changed(bundle: Path, **fields: Any) -> Bundle:
    opened = open_bundle(bundle)
    return dataclasses.replace(opened, manifest=dataclasses.replace(opened.manifest, **fields))


def test_a_quantised_bundle_is_refused_with_what_to_do(bundle, machine) -> None:
    message = refusal(changed(bundle, precision=Precision.of(Dtype.INT4)))
    assert "found int4 (LM head int8), whose operators are ONNX Runtime's" in message
    assert "export the pair again with --dtype float16" in message


def test_a_pool_above_topks_limit_is_refused(bundle, machine) -> None:
    form = dataclasses.replace(open_bundle(bundle).form, candidate_pool=3841)
    assert "expected at most 3840 tokens, the largest K of TensorRT's TopK, found 3841" in refusal(changed(bundle, form=form))


def test_stripped_weights_must_be_the_bundles(bundle, machine) -> None:
    assert "stripped weights: " in refusal(bundle, is_stripped=True, dtype=Dtype.FLOAT16)


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("aot", "--plugin aot: expected --backend tensorrt: tensorrt-rtx has no plugins compiled ahead of time"),
        ("v4", "expected auto, none, aot, v3 or the path of a compiled plugin, found 'v4'"),
        ("/no/such/libdomino.so", "found no such file"),
    ],
)
def test_plugins_that_are_not_there_are_refused(bundle, machine, plugin: str, words: str) -> None:
    assert words in refusal(bundle, plugin=plugin)


def test_auto_does_without_the_plugin_where_nothing_compiles_it(bundle, machine, monkeypatch) -> None:
    monkeypatch.setattr(engine_options.importlib.util, "find_spec", lambda name: None)
    assert settings(bundle).plugin.form is PluginForm.NONE
    assert "the package triton, which compiles the kernel" in refusal(bundle, plugin="v3")


@pytest.mark.parametrize("capability", ["89", "8.x", "sm89", "8.9.1", ""])
def test_compute_capabilities_are_two_numbers(bundle, machine, capability: str) -> None:
    assert "Expected compute capabilities like 8.9" in refusal(bundle, compute_capabilities=(capability,))


def test_tensorrt_builds_for_no_other_gpu(bundle, machine) -> None:
    machine(Flavour.TENSORRT, gpu=H200)
    message = refusal(bundle, compute_capabilities=("8.9",))
    assert "the compute capability of this NVIDIA H200" in message
    assert "--backend tensorrt-rtx" in message


def test_float8_is_refused_for_gpus_without_it(bundle, machine) -> None:
    assert "8.0" in refusal(bundle, is_float8=True, compute_capabilities=("8.0",))


@pytest.mark.parametrize(
    ("flavours", "arguments", "words"),
    [
        ((), (), "Expected tensorrt or tensorrt-rtx, found neither"),
        ((Flavour.TENSORRT_RTX,), ("--backend", "tensorrt"), "Expected the package tensorrt, found none"),
        ((Flavour.TENSORRT,), (), "tensorrt: expected an NVIDIA driver and a GPU, found no driver"),
        (
            (Flavour.TENSORRT_RTX,),
            ("--strip-weights",),
            "tensorrt-rtx: expected an NVIDIA driver and a GPU to build engines without weights",
        ),
    ],
)
def test_what_is_not_installed_is_exit_code_3(bundle, machine, flavours, arguments, words: str) -> None:
    machine(*flavours)
    done = command(bundle, *arguments)
    assert (done.exit_code, done.stdout) == (3, "")
    assert words in done.stderr


def test_a_driver_without_a_gpu_is_told_apart(bundle, machine, monkeypatch) -> None:
    machine(Flavour.TENSORRT)
    monkeypatch.setattr(libraries, "driver", lambda: Driver(cuda_version="13.0", gpus=()))
    with pytest.raises(MissingDependencyError, match=r"found a driver for CUDA 13\.0 and no GPU"):
        settings(bundle)


def test_an_old_version_is_refused(bundle, machine, monkeypatch) -> None:
    monkeypatch.setattr(libraries, "_version", lambda flavour: "10.13.3.9" if flavour is Flavour.TENSORRT else None)
    with pytest.raises(MissingDependencyError, match=r"Expected tensorrt 10\.15 or newer, found 10\.13\.3\.9"):
        settings(bundle)


@pytest.mark.parametrize("size", ["4GB", "-1", "4 TiB", "much"])
def test_a_workspace_that_is_no_size_is_wrong_usage(bundle, machine, size: str) -> None:
    done = command(bundle, "--workspace", size)
    assert done.exit_code == 2
    assert "expected bytes such as 4GiB or 512MiB" in done.stderr


def test_types_exclude_each_other(bundle, machine) -> None:
    done = command(bundle, "--fp16", "--fp8")
    assert done.exit_code == 2
    assert "Expected at most one of --fp16, --bf16, --fp32 and --fp8" in done.stderr


def test_too_little_memory_is_refused_before_anything_is_built(bundle, machine, worker, monkeypatch) -> None:
    monkeypatch.setattr(engine_plan, "free_memory", lambda: 10**6)
    done = command(bundle)
    assert done.exit_code == 1
    assert "found too little memory: at least" in done.stderr
    assert worker == []
    assert not (bundle / ENGINES_FOLDER).exists()
    planned = command(bundle, "--dry-run")
    assert planned.exit_code == 1
    assert "too little memory" in planned.stdout


def test_a_full_disk_is_refused_before_anything_is_built(bundle, machine, worker, monkeypatch) -> None:
    monkeypatch.setattr(engine_plan, "free_disk", lambda path: 10)
    done = command(bundle)
    assert done.exit_code == 1
    assert "too little disk: about" in done.stderr
    assert worker == []


def test_memory_that_may_not_do_is_a_warning(bundle, machine, worker, monkeypatch) -> None:
    plan = engine_plan.plan_engines(open_bundle(bundle), settings(bundle))
    monkeypatch.setattr(engine_plan, "free_memory", lambda: (plan.least_bytes + plan.peak_bytes) // 2)
    done = command(bundle)
    assert done.exit_code == 0, done.stderr
    assert "warning: memory: about" in done.stderr


def test_a_gpu_too_small_to_serve_is_a_warning(bundle, machine) -> None:
    machine(Flavour.TENSORRT, gpu=dataclasses.replace(H200, memory_bytes=10**4))
    plan = engine_plan.plan_engines(open_bundle(bundle), settings(bundle))
    assert any("this NVIDIA H200 has" in warning for warning in plan.warnings())


# What is made.


def test_engines_appear_with_their_manifest(bundle, machine, worker) -> None:
    done = command(bundle, "--compute-capability", "8.9", "--compute-capability", "12.0", "--max-model-len", "150", "--opt-level", "5")
    assert done.exit_code == 0, done.stderr
    folder = bundle / ENGINES_FOLDER / "tensorrt-rtx-sm89-sm120-float32"
    assert done.stdout.startswith(f"{folder}: tensorrt-rtx 1.7.1.116, compute capability 8.9, 12.0, float32, plugin v3, ")
    assert sorted(item.name for item in folder.iterdir()) == ["backbone.engine", MANIFEST, "head.engine", "target.engine"]
    manifest = open_engine_set(folder, open_bundle(bundle), check_hashes=True).manifest
    assert (manifest.compute_capabilities, manifest.max_model_len, manifest.opt_level) == (("8.9", "12.0"), 150, 5)
    assert [job.graph for job in worker] == ["head", "backbone", "target"]
    assert [job.plugin for job in worker] == [PluginForm.V3, PluginForm.NONE, PluginForm.NONE]
    assert {job.workspace for job in worker} == {4 * 2**30}


def test_a_compiled_plugin_lies_beside_the_engines_that_need_it(bundle, machine, worker, tmp_path) -> None:
    library = tmp_path / "libdomino.so"
    library.write_bytes(b"code")
    assert command(bundle, "--plugin", str(library), "-o", str(tmp_path / "engines")).exit_code == 0
    assert (tmp_path / "engines" / "libdomino.so").read_bytes() == b"code"
    assert worker[-1].plugin_library == str(library)


def test_stripped_engines_have_beside_them_what_they_are_refitted_from(bundle, machine, worker) -> None:
    machine(Flavour.TENSORRT, gpu=H200)
    engines = build_engines(open_bundle(bundle), EngineOptions(is_stripped=True))
    assert (engines.manifest.has_weights, engines.manifest.refittable) == (False, True)
    assert all(job.is_stripped for job in worker)
    for graph in ("target", "backbone", "head"):
        file = engines.weights_graph(graph)
        assert file is not None
        weights = onnx.load(file, load_external_data=False).graph.initializer
        places = {entry.value for tensor in weights for entry in tensor.external_data if entry.key == "location"}
        assert places
        assert places <= {"target/model.safetensors", "drafter/model.safetensors"}  # of the bundle


def test_a_failure_leaves_nothing_behind(bundle, machine, worker, monkeypatch) -> None:
    def fail(job: BuildJob, folder: Path, progress: Any) -> BuiltEngine:
        if job.graph == "target":
            raise ExportError("target: expected an engine, found none. Try again.")
        return run(job, folder, progress)

    run = engine_from_onnx.run_job
    monkeypatch.setattr(engine_from_onnx, "run_job", fail)
    before = contents(bundle)
    assert command(bundle).exit_code == 1
    assert len(worker) == 2
    assert contents(bundle) == before


def test_engines_are_replaced_on_request_only(bundle, machine, worker) -> None:
    assert command(bundle).exit_code == 0
    again = command(bundle)
    assert again.exit_code == 4
    assert "expected no such folder yet" in again.stderr
    assert len(worker) == 3
    assert command(bundle, "--force", "--max-model-len", "129").exit_code == 0
    assert open_engine_set(bundle / ENGINES_FOLDER / "tensorrt-rtx-float32", open_bundle(bundle)).manifest.max_model_len == 129


def test_what_is_no_engine_folder_is_never_replaced(bundle, machine, worker, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    done = command(bundle, "--force", "-o", str(tmp_path / "mine"))
    assert done.exit_code == 4
    assert "expected engines to replace, found something else" in done.stderr


def test_a_folder_that_cannot_be_written_to_is_named(bundle, machine, worker, tmp_path) -> None:
    (tmp_path / "file").touch()
    done = command(bundle, "-o", str(tmp_path / "file" / "engines"))
    assert done.exit_code == 4
    assert "expected a folder that engines can be written to" in done.stderr


def test_another_type_is_converted_aside_and_the_bundle_stays_as_it_is(bundle, machine, worker, monkeypatch) -> None:
    seen: dict[str, Any] = {}
    run = engine_from_onnx.run_job

    def look(job: BuildJob, folder: Path, progress: Any) -> BuiltEngine:
        private = open_bundle(folder / "bundle")
        seen.update(precision=private.precision.name, count=private.manifest.num_speculative_tokens)
        return run(job, folder, progress)

    monkeypatch.setattr(engine_from_onnx, "run_job", look)
    before = contents(bundle)
    engines = build_engines(open_bundle(bundle), EngineOptions(dtype=Dtype.FLOAT16))
    assert seen == {"precision": "float16", "count": open_bundle(bundle).manifest.num_speculative_tokens}
    assert engines.manifest.dtype == "float16"
    assert engines.manifest.graphs["target"].outputs[2].dtype == "float16"
    shutil.rmtree(bundle / ENGINES_FOLDER)
    assert contents(bundle) == before


def test_an_engine_with_other_inputs_than_its_graph_is_refused(bundle) -> None:
    opened = open_bundle(bundle)
    tensor = BuiltTensor(name="logits", dtype="half", shape=(-1, -1, 300))
    built = BuiltEngine(flavour_version="1", num_layers=1, layer_types={}, inputs=(tensor,), outputs=(), seconds=0.0)
    head = head_signature(opened.drafter, opened.form)
    with pytest.raises(ExportError, match="the engine does not have its graph's signature") as error:
        check_built("head", built, head)
    assert "expected 4 inputs and outputs, found 1" in str(error.value)
