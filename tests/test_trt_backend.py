"""The TensorRT backend on a stand-in for the GPU and for TensorRT: the golden tests, and what it asks of the device."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from domino_deploy import engine_checks, tensorrt_libraries
from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.engines import Flavour
from domino_deploy.errors import CapacityError, EngineError, VerificationError
from domino_deploy.precision import Dtype, Precision
from domino_deploy.runtime.backends import ort, trt
from domino_deploy.runtime.backends.trt_pair import TrtDrafter, TrtTarget
from domino_deploy.runtime.backends.trt_tensors import bytes_from_rows, rows_from_bytes
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.prompt_lookup import PromptLookupDrafter
from domino_deploy.runtime.protocols import Drafter, FloatArray, Proposal, Step, Target
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.runtime.session import Backend, DrafterChoice, Session
from domino_deploy.signature import DRAFT_IDS, GREEDY_IDS
from domino_deploy.tensorrt_libraries import Gpu
from tests.support.checkpoints import write_drafter, write_target
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_engines import with_engines
from tests.support.fake_tensorrt import FakeTensorRT, Outputs

CAPACITY = 400
PREFILL_ROWS = 64
# Between them: both kinds, both layouts, windows, a candidate pool, float16, fewer drafts than the block has.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "domino": ({}, {}, {}, {}),
    "domino, unshifted, sliding, three drafts": (
        {"family": "qwen3", "tied": False},
        {"shift_label": False, "pure_draft_prefix_len": 0, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
        {},
        {"num_speculative_tokens": 3},
    ),
    "dflash, sliding, float16": (
        {"family": "qwen2"},
        {"kind": "dflash", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
        {"precision": Precision.of(Dtype.FLOAT16)},
        {},
    ),
    "domino, candidate pool": ({"family": "llama"}, {}, {"candidate_pool": 20}, {}),
    "domino, prefill passes shorter than a draft": ({}, {}, {}, {"prefill_rows": 4}),
}


@dataclass
class Device:
    """The stand-ins, and what they were asked for."""

    cuda: FakeCuda
    tensorrt: FakeTensorRT

    def pair(self, bundle: Bundle, **options: Any) -> tuple[TrtTarget, TrtDrafter]:
        target, drafter = trt.open_pair(bundle, **{"capacity": CAPACITY, **options})
        assert drafter is not None
        return target, drafter


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    cuda = FakeCuda()
    made = Device(cuda, FakeTensorRT(cuda))
    monkeypatch.setattr(tensorrt_libraries, "installed", lambda: {Flavour.TENSORRT: made.tensorrt.__version__})
    monkeypatch.setattr(tensorrt_libraries, "require_gpu", lambda flavour: Gpu(name="H200", compute_capability="9.0", memory_bytes=2**37))
    monkeypatch.setattr(tensorrt_libraries, "load", lambda flavour: made.tensorrt)
    monkeypatch.setattr(trt, "Cuda", lambda: cuda)
    monkeypatch.setattr(engine_checks, "LEAST_PREFILL_ROWS", 1)  # many passes for a short prompt
    return made


@pytest.fixture(scope="module", params=PAIRS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Bundle:
    from domino_deploy.exporters.export import export_bundle
    from domino_deploy.exporters.options import ExportOptions

    folder = tmp_path_factory.mktemp("pair")
    target, drafter, export, engines = PAIRS[request.param]
    exported = tiny_bundle
    if target or drafter or export:
        target_folder = write_target(folder / "target", **target)
        drafter_folder = write_drafter(folder / "drafter", target_folder, **drafter)
        exported = export_bundle(drafter_folder, target_folder, folder / "bundle", ExportOptions(**export), verify=False).path
    return with_engines(exported, folder / "with", **{"max_model_len": CAPACITY, "prefill_rows": PREFILL_ROWS, **engines})


@pytest.fixture(scope="module")
def domino(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return with_engines(tiny_bundle, tmp_path_factory.mktemp("domino") / "bundle", max_model_len=CAPACITY, prefill_rows=PREFILL_ROWS)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, length).tolist()


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def run(target: Target, drafter: Drafter | None, prompt: list[int], *, count: int | None = None, **params: Any) -> list[Step]:
    asked = GenerationParams(**{"max_new_tokens": 60, **params})
    count = (drafter.max_proposals if drafter else 0) if count is None else count
    return list(generate(target, drafter, prompt, asked, num_speculative_tokens=count))


def counted(steps: Sequence[Step]) -> list[tuple[tuple[int, ...], int, int]]:
    return [(step.token_ids, step.proposed, step.accepted) for step in steps]


class Oracle:
    """Puts true tokens in front of the head's: 0, 1, 2, ... of them in turn, so that runs of every length are accepted."""

    def __init__(self, target: TrtTarget, truth: Sequence[int]) -> None:
        self.target, self.truth, self.calls = target, list(truth), 0

    def __call__(self, outputs: Outputs) -> None:
        drafts = outputs[DRAFT_IDS][0]
        right = self.truth[self.target.length + 1 :][: self.calls % (len(drafts) + 1)]
        drafts[: len(right)] = right
        self.calls += 1


class AcceptedDrafter:
    """The same by way of the host: a drafter that the target does not know, so that features go through the host as well."""

    def __init__(self, inner: Drafter, truth: Sequence[int], most: int) -> None:
        self.inner, self.truth, self.calls = inner, list(truth), 0
        self.max_proposals = most
        self.drafted: list[list[int]] = []

    def reset(self) -> None:
        self.inner.reset()

    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        own = self.inner.propose(token_ids, features, count).token_ids
        self.drafted.append(own.tolist())
        right = self.truth[len(token_ids) :][: min(self.calls % (self.max_proposals + 1), count)]
        self.calls += 1
        return Proposal(token_ids=np.concatenate([right, own[len(right) :]]).astype(np.int64))


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, seed=5)], ids=["greedy", "sampled"])
def test_the_drafter_changes_no_token(device: Device, bundle: Bundle, sampling: SamplingParams) -> None:
    target, drafter = device.pair(bundle)
    for length in (1, 20, PREFILL_ROWS + 3):
        prompt = prompt_of(length)
        plain = tokens_of(run(target, None, prompt, sampling=sampling))
        assert len(set(plain)) > 8  # not one token over and over, which would hide faults
        for count in (1, drafter.max_proposals):
            assert tokens_of(run(target, drafter, prompt, sampling=sampling, count=count)) == plain
        assert tokens_of(run(target, PromptLookupDrafter(), prompt, sampling=sampling)) == plain


@pytest.mark.parametrize("length", [1, 20, 150])
def test_tokens_drafts_and_acceptance_are_those_of_onnx_runtime(device: Device, bundle: Bundle, length: int) -> None:
    target, drafter = device.pair(bundle)
    reference, reference_drafter = ort.open_pair(bundle, capacity=CAPACITY, threads=1)
    count, prompt = drafter.max_proposals, prompt_of(length, seed=length)
    truth = [*prompt, *tokens_of(run(reference, None, prompt, max_new_tokens=70))]
    expected = counted(run(reference, AcceptedDrafter(reference_drafter, truth, count), prompt, count=count))
    by_host = AcceptedDrafter(drafter, truth, count)
    assert counted(run(target, by_host, prompt)) == expected
    device.tensorrt.after["head"] = Oracle(target, truth)
    steps = run(target, drafter, prompt)
    assert counted(steps) == expected
    assert {step.accepted for step in steps} >= set(range(count + 1))


def test_drafts_by_way_of_the_host_are_those_of_the_device(device: Device, domino: Bundle) -> None:
    target, drafter = device.pair(domino)
    prompt, drafted = prompt_of(30), []
    device.tensorrt.after["head"] = lambda outputs: drafted.append(outputs[DRAFT_IDS][0].tolist())
    steps = run(target, drafter, prompt)
    on_device, drafted = drafted, []
    by_host = AcceptedDrafter(drafter, [], drafter.max_proposals)
    assert counted(run(target, by_host, prompt)) == counted(steps)
    assert by_host.drafted == [drafts[: len(own)] for drafts, own in zip(on_device, by_host.drafted, strict=True)]


def test_logits_and_features_of_pieces_are_those_of_onnx_runtime(device: Device, domino: Bundle) -> None:
    """Through verify passes, whole and filled up, and prefill passes, with rows that were not kept."""
    target, _ = device.pair(domino)
    reference, _ = ort.open_pair(domino, capacity=CAPACITY, threads=1)
    tokens, most = prompt_of(150), domino.manifest.num_speculative_tokens + 1
    for sizes in ([150], [1, 63, most, 64, 21 - most, 1]):
        target.reset()
        reference.reset()
        start = 0
        for size in sizes:
            target.forward(prompt_of(5, seed=9), 1)  # a pass of which nothing is kept
            target.commit(0)
            logits = size if size <= most else 1
            found, expected = (one.forward(tokens[start : start + size], logits) for one in (target, reference))
            np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(found.features, expected.features, rtol=1e-4, atol=1e-4)
            target.commit(size)
            reference.commit(size)
            start += size
        assert target.length == 150
    with pytest.raises(ValueError, match=rf"more than {most} rows, found 2"):
        target.forward(prompt_of(most + 1), 2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["drafter", "plain", "lookup"])
def test_a_cycle_waits_for_the_device_once(device: Device, domino: Bundle, kind: str, temperature: float) -> None:
    target, drafter = device.pair(domino)
    chosen = {"drafter": drafter, "plain": None, "lookup": PromptLookupDrafter()}[kind]
    params = GenerationParams(sampling=SamplingParams(temperature=temperature, seed=1), max_new_tokens=60)
    count = 0 if chosen is None else min(chosen.max_proposals, drafter.max_proposals)
    steps = generate(target, chosen, prompt_of(2 * PREFILL_ROWS + 1), params, num_speculative_tokens=count)
    before = device.cuda.counts.synchronisations
    assert next(steps).finish_reason is None
    assert device.cuda.counts.synchronisations - before == 3  # prefill passes
    for step in steps:
        before += 1
        assert device.cuda.counts.synchronisations - before == 3
        assert step.terms_ms.verify > 0
        if kind == "drafter":
            assert (step.terms_ms.draft > 0) == (step.terms_ms.head > 0) == (step.proposed > 0)


def test_greedy_cycles_copy_tokens_and_no_logits(device: Device, domino: Bundle) -> None:
    target, drafter = device.pair(domino)
    rows = drafter.max_proposals + 1
    copied = {}
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(temperature=temperature, seed=1)
        steps = generate(target, drafter, prompt_of(9), GenerationParams(sampling=sampling), num_speculative_tokens=drafter.max_proposals)
        next(steps)
        before = device.cuda.counts.bytes_to_host
        next(steps)
        copied[temperature] = device.cuda.counts.bytes_to_host - before
    assert copied[0.0] <= 3 * 256  # drafted, chosen and uncertified tokens, each in a field of its own
    assert copied[0.8] == copied[0.0] + rows * target.vocab_size * 4


@pytest.mark.parametrize("token", [-1, 300, 2**31])
def test_a_greedy_token_that_is_none_is_an_error(device: Device, domino: Bundle, token: int) -> None:
    """What engines say of logits that are not finite, and what they may say of them if they do not look."""
    target, drafter = device.pair(domino)
    steps = generate(target, drafter, prompt_of(9), GenerationParams(), num_speculative_tokens=drafter.max_proposals)
    next(steps)
    device.tensorrt.after["target"] = lambda outputs: outputs[GREEDY_IDS].fill(token)
    with pytest.raises(VerificationError, match=r"finite logits for position 10, .*run: domino-deploy verify"):
        next(steps)


def test_cycles_replay_three_graphs_that_are_captured_once(device: Device, domino: Bundle) -> None:
    target, drafter = device.pair(domino)
    counts = device.cuda.counts
    run(target, drafter, prompt_of(9))  # the first passes run as they are, the second ones are captured
    assert counts.captures == 3
    before = counts.launches
    steps = run(target, drafter, prompt_of(200, seed=4)) + run(target, None, prompt_of(3))
    assert counts.captures == 3
    drafts, prefills, first_drafts = sum(step.proposed > 0 for step in steps), 2, 1  # a long prompt's first draft has another shape
    assert counts.launches - before == (drafts - first_drafts) + drafts + (len(steps) - prefills)


@pytest.mark.parametrize("can_capture", [True, False])
def test_passes_that_tensorrt_rtx_cannot_capture_run_as_they_are(device: Device, domino: Bundle, can_capture: bool) -> None:
    expected = counted(run(*device.pair(domino), prompt_of(20)))
    before = device.cuda.counts.captures
    device.tensorrt.can_capture = can_capture
    assert counted(run(*device.pair(domino), prompt_of(20))) == expected
    assert device.cuda.counts.captures - before == (3 if can_capture else 0)


def test_a_capture_that_fails_is_ended_and_the_reason_told(device: Device, domino: Bundle) -> None:
    target, drafter = device.pair(domino)
    device.tensorrt.refuses = "target"
    with pytest.raises(EngineError, match=r"target\.engine: expected an engine that takes a pass"):
        run(target, drafter, prompt_of(20))
    device.tensorrt.refuses = ""  # nothing of it is left over: neither a capture nor a graph
    fresh = counted(run(*device.pair(domino), prompt_of(20)))
    assert counted(run(target, drafter, prompt_of(20))) == fresh


def test_all_runtimes_have_one_logger(device: Device, domino: Bundle) -> None:
    """TensorRT goes on using the first, so it must not end with a session."""
    device.pair(domino)
    device.pair(domino)
    assert len(device.tensorrt.loggers) == 6
    assert len(set(map(id, device.tensorrt.loggers))) == 1


def test_engines_are_mapped_while_they_are_read_and_no_longer(device: Device, domino: Bundle) -> None:
    """A copy of a file as large as the weights would stand in memory beside the engine."""
    device.pair(domino)
    assert len(device.tensorrt.contents) == 3
    assert all(isinstance(content, mmap) and content.closed for content in device.tensorrt.contents)


def test_stripped_engines_take_the_bundles_weights_wherever_it_lies(
    device: Device, domino: Bundle, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = counted(run(*device.pair(domino), prompt_of(20)))
    assert device.tensorrt.refitted == []
    made = with_engines(tiny_bundle, tmp_path / "made", max_model_len=CAPACITY, prefill_rows=PREFILL_ROWS, is_stripped=True)
    moved = open_bundle(made.path.rename(tmp_path / "moved"))
    assert counted(run(*device.pair(moved), prompt_of(20))) == expected
    assert device.tensorrt.refitted == [moved.path / graph for graph in ("target.onnx", "backbone.onnx", "head.onnx")]
    monkeypatch.chdir(tmp_path)
    device.pair(open_bundle(Path("moved")))
    assert device.tensorrt.refitted[3:] == device.tensorrt.refitted[:3]


def test_prompts_are_read_in_prefill_passes_and_their_features_as_they_come(device: Device, domino: Bundle) -> None:
    target, drafter = device.pair(domino)
    run(target, drafter, prompt_of(2 * PREFILL_ROWS + 1), max_new_tokens=2)
    assert device.tensorrt.passes == [
        *(("target", 1), ("backbone", 1)) * 2,
        ("target", 1),
        ("target", 0),  # one token is left: nothing to draft for
    ]


def test_the_whole_capacity_can_be_used_and_no_more(device: Device, bundle: Bundle) -> None:
    target, drafter = device.pair(bundle)
    prompt = prompt_of(CAPACITY - 7)
    steps = run(target, drafter, prompt)
    assert len(tokens_of(steps)) == 8
    assert steps[-1].finish_reason == "length"
    assert target.length == target.capacity == CAPACITY
    assert tokens_of(steps) == tokens_of(run(target, None, prompt))
    with pytest.raises(CapacityError, match=r"found 400 \+ 1"):
        target.forward([5], 1)
    assert len(tokens_of(run(target, drafter, prompt_of(CAPACITY - 1)))) == 2


def test_requests_in_a_row_equal_fresh_ones(device: Device, domino: Bundle) -> None:
    target, drafter = device.pair(domino)
    for length in (90, 3, 40):
        again = counted(run(target, drafter, prompt_of(length)))
        assert again == counted(run(*device.pair(domino), prompt_of(length)))


def test_what_a_request_leaves_in_the_caches_reaches_no_other(device: Device, domino: Bundle) -> None:
    """A masked slot still takes part, times 0, so that a NaN in it would spread."""
    target, drafter = device.pair(domino)
    expected = counted(run(target, drafter, prompt_of(20)))
    for caches in (target.passes.caches, drafter.passes.caches):
        for address in caches.addresses.values():
            device.cuda.memory[address][:] = 0xFF
    assert counted(run(target, drafter, prompt_of(20))) == expected


def test_a_generation_left_half_way_does_no_harm_to_the_next(device: Device, domino: Bundle) -> None:
    target, drafter = device.pair(domino)
    expected = counted(run(target, drafter, prompt_of(20)))
    steps = generate(target, drafter, prompt_of(70), GenerationParams(), num_speculative_tokens=drafter.max_proposals)
    for _ in range(3):
        next(steps)
    steps.close()
    assert counted(run(target, drafter, prompt_of(20))) == expected


def test_without_a_drafter_its_engines_are_not_read(device: Device, domino: Bundle) -> None:
    target, drafter = trt.open_pair(domino, capacity=CAPACITY, with_drafter=False)
    assert drafter is None
    assert len(tokens_of(run(target, None, prompt_of(4), max_new_tokens=5))) == 5
    assert {name for name, _ in device.tensorrt.passes} == {"target"}


def test_a_drafter_refuses_features_that_skip_or_repeat_tokens(device: Device, domino: Bundle) -> None:
    target, drafter = device.pair(domino)
    features = target.forward(prompt_of(5), 1).features
    for rows in (0, 4):
        drafter.reset()
        with pytest.raises(ValueError, match="pass each token's row once"):
            drafter.propose(prompt_of(6), features[:rows], 2)


def test_all_memory_is_given_back(device: Device, domino: Bundle) -> None:
    target, drafter = device.pair(domino)
    run(target, drafter, prompt_of(20))
    assert device.cuda.memory
    assert device.cuda.graphs
    del target, drafter
    gc.collect()
    assert not device.cuda.memory
    assert not device.cuda.graphs
    assert not device.cuda.events
    assert not device.cuda.queues


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=2)], ids=["greedy", "sampled"])
def test_a_session_gives_the_text_of_onnx_runtime(device: Device, domino: Bundle, sampling: SamplingParams) -> None:
    answers = {}
    for backend in (Backend.ORT, Backend.TENSORRT):
        for drafter in DrafterChoice:
            with Session.open(domino.path, backend=backend, drafter=drafter) as session:
                prompt = session.prompt_ids("Count to ten: one, two,")
                chunks = list(session.generate(prompt, GenerationParams(sampling=sampling, max_new_tokens=40)))
            answers[backend, drafter] = "".join(chunk.text for chunk in chunks)
    assert len(set(answers.values())) == 1


def test_bfloat16_rows_survive_the_way_to_the_host_and_back() -> None:
    content = np.random.default_rng(0).integers(0, 2**16, 24).astype(np.uint16)
    content[(content & 0x7F80) == 0x7F80] = 0  # NaN has many spellings
    rows = rows_from_bytes(content.view(np.uint8), "bfloat16", 6)
    assert rows.shape == (4, 6)
    torch.testing.assert_close(torch.from_numpy(rows), torch.from_numpy(content.view(np.int16)).view(torch.bfloat16).view(4, 6).float())
    np.testing.assert_array_equal(bytes_from_rows(rows, "bfloat16"), content.view(np.uint8))
