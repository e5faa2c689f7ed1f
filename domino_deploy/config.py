"""Frozen descriptions of a target and a drafter, validated on construction.

What lives here: plain values and the numbers derived from them.  What does not: reading config.json
(`checkpoint.py`) and comparing a drafter with a target (`pairing.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from domino_deploy.errors import CheckpointError, listed, shortened

_MOST_PROBLEMS = 50  # named in one message


class Family(StrEnum):
    """Target architectures that `model/target.py` implements."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class DrafterKind(StrEnum):
    """DFLASH: parallel backbone alone.  DOMINO: backbone and causal correction head."""

    DFLASH = "dflash"
    DOMINO = "domino"


class RopeType(StrEnum):
    """Rotary scalings that are honoured; any other is refused by name in `checkpoint.py`."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and, beyond `default`, how it is stretched."""

    theta: float
    type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    original_max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not self.theta > 0:
            problems.append(f"rope theta must be positive, found {self.theta}")
        if self.factor < 1.0:
            problems.append(f"rope scaling factor must be at least 1, found {self.factor}")
        if self.type in (RopeType.LLAMA3, RopeType.YARN) and self.original_max_position_embeddings < 1:
            problems.append(f"rope scaling {self.type!s} needs original_max_position_embeddings")
        if self.type is RopeType.LLAMA3 and not self.high_freq_factor > self.low_freq_factor > 0:
            problems.append(
                "rope scaling llama3 needs 0 < low_freq_factor < high_freq_factor, "
                f"found {self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.type is RopeType.YARN and self.beta_fast < self.beta_slow:
            problems.append(f"rope scaling yarn needs beta_fast >= beta_slow, found {self.beta_fast} and {self.beta_slow}")
        _raise_if(problems, "rope settings")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What target and drafter layers share: the shape of one decoder layer and of the stack."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    has_qk_norm: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False

    def __post_init__(self) -> None:
        _raise_if(self._problems(), type(self).__name__)

    def _problems(self) -> list[str]:
        problems = [
            f"{name} must be at least 1, found {getattr(self, name)}"
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "max_position_embeddings",
            )
            if getattr(self, name) < 1
        ]
        if self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads must be a multiple of num_kv_heads, found {self.num_heads} and {self.num_kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim must be even for rotary embedding, found {self.head_dim}")
        if not 0 < self.rms_norm_eps < 1:
            problems.append(f"rms_norm_eps must lie between 0 and 1, found {self.rms_norm_eps}")
        return problems


@dataclass(frozen=True, kw_only=True)
class TargetConfig(DecoderConfig):
    """A target LLM: decoder stack, embedding and LM head."""

    family: Family
    tie_word_embeddings: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def _problems(self) -> list[str]:
        problems = super()._problems()
        ids = [("eos", token) for token in self.eos_token_ids] + ([] if self.bos_token_id is None else [("bos", self.bos_token_id)])
        problems += [
            f"{name} token id {token} lies outside the vocabulary of {self.vocab_size}"
            for name, token in ids
            if not 0 <= token < self.vocab_size
        ]
        return problems


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(DecoderConfig):
    """A Domino or plain DFlash drafter (field meanings: docs/architecture.md, "Checkpoint").

    `target_layer_ids` name decoder layers of the target whose *outputs* are tapped: id l is
    `hidden_states[l + 1]` in transformers' numbering.
    """

    kind: DrafterKind
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    shift_label: bool
    pure_draft_prefix_len: int = 0
    emb_dim: int = 0
    gru_hidden_dim: int = 0
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()

    @property
    def num_proposals(self) -> int:
        """Tokens a block can propose: every position when labels are shifted, else all but the anchor's."""
        return self.block_size if self.shift_label else self.block_size - 1

    @property
    def has_sliding_layers(self) -> bool:
        return any(self.sliding_layers)

    @property
    def feature_size(self) -> int:
        """Width of one row of tapped features: one target hidden state per tapped layer."""
        return len(self.target_layer_ids) * self.hidden_size

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.block_size < 2:
            problems.append(f"block_size must be at least 2, found {self.block_size}")
        if self.block_size > self.max_position_embeddings:
            problems.append(
                f"block_size must be at most max_position_embeddings, found {self.block_size} and {self.max_position_embeddings}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            problems.append(f"mask_token_id must lie in [0, {self.vocab_size}), found {self.mask_token_id}")
        ids = self.target_layer_ids
        if not ids:
            problems.append("target_layer_ids must name at least one target layer, found none")
        if any(not 0 <= layer < self.num_target_layers for layer in ids) or any(a >= b for a, b in pairwise(ids)):
            numbering = (
                " (layers count from 0; in hidden_states, whose first is the embedding, from 1)" if self.num_target_layers in ids else ""
            )
            problems.append(f"target_layer_ids must rise within [0, {self.num_target_layers}), found {list(ids)!s:.80}{numbering}")
        if self.kind is DrafterKind.DOMINO:
            # The last correctable proposal is number num_proposals - 1; beyond it no token would be corrected.
            if not 0 <= self.pure_draft_prefix_len < self.num_proposals:
                problems.append(f"pure_draft_prefix_len must lie in [0, {self.num_proposals}), found {self.pure_draft_prefix_len}")
            problems += [
                f"{name} must be at least 1 for a Domino head, found {getattr(self, name)}"
                for name in ("emb_dim", "gru_hidden_dim")
                if getattr(self, name) < 1
            ]
        if self.has_sliding_layers and (self.sliding_window is None or self.sliding_window < 1):
            problems.append(f"sliding_window must be at least 1 when layer_types has sliding_attention, found {self.sliding_window}")
        if len(self.sliding_layers) not in (0, self.num_layers):
            problems.append(f"layer_types must have one entry per layer ({self.num_layers}), found {len(self.sliding_layers)}")
        return problems


def _raise_if(problems: list[str], what: str) -> None:
    if problems:
        raise CheckpointError(
            listed(
                f"{what}: {len(problems)} value(s) out of range",
                shortened(problems, most=_MOST_PROBLEMS),
                "Correct config.json, or use another checkpoint.",
            )
        )
