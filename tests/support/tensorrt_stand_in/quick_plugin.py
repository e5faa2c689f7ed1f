"""A child process that drives a quickly deployable plugin as TensorRT's builder does: one JSON request in, one JSON answer out.

NVIDIA's template classes are real; symbolic dimensions and launch expressions, which only a builder can make, are stand-ins here.

    python -m tests.support.tensorrt_stand_in.quick_plugin REQUEST

The request: `registrations`, the compute capabilities of one after the other, and `calls`, each with `types` and `shapes` of the inputs
([size, is constant] per dimension) and a `tactic`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tensorrt as trt


@dataclass(frozen=True)
class Dimension:
    """IDimensionExpr, with a value even where the builder would not know one yet."""

    value: int
    constant: bool = True

    def is_constant(self) -> bool:
        return self.constant

    def get_constant_value(self) -> int:
        assert self.constant, "TensorRT has no value for a size that is dynamic"
        return self.value


class Expressions:
    """IExprBuilder."""

    def constant(self, value: int) -> Dimension:
        return Dimension(value)

    def operation(self, kind: Any, left: Dimension, right: Dimension) -> Dimension:
        kinds = trt.DimensionOperation
        values = {kinds.CEIL_DIV: -(-left.value // right.value), kinds.SUM: left.value + right.value, kinds.PROD: left.value * right.value}
        return Dimension(values[kind], left.constant and right.constant)


class Shape(list[Any]):
    """DimsExprs."""

    def __init__(self, sizes: int | Sequence[Dimension]) -> None:
        super().__init__([None] * sizes if isinstance(sizes, int) else sizes)


class Scalars(dict[int, Any]):
    """ISymExprs: what follows a kernel's inputs."""

    nbSymExprs = 0


class Scalar:
    """ISymExpr."""

    def __init__(self, expression: Any) -> None:
        self.expr: Dimension = expression._expr


def drive(name: str, namespace: str, types: Sequence[str], shapes: Sequence[Sequence[tuple[int, bool]]], tactic: int) -> dict[str, object]:
    """Everything that TensorRT would be told about one node."""
    creator = trt.get_plugin_registry().get_creator(name, "1", namespace)
    fields = trt.PluginFieldCollection([])
    plugin = creator.create_plugin(name, namespace, fields, trt.TensorRTPhase.BUILD, trt.QuickPluginCreationRequest.STRICT_AOT)
    input_types = [getattr(trt.DataType, each) for each in types]
    output_types = plugin.get_output_data_types(input_types, [len(shape) for shape in shapes])
    expressions = Expressions()
    output_shapes = plugin.get_output_shapes([Shape([Dimension(*size) for size in shape]) for shape in shapes], [], expressions)
    sizes = [[size for size, _ in shape] for shape in shapes] + [[size.value for size in shape] for shape in output_shapes]
    tensors = [_tensor(*each) for each in zip(sizes, [*input_types, *output_types], strict=True)]
    inputs, outputs = tensors[: len(shapes)], tensors[len(shapes) :]
    combinations = plugin.get_supported_format_combinations(tensors, len(inputs))
    plugin.configure_plugin(inputs, outputs)
    tactics = sorted(plugin.get_valid_tactics())
    plugin.set_tactic(tactic)
    launch, scalars = SimpleNamespace(), Scalars()
    plugin.get_launch_params(None, tensors, len(inputs), launch, scalars, expressions)
    kernel, ptx = plugin.get_kernel([each.desc for each in inputs], [each.desc for each in outputs])
    flat = [[each.type.name, each.format.name] for each in combinations]
    return {
        "fields": [field.name for field in creator.field_names],
        "types": [each.name for each in output_types],
        "shapes": [[size.value for size in shape] for shape in output_shapes],
        "combinations": [flat[start : start + len(tensors)] for start in range(0, len(flat), len(tensors))],
        "tactics": tactics,
        "entry": kernel,
        "ptx": ptx.decode(),
        "launch": {key: [each.expr.value, each.expr.constant] for key, each in vars(launch).items()},
        "scalars": [scalars[place].expr.value for place in range(scalars.nbSymExprs)],
    }


def _tensor(sizes: Sequence[int], dtype: Any) -> Any:
    tensor, desc = trt.DynamicPluginTensorDesc(), trt.PluginTensorDesc()
    desc.type, desc.format, desc.scale, desc.dims = dtype, trt.TensorFormat.LINEAR, 1.0, trt.Dims(list(sizes))
    tensor.desc, tensor.min, tensor.max, tensor.opt = desc, desc.dims, desc.dims, desc.dims
    return tensor


def main(request: dict[str, Any]) -> list[object]:
    """The answers, one per call: what `drive` returns, or the message of the plugin's refusal."""
    trt.IDimensionExpr, trt.DimsExprs = Dimension, Shape  # before tensorrt.plugin takes them
    import tensorrt.plugin._tensor as symbols

    symbols.SymExprImpl = Scalar
    from domino_deploy.errors import DominoDeployError
    from domino_deploy.plugins import op, trt_plugin

    answers: list[object] = []
    for capabilities in request["registrations"]:
        try:
            trt_plugin.register(capabilities)
        except DominoDeployError as refusal:
            answers.append(str(refusal))
    for call in request["calls"]:
        try:
            answers.append(drive(op.TILES_NAME, op.DOMAIN, **call))
        except DominoDeployError as refusal:
            answers.append(str(refusal))
    return answers


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
