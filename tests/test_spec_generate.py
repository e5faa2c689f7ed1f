"""The reference against transformers and against plain decoding; `runtime.decode` against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from domino_deploy.config import DrafterKind, Family
from domino_deploy.model.spec_generate import Cycle, greedy, reference_target, sampled, spec_generate, transformers_target
from domino_deploy.model.target import TargetModel
from domino_deploy.runtime.backends.eager import EagerDrafter, EagerTarget
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.sampling import Sampler, SamplingParams
from tests.support.tiny_models import tiny_drafter, tiny_target

PROMPT = [5, 17, 3, 42, 8]
DRAFTERS: dict[str, dict[str, Any]] = {
    "domino": {},
    "domino, unshifted": {"shift_label": False},
    "domino, no pure prefix": {"pure_draft_prefix_len": 0},
    "domino, unshifted, no pure prefix": {"shift_label": False, "pure_draft_prefix_len": 0},
    "domino, sliding": {"sliding_window": 4, "sliding_layers": (True, False)},
    "dflash": {"kind": DrafterKind.DFLASH},
    "dflash, unshifted": {"kind": DrafterKind.DFLASH, "shift_label": False},
}


def tokens_of(cycles: list[Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.token_ids]


def plain(target: TargetModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(target.lm_head(target.hidden_states(torch.tensor([tokens]))[0])[0, -1].argmax()))
    return tokens[len(prompt) :]


def transformers_twin(target: TargetModel) -> PreTrainedModel:
    """The transformers model of the same family with the same weights."""
    config = target.config
    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    makers = {
        Family.LLAMA: (LlamaConfig, LlamaForCausalLM),
        Family.QWEN2: (Qwen2Config, Qwen2ForCausalLM),
        Family.QWEN3: (Qwen3Config, Qwen3ForCausalLM),
    }
    make_config, make_model = makers[config.family]
    model = make_model(make_config(**values)).eval()
    model.load_state_dict(target.state_dict())
    return model


@pytest.mark.parametrize("family", [Family.LLAMA, Family.QWEN3])
def test_our_target_and_its_transformers_twin_give_the_same_cycles(family):
    target, drafter = tiny_target(family=family), tiny_drafter()
    twin = transformers_twin(target)
    ours, theirs = reference_target(target), transformers_target(twin, drafter.config.target_layer_ids)
    with torch.inference_mode():
        for mine, other in zip(ours.forward(torch.tensor([PROMPT])), theirs.forward(torch.tensor([PROMPT])), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert list(spec_generate(ours, drafter, PROMPT, max_new_tokens=24)) == list(spec_generate(theirs, drafter, PROMPT, max_new_tokens=24))
    expected = twin.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[
        0, len(PROMPT) :
    ]
    assert tokens_of(list(spec_generate(theirs, drafter, PROMPT, max_new_tokens=24))) == expected.tolist()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_is_that_of_plain_decoding(drafter):
    target = tiny_target()
    cycles = list(spec_generate(reference_target(target), tiny_drafter(**DRAFTERS[drafter]), PROMPT, max_new_tokens=20))
    assert tokens_of(cycles) == plain(target, PROMPT, 20)


def test_a_stop_token_ends_the_output():
    expected = plain(tiny_target(), PROMPT, 20)
    cycles = list(spec_generate(reference_target(tiny_target()), tiny_drafter(), PROMPT, max_new_tokens=20, stop_token_ids={expected[7]}))
    assert tokens_of(cycles) == expected[: expected.index(expected[7]) + 1]


def test_sampling_at_a_tiny_temperature_is_greedy_and_repeats_with_its_seed():
    target, drafter = reference_target(tiny_target()), tiny_drafter()

    def run(choose):
        return tokens_of(list(spec_generate(target, drafter, PROMPT, max_new_tokens=20, choose=choose)))

    assert run(sampled(1e-6, torch.Generator().manual_seed(0))) == run(greedy)
    assert run(sampled(1.0, torch.Generator().manual_seed(0))) == run(sampled(1.0, torch.Generator().manual_seed(0)))
    assert run(sampled(1.0, torch.Generator().manual_seed(0))) != run(sampled(1.0, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_decode_loop_drafts_accepts_and_emits_what_the_reference_does(drafter, count, temperature):
    """With caches that keep accepted rows only, in exactly the reference's cycles."""
    target, model = tiny_target(), tiny_drafter(**DRAFTERS[drafter])
    sampling = SamplingParams(temperature=temperature, seed=3)
    sampler = Sampler(sampling)
    cycles = list(
        spec_generate(
            reference_target(target),
            model,
            PROMPT,
            max_new_tokens=40,
            num_speculative_tokens=count,
            choose=lambda logits, position: sampler.choose(logits.numpy(), position),
        )
    )
    steps = list(
        generate(
            EagerTarget(target, 64),
            RecordingDrafter(model, target, 64),
            PROMPT,
            GenerationParams(max_new_tokens=40, sampling=sampling),
            num_speculative_tokens=model.config.num_proposals if count is None else count,
        )
    )
    assert [(step.token_ids, step.proposed, step.accepted) for step in steps] == [
        (cycle.token_ids, len(cycle.drafts), cycle.accepted) for cycle in cycles
    ]
    assert RecordingDrafter.proposals == [list(cycle.drafts) for cycle in cycles if cycle.drafts]


class RecordingDrafter(EagerDrafter):
    proposals: list[list[int]]

    def reset(self) -> None:
        super().reset()
        RecordingDrafter.proposals = []

    def propose(self, token_ids, features, count):
        proposal = super().propose(token_ids, features, count)
        RecordingDrafter.proposals.append(proposal.token_ids.tolist())
        return proposal
