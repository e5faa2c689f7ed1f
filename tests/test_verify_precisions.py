"""Verification where precisions round, where near ties part two generations, and of a target's first layers alone."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper

from domino_deploy.bundle import APART_GRAPHS, Bundle, open_bundle
from domino_deploy.cli import main
from domino_deploy.errors import RequestError
from domino_deploy.exporters import verify_generation, verify_layers
from domino_deploy.exporters.export import export_bundle
from domino_deploy.exporters.options import ExportOptions
from domino_deploy.exporters.stored import load_stored
from domino_deploy.exporters.verify import VerificationReport, compare, verify_bundle
from domino_deploy.exporters.verify_records import VerificationLine
from domino_deploy.exporters.verify_reference import Reference
from domino_deploy.exporters.verify_tolerances import TOLERANCES, Tolerance, Tolerances
from domino_deploy.model.target import TargetModel
from domino_deploy.precision import Dtype, Precision
from domino_deploy.runtime.backends.ort import OrtTarget
from domino_deploy.runtime.protocols import Step, TargetRows
from domino_deploy.safetensors_header import read_header
from domino_deploy.signature import FEATURES

BLOCK = 16


@pytest.fixture(scope="module")
def narrow(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny pair in a precision, exported once each, not verified."""
    made: dict[str, Path] = {}

    def bundle(dtype: str) -> Path:
        if dtype not in made:
            folder, source = tmp_path_factory.mktemp("narrow") / dtype, tiny_bundle.parent
            precision = Precision.of(Dtype(dtype), **({"block_size": BLOCK} if Dtype(dtype).is_quantised else {}))
            options = ExportOptions(precision=precision)
            export_bundle(source / "drafter", source / "target", folder, options, verify=False)
            made[dtype] = folder
        return made[dtype]

    return bundle


def values(report: VerificationReport, *, exact: bool = False) -> list[float]:
    """Of every output of numbers, the largest error as a part of its scale; of graphs with exact products, or of those that ship."""
    lines = [line for line in report.lines if line.case.endswith("exact products") is exact]
    return [line.max_rel_error for line in lines if line.max_rel_error is not None]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int4"])
def test_each_precision_keeps_its_own_bound_and_not_float32s(dtype: str, narrow: Callable[[str], Path]) -> None:
    report = verify_bundle(narrow(dtype))
    assert report.passed, report.failure()
    assert report.precision == Precision.of(Dtype(dtype)).name
    assert max(values(report)) < 0.8 * TOLERANCES[Dtype(dtype)].rtol
    if dtype in ("int8", "int4"):
        assert len(values(report, exact=True)) > 20
        assert max(values(report, exact=True)) < 0.3 * TOLERANCES[Dtype.FLOAT32].rtol
    if dtype == "bfloat16":
        assert report.generated == ()
        assert "does not run bfloat16" in report.notes[0]
    else:
        assert max(values(report)) > 2 * TOLERANCES[Dtype.FLOAT32].rtol
        assert {line.name for line in report.lines if line.graph == "generation"} == {"tokens", "proposals"}
        assert len(report.generated) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "end"), [("float16", ""), ("int8", ".scales"), ("int4", ".scales")])
def test_a_wrong_weight_of_a_narrow_bundle_is_found(dtype: str, end: str, narrow: Callable[[str], Path], tmp_path: Path) -> None:
    bundle, copy = open_bundle(narrow(dtype)), shutil.copytree(narrow(dtype), tmp_path / "bundle")
    models = load_stored(bundle)
    file = copy / "target" / "model.safetensors"
    entry = read_header(file)[f"model.layers.1.self_attn.o_proj.weight{end}"]
    with file.open("r+b") as content:  # one row of 32 zeroed: no huge number, merely a wrong one
        content.seek(entry.offset)
        content.write(bytes(entry.nbytes // entry.shape[0]))
    report = compare(dataclasses.replace(bundle, path=copy), models)
    assert not report.passed
    failed = [line for line in report.lines if not line.passed]
    assert {line.graph for line in failed} == {"target"}
    assert {line.first_layer for line in failed if line.name == "updated_value_cache"} == {2}


@pytest.fixture(scope="module")
def reference(tiny_bundle: Path) -> Reference:
    target, drafter = load_stored(open_bundle(tiny_bundle))
    return Reference(target=target, drafter=drafter)


class TestNearTies:
    """Generations that part: fine at two logits that are nearly the same, and nowhere else."""

    PROMPT = (5, 17, 120, 44)

    def greedy(self, target: TargetModel, tokens: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
        """Tokens behind `tokens`, and the logits each was chosen by."""
        chosen: list[int] = []
        logits: list[torch.Tensor] = []
        with torch.inference_mode():
            for _ in range(count):
                hidden, _ = target.hidden_states(torch.tensor([[*tokens, *chosen]]))
                logits.append(target.lm_head(hidden[0, -1]))
                chosen.append(int(logits[-1].argmax()))
        return chosen, logits

    @pytest.mark.parametrize("rank", [1, 5])
    def test_the_gap_at_the_first_difference_decides(self, rank: int, reference: Reference) -> None:
        expected, logits = self.greedy(reference.target, list(self.PROMPT), 8)
        other = int(logits[3].argsort(descending=True)[rank])
        found = [*expected[:3], other, *reversed(expected[4:])]
        gap, scale = float(logits[3].max() - logits[3][other]), float(logits[3].abs().max())
        for part, passes in ((1.01, True), (0.99, False)):
            difference = verify_generation._difference(
                reference,
                list(self.PROMPT),
                [Step(token_ids=tuple(expected))],
                [Step(token_ids=tuple(found[:2])), Step(token_ids=tuple(found[2:]))],
                Tolerance(rtol=part * gap / scale),
            )
            assert difference is not None
            assert (difference.position, difference.expected, difference.found) == (3, expected[3], other)
            assert difference.gap == pytest.approx(gap, rel=1e-4)
            line = verify_generation._tokens_line("prompt", difference, len(found))
            assert line.passed is passes
            assert line.compared == 4

    @pytest.mark.parametrize(
        ("outputs", "rtol", "bound"),
        [
            (("logits",), 0.3, 0.5),  # twice the error found
            (("logits", "base_logits"), 0.4, 1.25),  # errors add up
            (("logits", "base_logits"), 0.05, 0.2),  # never more than the output's own bound
        ],
    )
    def test_a_near_tie_follows_the_error_that_was_found(self, outputs: tuple[str, ...], rtol: float, bound: float) -> None:
        found = (("logits", 0.125), ("logits", 0.25), ("base_logits", 0.375), ("hidden", 9.0), ("logits top-1", 8.0))
        lines = [
            VerificationLine(graph="target", name=name, case="1 row", max_abs_error=error, mean_abs_error=0.0, bound=10.0)
            for name, error in found
        ]
        tolerance = verify_generation.near_tie(Tolerance(rtol=rtol, min_cosine=0.9), lines, *outputs)
        assert tolerance.bound(4.0) == pytest.approx(bound)

    @pytest.mark.slow
    def test_a_gap_within_the_logits_bound_and_beyond_their_error_is_found(
        self, narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A backend that takes another token than the graph's best, of a logit that int8's bound would let pass."""
        wanted, forward = 0.7, OrtTarget.forward

        def mistaken(self: OrtTarget, token_ids: Sequence[int], num_logits: int) -> TargetRows:
            rows = forward(self, token_ids, num_logits)
            logits = rows.logits.copy()
            if num_logits == 1:  # of the prompt's last token
                gaps = logits[0].max() - logits[0]
                logits[0, np.abs(gaps - wanted).argmin()] += gaps.max() + 1
            return dataclasses.replace(rows, logits=logits)

        monkeypatch.setattr(OrtTarget, "forward", mistaken)
        report = verify_bundle(narrow("int8"))
        logits = [line for line in report.lines if line.name == "logits"]
        error, scale = max(line.max_abs_error for line in logits), min(line.scale for line in logits if line.scale is not None)
        failed = [line for line in report.lines if not line.passed]
        assert {(line.graph, line.name) for line in failed} == {("generation", "tokens")}
        for line in failed:
            assert line.bound == pytest.approx(2 * error)
            assert line.bound < line.max_abs_error < TOLERANCES[Dtype.INT8].rtol * scale

    def test_float32_allows_not_even_a_near_tie(self, tiny_bundle: Path, tmp_path: Path) -> None:
        """A bias of half a bound makes the graph's choice another one wherever two logits are that close."""
        bundle = open_bundle(tiny_bundle)
        target, drafter = load_stored(bundle)
        reference = Reference(target=target, drafter=drafter)
        wide = Tolerances(rtol={"": 1.0})
        nudged = _with_swapped_best_two(bundle, reference, tmp_path)
        report = compare(nudged, (target, drafter), tolerances=wide)
        failed = [line for line in report.lines if not line.passed]
        assert [line.name for line in failed if line.graph == "generation"]
        assert {line.graph for line in failed} == {"generation"}
        first = report.generated[0].difference
        assert first is not None
        assert first.position == 0
        assert "generation: tokens, proposed, accepted" in report.failure()


def _with_swapped_best_two(bundle: Bundle, reference: Reference, folder: Path) -> Bundle:
    """A target graph that adds to one logit just enough to make PyTorch's second choice for the first prompt its first."""
    from domino_deploy.runtime.text import Tokenizer

    copy = shutil.copytree(bundle.path, folder / "bundle")
    prompt = Tokenizer(copy / "tokenizer.json").encode(verify_generation.PROMPTS[0])
    with torch.inference_mode():
        logits = reference.target.lm_head(reference.target.hidden_states(torch.tensor([prompt]))[0][0, -1])
    best, second = logits.argsort(descending=True)[:2].tolist()
    bias = np.zeros(len(logits), np.float32)
    bias[second] = 1.01 * float(logits[best] - logits[second])
    model = onnx.load(copy / "target.onnx", load_external_data=False)
    for node in model.graph.node:
        node.output[:] = ["logits.unbiased" if name == "logits" else name for name in node.output]
    model.graph.initializer.append(numpy_helper.from_array(bias, "bias"))
    model.graph.node.append(onnx.helper.make_node("Add", ["logits.unbiased", "bias"], ["logits"]))
    (copy / "target.onnx").write_bytes(model.SerializeToString())
    # Without the graphs of the LM head apart, which sessions prefer.
    graphs = {name: graph for name, graph in bundle.manifest.graphs.items() if name not in APART_GRAPHS}
    files = {name: entry for name, entry in bundle.manifest.files.items() if name not in APART_GRAPHS.values()}
    files["target.onnx"] = dataclasses.replace(files["target.onnx"], bytes=(copy / "target.onnx").stat().st_size)
    from domino_deploy.bundle import write_manifest

    write_manifest(copy, dataclasses.replace(bundle.manifest, graphs=graphs, files=files))
    return open_bundle(copy)


class TestFirstLayers:
    @pytest.mark.parametrize("num_layers", [1, 3])
    def test_a_cut_graph_computes_what_a_smaller_target_does(self, num_layers: int, tiny_bundle: Path) -> None:
        report = verify_bundle(tiny_bundle, num_layers=num_layers)
        assert report.passed, report.failure()
        assert report.num_layers == num_layers
        assert report.generated == ()
        assert report.notes == (f"generation left out: only {num_layers} of 4 target layers take part",)
        assert {line.graph for line in report.lines} == {"target", "backbone", "head"}
        # Layers 0 and 2 are tapped; that of a last layer would pass the final norm.
        assert (FEATURES in {line.name for line in report.lines}) is (num_layers == 3)

    def test_only_the_layers_asked_for_are_read(self, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from domino_deploy.exporters import stored

        names: list[str] = []
        read = stored._read

        def recorded(entry):
            names.append(entry.name)
            return read(entry)

        monkeypatch.setattr(stored, "_read", recorded)
        verify_layers.load_truncated(open_bundle(tiny_bundle), 2)
        assert {name.split(".")[2] for name in names if name.startswith("model.layers.")} == {"0", "1"}

    def test_a_fault_in_a_layer_that_takes_part_is_found_and_one_behind_is_not(self, tiny_bundle: Path, tmp_path: Path) -> None:
        bundle, copy = open_bundle(tiny_bundle), shutil.copytree(tiny_bundle, tmp_path / "bundle")
        model = onnx.load(copy / "target.onnx", load_external_data=False)
        scatters = [node for node in model.graph.node if node.op_type == "TensorScatter"]
        scatters[2].input[2] = ""  # layer 1 writes its keys to the front
        (copy / "target.onnx").write_bytes(model.SerializeToString())
        wrong = dataclasses.replace(bundle, path=copy)
        assert compare(wrong, num_layers=1).passed
        report = compare(wrong, num_layers=2)
        assert not report.passed
        assert {line.graph for line in report.lines if not line.passed} == {"target"}
        assert {line.first_layer for line in report.lines if line.name == "updated_key_cache" and not line.passed} == {1}

    @pytest.mark.parametrize("num_layers", [0, 4, 9])
    def test_a_number_that_leaves_nothing_or_everything_is_refused(self, num_layers: int, tiny_bundle: Path) -> None:
        with pytest.raises(RequestError, match=f"--num-layers from 1 to 3.*found {num_layers}"):
            compare(open_bundle(tiny_bundle), num_layers=num_layers)


def test_the_command_takes_bounds_layers_and_a_report_file(tiny_bundle: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    arguments = ["verify", str(tiny_bundle), "--num-layers", "1", "--rtol", "logits:1e-9", "--atol", "0", "--report", str(page)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1, done.output
    assert "target: logits (1 row): error" in done.stdout
    assert "note: generation left out" in done.stdout
    assert "Failed:" in page.read_text(encoding="utf-8")
    assert not (tiny_bundle / "verification.html").exists() or page.read_bytes() != (tiny_bundle / "verification.html").read_bytes()
