"""The stages of the prepared check on a GPU, at tiny size on the CPU."""

from __future__ import annotations

import ctypes
import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.support.tiny_models import VOCAB, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("gpu_check_scripts")


class Timer:
    """Says that every run took 100 microseconds, after running each action once."""

    def times(self, actions):
        from gpu_check_context import Time

        for action in actions.values():
            action()
        return {name: Time(median_us=100.0, p10_us=90.0, p90_us=110.0, runs=7) for name in actions}


@pytest.fixture
def context(tmp_path):
    from gpu_check_context import TINY, Context, Deadline

    noted = {}
    made = Context(device="cpu", sizes=TINY, carried=tmp_path, deadline=Deadline(600), timer=Timer(), note=noted.update)
    return made, noted


def test_bandwidth_counts_bytes_read_and_written(context):
    import gpu_check_machine

    made, noted = context
    gpu_check_machine.run(made)
    assert noted["bandwidth"]["copy_gb_per_s"] == pytest.approx(2 * 2**20 / 1e5, abs=0.1)
    assert noted["bandwidth"]["read_gb_per_s"] == pytest.approx(2**20 / 1e5, abs=0.1)
    assert noted["versions"]["torch"] == torch.__version__


def test_a_time_is_the_median_and_the_outer_tenths():
    from gpu_check_context import Time, summary

    assert summary([float(value) for value in range(1, 100)]) == Time(median_us=50.0, p10_us=10.0, p90_us=90.0, runs=99)
    assert summary([4.0]) == Time(median_us=4.0, p10_us=4.0, p90_us=4.0, runs=1)


def rollout_weights(drafter, target):
    from domino_deploy.plugins.triton_rollout import RolloutWeights

    head = drafter.head
    return RolloutWeights(
        embedding=target.model.embed_tokens.weight.detach(),
        w_ih=head.prefix_gru.weight_ih_l0.detach(),
        w_hh=head.prefix_gru.weight_hh_l0.detach(),
        state_projection=head.embed_proj[0].weight.detach()[:, head.width :],
        codebook=head.codebook_VR.detach(),
    )


def block_of(seed=0, batch=2):
    """Hidden states [batch, 5, width] and base logits [batch, 5, vocabulary]."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 5, 24, generator=random), torch.randn(batch, 5, VOCAB, generator=random)


def test_the_plain_rollout_is_the_drafters():
    from gpu_check_plain import PlainRollout, logit_lost

    target, drafter = tiny_target(), tiny_drafter()
    hidden, base = block_of()
    anchors, z = torch.tensor([3, 40]), drafter.head.project_hidden(hidden).detach()
    weights = rollout_weights(drafter, target)
    found = PlainRollout(weights, 2, 5, drafter.head.prefix_len)(anchors, z, base)
    expected = drafter.draft(target.model.embed_tokens, anchors, hidden, base)
    assert torch.equal(found, expected)
    assert len(set(found.flatten().tolist())) > 3
    assert logit_lost(weights, anchors, z, base, found, drafter.head.prefix_len) < 1e-5


def test_a_worse_token_is_seen_by_the_logit_that_it_loses():
    from gpu_check_plain import PlainRollout, logit_lost, next_state

    target, drafter = tiny_target(), tiny_drafter()
    hidden, base = block_of(seed=1, batch=1)
    anchors, z = torch.tensor([3]), drafter.head.project_hidden(hidden).detach()
    weights = rollout_weights(drafter, target)
    drafts = PlainRollout(weights, 1, 5, 1)(anchors, z, base).clone()
    state = torch.zeros(1, 10)
    for token in (3, *drafts[0, :4].tolist()):
        state = next_state(weights.embedding[[token]], state, weights.w_ih, weights.w_hh)
    logits = base[0, 4] + weights.codebook @ F.silu(z[0, 4] + weights.state_projection @ state[0])
    worse = int(logits.topk(3).indices[2])
    drafts[0, 4] = worse
    assert logit_lost(weights, anchors, z, base, drafts, 1) == pytest.approx(float(logits.max() - logits[worse]), abs=1e-4)


def test_the_loop_drafts_and_commits_as_the_reference_does():
    from gpu_check_loop import Loop
    from gpu_check_plain import PlainRollout

    from domino_deploy.model.spec_generate import reference_target, spec_generate

    target, drafter = tiny_target(), tiny_drafter()
    head = PlainRollout(rollout_weights(drafter, target), 1, 5, drafter.head.prefix_len)
    loop = Loop(target, drafter, slots=90, widths=(6,))
    prompt = [7, 21, 3, 44, 5]
    expected = [
        (list(cycle.drafts), list(cycle.token_ids)) for cycle in spec_generate(reference_target(target), drafter, prompt, max_new_tokens=60)
    ]
    found = list(loop.generate(prompt, head, 20))
    assert found == expected[: len(found)]
    assert len(found) == 21
    assert max(len(committed) for _, committed in found) > 1, "no draft was ever accepted: the cache behind one is not tested"
    text = [token for _, committed in found for token in committed]
    assert list(loop.decode(prompt, len(text))) == text


def test_the_loop_ends_where_the_slots_are_used_up():
    from gpu_check_loop import Loop
    from gpu_check_plain import PlainRollout

    target, drafter = tiny_target(), tiny_drafter()
    head = PlainRollout(rollout_weights(drafter, target), 1, 5, 1)
    loop = Loop(target, drafter, slots=12, widths=(6,))
    found = list(loop.generate([7, 21, 3, 44, 5], head, 20))
    assert 1 < len(found) < 9
    assert 5 + sum(len(committed) for _, committed in found) <= 13


class Libcuda:
    """Takes the driver's calls and keeps what a launch was given."""

    def __init__(self, refused=None):
        self.launched = []
        self.refused = refused

    def __getattr__(self, name):
        def call(*arguments):
            if name == "cuModuleGetFunction":
                arguments[0]._obj.value = 77
            if name == "cuLaunchKernel":
                function, *numbers, _, slots, _ = arguments
                read = [ctypes.cast(slot, ctypes.POINTER(ctypes.c_uint64)).contents.value for slot in slots]
                self.launched.append((function.value, [number.value for number in numbers], read))
            return 1 if name == self.refused else 0

        return call


def test_the_driver_is_given_inputs_scalars_outputs_and_two_nulls():
    from gpu_check_driver import Driver

    from domino_deploy.plugins.trt_plugin_kernels import tiles_ptx

    library = Libcuda()
    driver = Driver(library)
    ptx = tiles_ptx("bfloat16", 256, 90)
    inputs, outputs = torch.zeros(4, 8), torch.zeros(2, 8)
    values = [*inputs, 151_936, 256, *outputs]
    driver.launch(driver.load(ptx), ptx, (1187, 2), values, 0)
    ((function, numbers, read),) = library.launched
    assert function == 77
    assert numbers == [1187, 2, 1, 32 * ptx.num_warps, 1, 1, ptx.shared_bytes]
    pointers = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
    # An int32 has four bytes; what lies behind them is not its own.
    assert [value if place not in (4, 5) else value & 0xFFFFFFFF for place, value in enumerate(read)] == (
        [*pointers[:4], 151_936, 256, *pointers[4:], 0, 0]
    )
    assert len(read) == len(re.findall(r"\.param [^\n]*_param_\d+", ptx.text.partition(".entry")[2].partition(")")[0]))


def test_the_drivers_ptx_is_that_of_an_engine_for_this_gpu(monkeypatch):
    """Of a Hopper it is that for 8.9: Triton's for 9.0 would run on no later GPU."""
    from gpu_check_corrections import Correction
    from gpu_check_driver import plugin_ptx

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    inputs = Correction(base=torch.zeros(1, 130), z=torch.zeros(1, 16), s=torch.zeros(1, 16), codebook=torch.zeros(130, 16))
    assert all(".target sm_89\n" in ptx.text for ptx in plugin_ptx(inputs, 1))


def test_a_call_that_the_driver_refuses_is_named():
    from gpu_check_driver import Driver, DriverError

    with pytest.raises(DriverError, match="expected cuInit to succeed, found error 1"):
        Driver(Libcuda(refused="cuInit"))


def test_what_is_compiled_beforehand_are_the_cases_of_the_stages():
    import gpu_check_compile
    from gpu_check_context import QWEN3_4B
    from gpu_check_corrections import DTYPES

    from domino_deploy.plugins.trt_plugin_kernels import TACTICS

    tasks = gpu_check_compile.tasks("qwen3-4b")
    assert len(set(tasks)) == len(tasks)
    assert ("rollouts", "bfloat16", 151_936, 32) in tasks
    assert {(dtype, tactic) for what, dtype, _, tactic in tasks if what == "tactics"} == set(product(DTYPES, TACTICS))
    for vocab_size in (QWEN3_4B.vocab_size, *QWEN3_4B.odd_vocab_sizes):
        assert {dtype for what, dtype, vocab, _ in tasks if (what, vocab) == ("forms", vocab_size)} == {"float32", "float16", "bfloat16"}
