"""Speculative generation as the Domino paper's reference does it (arXiv 2605.29707): the truth for `runtime.decode`.

No caches and no shortcuts: every cycle runs drafter and target over the whole sequence.  Works on our targets and on
transformers' causal language models alike.

Shape legend: S rows, F features, P block positions, N proposals, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The target's token at a position of the sequence, from the logits [V] of the row before it.
Choose = Callable[[Tensor, int], int]


@dataclass(frozen=True, kw_only=True)
class ReferenceTarget:
    """A target as spec_generate needs it.

    forward: int64 tokens [1, S] -> logits [1, S, V] and tapped features [1, S, F]; embed, lm_head: what a drafter borrows.
    """

    forward: Callable[[Tensor], tuple[Tensor, Tensor]]
    embed: nn.Embedding
    lm_head: nn.Linear


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """drafts: what was verified; token_ids: what was committed; accepted: drafts among them."""

    drafts: tuple[int, ...]
    token_ids: tuple[int, ...]
    accepted: int


def reference_target(model: TargetModel) -> ReferenceTarget:
    """Our own target, with the layers it taps."""

    def forward(tokens_1S: Tensor) -> tuple[Tensor, Tensor]:
        hidden, features = model.hidden_states(tokens_1S)
        return model.lm_head(hidden), features

    return ReferenceTarget(forward=forward, embed=model.model.embed_tokens, lm_head=model.lm_head)


def transformers_target(model: PreTrainedModel, target_layer_ids: Sequence[int]) -> ReferenceTarget:
    """A transformers causal language model; layer l's output is its `hidden_states[l + 1]`."""

    def forward(tokens_1S: Tensor) -> tuple[Tensor, Tensor]:
        output = model(input_ids=tokens_1S, output_hidden_states=True, use_cache=False)
        return output.logits, torch.cat([output.hidden_states[layer + 1] for layer in target_layer_ids], dim=-1)

    embed, lm_head = cast("nn.Embedding", model.get_input_embeddings()), cast("nn.Linear", model.get_output_embeddings())
    return ReferenceTarget(forward=forward, embed=embed, lm_head=lm_head)


def greedy(logits_V: Tensor, position: int) -> int:
    return int(logits_V.argmax())


def sampled(temperature: float, generator: torch.Generator) -> Choose:
    """Draws from softmax(logits / temperature)."""

    def choose(logits_V: Tensor, position: int) -> int:
        return int(torch.multinomial((logits_V.double() / temperature).softmax(-1), 1, generator=generator))

    return choose


@torch.inference_mode()
def spec_generate(
    target: ReferenceTarget,
    drafter: DrafterModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    num_speculative_tokens: int | None = None,
    choose: Choose = greedy,
) -> Iterator[Cycle]:
    """Generate behind a prompt; the first cycle drafts nothing.

    A draft is accepted while it is the target's own choice, and the target's own token follows: lossless for any `choose`.

    Args:
        target: from `reference_target` or `transformers_target`.
        drafter: taps what `target` gives.
        prompt_ids: at least one token.
        max_new_tokens: tokens to generate at most.
        stop_token_ids: end behind one of these.
        num_speculative_tokens: tokens to draft per cycle; None for all that the drafter offers.
        choose: greedy, or `sampled(...)`.
    """
    offered = drafter.config.num_proposals if num_speculative_tokens is None else num_speculative_tokens
    tokens, end = list(prompt_ids), len(prompt_ids) + max_new_tokens
    drafts: list[int] = []
    while True:
        logits_SV, features = (output[0] for output in target.forward(torch.tensor([[*tokens, *drafts]])))
        chosen = _verify(logits_SV[len(tokens) - 1 :], drafts, len(tokens), choose)
        kept = chosen[: next((index + 1 for index, token in enumerate(chosen) if token in stop_token_ids), end - len(tokens))]
        tokens += kept
        yield Cycle(drafts=tuple(drafts), token_ids=tuple(kept), accepted=min(len(kept), len(chosen) - 1))
        if tokens[-1] in stop_token_ids or len(tokens) == end:
            return
        count = min(offered, end - len(tokens) - 1)
        drafts = propose(target, drafter, tokens[-1], features[: len(tokens) - 1], count) if count else []


def _verify(logits_RV: Tensor, drafts: list[int], position: int, choose: Choose) -> list[int]:
    """Accepted drafts and one token more; row j of `logits` saw the sequence and the drafts before j."""
    chosen: list[int] = []
    for row, logits_V in enumerate(logits_RV):
        chosen.append(choose(logits_V, position + row))
        if row == len(drafts) or chosen[row] != drafts[row]:
            break
    return chosen


def propose(target: ReferenceTarget, drafter: DrafterModel, anchor: int, features_SF: Tensor, count: int) -> list[int]:
    """`count` tokens behind the anchor, from the features of all tokens before it."""
    config, context, anchor_1 = drafter.config, len(features_SF), torch.tensor([anchor])
    slots, rows = torch.arange(context + config.block_size), torch.arange(context, context + config.block_size)[:, None]
    everything = torch.ones(config.block_size, len(slots), dtype=torch.bool)
    # A sliding layer's row at position p sees the context above p - window, and the whole block.
    sliding = None if config.sliding_window is None else (slots >= context) | (slots > rows - config.sliding_window)
    hidden = drafter(target.embed(drafter.block_ids(anchor_1)), features_SF[None], slots[None], everything, sliding)
    hidden = drafter.proposal_rows(hidden)[:, :count]
    return drafter.draft(target.embed, anchor_1, hidden, target.lm_head(hidden))[0].tolist()
