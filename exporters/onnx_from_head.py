"""The head graph: the greedy rollout over the proposals, one trip of an ONNX Loop per proposal.

PyTorch exports what happens in one trip (`HeadStep`) and what happens once for all of them (`HiddenProjection`); the
loop around the trip is built here, since a rollout of symbolic length has no form in an exported PyTorch program.

Everything is float32; `precision.py` gives weights and inputs the types they are stored in.

Shape legend: B batch, N proposals, M model width, G GRU width, R rank, V (draft) vocabulary, K candidates.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
from onnx_ir.tape import Tape
from torch import Tensor, nn

from domino_deploy.config import DrafterConfig, DrafterKind, TargetConfig
from domino_deploy.errors import RequestError
from domino_deploy.exporters import passes
from domino_deploy.exporters.graph import TargetEnds, export_graph
from domino_deploy.exporters.rollout import looped_over_proposals
from domino_deploy.model.draft_vocab import TOKEN_IDS, DraftVocab
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.head import DominoHead
from domino_deploy.plugins.reference import deviations
from domino_deploy.plugins.torch_op import fused_logit_correction, pooled_logit_correction
from domino_deploy.signature import (
    ANCHOR_IDS,
    BASE_LOGITS,
    DRAFT_IDS,
    HIDDEN,
    UNCERTIFIED,
    GraphForm,
    GraphSignature,
    TensorSpec,
    head_signature,
)

_FULL = GraphForm()


class ArgmaxHead(nn.Module):
    """A DFlash drafter has no head: every proposal is the base logits' argmax."""

    def forward(self, base_logits_BNV: Tensor) -> Tensor:
        return base_logits_BNV.argmax(dim=-1)


class SelectedArgmaxHead(nn.Module):
    """The same on a draft vocabulary."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.draft_vocab = DraftVocab(size, width, 0)

    def forward(self, base_logits_BNV: Tensor) -> Tensor:
        return self.draft_vocab.token_ids[base_logits_BNV.argmax(dim=-1)]


class HiddenProjection(nn.Module):
    """z = W1[:, :M] h for all positions at once."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.drafter = DrafterModel(config)

    def forward(self, hidden_BNM: Tensor) -> Tensor:
        return _head(self.drafter).project_hidden(hidden_BNM)


class HeadStep(nn.Module):
    """One trip of `DominoHead.rollout`: consume the last token, draft the next."""

    def __init__(self, drafter: DrafterConfig, target: TargetConfig, draft_vocab_size: int | None) -> None:
        super().__init__()
        self.target = TargetEnds(target)
        self.drafter = DrafterModel(drafter)
        self.draft_vocab = None if draft_vocab_size is None else DraftVocab(draft_vocab_size, drafter.hidden_size, drafter.emb_dim)

    def forward(self, token_ids_B: Tensor, state_BG: Tensor, base_row_BV: Tensor, projected_row_BR: Tensor) -> tuple[Tensor, ...]:
        state_BG, projected_state_BR = self.next_state(token_ids_B, state_BG)
        token_ids_B, _ = fused_logit_correction(base_row_BV, projected_row_BR, projected_state_BR, self.codebook_VR)
        return token_ids_B, state_BG

    def next_state(self, token_ids_B: Tensor, state_BG: Tensor) -> tuple[Tensor, Tensor]:
        """The state after one more token, and its projection s."""
        head = _head(self.drafter)
        state_BG = head.step(self.target.model.embed_tokens(token_ids_B), state_BG)
        return state_BG, head.project_state(state_BG)

    @property
    def codebook_VR(self) -> Tensor:
        return _head(self.drafter).codebook_VR if self.draft_vocab is None else self.draft_vocab.codebook  # type: ignore[return-value]


class PooledHeadStep(HeadStep):
    """The same with a candidate pool; a third output says where the pool does not settle the token."""

    def __init__(self, drafter: DrafterConfig, target: TargetConfig, draft_vocab_size: int | None, is_certified: bool) -> None:
        super().__init__(drafter, target, draft_vocab_size)
        self.is_certified = is_certified

    def forward(  # type: ignore[override]  # one more row
        self, token_ids_B: Tensor, state_BG: Tensor, base_row_BV: Tensor, projected_row_BR: Tensor, candidates_BK: Tensor
    ) -> tuple[Tensor, ...]:
        state_BG, projected_state_BR = self.next_state(token_ids_B, state_BG)
        codebook_VR = self.codebook_VR
        token_ids_B, _, uncertified_B = pooled_logit_correction(
            base_row_BV,
            projected_row_BR,
            projected_state_BR,
            codebook_VR,
            *deviations(codebook_VR),
            candidates_BK,
            self.is_certified,
        )
        return token_ids_B, state_BG, uncertified_B


def onnx_from_head(drafter: DrafterConfig, target: TargetConfig, form: GraphForm = _FULL, certified_pool: bool = False) -> ir.Model:
    """The head as one graph, in float32.

    Its weights are initializers `drafter.<tensor name>`, `target.<tensor name>` and `draft_vocab.<tensor name>` without data.

    Args:
        drafter: the drafter.
        target: its target.
        form: candidate pool and draft vocabulary; its dtype is left to `precision.py`.
        certified_pool: look at every token that could beat the pool's winner as well, so that the whole (draft) vocabulary's wins.

    Raises:
        RequestError: a candidate pool that has no meaning for this drafter, or more candidates than tokens.
    """
    form = dataclasses.replace(form, dtype="float32")
    check_candidate_pool(drafter, form, certified_pool)
    signature = head_signature(drafter, form)
    if drafter.kind is DrafterKind.DFLASH:
        size = form.draft_vocab_size
        return export_graph(ArgmaxHead if size is None else lambda: SelectedArgmaxHead(size, drafter.hidden_size), signature)
    model = export_graph(lambda: HiddenProjection(drafter), _projection_signature(drafter))
    step = export_graph(lambda: _step(drafter, target, form, certified_pool), _step_signature(drafter, form))
    _roll_out(model, step, drafter, form, signature)
    passes.add_correction_function(model)
    passes.clean(model)
    passes.check_signature(model, signature)
    return model


def check_candidate_pool(drafter: DrafterConfig, form: GraphForm, certified_pool: bool) -> None:
    """Check what an export asks of the correction before anything is written.

    Raises:
        RequestError: see `onnx_from_head`.
    """
    size, vocab_size = form.candidate_pool, form.draft_vocab_size or drafter.vocab_size
    if not 0 <= size <= vocab_size:
        raise RequestError(
            f"Expected a candidate pool of 0 (the whole vocabulary) to {vocab_size} tokens, the vocabulary drafted from, found {size}. "
            "Choose a size in that range; 2048 is usual."
        )
    if size and drafter.kind is DrafterKind.DFLASH:
        raise RequestError(
            f"Expected no candidate pool for a DFlash drafter, which has no correction, found one of {size} tokens. Leave it out."
        )
    if certified_pool and not size:
        raise RequestError("Expected the size of the candidate pool that is to be certified, found none. Say how many candidates.")


def _head(drafter: DrafterModel) -> DominoHead:
    assert drafter.head is not None, "only Domino drafters reach this"
    return drafter.head


def _step(drafter: DrafterConfig, target: TargetConfig, form: GraphForm, certified_pool: bool) -> HeadStep:
    if form.candidate_pool:
        return PooledHeadStep(drafter, target, form.draft_vocab_size, certified_pool)
    return HeadStep(drafter, target, form.draft_vocab_size)


def _roll_out(model: ir.Model, step: ir.Model, config: DrafterConfig, form: GraphForm, signature: GraphSignature) -> None:
    """Turn the hidden projection's graph into the whole head's."""
    graph = model.graph
    (hidden,), (projected,) = graph.inputs, graph.outputs
    anchor, base = (_value(spec) for spec in signature.inputs if spec.name in (ANCHOR_IDS, BASE_LOGITS))
    rows, token_ids = [base, projected], None
    if form.candidate_pool:
        rows.append(_candidates(Tape(graph), base, form.candidate_pool))
    if form.draft_vocab_size is not None:
        token_ids = ir.val(f"draft_vocab.{TOKEN_IDS}", ir.DataType.INT64, [form.draft_vocab_size])
        graph.initializers.add(token_ids)
    drafted, uncertified = looped_over_proposals(
        graph, step.graph, anchor, rows, prefix_len=config.pure_draft_prefix_len, state_size=config.gru_hidden_dim, token_ids=token_ids
    )
    outputs = {DRAFT_IDS: drafted, UNCERTIFIED: uncertified}
    graph.inputs[:] = [anchor, hidden, base]
    graph.outputs[:] = [_named(outputs[spec.name], spec) for spec in signature.outputs]
    graph.name = "DominoHead"


def _candidates(tape: Tape, base_BNV: ir.Value, size: int) -> ir.Value:
    """`plugins.reference.candidates`: ids of the highest base logits, ties to the lowest id, rising: int64 [B, N, K]."""
    count = tape.op("Constant", [], {"value_ints": [size]})
    _, ids = tape.op_multi_out("TopK", [base_BNV, count], {"axis": -1, "sorted": 0}, num_outputs=2)
    rising, _ = tape.op_multi_out("TopK", [ids, count], {"axis": -1, "largest": 0}, num_outputs=2)
    return rising


def _value(spec: TensorSpec) -> ir.Value:
    return _named(ir.val(spec.name), spec)


def _named(value: ir.Value | None, spec: TensorSpec) -> ir.Value:
    assert value is not None, "the signature's outputs are those of the form"
    value.name, value.type, value.shape = spec.name, ir.TensorType(ir.DataType[_ONNX_NAMES[spec.dtype]]), ir.Shape(spec.shape)
    return value


_ONNX_NAMES = {"int64": "INT64", "float32": "FLOAT"}


def _projection_signature(config: DrafterConfig) -> GraphSignature:
    hidden = TensorSpec(name=HIDDEN, dtype="float32", shape=("batch", "proposals", config.hidden_size), meaning="from the backbone")
    projected = TensorSpec(name="projected", dtype="float32", shape=("batch", "proposals", config.emb_dim), meaning="z")
    return GraphSignature(inputs=(hidden,), outputs=(projected,))


def _step_signature(config: DrafterConfig, form: GraphForm) -> GraphSignature:
    def spec(name: str, dtype: str, *sizes: int) -> TensorSpec:
        return TensorSpec(name=name, dtype=dtype, shape=("batch", *sizes), meaning="one trip of the rollout")

    vocab_size = form.draft_vocab_size or config.vocab_size
    inputs = [
        spec("step.token", "int64"),
        spec("step.state", "float32", config.gru_hidden_dim),
        spec("step.base_row", "float32", vocab_size),
        spec("step.projected_row", "float32", config.emb_dim),
    ]
    outputs = [spec("next_token", "int64"), spec("next_state", "float32", config.gru_hidden_dim)]
    if form.candidate_pool:
        inputs.append(spec("step.candidates_row", "int64", form.candidate_pool))
        outputs.append(spec("next_uncertified", "bool"))
    return GraphSignature(inputs=tuple(inputs), outputs=tuple(outputs))
