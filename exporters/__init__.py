"""Build time: checkpoints in, a verified ONNX bundle out.

export.py            the whole way, and the only entry point besides verify.py
onnx_from_*.py       one PyTorch module with flat inputs and outputs per graph, and how it is exported
graph.py             what they share: torch.onnx with example inputs and dimensions out of signature.py, no weights in memory
translations.py      PyTorch operator -> ONNX node
rollout.py           the head's Loop over proposals
passes.py            graph passes
weights.py           weights as fp32 safetensors, and initializers as ranges of those files
engine_from_onnx.py  from a bundle to TensorRT engines; engine_graph.py and engine_correction.py hold the passes
trt_api.py           TensorRT's builder and parser, called in processes of their own (engine_worker.py)
verify.py            graphs against PyTorch; verify_cases.py holds the inputs they are compared on
"""
