"""Does ONNX Runtime compute with a bundle's graphs what PyTorch computes?  One line per output and case.

Two comparisons: every output of every graph on the cases of `verify_cases.py`, and greedy speculative generation with both backends
of the runtime (`verify_generation.py`), since errors that stay within bounds could still add up.  PyTorch computes in fp32 on what
the bundle stores, dequantised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import onnxruntime
import torch

from domino_deploy.bundle import DRAFT_VOCAB, DRAFTER_FOLDER, GRAPHS, TARGET_FOLDER, TOKENIZER, Bundle, open_bundle
from domino_deploy.errors import VerificationError
from domino_deploy.exporters import verify_layers
from domino_deploy.exporters.precision import float32_copy
from domino_deploy.exporters.stored import load_stored, read_tensor, stored_tensors
from domino_deploy.exporters.verify_cases import SENTENCES, Case, TokenRows, backbone_cases, head_cases, target_cases
from domino_deploy.exporters.verify_exact import exact_copy
from domino_deploy.exporters.verify_generation import compare_generation
from domino_deploy.exporters.verify_metrics import case_lines
from domino_deploy.exporters.verify_records import VerificationLine, VerificationReport
from domino_deploy.exporters.verify_reference import Reference
from domino_deploy.exporters.verify_tolerances import Tolerances
from domino_deploy.model.draft_vocab import DraftVocab, draft_vocab_of
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.head import CandidatePool
from domino_deploy.model.loading import TORCH_DTYPES
from domino_deploy.model.target import TargetModel
from domino_deploy.precision import Dtype, Precision
from domino_deploy.runtime.backends.ort_graph import open_graph, run_graph
from domino_deploy.runtime.text import Tokenizer
from domino_deploy.signature import FEATURES, GraphSignature, backbone_signature, head_signature, target_signature

__all__ = ["Tolerances", "VerificationLine", "VerificationReport", "compare", "verify_bundle"]

Progress = Callable[[str], None]
Models = tuple[TargetModel, DrafterModel]

_EXACT = ", exact products"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Graph:
    """A graph to compare: its file, what is opened in the file's place, its signature, the cases it is tried on, and whose bounds
    it is held to; `variant` tells a second form of a graph from the first.
    """

    file: Path
    content: bytes | None
    signature: GraphSignature
    cases: Callable[[], Iterator[Case]]
    precision: Precision
    variant: str = ""


def verify_bundle(
    path: str | Path,
    *,
    tolerances: Tolerances | None = None,
    num_layers: int | None = None,
    progress: Progress = lambda step: None,
) -> VerificationReport:
    """Compare a bundle's graphs with PyTorch on the bundle's own weights, whose hashes are checked first; arguments as `compare`.

    Raises:
        BundleError: not a bundle, or files that are not those of the export.
        RequestError: as `compare`.
    """
    progress("Checking the bundle's files")
    bundle = open_bundle(path, check_hashes=True)
    return compare(bundle, tolerances=tolerances, num_layers=num_layers, progress=progress)


def compare(
    bundle: Bundle,
    models: Models | None = None,
    *,
    tolerances: Tolerances | None = None,
    num_layers: int | None = None,
    progress: Progress = lambda step: None,
) -> VerificationReport:
    """Compare a bundle's graphs with PyTorch.

    Args:
        bundle: a whole bundle.
        models: target and drafter in fp32; None for the weights that the bundle stores.  An export that does not quantise gives those
            of its sources, so that a wrong conversion of weights is seen; they are rounded to the bundle's floating type, in place.
        tolerances: other bounds than the table's.
        num_layers: compare the target's first layers only, where two whole targets do not fit into memory: its own graph is cut
            behind them, backbone and head are compared on features made of those layers, and nothing is generated.
        progress: told what is being compared.

    Raises:
        RequestError: `num_layers` leaves nothing, or nothing out.
        BundleError: a graph that cannot be run.
        VerificationError: a tokenizer of another model.
    """
    tolerances = tolerances or Tolerances()
    if num_layers is not None:
        verify_layers.check_layers(bundle.target, num_layers)
    tokenizer = Tokenizer(bundle.path / TOKENIZER)
    tokens = TokenRows(_token_ids(tokenizer, bundle.target.vocab_size))
    progress("Loading the PyTorch models")
    reference = _reference(bundle, models, num_layers)
    lines: list[VerificationLine] = []
    for name, graph in _graphs(bundle, reference, tokens, num_layers).items():
        progress(f"Comparing the {name} graph")
        session = open_graph(graph.file, graph.signature, _options(), content=graph.content)
        wanted = {spec.name for spec in graph.signature.outputs}
        dtypes = {spec.name: spec.dtype for spec in graph.signature.inputs}
        for case in graph.cases():
            inputs = {name: array.astype(dtypes[name], copy=False) for name, array in case.inputs.items()}
            case = dataclasses.replace(case, expected={name: array for name, array in case.expected.items() if name in wanted})
            found = run_graph(session, graph.file, inputs)
            case = dataclasses.replace(case, name=case.name + graph.variant)
            lines += case_lines(case, found, partial(tolerances.of, graph=case.graph, precision=graph.precision))
        del session
    report = VerificationReport(lines=tuple(lines), generated=(), precision=bundle.precision.name, num_layers=num_layers)
    if not report.passed:  # generation would only show the same once more
        return dataclasses.replace(report, notes=(*_damage(bundle, report), "generation left out: the graphs are out of bounds"))
    reason = _why_no_generation(bundle, num_layers)
    if reason is not None:
        return dataclasses.replace(report, notes=(f"generation left out: {reason}",))
    progress("Comparing speculative generation")
    generated = list(compare_generation(bundle, reference, tolerances, lines))
    lines += [line for made, _ in generated for line in made]
    return dataclasses.replace(report, lines=tuple(lines), generated=tuple(record for _, record in generated))


def _reference(bundle: Bundle, models: Models | None, num_layers: int | None) -> Reference:
    if num_layers is not None:
        target, drafter = verify_layers.load_truncated(bundle, num_layers)
    else:
        target, drafter = models or load_stored(bundle)
    activations, pool = TORCH_DTYPES[bundle.precision.activations], bundle.form.candidate_pool
    if models is not None and activations is not torch.float32:
        for parameter in (*target.parameters(), *drafter.parameters()):  # one at a time, in place
            parameter.data = parameter.data.to(activations).float()
    return Reference(
        target=target,
        drafter=drafter,
        activations=activations,
        pool=CandidatePool(size=pool, is_certified=bundle.manifest.certified_pool) if pool else None,
        vocab=_draft_vocab(bundle),
        is_truncated=num_layers is not None,
    )


def _draft_vocab(bundle: Bundle) -> DraftVocab | None:
    if bundle.form.draft_vocab_size is None:
        return None
    from safetensors.torch import load_file

    rows = load_file(bundle.path / DRAFTER_FOLDER / DRAFT_VOCAB)
    return draft_vocab_of({name: values.float() if values.is_floating_point() else values for name, values in rows.items()})


def _graphs(bundle: Bundle, reference: Reference, tokens: TokenRows, num_layers: int | None) -> dict[str, _Graph]:
    """How each graph is opened: bfloat16, which ONNX Runtime lacks on CPUs, as a private copy in float32; a quantised one first with
    exact products; a target perhaps truncated.
    """
    is_copied = bundle.precision.activations is Dtype.BFLOAT16
    form = dataclasses.replace(bundle.form, dtype=str(Dtype.FLOAT32)) if is_copied else bundle.form
    files = {name: bundle.path / file for name, file in GRAPHS.items()}
    target, feature_size = bundle.target, bundle.drafter.feature_size
    if num_layers is not None:
        target = verify_layers.truncated_config(bundle, num_layers)
        feature_size = len(verify_layers.kept_taps(bundle, num_layers)) * target.hidden_size
    signatures = {
        "target": target_signature(target, feature_size, form),
        "backbone": backbone_signature(bundle.drafter, form),
        "head": head_signature(bundle.drafter, form),
    }
    if feature_size == 0:
        outputs = tuple(spec for spec in signatures["target"].outputs if spec.name != FEATURES)
        signatures["target"] = dataclasses.replace(signatures["target"], outputs=outputs)
    contents: dict[str, bytes | None] = {name: float32_copy(file) if is_copied else None for name, file in files.items()}
    if num_layers is not None:
        contents["target"] = verify_layers.truncated_graph(files["target"], bundle, num_layers, contents["target"])
    cases: dict[str, Callable[[], Iterator[Case]]] = {
        "target": lambda: _cut(target_cases(reference, tokens), feature_size),
        "backbone": lambda: backbone_cases(reference, tokens),
        "head": lambda: head_cases(reference, tokens),
    }
    graphs: dict[str, _Graph] = {}
    for name, file in files.items():
        graph = _Graph(file=file, content=contents[name], signature=signatures[name], cases=cases[name], precision=bundle.precision)
        if bundle.precision.is_quantised and name != "head":
            exact = exact_copy(file, contents[name])
            graphs[f"{name}{_EXACT}"] = dataclasses.replace(graph, content=exact, precision=Precision(), variant=_EXACT)
        graphs[name] = graph
    return graphs


def _cut(cases: Iterator[Case], feature_size: int) -> Iterator[Case]:
    """A truncated target taps a layer more, for the drafter's sake, than its graph has."""
    for case in cases:
        yield dataclasses.replace(case, expected=case.expected | {FEATURES: case.expected[FEATURES][..., :feature_size]})


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: it warns of each cache that is not updated in place, which is as wanted here
    return options


def _why_no_generation(bundle: Bundle, num_layers: int | None) -> str | None:
    if num_layers is not None:
        return f"only {num_layers} of {bundle.target.num_layers} target layers take part"
    if bundle.precision.activations is Dtype.BFLOAT16:
        return "ONNX Runtime does not run bfloat16 graphs on a CPU; they were compared as float32 copies"
    return None


def _damage(bundle: Bundle, report: VerificationReport) -> Iterator[str]:
    """Where outputs are not finite, the weights that are not."""
    if all(line.not_finite is None for line in report.lines):
        return
    for folder in (TARGET_FOLDER, DRAFTER_FOLDER):
        for name, tensor in stored_tensors(bundle.path / folder).items():
            values = read_tensor(tensor)
            bad = int((~torch.isfinite(values)).sum()) if values.is_floating_point() else 0
            if bad:
                first = tuple(torch.nonzero(~torch.isfinite(values))[0].tolist())
                yield f"{folder}: {name} holds {bad} NaN or infinite weights, the first at {list(first)}"


def _token_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    ids = tokenizer.encode(" ".join(SENTENCES))
    foreign = sorted({token for token in ids if token >= vocab_size})
    if foreign:
        raise VerificationError(
            f"{TOKENIZER}: expected token ids below the target's {vocab_size}, found {foreign[-1]}. Use the target's own tokenizer."
        )
    return ids
