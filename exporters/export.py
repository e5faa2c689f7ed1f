"""From two checkpoints to a verified bundle; a failure at any point leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from domino_deploy import __version__, bundle
from domino_deploy.bundle import Bundle, GraphEntry, Manifest, SourceEntry, create_bundle, open_bundle, write_manifest
from domino_deploy.checkpoint import GENERATION_CONFIG, Checkpoint, open_drafter, open_target
from domino_deploy.checkpoint_text import chat_template, check_tokenizer, special_tokens, tokenizer_file
from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.config_json import to_json
from domino_deploy.errors import CheckpointError, ExportError, VerificationError, listed
from domino_deploy.exporters import verify as verification
from domino_deploy.exporters.draft_vocab import write_draft_vocab
from domino_deploy.exporters.lm_head import backbone_trunk, lm_head, target_trunk
from domino_deploy.exporters.onnx_from_backbone import onnx_from_backbone
from domino_deploy.exporters.onnx_from_head import onnx_from_head
from domino_deploy.exporters.onnx_from_target import onnx_from_target
from domino_deploy.exporters.options import ExportOptions, check_request, graph_form
from domino_deploy.exporters.passes import check_signature
from domino_deploy.exporters.precision import apply_precision, apply_precision_to_head
from domino_deploy.exporters.stored import Stored, floating_tensors
from domino_deploy.exporters.translations import OPSET
from domino_deploy.exporters.verify_report import write_report
from domino_deploy.exporters.verify_tolerances import Tolerances
from domino_deploy.exporters.weights import bind_weights, check_all_used, write_weights
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.loading import load_drafter, load_target
from domino_deploy.model.target import TargetModel
from domino_deploy.pairing import check_pairing
from domino_deploy.precision import Precision
from domino_deploy.signature import (
    GraphForm,
    backbone_signature,
    backbone_trunk_signature,
    head_signature,
    lm_head_signature,
    target_signature,
    target_trunk_signature,
)
from domino_deploy.template_variables import TRAINED_WITH, variable_problems

Progress = Callable[[str], None]


_LIBRARIES = ("onnx", "onnx-ir", "onnxruntime", "onnxscript", "torch")


def export_bundle(
    drafter: str | Path,
    target: str | Path,
    output: str | Path,
    options: ExportOptions | None = None,
    *,
    drafter_revision: str | None = None,
    target_revision: str | None = None,
    verify: bool = True,
    tolerances: Tolerances | None = None,
    num_layers: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda step: None,
) -> Bundle:
    """Export a pair to the bundle `output`.

    Args:
        drafter: folder or hub id of a Domino or DFlash drafter.
        target: folder or hub id of its target.
        output: the bundle's folder; must not exist unless `overwrite`.
        options: precision and form of the bundle.
        drafter_revision: for hub ids.
        target_revision: for hub ids.
        verify: compare the graphs with PyTorch: on the checkpoints' weights, or, where they are quantised, on what the bundle's
            integers stand for; the manifest records the figures.
        tolerances: other bounds than the table's.
        num_layers: compare the target's first layers only.
        overwrite: replace the bundle at `output`, once the new one is complete.
        progress: told what is being done, one line per step.

    Raises:
        CheckpointError, PairingError: the checkpoints cannot be used, or not together.
        RequestError: options that do not fit the pair.
        BundleError: `output` exists or cannot be written to.
        ExportError: a graph could not be made.
        VerificationError: a graph does not reproduce PyTorch's numbers.
    """
    options = options or ExportOptions()
    with create_bundle(output, overwrite=overwrite) as folder:
        progress("Opening the checkpoints")
        sources: dict[str, Checkpoint[Any]] = {
            bundle.TARGET_FOLDER: open_target(target, revision=target_revision),
            bundle.DRAFTER_FOLDER: open_drafter(drafter, revision=drafter_revision),
        }
        target_config, drafter_config = (source.config for source in sources.values())
        pairing = check_pairing(target_config, drafter_config)
        if options.trained_with is None:
            _check_variables(sources[bundle.DRAFTER_FOLDER])
        check_request(options, target_config, drafter_config, verify=verify, num_layers=num_layers)
        form = graph_form(options)
        check_tokenizer(sources[bundle.TARGET_FOLDER].folder, target_config.vocab_size)
        tokens = special_tokens(sources[bundle.TARGET_FOLDER].folder)
        _copy_text(sources[bundle.TARGET_FOLDER].folder, folder)
        progress("Placing the weights")
        stored = _place_weights(sources, folder, options)
        graphs = _export_graphs(target_config, drafter_config, stored, form, options, folder, progress)
        progress("Hashing")
        manifest = Manifest(
            format_version=bundle.FORMAT_VERSION,
            created_by=f"domino-deploy {__version__}",
            libraries={"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}},
            precision=options.precision,
            form=form,
            certified_pool=options.certified_pool,
            sources={name: SourceEntry(source=source.source, revision=source.revision) for name, source in sources.items()},
            target=target_config,
            drafter=drafter_config,
            pairing=pairing,
            num_speculative_tokens=options.num_speculative_tokens or drafter_config.num_proposals,
            special_tokens=tokens,
            graphs=graphs,
            files=bundle.file_entries(folder),
            verification=None,
        )
        write_manifest(folder, manifest)
        if verify:
            models = None if options.precision.is_quantised or num_layers is not None else _models(sources)
            report = verification.compare(open_bundle(folder), models, tolerances=tolerances, num_layers=num_layers, progress=progress)
            if not report.passed:
                raise VerificationError(report.failure())
            write_report(folder / bundle.REPORT, report, title=Path(output).name)
            files = {**manifest.files, bundle.REPORT: bundle.file_entry(folder / bundle.REPORT)}
            write_manifest(folder, dataclasses.replace(manifest, verification=report.summary(), files=files))
    return open_bundle(output)


def _models(sources: Mapping[str, Checkpoint[Any]]) -> tuple[TargetModel, DrafterModel]:
    """Both models on the weights of the sources, so that a wrong conversion is seen."""
    target, drafter = sources.values()
    return load_target(target, tapped_layers=drafter.config.target_layer_ids), load_drafter(drafter)


def _check_variables(drafter: Checkpoint[DrafterConfig]) -> None:
    stated = drafter.raw_config.get(TRAINED_WITH)
    problems = [] if stated is None else variable_problems(stated)
    if problems:
        where = f"{drafter.folder / bundle.CONFIG}: {TRAINED_WITH} cannot be used"
        raise CheckpointError(listed(where, problems, "Say by --drafter-chat-template-kwargs what it was trained with."))


def _copy_text(source: Path, folder: Path) -> None:
    shutil.copyfile(tokenizer_file(source), folder / bundle.TOKENIZER)
    template = chat_template(source)
    if template is not None:
        (folder / bundle.CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _place_weights(sources: dict[str, Checkpoint[Any]], folder: Path, options: ExportOptions) -> dict[str, Stored]:
    """Both checkpoints in the bundle: where each tensor lies."""
    stored: dict[str, Stored] = {}
    for name, source in sources.items():
        inside = folder / name
        inside.mkdir()
        stored[name] = write_weights(source, inside, options.precision, options.placement)
        trained_with = options.trained_with if name == bundle.DRAFTER_FOLDER else None
        _copy_config(source, inside, options.precision, trained_with)
    if options.draft_vocab is not None:
        file = folder / bundle.DRAFTER_FOLDER / bundle.DRAFT_VOCAB
        target, drafter = sources.values()
        write_draft_vocab(target, drafter, options.draft_vocab, file, options.precision.activations)
        stored["draft_vocab"] = floating_tensors(file)
    return stored


def _copy_config(source: Checkpoint[Any], folder: Path, precision: Precision, trained_with: Mapping[str, Any] | None) -> None:
    raw = {name: value for name, value in source.raw_config.items() if name != "torch_dtype"}
    if trained_with is not None:
        raw[TRAINED_WITH] = dict(trained_with)
    part = precision.target if folder.name == bundle.TARGET_FOLDER else precision.drafter
    raw["dtype"] = str(part.activations)
    if precision.is_quantised:  # other tools must not take such a folder for a plain checkpoint
        raw["quantization_config"] = {"quant_method": "domino-deploy", **to_json(precision)}
    (folder / bundle.CONFIG).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    if (source.folder / GENERATION_CONFIG).is_file():  # may name more end-of-sequence tokens
        shutil.copyfile(source.folder / GENERATION_CONFIG, folder / GENERATION_CONFIG)


def _export_graphs(
    target: TargetConfig,
    drafter: DrafterConfig,
    stored: dict[str, Stored],
    form: GraphForm,
    options: ExportOptions,
    folder: Path,
    progress: Progress,
) -> dict[str, GraphEntry]:
    precision = options.precision
    signatures = {
        "target": target_signature(target, drafter.feature_size, form),
        "backbone": backbone_signature(drafter, form),
        "head": head_signature(drafter, form),
    }
    exports: dict[str, Callable[[], ir.Model]] = {
        "target": lambda: onnx_from_target(target, drafter.target_layer_ids),
        "backbone": lambda: onnx_from_backbone(drafter, target, form),
        "head": lambda: onnx_from_head(drafter, target, form, options.certified_pool),
    }
    entries, used = {}, []
    for name, export in exports.items():
        progress(f"Exporting the {name} graph")
        signature, file = signatures[name], bundle.GRAPHS[name]
        model = export()
        if name == "head":
            apply_precision_to_head(model, stored, precision, signature)
        else:
            apply_precision(model, stored, precision, signature)
        check_signature(model, signature)
        used.append(bind_weights(model, stored))
        ir.save(model, folder / file)
        check_onnx(folder / file)
        entries[name] = GraphEntry(file=file, opset=OPSET, inputs=signature.inputs, outputs=signature.outputs)
    if options.draft_vocab is None:  # else the drafter has an LM head of its own
        entries |= _export_apart(target, drafter, form, folder)
    # A draft vocabulary has rows of the codebook of its own.
    check_all_used(stored, used, replaced=() if options.draft_vocab is None else ("drafter.embed_proj.2.weight",))
    return entries


def _export_apart(target: TargetConfig, drafter: DrafterConfig, form: GraphForm, folder: Path) -> dict[str, GraphEntry]:
    """Both trunks and the LM head between them, cut out of the whole graphs."""
    cuts = {
        "target_trunk": (target_trunk, bundle.TARGET_GRAPH, target_trunk_signature(target, drafter.feature_size, form)),
        "backbone_trunk": (backbone_trunk, bundle.BACKBONE_GRAPH, backbone_trunk_signature(drafter, form)),
        "lm_head": (lm_head, bundle.TARGET_GRAPH, lm_head_signature(target, form)),
    }
    entries = {}
    for name, (cut, whole, signature) in cuts.items():
        file = bundle.APART_GRAPHS[name]
        ir.save(cut(folder / whole, signature), folder / file)
        check_onnx(folder / file)
        entries[name] = GraphEntry(file=file, opset=OPSET, inputs=signature.inputs, outputs=signature.outputs)
    return entries


def check_onnx(file: Path) -> None:
    """Check a graph, its weights taken as inputs: onnx refuses external data that have more than one hard link.

    Raises:
        ExportError: it is not valid ONNX.
    """
    model = onnx.load(file, load_external_data=False)
    weights = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    model.graph.input.extend(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in weights)
    for tensor in weights:
        model.graph.initializer.remove(tensor)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{file.name}: expected a valid ONNX graph, found: {error} Please report this fault of the exporter.") from error
