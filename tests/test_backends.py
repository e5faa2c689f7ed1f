"""Backends: ONNX Runtime and eager PyTorch do the same, speculation changes nothing, caches hold what they should."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.errors import BundleError, CapacityError
from domino_deploy.model.loading import load_drafter, load_target
from domino_deploy.model.spec_generate import propose, reference_target
from domino_deploy.runtime.backends import eager, ort
from domino_deploy.runtime.backends.ort_passes import TargetPasses
from domino_deploy.runtime.decode import PREFILL_ROWS, generate
from domino_deploy.runtime.kv_cache import GROWTH_ROWS
from domino_deploy.runtime.prompt_lookup import PromptLookupDrafter
from domino_deploy.runtime.protocols import Drafter, FloatArray, Proposal, Step, Target
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.sampling import SamplingParams
from tests.support.checkpoints import write_drafter, write_target

CAPACITY = 400
BACKENDS = {"ort": ort, "eager": eager}
# Between them: both kinds, both layouts, both prefix lengths, windows, tied and untied embeddings, all families.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "domino": ({"family": "llama"}, {}),
    "domino, unshifted, no pure prefix, sliding": (
        {"family": "qwen3", "tied": False},
        {"shift_label": False, "pure_draft_prefix_len": 0, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
    ),
    "dflash": ({"family": "qwen2"}, {"kind": "dflash", "shift_label": False}),
}


@pytest.fixture(scope="module", params=PAIRS)
def bundle(request, tmp_path_factory, tiny_bundle) -> Bundle:
    if request.param == "domino":
        return open_bundle(tiny_bundle)
    from domino_deploy.exporters.export import export_bundle

    folder = tmp_path_factory.mktemp("pair")
    target, drafter = PAIRS[request.param]
    target_folder = write_target(folder / "target", **target)
    return export_bundle(write_drafter(folder / "drafter", target_folder, **drafter), target_folder, folder / "bundle", verify=False)


@pytest.fixture(params=BACKENDS)
def pair(request, bundle) -> tuple[Target, Drafter]:
    return BACKENDS[request.param].open_pair(bundle, capacity=CAPACITY, threads=1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, length).tolist()


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def run(target: Target, drafter: Drafter | None, prompt: list[int], *, count: int | None = None, **params) -> list[Step]:
    params = GenerationParams(**{"max_new_tokens": 100, **params})
    count = (drafter.max_proposals if drafter else 0) if count is None else count
    return list(generate(target, drafter, prompt, params, num_speculative_tokens=count))


class AcceptedDrafter:
    """Gets some of its proposals right: puts true tokens in front of the inner drafter's, 0, 1, 2, ... of them in turn.

    A random drafter is hardly ever right; this way runs of every length are accepted and its cache is put to the test.
    """

    def __init__(self, inner: Drafter, truth: Sequence[int]) -> None:
        self.inner = inner
        self.truth = list(truth)
        self.proposals: list[tuple[list[int], list[int]]] = []  # tokens so far, the inner drafter's own proposal

    @property
    def max_proposals(self) -> int:
        return self.inner.max_proposals

    def reset(self) -> None:
        self.inner.reset()
        self.proposals = []

    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        own = self.inner.propose(token_ids, features, count).token_ids
        right = self.truth[len(token_ids) :][: min(len(self.proposals) % (self.max_proposals + 1), count)]
        self.proposals.append((list(token_ids), own.tolist()))
        return Proposal(token_ids=np.concatenate([right, own[len(right) :]]).astype(np.int64))


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, seed=5)], ids=["greedy", "sampled"])
def test_a_random_drafter_changes_no_token(pair, sampling):
    target, drafter = pair
    prompt = prompt_of(20)
    plain = tokens_of(run(target, None, prompt, sampling=sampling))
    assert len(set(plain)) > 10  # not one token over and over, which would hide faults
    for count in (1, 3, drafter.max_proposals):
        assert tokens_of(run(target, drafter, prompt, sampling=sampling, count=count)) == plain
    assert tokens_of(run(target, PromptLookupDrafter(), prompt * 2, sampling=sampling)) == tokens_of(
        run(target, None, prompt * 2, sampling=sampling)
    )


def test_accepted_runs_of_every_length_change_no_token(pair):
    target, drafter = pair
    prompt = prompt_of(20)
    plain = tokens_of(run(target, None, prompt, max_new_tokens=150))
    steps = run(target, AcceptedDrafter(drafter, [*prompt, *plain]), prompt, max_new_tokens=150)
    assert tokens_of(steps) == plain
    assert {step.accepted for step in steps} >= set(range(drafter.max_proposals + 1))


def test_drafts_from_the_cache_are_those_from_the_whole_sequence(pair, bundle):
    """The cache keeps feature rows alone, whatever was accepted, drafted or rejected before, and grows with its rows."""
    from domino_deploy.checkpoint import open_drafter, open_target

    model = load_target(open_target(bundle.path / "target"), bundle.drafter.target_layer_ids)
    reference, reference_drafter = reference_target(model), load_drafter(open_drafter(bundle.path / "drafter"))
    target, drafter = pair
    prompt = prompt_of(GROWTH_ROWS - 30)
    plain = tokens_of(run(target, None, prompt))
    accepted = AcceptedDrafter(drafter, [*prompt, *plain])
    run(target, accepted, prompt)
    assert len(accepted.proposals) > 15
    assert len(prompt) + 100 > 2 * GROWTH_ROWS
    for tokens, drafts in accepted.proposals:
        with torch.inference_mode():
            features = reference.forward(torch.tensor([tokens]))[1][0, : len(tokens) - 1]
            assert drafts == propose(reference, reference_drafter, tokens[-1], features, len(drafts))


def test_both_backends_draft_and_accept_the_same(bundle):
    prompt = prompt_of(30)
    cycles, proposals = [], []
    for backend in BACKENDS.values():
        target, drafter = backend.open_pair(bundle, capacity=CAPACITY, threads=1)
        plain = tokens_of(run(target, None, prompt))
        accepted = AcceptedDrafter(drafter, [*prompt, *plain])
        steps = run(target, accepted, prompt) + run(target, drafter, prompt)
        cycles.append([(step.token_ids, step.proposed, step.accepted) for step in steps])
        proposals.append(accepted.proposals)
    assert cycles[0] == cycles[1]
    assert proposals[0] == proposals[1]


def test_logits_and_features_of_pieces_are_those_of_one_pass(pair, bundle):
    """Across growing caches, rows that were not kept, and a reset."""
    target, _ = pair
    tokens = prompt_of(150)
    [whole] = reference_pass(bundle, tokens)
    for sizes in ([150], [1, 63, 1, 64, 21], [100, 7, 43]):
        target.reset()
        start = 0
        for size in sizes:
            target.forward(prompt_of(5, seed=9), 1)  # a pass of which nothing is kept
            target.commit(0)
            piece = target.forward(tokens[start : start + size], min(size, 3))
            np.testing.assert_allclose(piece.features, whole[1][start : start + size], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(piece.logits, whole[0][start + size - min(size, 3) : start + size], rtol=1e-4, atol=1e-4)
            target.commit(size)
            start += size
        assert target.length == 150


def reference_pass(bundle: Bundle, *sequences: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    from domino_deploy.checkpoint import open_target

    forward = reference_target(load_target(open_target(bundle.path / "target"), bundle.drafter.target_layer_ids)).forward
    with torch.inference_mode():
        return [tuple(output[0].numpy() for output in forward(torch.tensor([tokens]))) for tokens in sequences]


def test_two_requests_in_a_row_equal_two_fresh_ones(pair, bundle, request):
    target, drafter = pair
    backend = BACKENDS[request.node.callspec.params["pair"]]
    for length in (90, 3, 40):
        again = [(step.token_ids, step.proposed, step.accepted) for step in run(target, drafter, prompt_of(length), max_new_tokens=40)]
        fresh = run(*backend.open_pair(bundle, capacity=CAPACITY, threads=1), prompt_of(length), max_new_tokens=40)
        assert again == [(step.token_ids, step.proposed, step.accepted) for step in fresh]


def test_a_prompt_longer_than_one_piece_works(pair):
    target, drafter = pair
    prompt = prompt_of(PREFILL_ROWS + 40)
    assert tokens_of(run(target, drafter, prompt, max_new_tokens=30)) == tokens_of(run(target, None, prompt, max_new_tokens=30))


def test_the_whole_capacity_can_be_used_and_no_more(pair):
    target, drafter = pair
    prompt = prompt_of(CAPACITY - 7)
    steps = run(target, drafter, prompt)
    assert len(tokens_of(steps)) == 8
    assert steps[-1].finish_reason == "length"
    assert target.length == target.capacity == CAPACITY
    assert tokens_of(steps) == tokens_of(run(target, None, prompt))
    with pytest.raises(CapacityError, match=r"found 400 \+ 1"):
        target.forward([5], 1)
    assert len(tokens_of(run(target, drafter, prompt_of(CAPACITY - 1)))) == 2


def test_a_drafter_refuses_features_that_skip_or_repeat_tokens(pair):
    target, drafter = pair
    features = target.forward(prompt_of(5), 1).features
    for rows in (0, 4):
        drafter.reset()
        with pytest.raises(ValueError, match="pass each token's row once"):
            drafter.propose(prompt_of(6), features[:rows], 2)


def test_without_a_drafter_its_weights_are_not_needed(bundle, tmp_path):
    for backend in BACKENDS.values():
        target, drafter = backend.open_pair(bundle, capacity=CAPACITY, with_drafter=False)
        assert drafter is None
        assert len(tokens_of(run(target, None, prompt_of(4), max_new_tokens=5))) == 5


def test_onnx_runtime_updates_caches_in_place_and_copies_none(tiny_bundle):
    target, _ = ort.open_pair(open_bundle(tiny_bundle), capacity=CAPACITY, threads=1)
    target.forward(prompt_of(10), 1)
    target.commit(10)
    cache = target._passes.graph._caches["key_cache.0"]
    before = cache.copy()
    target.forward(prompt_of(3), 1)
    np.testing.assert_array_equal(cache[:, :, :10], before[:, :, :10])
    assert (cache[:, :, 10:13] != before[:, :, 10:13]).all()
    np.testing.assert_array_equal(cache[:, :, 13:], 0)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_memory_does_not_grow_with_the_number_of_requests(tiny_bundle):
    target, drafter = ort.open_pair(open_bundle(tiny_bundle), capacity=CAPACITY, threads=1)

    def resident_bytes_after(requests: int) -> int:
        for seed in range(requests):
            run(target, drafter, prompt_of(100, seed), max_new_tokens=10)
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes_after(50)
    # One request's caches and features take 0.2 MB here, so keeping them would show as 40 MB.
    assert resident_bytes_after(200) - before < 10 * 2**20


def test_a_damaged_graph_is_named(tmp_path: Path, tiny_bundle):
    broken = tmp_path / "target.onnx"
    broken.write_bytes(b"not a graph")
    config = open_bundle(tiny_bundle)
    with pytest.raises(BundleError, match=r"target\.onnx.*Export the bundle again"):
        TargetPasses(broken, config.target, config.drafter.feature_size)


def test_a_graph_in_the_place_of_another_is_refused_when_opened(tiny_bundle):
    config = open_bundle(tiny_bundle)
    with pytest.raises(
        BundleError, match=r"(?s)backbone\.onnx: the graph is not the one.*input input_ids: missing.*input block_ids: unknown"
    ):
        TargetPasses(tiny_bundle / "backbone.onnx", config.target, config.drafter.feature_size)


def test_a_graph_of_another_shape_is_refused_when_opened(tiny_bundle):
    config = open_bundle(tiny_bundle)
    other = replace(config.target, vocab_size=400)
    with pytest.raises(BundleError, match=r"output logits: expected float32 \['batch', 'logit_rows', 400\], found .*300"):
        TargetPasses(tiny_bundle / "target.onnx", other, config.drafter.feature_size)


def test_an_operator_that_fails_names_the_graph(tmp_path, tiny_bundle):
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    model = onnx.load(folder / "target.onnx", load_external_data=False)
    gather = next(node for node in model.graph.node if node.op_type == "Gather" and "input_ids" in node.input)
    far = onnx.helper.make_tensor("far", onnx.TensorProto.INT64, [], [10**6])
    model.graph.initializer.append(far)
    model.graph.node.insert(0, onnx.helper.make_node("Add", ["input_ids", "far"], ["moved_ids"]))
    gather.input[list(gather.input).index("input_ids")] = "moved_ids"
    onnx.save(model, folder / "target.onnx")
    config = open_bundle(tiny_bundle)
    target = ort.OrtTarget(TargetPasses(folder / "target.onnx", config.target, config.drafter.feature_size), CAPACITY)
    with pytest.raises(BundleError, match=r"a graph that runs .*target\.onnx.*Export the bundle again"):
        target.forward([1, 2], 1)
