"""Products in float8 for engines: where a graph multiplies with a layer's matrix, both sides are rounded to float8 and back first.

The seven matrices of every decoder layer are multiplied in float8 (e4m3); the LM head, the projection of the tapped features, the whole
head, attention and norms stay as they are.  TensorRT takes the pairs of QuantizeLinear and DequantizeLinear for what they say: a
product whose inputs are float8, scaled behind it in float32.  Weights stay in the bundle in 16 bits, and the builder rounds them, so
that no copy of them is written.

Scales are powers of two, one for each tensor.  A floating type loses no precision by that, and every division by a scale is exact, in
whatever type the builder carries it out.  One scale for each output would not do: TensorRT-RTX 1.7 then keeps the product in the
graph's type and scales it afterwards, and sums of products of float8 values exceed float16 (65504) from a few hundred inputs on.  It
also makes one product of those that share an input (queries, keys and values; gate and up), so their matrices share one scale as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from domino_deploy.engines import ProductRange
from domino_deploy.errors import ExportError, RequestError, listed

# Largest finite value of e4m3 without infinities (arXiv 2209.05433, table 1).
LARGEST = 448.0

# Scales are stored in the graph's type: from float16's smallest normal number to its largest power of two.  With the smallest one a
# tensor is below 0.03, and its values down to 1e-6 of that keep all their digits.
_LEAST_EXPONENT, _MOST_EXPONENT = -14, 15
_MOST = LARGEST * 2.0**_MOST_EXPONENT

# The oldest GPUs that multiply in float8: Ada (8.9), then Hopper (9.0).
_LEAST_CAPABILITY = (8, 9)

_FLOAT8 = ir.DataType.FLOAT8E4M3FN
_SIXTEEN_BITS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MATRIX = re.compile(r"(target\.model|drafter)\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
_DTYPE_ADVICE = "Export the pair with --dtype float16 or bfloat16, or build engines without --fp8."
_CALIBRATE_AGAIN = "Calibrate with other text (--calibration), or build engines without --fp8."


@dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """What to calibrate with: token ids of the bundle's tokenizer, prompt by prompt, and where they come from."""

    source: str
    prompts: Sequence[Sequence[int]]


def is_float8_matrix(name: str) -> bool:
    """Whether an initializer is a matrix whose products are float8."""
    return _MATRIX.fullmatch(name) is not None


def check_float8_capabilities(capabilities: Iterable[str]) -> None:
    """Check that GPUs of these compute capabilities ("8.9") multiply in float8.

    Raises:
        RequestError: those that do not, by name; or none given, which stands for all GPUs that TensorRT-RTX knows.
    """
    wanted = list(capabilities)
    old = [found for found in wanted if tuple(map(int, found.split("."))) < _LEAST_CAPABILITY]
    if old or not wanted:
        least = ".".join(map(str, _LEAST_CAPABILITY))
        raise RequestError(
            f"--fp8: expected GPUs of compute capability {least} or above, which multiply in float8, found "
            f"{', '.join(old) or 'all that TensorRT-RTX supports'}. Choose others (--compute-capability), or build with --fp16 or --bf16."
        )


def scale_of(largest: float) -> float:
    """The least power of two that brings a magnitude down to what float8 holds; 1 for a tensor of zeros."""
    if largest == 0:
        return 1.0
    mantissa, exponent = math.frexp(largest / LARGEST)  # mantissa in [0.5, 1): a power of two has 0.5
    return math.ldexp(1.0, max(exponent - (mantissa == 0.5), _LEAST_EXPONENT))


def quantise_fp8(model: ir.Model, ranges: Mapping[str, ProductRange]) -> int:
    """Afterwards: every product with a layer's matrix has float8 inputs; products of one input share its float8 form.

    Args:
        model: a private copy of a target or backbone in float16 or bfloat16, with or without the data of its weights.
        ranges: from calibration, by the name of the matrix's initializer; others are left alone.

    Returns:
        The number of products.

    Raises:
        RequestError: the graph has no such products in 16 bits (float32, or weights in integers).
        ExportError: a product that was not calibrated, or magnitudes that are no numbers; all of them by name.
    """
    products = _products(model.graph)
    _check_types(model.graph.name or "the graph", products)
    scales = _scales(products, ranges)
    rounded: dict[ir.Value, ir.Value] = {}
    for product in products:
        source, weight = product.source, product.weight
        for_source, for_weight = scales[source]
        if source not in rounded:
            rounded[source] = _insert(model.graph, product.node, source, for_source, product.dtype)
        product.node.replace_input_with(0, rounded[source])
        if product.turn.inputs[0] is weight:  # not done for another product of the same matrix
            product.turn.replace_input_with(0, _insert(model.graph, product.turn, weight, for_weight, product.dtype))
    return len(products)


class _Product(NamedTuple):
    """MatMul(source, Transpose(weight))."""

    node: ir.Node
    turn: ir.Node
    source: ir.Value
    weight: ir.Value

    @property
    def name(self) -> str:
        return str(self.weight.name)

    @property
    def dtype(self) -> ir.DataType:
        return self.weight.dtype or ir.DataType.UNDEFINED


def _products(graph: ir.Graph) -> list[_Product]:
    """Every product with a layer's matrix, in the order of the graph."""
    found = []
    for node in graph:
        if node.op_type != "MatMul":
            continue
        source, factor = node.inputs
        turn = None if factor is None else factor.producer()
        weight = turn.inputs[0] if turn is not None and turn.op_type == "Transpose" else None
        if source is not None and turn is not None and weight is not None and is_float8_matrix(str(weight.name)):
            found.append(_Product(node, turn, source, weight))
    return found


def _check_types(graph: str, products: list[_Product]) -> None:
    others = sorted({str(product.dtype) for product in products} - {str(dtype) for dtype in _SIXTEEN_BITS})
    if others or not products:
        found = ", ".join(others) or "none of a floating type"
        raise RequestError(f"--fp8: {graph}: expected the layers' matrices in float16 or bfloat16, found {found}. {_DTYPE_ADVICE}")


def _scales(products: list[_Product], ranges: Mapping[str, ProductRange]) -> dict[ir.Value, tuple[float, float]]:
    """By input: its scale, and the one of all matrices that it is multiplied with."""
    largest: dict[ir.Value, tuple[float, float]] = {}
    problems = []
    for product in products:
        found = ranges.get(product.name)
        if found is None:
            problems.append(f"{product.name}: not calibrated")
            continue
        problems += [f"{product.name}: {magnitude}" for magnitude in (found.input, found.weight) if not 0 <= magnitude <= _MOST]
        by_input, by_matrix = largest.get(product.source, (0.0, 0.0))
        largest[product.source] = max(by_input, found.input), max(by_matrix, found.weight)
    if problems:
        intro = f"--fp8: expected a magnitude from 0 to {_MOST:.0f} for the input and the matrix of every product, found"
        raise ExportError(listed(intro, problems, _CALIBRATE_AGAIN))
    return {source: (scale_of(by_input), scale_of(by_matrix)) for source, (by_input, by_matrix) in largest.items()}


def _insert(graph: ir.Graph, before: ir.Node, value: ir.Value, scale: float, dtype: ir.DataType) -> ir.Value:
    """The value rounded to float8 and back, for `before` and nodes behind it."""
    scale_value = _scalar(graph, f"{value.name}.float8_scale", scale, dtype)
    zero = _scalar(graph, "float8_zero", 0.0, _FLOAT8)  # says which type; parsers know it for longer than the attribute for that
    down = ir.node("QuantizeLinear", [value, scale_value, zero], name=f"{value.name}.quantise")
    up = ir.node("DequantizeLinear", [down.outputs[0], scale_value, zero], name=f"{value.name}.dequantise")
    for made, suffix, kind in ((down, "float8", _FLOAT8), (up, "rounded", dtype)):
        made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = f"{value.name}.{suffix}", ir.TensorType(kind), value.shape
    before.prepend([down, up])
    return up.outputs[0]


def _scalar(graph: ir.Graph, name: str, number: float, dtype: ir.DataType) -> ir.Value:
    """The initializer of that name."""
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(number).astype(dtype.numpy()), name=name)
        graph.register_initializer(ir.Value(name=name, const_value=tensor, type=ir.TensorType(dtype), shape=ir.Shape(())))
    return graph.initializers[name]
