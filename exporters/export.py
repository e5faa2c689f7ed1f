"""From two checkpoints to a verified bundle; a failure at any point leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from domino_deploy import __version__, bundle
from domino_deploy.bundle import Bundle, GraphEntry, Manifest, SourceEntry, create_bundle, open_bundle, write_manifest
from domino_deploy.checkpoint import GENERATION_CONFIG, Checkpoint, open_drafter, open_target
from domino_deploy.checkpoint_text import chat_template, special_tokens, tokenizer_file
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import ExportError, RequestError, VerificationError
from domino_deploy.exporters import verify as verification
from domino_deploy.exporters.onnx_from_backbone import onnx_from_backbone
from domino_deploy.exporters.onnx_from_head import onnx_from_head
from domino_deploy.exporters.onnx_from_target import onnx_from_target
from domino_deploy.exporters.translations import OPSET
from domino_deploy.exporters.weights import bind_weights, check_all_used, write_weights
from domino_deploy.pairing import check_pairing
from domino_deploy.signature import GraphSignature, backbone_signature, head_signature, target_signature

Progress = Callable[[str], None]

_LIBRARIES = ("onnx", "onnx-ir", "onnxruntime", "onnxscript", "torch")


def export_bundle(
    drafter: str | Path,
    target: str | Path,
    output: str | Path,
    *,
    drafter_revision: str | None = None,
    target_revision: str | None = None,
    num_speculative_tokens: int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    progress: Progress = lambda step: None,
) -> Bundle:
    """Export a pair to the bundle `output`.

    Args:
        drafter: folder or hub id of a Domino or DFlash drafter.
        target: folder or hub id of its target.
        output: the bundle's folder; must not exist unless `overwrite`.
        drafter_revision: for hub ids.
        target_revision: for hub ids.
        num_speculative_tokens: how many tokens sessions draft and verify per cycle unless a request says otherwise; None for
            all that the drafter proposes.
        verify: compare the graphs with PyTorch on the checkpoints' own weights; the manifest records the figures.
        overwrite: replace the bundle at `output`, once the new one is complete.
        progress: told what is being done, one line per step.

    Raises:
        CheckpointError, PairingError: the checkpoints cannot be used, or not together.
        RequestError: `num_speculative_tokens` is more than the drafter proposes, or less than 1.
        BundleError: `output` exists or cannot be written to.
        ExportError: a graph could not be made.
        VerificationError: a graph does not reproduce PyTorch's numbers.
    """
    with create_bundle(output, overwrite=overwrite) as folder:
        progress("Opening the checkpoints")
        target_source, drafter_source = open_target(target, revision=target_revision), open_drafter(drafter, revision=drafter_revision)
        pairing = check_pairing(target_source.config, drafter_source.config)
        count = _speculation(num_speculative_tokens, drafter_source.config)
        _copy_text(target_source.folder, folder)
        progress("Writing the weights")
        copies = {
            bundle.TARGET_FOLDER: _copy_checkpoint(target_source, folder / bundle.TARGET_FOLDER, open_target),
            bundle.DRAFTER_FOLDER: _copy_checkpoint(drafter_source, folder / bundle.DRAFTER_FOLDER, open_drafter),
        }
        graphs = _export_graphs(copies, folder, progress)
        progress("Hashing")
        manifest = Manifest(
            format_version=bundle.FORMAT_VERSION,
            created_by=f"domino-deploy {__version__}",
            libraries={"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}},
            dtype="float32",
            sources={"target": _source(target_source), "drafter": _source(drafter_source)},
            target=target_source.config,
            drafter=drafter_source.config,
            pairing=pairing,
            num_speculative_tokens=count,
            special_tokens=special_tokens(target_source.folder),
            graphs=graphs,
            files=bundle.file_entries(folder),
            verification=None,
        )
        write_manifest(folder, manifest)
        if verify:
            report = verification.compare(folder, target_source, drafter_source, progress=progress)
            if not report.passed:
                raise VerificationError(report.failure())
            write_manifest(folder, dataclasses.replace(manifest, verification=report.to_dict()))
    return open_bundle(output)


def _speculation(asked: int | None, drafter: DrafterConfig) -> int:
    if asked is not None and not 1 <= asked <= drafter.num_proposals:
        raise RequestError(
            f"Expected num_speculative_tokens from 1 to {drafter.num_proposals}, the proposals of this drafter, found {asked}. "
            "Choose a number in that range, or leave it out."
        )
    return drafter.num_proposals if asked is None else asked


def _source(checkpoint: Checkpoint[Any]) -> SourceEntry:
    return SourceEntry(source=checkpoint.source, revision=checkpoint.revision)


def _copy_text(source: Path, folder: Path) -> None:
    shutil.copyfile(tokenizer_file(source), folder / bundle.TOKENIZER)
    template = chat_template(source)
    if template is not None:
        (folder / bundle.CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _copy_checkpoint(source: Checkpoint[Any], folder: Path, reopen: Callable[[Path], Checkpoint[Any]]) -> Checkpoint[Any]:
    """A checkpoint of its own in `folder`, fp32 under canonical names; opened, so that offsets are known."""
    folder.mkdir()
    write_weights(source, folder / bundle.WEIGHTS)
    raw = {name: value for name, value in source.raw_config.items() if name != "torch_dtype"}
    (folder / bundle.CONFIG).write_text(json.dumps(raw | {"dtype": "float32"}, indent=2) + "\n", encoding="utf-8")
    if (source.folder / GENERATION_CONFIG).is_file():  # may name more end-of-sequence tokens
        shutil.copyfile(source.folder / GENERATION_CONFIG, folder / GENERATION_CONFIG)
    copy = reopen(folder)
    if copy.config != source.config:
        raise ExportError(f"{folder.name}: expected the copied config.json to say {source.config}, found {copy.config}. Please report it.")
    return copy


def _export_graphs(copies: dict[str, Checkpoint[Any]], folder: Path, progress: Progress) -> dict[str, GraphEntry]:
    target: TargetConfig = copies[bundle.TARGET_FOLDER].config
    drafter: DrafterConfig = copies[bundle.DRAFTER_FOLDER].config
    exports: dict[str, tuple[Callable[[], ir.Model], GraphSignature]] = {
        "target": (lambda: onnx_from_target(target, drafter.target_layer_ids), target_signature(target, drafter.feature_size)),
        "backbone": (lambda: onnx_from_backbone(drafter, target), backbone_signature(drafter)),
        "head": (lambda: onnx_from_head(drafter, target), head_signature(drafter)),
    }
    entries, used = {}, []
    for name, (export, signature) in exports.items():
        progress(f"Exporting the {name} graph")
        file = bundle.GRAPHS[name]
        model = export()
        used.append(bind_weights(model, copies))
        ir.save(model, folder / file)
        _check_onnx(folder / file)
        entries[name] = GraphEntry(file=file, opset=OPSET, inputs=signature.inputs, outputs=signature.outputs)
    check_all_used(copies, used)
    return entries


def _check_onnx(file: Path) -> None:
    try:
        onnx.checker.check_model(str(file), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{file.name}: expected a valid ONNX graph, found: {error} Please report this fault of the exporter.") from error
