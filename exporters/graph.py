"""One PyTorch module, one ONNX graph: example inputs, names and dynamic dimensions out of `signature.py`.

The modules are built without memory for their weights (fake tensors), so exporting costs the same for a model of any
size; `weights.py` gives the initializers their contents afterwards.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from domino_deploy.config import TargetConfig
from domino_deploy.errors import ExportError
from domino_deploy.exporters import passes
from domino_deploy.exporters.translations import OPSET, translation_table
from domino_deploy.signature import GraphSignature

_DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}

# Sizes of the example tensors: all different and none equal to 1, since the exporter takes equal sizes for one dimension
# and a size of 1 for a constant.
_EXAMPLE_SIZES = {"batch": 2, "rows": 3, "logit_rows": 5, "capacity": 41, "feature_rows": 7, "draft_capacity": 83, "proposals": 13}


class _Embedding(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)


class TargetEnds(nn.Module):
    """The target's embedding and LM head, which the drafter borrows, under the names they have in the target."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.model = _Embedding(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


def export_graph(build: Callable[[], nn.Module], signature: GraphSignature, derived: dict[str, tuple[str, int]] | None = None) -> ir.Model:
    """Export the module that `build` makes.

    Initializers keep their names in the module (`target.model.norm.weight`); those that are weights hold no data yet.

    Args:
        build: makes the module; called where parameters are fake.  Buffers that it makes with `constant` are real.
        signature: inputs in the order of the module's `forward`, outputs in the order it returns.
        derived: symbolic sizes that are another one plus a number, such as context_rows = feature_rows + block.

    Raises:
        ExportError: the exporter fails, or the graph does not have the signature's inputs and outputs.
    """
    derived = derived or {}
    sizes = dict(_EXAMPLE_SIZES)
    dims = {name: Dim(name, min=1) for name in sizes}
    for name, (base, offset) in derived.items():
        sizes[name], dims[name] = sizes[base] + offset, dims[base] + offset
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        module = build().eval()
        example = tuple(_example(spec.shape, spec.dtype, sizes) for spec in signature.inputs)
        model = _exported(module, example, signature, _dynamic_shapes(module, signature, dims))
    model.producer_name, model.producer_version, model.graph.name = "domino-deploy", None, type(module).__name__
    for name in module.state_dict():
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = None  # a fake tensor, which nothing may read
    passes.fold_constants(model)
    passes.reshape_by_position(model)
    passes.clean(model)
    passes.name_dimensions(model, {str(dims[name]): name for name in derived})
    passes.check_signature(model, signature)
    return model


def constant(make: Callable[[], Tensor]) -> Tensor:
    """A real tensor in the midst of fake ones (torch has no public way)."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        return make()


def _exported(module: nn.Module, example: tuple[Tensor, ...], signature: GraphSignature, dynamic_shapes: tuple[object, ...]) -> ir.Model:
    try:
        program = torch.onnx.export(
            module,
            example,
            input_names=[spec.name for spec in signature.inputs],
            output_names=[spec.name for spec in signature.outputs],
            dynamic_shapes=dynamic_shapes,
            custom_translation_table=translation_table(),
            opset_version=OPSET,
            dynamo=True,
            optimize=False,  # the exporter's own optimiser fails on fake weights
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        if (refusal := _refusal(error)) is not None:
            raise refusal from None
        raise ExportError(
            f"{type(module).__name__}: expected an exportable module, found: {error} Check the versions of torch and onnxscript."
        ) from error
    assert program is not None, "the dynamo exporter always returns a program"
    return program.model


def _refusal(error: BaseException) -> ExportError | None:
    """What a translation refused by name, out of the layers that the exporter wraps around it."""
    cause = error.__cause__
    return cause if cause is None or isinstance(cause, ExportError) else _refusal(cause)


def _example(shape: tuple[int | str, ...], dtype: str, sizes: dict[str, int]) -> Tensor:
    return torch.zeros([sizes[size] if isinstance(size, str) else size for size in shape], dtype=_DTYPES[dtype])


def _dynamic_shapes(module: nn.Module, signature: GraphSignature, dims: Mapping[str, object]) -> tuple[object, ...]:
    """One entry per parameter of `forward`; a trailing `*args` takes the remaining inputs as one entry."""
    shapes = [{axis: dims[size] for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in signature.inputs]
    parameters = list(inspect.signature(module.forward).parameters.values())
    if parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        named = len(parameters) - 1
        return (*shapes[:named], tuple(shapes[named:]))
    return tuple(shapes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's remarks on its own internals (torchvision absent, shared dimension names)."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
