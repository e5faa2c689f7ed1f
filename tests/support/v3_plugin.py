"""A child process that leads the V3 plugin through an engine's life as TensorRT does, on TensorRT-RTX's own classes.

    python -m tests.support.v3_plugin CODEBOOK_TYPE BATCH VOCAB RANK

Answers with one JSON object on the last line of stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import tensorrt_rtx as trt

from domino_deploy.errors import DominoDeployError
from domino_deploy.plugins import op, trt_plugin_v3
from domino_deploy.plugins.trt_plugin_launch import CorrectionKernels


def tensor(sizes: Sequence[int], dtype: Any, form: Any = trt.TensorFormat.LINEAR) -> Any:
    """A DynamicPluginTensorDesc whose batch may be four times as large."""
    found, desc = trt.DynamicPluginTensorDesc(), trt.PluginTensorDesc()
    desc.type, desc.format, desc.dims = dtype, form, trt.Dims(list(sizes))
    largest = trt.Dims([4 * sizes[0], *sizes[1:]])
    found.desc, found.min, found.opt, found.max = desc, desc.dims, desc.dims, largest
    return found


def taken(plugin: Any, tensors: Sequence[Any], inputs: int) -> list[list[str]]:
    """Per tensor, the types that the plugin takes for it in the linear format."""
    types = [trt.float32, trt.float16, trt.bfloat16, trt.int32, trt.int64, trt.int8]
    sizes = [list(each.desc.dims) for each in tensors]
    answer = []
    for place in range(len(tensors)):
        tries = {each: [*tensors[:place], tensor(sizes[place], each), *tensors[place + 1 :]] for each in types}
        answer.append([each.name for each, tried in tries.items() if plugin.supports_format_combination(place, tried, inputs)])
    return answer


def refusal(call: Any, *arguments: Any) -> str:
    """The message of the project's error that a call raises."""
    try:
        call(*arguments)
    except DominoDeployError as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing was refused"


def main(codebook_type: str, batch: int, vocab_size: int, rank: int) -> dict[str, object]:
    keep = trt_plugin_v3.register(trt, ["8.9", "12.0"])
    creator = trt.get_plugin_registry().get_creator(op.NAME, op.VERSION, op.DOMAIN)
    plugin = creator.create_plugin("node", trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD)
    inputs = [
        tensor([batch, vocab_size], trt.float32),
        tensor([batch, rank], trt.float32),
        tensor([batch, rank], trt.float32),
        tensor([vocab_size, rank], getattr(trt, codebook_type)),
    ]
    outputs = [tensor([batch], trt.int64), tensor([batch], trt.float32)]
    types = plugin.get_output_data_types([each.desc.type for each in inputs])
    plugin.configure_plugin(inputs, outputs)
    clone = plugin.clone()
    fields = clone.get_fields_to_serialize()
    revived = creator.create_plugin("node", fields, trt.TensorRTPhase.RUNTIME).attach_to_context(None)
    again = revived.get_fields_to_serialize()
    descriptions = ([each.desc for each in inputs], [each.desc for each in outputs])
    answer = {
        "types": [each.name for each in types],
        "taken": taken(plugin, [*inputs, *outputs], len(inputs)),
        "other_format": plugin.supports_format_combination(0, [tensor([1, 1], trt.float32, trt.TensorFormat.CHW32)], 4),
        "workspace": plugin.get_workspace_size(inputs, outputs),
        "kernels": json.loads(next(iter(fields)).data.tobytes()),
        "survives": next(iter(again)).data.tobytes() == next(iter(fields)).data.tobytes(),
        "no_kernels": refusal(creator.create_plugin, "node", trt.PluginFieldCollection([]), trt.TensorRTPhase.RUNTIME),
        "damaged": refusal(creator.create_plugin, "node", _damaged(), trt.TensorRTPhase.RUNTIME),
        "taken_shapes": refusal(revived.on_shape_change, *descriptions),
        "refused_shapes": refusal(revived.on_shape_change, [tensor([batch, vocab_size + 1], trt.float32).desc, *descriptions[0][1:]], []),
        "launches": launches(revived, descriptions),
    }
    del keep
    return answer


def launches(plugin: Any, descriptions: Sequence[Sequence[Any]]) -> list[object]:
    """What the plugin asks of its kernels in two runs and at its end, with addresses 1 to 6, workspace 7 and stream 8."""
    calls: list[object] = []

    class Recorded:
        def __init__(self, kernels: CorrectionKernels) -> None:
            calls.append(["load", kernels.codebook_type])

        def launch(self, *arguments: object) -> None:
            calls.append(["launch", *arguments])

        def close(self) -> None:
            calls.append(["close"])

    trt_plugin_v3.LoadedCorrection = Recorded  # type: ignore[assignment, misc]
    for _ in range(2):
        plugin.enqueue(*descriptions, [1, 2, 3, 4], [5, 6], 7, 8)
    plugin.clone().destroy()
    plugin.destroy()
    return calls


def _damaged() -> Any:
    return trt.PluginFieldCollection([trt.PluginField(trt_plugin_v3.KERNELS_FIELD, b'{"tiles": 3}', trt.PluginFieldType.CHAR)])


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
