"""What TensorRT-RTX builds of an ONNX graph, by its own account of the engine: products by the types of input and matrix, as JSON.

    python -m tests.support.fp8_engine FILE.onnx SM89 '{"input": [1, 5]}'

A process of its own: a C++ exception in the parser would end the one it happens in.
"""

from __future__ import annotations

import collections
import json
import re
import sys

import tensorrt_rtx as trt

_PRODUCT = re.compile(r"LayerType: gemm, Inputs: .*?Datatype: (\w+),.*?Constants: .*?Datatype: (\w+),")


class Log(trt.ILogger):  # type: ignore[misc]  # a module without types
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, severity: object, message: str) -> None:
        self.lines.append(message)


def main(file: str, capability: str, shapes: str) -> None:
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    assert parser.parse_from_file(file), [parser.get_error(index).desc() for index in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    profile = builder.create_optimization_profile()
    for name, shape in json.loads(shapes).items():
        profile.set_shape(name, shape, shape, shape)
    config.add_optimization_profile(profile)
    if builder.build_serialized_network(network, config) is None:
        print(json.dumps({"refused": next(line for line in log.lines if "fp8" in line)}))
        return
    account = "\n".join(line for line in log.lines if line.startswith("Layers:"))
    print(json.dumps({"gemms": collections.Counter("*".join(found) for found in _PRODUCT.findall(account))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
