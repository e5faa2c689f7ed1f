"""The head graph: the greedy rollout over the proposals, one trip of an ONNX Loop per proposal.

PyTorch exports what happens in one trip (`HeadStep`) and what happens once for all of them (`HiddenProjection`); the
loop around the trip is built here, since a rollout of symbolic length has no form in an exported PyTorch program.

Shape legend: B batch, N proposals, M model width, G GRU width, R rank, V vocabulary.
"""

from __future__ import annotations

import onnx_ir as ir
from torch import Tensor, nn

from domino_deploy.config import DrafterConfig, DrafterKind, TargetConfig
from domino_deploy.exporters import passes
from domino_deploy.exporters.graph import TargetEnds, export_graph
from domino_deploy.exporters.rollout import looped_over_proposals
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.head import DominoHead
from domino_deploy.plugins.torch_op import fused_logit_correction
from domino_deploy.signature import ANCHOR_IDS, BASE_LOGITS, DRAFT_IDS, HIDDEN, GraphSignature, TensorSpec, head_signature


class ArgmaxHead(nn.Module):
    """A DFlash drafter has no head: every proposal is the base logits' argmax."""

    def forward(self, base_logits_BNV: Tensor) -> Tensor:
        return base_logits_BNV.argmax(dim=-1)


class HiddenProjection(nn.Module):
    """z = W1[:, :M] h for all positions at once."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.drafter = DrafterModel(config)

    def forward(self, hidden_BNM: Tensor) -> Tensor:
        return _head(self.drafter).project_hidden(hidden_BNM)


class HeadStep(nn.Module):
    """One trip of `DominoHead.rollout`: consume the last token, draft the next."""

    def __init__(self, drafter: DrafterConfig, target: TargetConfig) -> None:
        super().__init__()
        self.target = TargetEnds(target)
        self.drafter = DrafterModel(drafter)

    def forward(self, token_ids_B: Tensor, state_BG: Tensor, base_row_BV: Tensor, projected_row_BR: Tensor) -> tuple[Tensor, Tensor]:
        head = _head(self.drafter)
        state_BG = head.step(self.target.model.embed_tokens(token_ids_B), state_BG)
        token_ids_B, _ = fused_logit_correction(base_row_BV, projected_row_BR, head.project_state(state_BG), head.codebook_VR)
        return token_ids_B, state_BG


def onnx_from_head(drafter: DrafterConfig, target: TargetConfig) -> ir.Model:
    """The head as one graph; its weights are initializers `drafter.<tensor name>` and `target.<tensor name>` without data."""
    if drafter.kind is DrafterKind.DFLASH:
        return export_graph(ArgmaxHead, head_signature(drafter))
    model = export_graph(lambda: HiddenProjection(drafter), _projection_signature(drafter))
    step = export_graph(lambda: HeadStep(drafter, target), _step_signature(drafter))
    _roll_out(model, step, drafter)
    passes.add_correction_function(model)
    passes.clean(model)
    passes.check_signature(model, head_signature(drafter))
    return model


def _head(drafter: DrafterModel) -> DominoHead:
    assert drafter.head is not None, "only Domino drafters reach this"
    return drafter.head


def _roll_out(model: ir.Model, step: ir.Model, config: DrafterConfig) -> None:
    """Turn the hidden projection's graph into the whole head's."""
    graph = model.graph
    (hidden,), (projected,) = graph.inputs, graph.outputs
    anchor = ir.val(ANCHOR_IDS, ir.DataType.INT64, ["batch"])
    base = ir.val(BASE_LOGITS, ir.DataType.FLOAT, ["batch", "proposals", config.vocab_size])
    drafted = looped_over_proposals(
        graph, step.graph, anchor, base, projected, prefix_len=config.pure_draft_prefix_len, state_size=config.gru_hidden_dim
    )
    drafted.name, drafted.type, drafted.shape = DRAFT_IDS, ir.TensorType(ir.DataType.INT64), ir.Shape(["batch", "proposals"])
    graph.inputs[:] = [anchor, hidden, base]
    graph.outputs[:] = [drafted]
    graph.name = "DominoHead"


def _projection_signature(config: DrafterConfig) -> GraphSignature:
    hidden = TensorSpec(name=HIDDEN, dtype="float32", shape=("batch", "proposals", config.hidden_size), meaning="from the backbone")
    projected = TensorSpec(name="projected", dtype="float32", shape=("batch", "proposals", config.emb_dim), meaning="z")
    return GraphSignature(inputs=(hidden,), outputs=(projected,))


def _step_signature(config: DrafterConfig) -> GraphSignature:
    def spec(name: str, dtype: str, *sizes: int) -> TensorSpec:
        return TensorSpec(name=name, dtype=dtype, shape=("batch", *sizes), meaning="one trip of the rollout")

    token, state = spec("step.token", "int64"), spec("step.state", "float32", config.gru_hidden_dim)
    rows = spec("step.base_row", "float32", config.vocab_size), spec("step.projected_row", "float32", config.emb_dim)
    outputs = spec("next_token", "int64"), spec("next_state", "float32", config.gru_hidden_dim)
    return GraphSignature(inputs=(token, state, *rows), outputs=outputs)
