"""What an export may choose, and the checks of it against the pair; nothing is written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import RequestError, listed
from domino_deploy.exporters.onnx_from_head import check_candidate_pool
from domino_deploy.exporters.placement import Placement
from domino_deploy.exporters.verify_layers import check_layers
from domino_deploy.precision import Precision
from domino_deploy.signature import GraphForm
from domino_deploy.template_variables import variable_problems


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What an export may choose.

    Args:
        precision: how weights are stored and graphs compute.
        placement: how weight files that stay as they are come into the bundle.
        num_speculative_tokens: how many tokens sessions draft and verify per cycle unless a request says otherwise; None for
            all that the drafter proposes.
        candidate_pool: tokens per position that the correction looks at, those with the highest base logits; 0 for all.
        certified_pool: fall back to the full vocabulary wherever the pool's choice is not certain.
        draft_vocab: token ids that the drafter may propose, rising (draft_vocab.py); None for all.
        trained_with: variables of the chat template that the drafter was trained with; None for what its config.json says.
    """

    precision: Precision = field(default_factory=Precision)
    placement: Placement = Placement.LINK
    num_speculative_tokens: int | None = None
    candidate_pool: int = 0
    certified_pool: bool = False
    draft_vocab: tuple[int, ...] | None = None
    trained_with: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        problems = variable_problems(self.trained_with or {})
        if problems:
            raise RequestError(listed("Variables that a drafter was trained with cannot be these", problems, "Correct or leave them out."))


def graph_form(options: ExportOptions) -> GraphForm:
    """What the graphs' inputs and outputs will be like."""
    vocab = options.draft_vocab
    return GraphForm(
        dtype=str(options.precision.activations),
        draft_vocab_size=None if vocab is None else len(vocab),
        candidate_pool=options.candidate_pool,
    )


def check_request(options: ExportOptions, target: TargetConfig, drafter: DrafterConfig, *, verify: bool, num_layers: int | None) -> None:
    """Check what is asked of an export against the pair; nothing is written.

    Args:
        options: of the export.
        target, drafter: that belong together.
        verify, num_layers: as for `export_bundle`.

    Raises:
        RequestError: options that do not fit the pair, or one another.
    """
    count, most = options.num_speculative_tokens, drafter.num_proposals
    if count is not None and not 1 <= count <= most:
        raise RequestError(
            f"Expected num_speculative_tokens from 1 to {most}, the proposals of this drafter, found {count}. "
            "Choose a number in that range, or leave it out."
        )
    check_candidate_pool(drafter, graph_form(options), options.certified_pool)
    if num_layers is not None:
        if not verify:
            raise RequestError(f"Expected a verification of {num_layers} layers, found that it is to be skipped. Drop one of the two.")
        check_layers(target, num_layers)
