"""`export_bundle`: what it copies, what it refuses, and that whatever goes wrong leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from domino_deploy.bundle import open_bundle
from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.errors import BundleError, CheckpointError, DominoDeployError, ExportError, PairingError, RequestError, VerificationError
from domino_deploy.exporters import export
from domino_deploy.exporters.export import export_bundle
from domino_deploy.exporters.options import ExportOptions
from domino_deploy.exporters.placement import Placement
from domino_deploy.exporters.verify import VerificationLine, VerificationReport
from domino_deploy.runtime.session import Session
from tests.support.bundles import contents
from tests.support.checkpoints import write_drafter, write_target

FAILED = VerificationReport(
    lines=(
        VerificationLine(graph="target", name="features", case="1 row", max_abs_error=0.0, mean_abs_error=0.0, bound=1e-4),
        VerificationLine(graph="target", name="logits", case="1 row", max_abs_error=0.5, mean_abs_error=0.1, bound=1e-4),
    ),
    generated=(),
)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Drafter and target, in that order."""
    target = write_target(tmp_path / "source" / "target")
    return write_drafter(tmp_path / "source" / "drafter", target), target


@pytest.fixture
def without_graphs(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the exporter, which takes seconds: the tiny bundle's graphs fit every pair of the default shape."""

    def copied(
        target: object, drafter: object, stored: object, form: object, options: object, folder: Path, progress: object
    ) -> dict[str, object]:
        for file in tiny_bundle.glob("*.onnx"):
            shutil.copyfile(file, folder / file.name)
        return dict(open_bundle(tiny_bundle).manifest.graphs)

    monkeypatch.setattr(export, "_export_graphs", copied)


def refused(error: type[BaseException], pair: tuple[Path, Path], tmp_path: Path, **options: bool) -> str:
    before = contents(tmp_path)
    with pytest.raises(error) as caught:
        export_bundle(*pair, tmp_path / "new" / "bundle", **options)
    assert contents(tmp_path) == before, "something was left behind"
    return str(caught.value)


class TestNothingIsLeftBehind:
    def test_by_a_missing_drafter(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        assert "nowhere" in refused(CheckpointError, (tmp_path / "nowhere", pair[1]), tmp_path)

    def test_by_a_pair_that_does_not_match(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        other = write_target(tmp_path / "source" / "other", num_hidden_layers=5)
        assert "num_target_layers" in refused(PairingError, (pair[0], other), tmp_path)

    def test_by_a_target_without_a_fast_tokenizer(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        (pair[1] / "tokenizer.json").unlink()
        (pair[1] / "tokenizer.model").write_text("sentencepiece")
        message = refused(CheckpointError, pair, tmp_path)
        assert "expected tokenizer.json, found tokenizer.model, tokenizer_config.json" in message
        assert "save_pretrained" in message

    @pytest.mark.parametrize("error", [ExportError("no graph"), KeyboardInterrupt(), MemoryError()], ids=lambda error: type(error).__name__)
    def test_by_an_exporter_that_fails(
        self, error: BaseException, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*arguments: object) -> None:
            raise error

        monkeypatch.setattr(export, "onnx_from_target", fail)
        refused(type(error), pair, tmp_path)

    @pytest.mark.usefixtures("without_graphs")
    def test_by_graphs_that_miss_their_bounds(self, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(export.verification, "compare", lambda *arguments, **options: FAILED)
        message = refused(VerificationError, pair, tmp_path)
        assert "1 of 2 outputs of the graphs do not reproduce PyTorch" in message
        assert "target: logits (1 row): error 5.00e-01, allowed 1.00e-04" in message

    @pytest.mark.usefixtures("without_graphs")
    def test_by_an_interrupted_verification(self, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*arguments: object, **options: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(export.verification, "compare", interrupt)
        refused(KeyboardInterrupt, pair, tmp_path)

    def test_by_an_output_that_exists(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        (tmp_path / "new" / "bundle").mkdir(parents=True)
        (tmp_path / "new" / "bundle" / "mine.txt").write_text("keep")
        refused(BundleError, pair, tmp_path)
        refused(BundleError, pair, tmp_path, overwrite=True)


class TestVerificationUsesTheSource:
    """Weights that were converted wrongly agree with themselves: only the source shows the fault."""

    @pytest.mark.usefixtures("without_graphs")
    def test_so_wrongly_converted_weights_are_refused(
        self, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = export.write_weights

        def transposed(source: object, folder: Path, precision: object, placement: object) -> object:
            stored = write(source, folder, precision, Placement.COPY)  # type: ignore[arg-type]
            file = folder / "model.safetensors"
            if folder.name == "target":
                from domino_deploy.safetensors_header import read_header

                entry = read_header(file)["model.layers.1.self_attn.o_proj.weight"]
                content = bytearray(file.read_bytes())
                one, other = entry.offset, entry.offset + 4 * entry.shape[1]
                row = content[one:other]
                content[one:other] = content[other : other + len(row)]
                content[other : other + len(row)] = row  # two rows swapped
                file.write_bytes(content)
            return stored

        monkeypatch.setattr(export, "write_weights", transposed)
        assert "target: logits" in refused(VerificationError, pair, tmp_path)


@pytest.mark.usefixtures("without_graphs")
class TestWhatIsCopied:
    def exported(self, pair: tuple[Path, Path], tmp_path: Path) -> Path:
        return export_bundle(*pair, tmp_path / "bundle", verify=False).path

    def test_the_copied_checkpoints_open_with_the_same_configs(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        bundle = self.exported(pair, tmp_path)
        assert open_target(bundle / "target").config == open_target(pair[1]).config == open_bundle(bundle).target
        assert open_drafter(bundle / "drafter").config == open_drafter(pair[0]).config == open_bundle(bundle).drafter

    def test_more_stop_tokens_of_the_generation_config_are_kept(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        (pair[1] / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
        bundle = self.exported(pair, tmp_path)
        assert open_bundle(bundle).target.eos_token_ids == (2, 5)
        assert open_target(bundle / "target").config.eos_token_ids == (2, 5)

    @pytest.mark.parametrize("form", ["file", "text", "list", "none"])
    def test_the_chat_template_is_found_where_targets_keep_it(self, form: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
        template = (pair[1] / "chat_template.jinja").read_text()
        if form != "file":
            (pair[1] / "chat_template.jinja").unlink()
            config = json.loads((pair[1] / "tokenizer_config.json").read_text())
            if form == "text":
                config["chat_template"] = template
            if form == "list":
                config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
            (pair[1] / "tokenizer_config.json").write_text(json.dumps(config))
        bundle = self.exported(pair, tmp_path)
        if form == "none":
            assert not (bundle / "chat_template.jinja").exists()
        else:
            assert (bundle / "chat_template.jinja").read_text() == template

    @pytest.mark.parametrize("form", ["text", "object"])
    def test_special_tokens_go_into_the_manifest(self, form: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
        tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
        config = tokens if form == "text" else {name: {"content": text, "lstrip": False} for name, text in tokens.items()}
        (pair[1] / "tokenizer_config.json").write_text(json.dumps(config))
        assert open_bundle(self.exported(pair, tmp_path)).manifest.special_tokens == tokens

    def test_the_manifest_says_where_it_all_came_from(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        import torch

        manifest = open_bundle(self.exported(pair, tmp_path), check_hashes=True).manifest
        assert manifest.sources["drafter"].source == str(pair[0])
        assert manifest.sources["target"].revision is None
        assert manifest.libraries["torch"] == torch.__version__
        assert manifest.created_by.startswith("domino-deploy ")
        assert manifest.pairing["target_layer_ids"] == [0, 2]
        assert manifest.verification is None, "unverified bundles must say so"


@pytest.mark.usefixtures("without_graphs")
def test_replacing_a_bundle_needs_permission(pair: tuple[Path, Path], tmp_path: Path) -> None:
    first = export_bundle(*pair, tmp_path / "bundle", verify=False)
    with pytest.raises(BundleError, match="expected no such folder yet"):
        export_bundle(*pair, tmp_path / "bundle", verify=False)
    other = write_drafter(tmp_path / "source" / "other", pair[1], seed=5)
    second = export_bundle(other, pair[1], tmp_path / "bundle", verify=False, overwrite=True)
    name = "drafter/model.safetensors"
    assert first.manifest.files[name].sha256 != second.manifest.files[name].sha256
    assert {item.name for item in tmp_path.iterdir()} == {"source", "bundle"}


def test_a_whole_export_tells_its_steps_and_serves(tmp_path: Path) -> None:
    """Biases, unshifted labels, a longer prefix and a rope that is stretched: what the shared bundles do not have."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    target = write_target(tmp_path / "target", family="qwen2", rope_parameters=rope, rope_theta=10000.0)
    drafter = write_drafter(tmp_path / "drafter", target, shift_label=False, pure_draft_prefix_len=2, layout="flat")
    steps: list[str] = []
    bundle = export_bundle(drafter, target, tmp_path / "bundle", options=ExportOptions(num_speculative_tokens=3), progress=steps.append)
    assert bundle.manifest.verification is not None
    assert bundle.manifest.verification["passed"] is True
    assert [step for step in steps if "xporting" in step] == [f"Exporting the {name} graph" for name in ("target", "backbone", "head")]
    with Session.open(bundle.path) as session:
        assert session.default_num_speculative_tokens == 3


@pytest.mark.parametrize("asked", [0, 7])
def test_speculation_beyond_the_drafter_is_refused_before_anything_is_written(asked: int, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    drafter = write_drafter(tmp_path / "drafter", target)
    with pytest.raises(RequestError, match="from 1 to 6"):
        export_bundle(drafter, target, tmp_path / "bundle", options=ExportOptions(num_speculative_tokens=asked))
    assert sorted(item.name for item in tmp_path.iterdir()) == ["drafter", "target"]


@pytest.mark.parametrize("drafter", ["empty folder", "a/b/c"])
def test_errors_are_ours(drafter: str, tmp_path: Path) -> None:
    with pytest.raises(DominoDeployError):
        export_bundle(tmp_path if drafter == "empty folder" else drafter, tmp_path, tmp_path / "bundle")
    assert contents(tmp_path) == {}
