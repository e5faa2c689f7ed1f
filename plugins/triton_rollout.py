"""A block's greedy rollout in Triton: GRU step, state projection and corrected token for each proposal, on a GPU as one CUDA graph.

Shape legend: B batch, N proposals, E embedding width, G GRU width, R rank, V vocabulary, D draft vocabulary: V where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from domino_deploy.errors import RequestError, listed
from domino_deploy.plugins import reference
from domino_deploy.plugins import triton_bounds as bounds
from domino_deploy.plugins import triton_cell as cell
from domino_deploy.plugins import triton_kernels as kernels
from domino_deploy.plugins import triton_ops as ops
from domino_deploy.plugins import triton_tuning as tuned
from domino_deploy.plugins.triton_traffic import RolloutShape, Traffic, Variant, traffic

_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, kw_only=True)
class RolloutWeights:
    """What a rollout reads, of float32, float16 or bfloat16, on one device; rows may be strided, their elements lie side by side.

    embedding: [V, E], the target's.
    w_ih, w_hh: [3 G, E] and [3 G, G], the GRU's, gates in the order reset, update, new.
    state_projection: the columns of W1 for the state, [R, G].
    codebook: W2, [D, R].
    prefilter: `triton_bounds.by_int8_rows(codebook)`, D * (R + 8) bytes, for the variant `int8`.
    table: `embedding_table`, if its memory is to be spent; then neither embedding nor w_ih are read.
    token_ids: int64 [D], the tokens that the codebook's rows stand for; None where they are the target's own, in order.

    Raises:
        RequestError: tensors that do not fit together.
    """

    embedding: Tensor
    w_ih: Tensor
    w_hh: Tensor
    state_projection: Tensor
    codebook: Tensor
    prefilter: bounds.Approximation | None = None
    table: Tensor | None = None
    token_ids: Tensor | None = None

    def __post_init__(self) -> None:
        units, vocab_size = self.w_hh.shape[-1], self.codebook.shape[0] if self.token_ids is None else self.embedding.shape[0]
        expected = {
            "embedding": (self.embedding, (vocab_size, self.embedding.shape[-1])),
            "w_ih": (self.w_ih, (3 * units, self.embedding.shape[-1])),
            "w_hh": (self.w_hh, (3 * units, units)),
            "state_projection": (self.state_projection, (self.codebook.shape[-1], units)),
            "codebook": (self.codebook, (self.codebook.shape[0], self.codebook.shape[-1])),
        }
        if self.table is not None:
            expected["table"] = (self.table, (vocab_size, 3 * units))
        problems = [
            f"{name}: expected {list(shape)} of contiguous floats on {self.codebook.device}, found {list(tensor.shape)} of {tensor.dtype}"
            f" with strides {tensor.stride()} on {tensor.device}"
            for name, (tensor, shape) in expected.items()
            if tensor.shape != shape or tensor.dtype not in ops.FLOATS or tensor.stride(-1) != 1 or tensor.device != self.codebook.device
        ]
        if self.token_ids is not None and (self.token_ids.shape != self.codebook.shape[:1] or self.token_ids.dtype != torch.int64):
            found = f"{list(self.token_ids.shape)} of {self.token_ids.dtype}"
            problems.append(f"token_ids: expected [{self.codebook.shape[0]}] of torch.int64, found {found}")
        if problems:
            raise RequestError(listed("These weights make no rollout:", problems, "Pass the tensors of one drafter and its target."))


def embedding_table(embedding_VE: Tensor, w_ih_3GE: Tensor) -> Tensor:
    """The embedding times W_ih^T, [V, 3 G] in the embedding's type: V * 3 G values of memory, so that a step reads 3 G of them
    in place of W_ih.  Sums are in float32; the products' rounding to a half type changes the drafts slightly."""
    parts = [rows.float() @ w_ih_3GE.float().T for rows in embedding_VE.split(_ROWS_AT_ONCE)]
    return torch.cat([part.to(embedding_VE.dtype) for part in parts])


class TritonRollout:
    """Drafts N tokens per row, for a fixed batch.

    Proposal j uses the GRU's state after the anchor and the proposals before j; the first `prefix_len` are the base logits' argmax.

    Args:
        weights: see there.
        batch: rows, 1 to 32.
        proposals: N.
        variant: how the best token is found; all of them find the best of the whole vocabulary.
        prefix_len: leading proposals that are not corrected.
        pool_size: candidates per proposal, of the variant `pool` only.

    Attributes:
        anchor_ids, hidden_projection, base_logits: the inputs' buffers.  A call copies its arguments there, except a buffer itself:
            who writes to the buffers spares that copy.
        contenders: int32 [N, B], tokens per proposal that the last block's bound did not rule out; zeros of `full`.

    Raises:
        RequestError: numbers out of range, a variant without its weights, or no GPU.
    """

    def __init__(
        self, weights: RolloutWeights, batch: int, proposals: int, variant: Variant | str, prefix_len: int = 0, pool_size: int = 256
    ) -> None:
        self._weights, self._variant, self._prefix_len = weights, _checked(weights, batch, proposals, variant, prefix_len), prefix_len
        vocab_size, rank = weights.codebook.shape
        units, device = weights.w_hh.shape[1], weights.codebook.device
        self._pool_size = min(pool_size, vocab_size)
        self.anchor_ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self.hidden_projection = torch.zeros(batch, proposals, rank, device=device)
        self.base_logits = torch.zeros(batch, proposals, vocab_size, device=device)
        self.contenders = torch.zeros(proposals, batch, dtype=torch.int32, device=device)
        self._keys, self._thresholds = torch.zeros(2, proposals + 1, batch, dtype=torch.int64, device=device)
        self._states = torch.zeros(2, batch, units, device=device)
        self._state_projection = torch.zeros(batch, rank, device=device)
        self._draft_ids = torch.zeros(batch, proposals, dtype=torch.int64, device=device)
        self._approximation = weights.prefilter
        if self._variant is Variant.POOL:
            self._approximation = bounds.by_mean(*reference.deviations(weights.codebook))
        self._graph = self._captured() if device.type == "cuda" else None

    def __call__(self, anchor_ids: Tensor, hidden_projection: Tensor, base_logits: Tensor) -> Tensor:
        """Draft a block.

        Args:
            anchor_ids: int64 [B], the last committed tokens, each in 0..V-1 (not checked: that would wait for the GPU).
            hidden_projection: z, float32 [B, N, R].
            base_logits: float32 [B, N, D].

        Returns:
            int64 [B, N]; the next call overwrites it.

        Raises:
            RequestError: tensors of other shapes or types.
        """
        given = {"anchor_ids": anchor_ids, "hidden_projection": hidden_projection, "base_logits": base_logits}
        buffers = {name: getattr(self, name) for name in given}
        problems = [
            f"{name}: expected {list(buffer.shape)} of {buffer.dtype}, found {list(given[name].shape)} of {given[name].dtype}"
            for name, buffer in buffers.items()
            if given[name].shape != buffer.shape or given[name].dtype != buffer.dtype
        ]
        if problems:
            raise RequestError(listed("A rollout does not fit its inputs:", problems, "Make a TritonRollout for these sizes."))
        for name, buffer in buffers.items():
            if given[name] is not buffer:
                buffer.copy_(given[name])
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()
        return self._draft_ids

    def traffic(self, contenders: int = 0) -> Traffic:
        """Bytes and launches of a block (`triton_traffic.traffic`)."""
        weights, (batch, proposals, vocab_size) = self._weights, self.base_logits.shape
        shape = RolloutShape(
            vocab_size=vocab_size,
            rank=weights.codebook.shape[1],
            width=weights.embedding.shape[1],
            units=weights.w_hh.shape[1],
            proposals=proposals,
            weight_bytes=weights.codebook.element_size(),
            batch=batch,
            prefix_len=self._prefix_len,
            pool_size=self._pool_size,
            has_table=weights.table is not None,
        )
        return traffic(shape, self._variant, contenders)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The block's launches as a graph, after a run on a side stream that compiles the kernels."""
        with torch.cuda.device(self.anchor_ids.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._launch()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._launch()
        return graph

    def _launch(self) -> None:
        """Every kernel of a block, in order."""
        batch, proposals, vocab_size = self.base_logits.shape
        blocks = {"BLOCK_B": tuned.power_of_two(batch), "BLOCK_N": tuned.power_of_two(proposals + 1)}
        cell.begin_kernel[(1,)](self.anchor_ids, self._keys, self._thresholds, self.contenders, batch, proposals, **blocks)
        if self._prefix_len:
            kernels.argmax_kernel[(tuned.blocks(vocab_size, tuned.ARGMAX_COLUMNS), batch, min(self._prefix_len, proposals))](
                self.base_logits, *self.base_logits.stride()[:2], vocab_size, self._keys[1:], BLOCK_V=tuned.ARGMAX_COLUMNS
            )
        pools = None
        if self._variant is Variant.POOL and self._prefix_len < proposals:
            pools = torch.topk(self.base_logits[:, self._prefix_len :], self._pool_size, sorted=False).indices  # [B, N - prefix, K]
        for step in range(proposals):
            self._step_state(step)
            if step >= self._prefix_len:
                self._correct(step, None if pools is None else pools[:, step - self._prefix_len])
        is_mapped, token_ids = self._token_ids()
        cell.finish_kernel[(1,)](self._keys, token_ids, self._draft_ids, batch, proposals, IS_MAPPED=is_mapped, **blocks)

    def _token_ids(self) -> tuple[bool, Tensor]:
        """Whether drafted ids have to be looked up, and where."""
        mapping = self._weights.token_ids
        return mapping is not None, self._keys if mapping is None else mapping

    def _step_state(self, step: int) -> None:
        """The GRU's state after one more token."""
        weights, batch, units = self._weights, self.base_logits.shape[0], self._states.shape[2]
        tuning = tuned.tuning(batch).cell
        rows = weights.embedding if weights.table is None else weights.table
        is_mapped, token_ids = self._token_ids()
        cell.gru_cell_kernel[(tuned.blocks(units, tuning.rows // 4),)](
            self._keys[step],
            token_ids,
            rows,
            rows.stride(0),
            weights.w_ih,
            weights.w_ih.stride(0),
            weights.w_hh,
            weights.w_hh.stride(0),
            self._states[step % 2],
            self._states[(step + 1) % 2],
            weights.embedding.shape[1],
            units,
            rows.shape[0],
            batch,
            IS_TABLE=weights.table is not None,
            IS_MAPPED=is_mapped and step > 0,  # the anchors are the target's tokens
            IS_FIRST=step == 0,
            BLOCK_G=tuning.rows // 4,
            BLOCK_C=tuning.columns,
            BLOCK_B=tuned.batch_block(batch),
            num_warps=tuning.warps,
        )

    def _correct(self, step: int, pool: Tensor | None) -> None:
        """The proposal's token, from the state after it."""
        weights, batch = self._weights, self.base_logits.shape[0]
        (rank, units), tuning = weights.state_projection.shape, tuned.tuning(batch).projection
        cell.projection_kernel[(tuned.blocks(rank, tuning.rows),)](
            weights.state_projection,
            weights.state_projection.stride(0),
            self._states[(step + 1) % 2],
            self._state_projection,
            rank,
            units,
            batch,
            BLOCK_W=tuning.rows,
            BLOCK_C=tuning.columns,
            BLOCK_B=tuned.batch_block(batch),
            num_warps=tuning.warps,
        )
        rows = (self.base_logits[:, step], self.hidden_projection[:, step], self._state_projection, weights.codebook)
        keys = self._keys[step + 1]
        if self._approximation is None or self._variant is Variant.FULL:
            ops.correct(*rows, keys)
            return
        thresholds = keys  # which rise with every tile's finds
        if pool is not None:
            thresholds = self._thresholds[step + 1]
            ops.correct_pool(*rows, pool, thresholds)
        ops.correct_certified(*rows, self._approximation, thresholds, keys, self.contenders[step])


def _checked(weights: RolloutWeights, batch: int, proposals: int, variant: Variant | str, prefix_len: int) -> Variant:
    """The variant, if everything is in range."""
    ops.check_can_run(weights.codebook.device)
    problems = []
    if not 1 <= batch <= tuned.MOST_ROWS:
        problems.append(f"batch: expected 1 to {tuned.MOST_ROWS}, found {batch}")
    if proposals < 1:
        problems.append(f"proposals: expected 1 or more, found {proposals}")
    if prefix_len < 0:
        problems.append(f"prefix_len: expected 0 or more, found {prefix_len}")
    if variant not in list(Variant):
        problems.append(f"variant: expected one of {', '.join(Variant)}, found {variant}")
    if variant == Variant.INT8 and weights.prefilter is None:
        problems.append("variant int8: expected weights with a prefilter, found none")
    if problems:
        raise RequestError(listed("A rollout cannot be made:", problems, "Change these arguments."))
    return Variant(variant)
