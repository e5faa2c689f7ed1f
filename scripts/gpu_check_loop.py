"""A speculative loop in plain PyTorch at the shape of a public pair: random weights, caches written in place, every part one graph.

It shows what a cycle costs.  `domino_deploy.model.spec_generate` is the same loop without caches and graphs, on the CPU.

Shape legend: W verified rows, N proposals, P block positions, L feature rows of a draft, F feature width, V vocabulary, C slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from gpu_check_context import Context
from gpu_check_graphs import Replay
from random_pair import SHAPES, drafter_json, target_json
from torch import Tensor

from domino_deploy.checkpoint_config import target_config
from domino_deploy.checkpoint_drafter import drafter_config
from domino_deploy.checkpoint_tensors import Shapes, expected_drafter_tensors, expected_target_tensors
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.loading import drafter_of, target_of
from domino_deploy.model.target import TargetModel
from domino_deploy.training.cached_pass import cached_pass

STANDARD_DEVIATION = 0.02  # initializer_range of Qwen3

# Token ids [1, N] out of anchor [1], hidden projection [1, N, R] and base logits [1, N, V].
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def random_models(context: Context) -> tuple[TargetModel, DrafterModel]:
    """Target and Domino drafter with random weights made on the device: bf16 on a GPU, float32 on the CPU."""
    sizes = context.sizes
    target = target_json({**SHAPES["qwen3-4b"], **sizes.target})
    targets, drafters = target_config(target, "target", None), drafter_config(drafter_json(target, **sizes.drafter), "drafter")
    random, dtype = context.generator(), torch.bfloat16 if context.is_cuda else torch.float32

    def weights(shapes: Shapes) -> dict[str, Tensor]:
        made = {}
        for name, shape in shapes.items():
            tensor = torch.ones(shape, dtype=dtype, device=context.device)  # norms keep it
            made[name] = tensor if len(shape) == 1 else tensor.normal_(0, STANDARD_DEVIATION, generator=random)
        return made

    model = target_of(targets, weights(expected_target_tensors(targets)), drafters.target_layer_ids)
    return model.to(context.device), drafter_of(drafters, weights(expected_drafter_tensors(drafters))).to(context.device)


class Loop:
    """Both models with their caches and graphs, for one sequence.

    Args:
        target: taps what the drafter wants.
        drafter: Domino.
        slots: tokens that fit.
        widths: rows to make verification graphs for.
    """

    def __init__(self, target: TargetModel, drafter: DrafterModel, *, slots: int, widths: Sequence[int]) -> None:
        head = drafter.head
        assert head is not None, "a Domino drafter"
        self.target, self.drafter, self.slots = target, drafter, slots
        self.proposals, self.block = drafter.config.num_proposals, drafter.config.block_size
        self.feature_rows = self.proposals + 1
        weight = target.model.embed_tokens.weight
        self._is_cuda, self._device = weight.is_cuda, weight.device
        self._caches = list(zip(*target.empty_caches(1, slots), strict=True))
        self._draft_caches = drafter.empty_caches(1, slots + self.feature_rows + self.block)
        zeros = weight.new_zeros
        self._start, self._anchor = zeros(1, dtype=torch.int64), zeros(1, dtype=torch.int64)
        self._kept_from, self._kept = zeros(1, dtype=torch.int64), zeros(1, dtype=torch.int64)
        self._features = zeros(1, self.feature_rows, drafter.config.feature_size)
        self._ids = {width: zeros(1, width, dtype=torch.int64) for width in {1, *widths}}
        self.plain = Replay(lambda: self._pass(self._ids[1], with_features=False), is_cuda=self._is_cuda)
        self.verify = {width: Replay(partial(self._pass, ids), is_cuda=self._is_cuda) for width, ids in self._ids.items()}
        self.draft = Replay(lambda: self._draft(self._features, self._kept_from, self._kept), is_cuda=self._is_cuda)

    @torch.inference_mode()
    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Reads the prompt (two tokens at least) with both models; returns the token behind it.

        Of the features, the last row is left for the first draft, which wants one.
        """
        ids = torch.tensor([prompt_ids], device=self._device)
        self._start.zero_()
        tokens, features = self._pass(ids)
        self._draft(features[:, :-1], self._kept_from.zero_(), self._kept.fill_(len(prompt_ids) - 1))
        self._features[:, :1].copy_(features[:, -1:])
        return int(tokens[0, -1])

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], head: Head, cycles: int) -> Iterator[tuple[list[int], list[int]]]:
        """Per cycle: what was drafted, and what was committed; the first token behind the prompt comes without a draft.

        Args:
            prompt_ids: as `prefill`.
            head: reads the tensors that `draft` gives, which stay where they are.
            cycles: fewer where the slots are used up.
        """
        width = self.proposals + 1
        anchor, start, kept = self.prefill(prompt_ids), len(prompt_ids), 1
        yield [], [anchor]
        for _ in range(cycles):
            if start + width > self.slots:
                return
            self._anchor.fill_(anchor)
            self._kept_from.fill_(start - kept)
            self._kept.fill_(kept)
            drafts_1N = head(self._anchor, *self.draft())
            self._ids[width][:, :1].copy_(self._anchor[:, None])
            self._ids[width][:, 1:].copy_(drafts_1N)
            self._start.fill_(start)
            chosen_1W, features = self.verify[width]()
            both = torch.cat([chosen_1W[0], drafts_1N[0]]).tolist()  # one wait for the GPU
            chosen, drafts = both[:width], both[width:]
            accepted = next((j for j, draft in enumerate(drafts) if draft != chosen[j]), self.proposals)
            self._features.copy_(features)
            kept, start, anchor = accepted + 1, start + accepted + 1, chosen[accepted]
            yield drafts, chosen[: accepted + 1]

    @torch.inference_mode()
    def decode(self, prompt_ids: Sequence[int], tokens: int) -> Iterator[int]:
        """Plain greedy decoding, token by token."""
        token, start = self.prefill(prompt_ids), len(prompt_ids)
        yield token
        for _ in range(tokens - 1):
            self._ids[1].fill_(token)
            self._start.fill_(start)
            token, start = int(self.plain()[0][0, 0]), start + 1
            yield token

    @torch.inference_mode()
    def _pass(self, ids_1W: Tensor, with_features: bool = True) -> tuple[Tensor, Tensor]:
        """The target's own token behind every row [1, W] and the rows' features [1, W, F]; keys and values written from `_start`."""
        every_row_W1 = torch.arange(ids_1W.shape[1], device=self._device)[:, None]
        logits_W1V, features = cached_pass(self.target, ids_1W, self._start, every_row_W1, self._caches, self.slots, with_features)
        return logits_W1V[:, 0].argmax(-1)[None], features

    @torch.inference_mode()
    def _draft(self, features_1LF: Tensor, start_1: Tensor, kept_1: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden projection [1, N, R] and base logits [1, N, V], float32; the first `kept` feature rows stay in the cache."""
        drafter, rows = self.drafter, features_1LF.shape[1]
        assert drafter.head is not None, "a Domino drafter"
        keys, values = self._draft_caches
        slots_C, own_P = torch.arange(keys[0].shape[2], device=self._device), torch.arange(self.block, device=self._device)
        anchor_at_1 = start_1 + kept_1
        first_own_1 = start_1 + rows
        positions = torch.cat([start_1 + torch.arange(rows, device=self._device), anchor_at_1 + own_P])[None]
        is_own_C = (slots_C >= first_own_1) & (slots_C < first_own_1 + self.block)
        mask = ((slots_C < anchor_at_1) | is_own_C)[None, None, None].expand(1, 1, self.block, -1)
        embeddings = self.target.model.embed_tokens(drafter.block_ids(self._anchor))
        output = drafter.cached(embeddings, features_1LF.to(embeddings.dtype), positions, mask, start_1, keys, values)
        for cache, updated in zip([*keys, *values], [*output.key_caches, *output.value_caches], strict=True):
            cache.copy_(updated)
        hidden = drafter.proposal_rows(output.hidden)
        return drafter.head.project_hidden(hidden).float(), self.target.lm_head(hidden).float()
