"""Rotary frequencies against transformers' own functions, and angles against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from domino_deploy.config import RopeConfig, RopeType
from domino_deploy.model import rope

LLAMA3 = {"type": RopeType.LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}
YARN = {"type": RopeType.YARN, "original_max_position_embeddings": 4096}

SCALED = {
    "linear 1": RopeConfig(theta=1e4, type=RopeType.LINEAR, factor=1.0),
    "linear 4": RopeConfig(theta=1e4, type=RopeType.LINEAR, factor=4.0),
    "llama3.1": RopeConfig(theta=5e5, **LLAMA3),
    "llama3.2": RopeConfig(theta=5e5, **(LLAMA3 | {"factor": 32.0})),
    "llama3, other bounds": RopeConfig(theta=5e5, low_freq_factor=2.0, high_freq_factor=16.0, **LLAMA3),
    "yarn 4": RopeConfig(theta=1e6, factor=4.0, **YARN),
    "yarn 40, other ramp": RopeConfig(theta=1e4, factor=40.0, beta_fast=64.0, beta_slow=2.0, **YARN),
    "yarn, given attention factor": RopeConfig(theta=1e4, factor=4.0, attention_factor=1.5, **YARN),
    "yarn, ramp ends beyond the head": RopeConfig(theta=100.0, factor=4.0, beta_fast=128.0, beta_slow=0.01, **YARN),
    "yarn, ramp lies beyond the head": RopeConfig(theta=10.0, factor=4.0, beta_fast=0.01, beta_slow=0.001, **YARN),
    "yarn, ramp ends before the head": RopeConfig(theta=1e4, factor=4.0, beta_fast=3000.0, beta_slow=2000.0, **YARN),
    # Both ends of the ramp are dimension 0.
    "yarn, ramp of no width": RopeConfig(theta=1e4, factor=4.0, beta_fast=700.0, beta_slow=4096 / (2 * math.pi), **YARN),
}


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("config", SCALED.values(), ids=SCALED.keys())
def test_scaled_frequencies_equal_transformers(config: RopeConfig, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters: dict[str, Any] = {"rope_type": str(config.type), "rope_theta": config.theta, "factor": config.factor}
    if config.type is RopeType.LLAMA3:
        parameters |= {"low_freq_factor": config.low_freq_factor, "high_freq_factor": config.high_freq_factor}
    if config.type is RopeType.YARN:
        parameters |= {"beta_fast": config.beta_fast, "beta_slow": config.beta_slow, "attention_factor": config.attention_factor}
    if config.type is not RopeType.LINEAR:
        parameters["original_max_position_embeddings"] = config.original_max_position_embeddings
    theirs = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=parameters)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[str(config.type)](theirs, torch.device("cpu"))
    frequencies, factor = rope.inverse_frequencies(config, head_dim)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_default_frequencies_are_powers_of_the_base(theta: float) -> None:
    frequencies, factor = rope.inverse_frequencies(RopeConfig(theta=theta), 64)
    np.testing.assert_allclose(frequencies.numpy(), [theta ** (-i / 32) for i in range(32)], rtol=1e-6)
    assert factor == 1.0


def test_llama3_keeps_fast_waves_and_divides_slow_ones() -> None:
    config = SCALED["llama3.1"]
    plain, _ = rope.inverse_frequencies(RopeConfig(theta=config.theta), 128)
    scaled, _ = rope.inverse_frequencies(config, 128)
    wavelengths = 2 * math.pi / plain
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192
    assert fast.any()
    assert slow.any()
    assert not (fast | slow).all()
    torch.testing.assert_close(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8)
    between = scaled[~fast & ~slow] / plain[~fast & ~slow]
    assert ((between > 1 / 8) & (between < 1)).all()


def test_yarn_temperature_is_the_papers() -> None:
    assert rope.inverse_frequencies(RopeConfig(theta=1e4, factor=16.0, **YARN), 64)[1] == pytest.approx(0.1 * math.log(16) + 1)
    assert rope.inverse_frequencies(RopeConfig(theta=1e4, factor=1.0, **YARN), 64)[1] == 1.0


def test_angles_equal_float64_at_positions_near_and_far() -> None:
    positions = torch.tensor([[0, 1, 17, 4095], [40_959, 3, 2, 1]])
    frequencies, _ = rope.inverse_frequencies(RopeConfig(theta=1e6), 16)
    cos, sin = rope.angles(positions, frequencies, factor=1.25)
    phase = positions.numpy()[..., None].astype(np.float64) * frequencies.numpy().astype(np.float64)
    # fp32 keeps 24 bits of a phase of up to 4e4 radians: some 2e-3 absolute.
    np.testing.assert_allclose(cos.numpy(), 1.25 * np.cos(phase), atol=5e-3)
    np.testing.assert_allclose(sin.numpy(), 1.25 * np.sin(phase), atol=5e-3)
    near = positions < 20
    np.testing.assert_allclose(cos[near].numpy(), 1.25 * np.cos(phase[near.numpy()]), atol=2e-6)
    np.testing.assert_allclose(sin[near].numpy(), 1.25 * np.sin(phase[near.numpy()]), atol=2e-6)
    assert cos.dtype == sin.dtype == torch.float32


@pytest.mark.parametrize("config", [RopeConfig(theta=1e4), SCALED["llama3.1"], SCALED["yarn 4"]], ids=["default", "llama3", "yarn"])
def test_frequencies_fall_and_stay_fp32(config: RopeConfig) -> None:
    frequencies, _ = rope.inverse_frequencies(config, 128)
    assert frequencies.dtype == torch.float32
    assert (frequencies[1:] < frequencies[:-1]).all()
