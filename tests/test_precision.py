"""Precisions: what the graphs compute, what they store, what is refused; tiny pairs, every type."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.checkpoint import open_target
from domino_deploy.errors import CheckpointError, RequestError
from domino_deploy.exporters.export import export_bundle
from domino_deploy.exporters.options import ExportOptions
from domino_deploy.exporters.stored import load_stored, stored_tensors
from domino_deploy.precision import Dtype, Precision
from domino_deploy.runtime.backends.ort_graph import open_graph, run_graph
from domino_deploy.runtime.session import Backend, DrafterChoice, GenerationParams, Session
from domino_deploy.signature import backbone_signature
from tests.support.checkpoints import write_drafter, write_target

PRECISIONS = {
    "float16": Precision.of(Dtype.FLOAT16),
    "bfloat16": Precision.of(Dtype.BFLOAT16),
    "int8": Precision.of(Dtype.INT8, block_size=16),
    "int4": Precision.of(Dtype.INT4, block_size=16),
    "int4 with zero points": Precision.of(Dtype.INT4, block_size=16, symmetric=False),
    "int4 LM head, float32 drafter": Precision.of(Dtype.INT4, lm_head=Dtype.INT4, drafter=Dtype.FLOAT32, block_size=16),
}
ON_ORT = [*(name for name in PRECISIONS if name != "bfloat16"), "float16, untied", "int4, untied"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made_pair(tmp_path_factory.mktemp("pair"), tied=True)


@pytest.fixture(scope="module")
def bundles(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    made = {name: (pair, precision) for name, precision in PRECISIONS.items()}
    untied = made_pair(tmp_path_factory.mktemp("untied"), tied=False)
    made |= {f"{name}, untied": (untied, PRECISIONS[name]) for name in ("float16", "int4")}
    return {
        name: export_bundle(*its, folder / str(index), ExportOptions(precision=precision), verify=False)
        for index, (name, (its, precision)) in enumerate(made.items())
    }


def made_pair(folder: Path, *, tied: bool) -> tuple[Path, Path]:
    """Drafter and target."""
    target = write_target(folder / "target", family="qwen3", tied=tied, dtype="bfloat16", shards=2)
    return write_drafter(folder / "drafter", target, dtype="bfloat16"), target


def text_of(session: Session, prompt: str, count: int | None = None) -> list[int]:
    params = GenerationParams(max_new_tokens=24, ignore_eos=True, num_speculative_tokens=count)
    return [token for step in session.steps(session.tokenizer.encode(prompt), params) for token in step.token_ids]


@pytest.mark.parametrize("name", ON_ORT)
def test_greedy_output_is_that_of_plain_decoding_with_the_same_bundle(name: str, bundles: dict[str, Bundle]) -> None:
    with Session.open(bundles[name].path) as session:
        for prompt in ("The quick brown fox", "Count to ten: one, two"):
            assert text_of(session, prompt) == text_of(session, prompt, 0)


@pytest.mark.parametrize("name", ON_ORT)
def test_logits_are_those_of_the_stored_weights(name: str, bundles: dict[str, Bundle]) -> None:
    bundle = bundles[name]
    target, _ = load_stored(bundle)
    ids = list(range(5, 17))
    with Session.open(bundle.path, drafter=DrafterChoice.NONE) as session:
        found = session.target.forward(ids, len(ids)).logits
    with torch.inference_mode():
        hidden, _ = target.hidden_states(torch.tensor([ids]))
        expected = target.lm_head(hidden)[0].numpy()
    # Products of integers round activations to 8 bits, which the tiny widths of this model average out the least.
    bound = (5e-3 if name.startswith("float16") else 0.12) * np.abs(expected).max()
    assert np.abs(found - expected).max() < bound
    assert np.abs(found - np.roll(expected, 1, axis=1)).max() > bound, "the bound would not tell other logits"


def test_bfloat16_writes_no_weights_and_runs_on_the_eager_backend_alone(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["bfloat16"]
    assert all(file.stat().st_nlink > 1 for file in bundle.path.rglob("*.safetensors"))
    with pytest.raises(RequestError, match=r"float32, float16, int8, int4.*found bfloat16.*--backend eager"):
        Session.open(bundle.path)
    with Session.open(bundle.path, backend=Backend.EAGER) as session:
        assert len(text_of(session, "The quick")) == 24


@pytest.mark.parametrize("backend", [Backend.EAGER, Backend.TENSORRT])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_other_backends_refuse_quantised_weights_with_alternatives(name: str, backend: Backend, bundles: dict[str, Bundle]) -> None:
    with pytest.raises(RequestError, match=rf"the backend {backend} runs \(float32, float16, bfloat16\), found {name}.*--backend ort"):
        Session.open(bundles[name].path, backend=backend)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_quantised_folder_is_no_plain_checkpoint(name: str, bundles: dict[str, Bundle]) -> None:
    with pytest.raises(CheckpointError):
        open_target(bundles[name].path / "target")
    assert json.loads((bundles[name].path / "target" / "config.json").read_text())["quantization_config"]["quant_method"] == "domino-deploy"


def test_parts_are_stored_in_their_own_types(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["int4 LM head, float32 drafter"]
    target, drafter = stored_tensors(bundle.path / "target"), stored_tensors(bundle.path / "drafter")
    head = "model.embed_tokens.weight" if bundle.target.tie_word_embeddings else "lm_head.weight"
    assert target[head].dtype is Dtype.INT4
    assert target["model.layers.0.mlp.up_proj.weight"].dtype is Dtype.INT4
    assert target["model.norm.weight"].dtype is Dtype.BFLOAT16, "norms keep the checkpoint's type"
    assert {tensor.dtype for tensor in drafter.values()} == {Dtype.FLOAT32}
    assert open_bundle(bundle.path, check_hashes=True).precision == PRECISIONS["int4 LM head, float32 drafter"]


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_islands_are_float32_in_the_graph(name: str, bundles: dict[str, Bundle]) -> None:
    low = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}[name]
    for graph in ("target", "backbone"):
        model = onnx.load(bundles[name].path / f"{graph}.onnx", load_external_data=False)
        types = {
            value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.input, *model.graph.output)
        }
        norms = [node for node in model.graph.node if node.op_type == "RMSNormalization"]
        attentions = [node for node in model.graph.node if node.op_type == "Attention"]
        assert norms
        assert all(types[node.output[0]] == onnx.TensorProto.FLOAT for node in norms)
        assert attentions
        assert all(types[node.output[0]] == low for node in attentions)
        assert all({item.name: item.i for item in node.attribute}["softmax_precision"] == onnx.TensorProto.FLOAT for node in attentions)
        logits = [value for value in model.graph.output if "logits" in value.name]
        assert [value.type.tensor_type.elem_type for value in logits] == [onnx.TensorProto.FLOAT]


def test_large_features_pass_the_float16_drafter(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Features of 3e4 are normal for large targets; their projection exceeds float16, whose largest number is 65504."""
    drafter, target = pair
    strong = tmp_path / "strong"
    strong.mkdir()
    for file in drafter.iterdir():
        (strong / file.name).write_bytes(file.read_bytes())
    tensors = load_file(strong / "model.safetensors")
    tensors["fc.weight"] = torch.full_like(tensors["fc.weight"], 0.5)
    save_file(tensors, strong / "model.safetensors")
    bundle = export_bundle(strong, target, tmp_path / "bundle", ExportOptions(precision=Precision.of(Dtype.FLOAT16)), verify=False)
    config, rows, slots = bundle.drafter, 3, 16
    features = np.full((1, rows, config.feature_size), 3e4, dtype=np.float16)
    assert np.isinf(features.astype(np.float32) @ tensors["fc.weight"].float().numpy().T).any() or (
        (features[0].astype(np.float32) @ tensors["fc.weight"].float().numpy().T).max() > 65504
    ), "the projection stays within float16: the test proves nothing"
    signature = backbone_signature(config, bundle.form)
    sizes = {"batch": 1, "feature_rows": rows, "context_rows": rows + config.block_size, "draft_capacity": slots}
    inputs = {
        spec.name: np.zeros([sizes[size] if isinstance(size, str) else size for size in spec.shape], dtype=spec.dtype)
        for spec in signature.inputs
    }
    inputs["features"], inputs["attention_mask"][:] = features, np.arange(slots) < rows + config.block_size
    import onnxruntime

    session = open_graph(bundle.path / "backbone.onnx", signature, onnxruntime.SessionOptions())
    for name, output in run_graph(session, bundle.path / "backbone.onnx", inputs).items():
        assert np.isfinite(output.astype(np.float32)).all(), name
        assert np.abs(output).max() > 0 or name.startswith("updated_"), name


class TestRefused:
    def test_floating_types_that_differ(self) -> None:
        with pytest.raises(RequestError, match="one floating type"):
            Precision(target=Dtype.FLOAT16, drafter=Dtype.INT8, lm_head=Dtype.FLOAT16)

    def test_an_odd_block_size(self) -> None:
        with pytest.raises(RequestError, match="block_size must be one of 16, 32"):
            Precision.of(Dtype.INT8, block_size=24)

    @pytest.mark.parametrize("choice", [{"block_size": 64}, {"symmetric": False}])
    def test_a_choice_for_blocks_where_there_are_none(self, choice: dict[str, int]) -> None:
        with pytest.raises(RequestError, match=r"for int8 or int4 only, found them for float16\. Leave them out"):
            Precision.of(Dtype.FLOAT16, **choice)  # type: ignore[arg-type]  # a keyword of either type
        Precision.of(Dtype.FLOAT32, lm_head=Dtype.INT8, **choice)  # type: ignore[arg-type]

    def test_matrices_that_are_no_whole_number_of_blocks(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        options = ExportOptions(precision=Precision.of(Dtype.INT8, block_size=256))
        with pytest.raises(RequestError, match=r"(?s)multiple of the block size 256.*32 inputs.*smaller block size"):
            export_bundle(*pair, tmp_path / "bundle", options, verify=False)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["int8", "int4", "int4 with zero points", "int4, untied"])
def test_a_rows_numbers_do_not_depend_on_the_rows_beside_it(name: str, bundles: dict[str, Bundle]) -> None:
    """Bit for bit: the smallest difference would change which way an activation is rounded to 8 bits, and then the text."""
    ids = list(range(5, 40))
    with Session.open(bundles[name].path, drafter=DrafterChoice.NONE) as session:
        target = session.target
        target.forward(ids, 1)
        target.commit(len(ids))
        alone = target.forward([7], 1)
        logits, features = alone.logits[0].copy(), alone.features[0].copy()
        beside = target.forward([7, 8, 9, 10, 11], 5)
        assert np.array_equal(beside.logits[0], logits)
        assert np.array_equal(beside.features[0], features)


def test_a_quantised_target_runs_to_the_last_row_of_its_cache(bundles: dict[str, Bundle]) -> None:
    with Session.open(bundles["int4"].path, max_model_len=65) as session:
        whole = text_of(session, "The quick")
        prompt = session.tokenizer.encode("The quick")
        params = GenerationParams(max_new_tokens=500, ignore_eos=True)
        tokens = [token for step in session.steps(prompt, params) for token in step.token_ids]
        assert len(prompt) + len(tokens) == 66, "the last token needs no row of its own"
        assert tokens[: len(whole)] == whole
