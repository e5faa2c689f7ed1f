"""Triton kernels to PTX, ahead of time and without a GPU, for what loads a kernel through the CUDA driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from domino_deploy.errors import ExportError, listed

# The oldest PTX that knows the target, so that the oldest driver that knows the GPU takes it (PTX ISA, "Release history": sm_90a with 8.0,
# sm_100a with 8.6, sm_120a with 8.7, sm_103a and sm_121a with 8.8, sm_110a with 9.0).  LLVM ends the whole process over an older one.
_PTX_VERSIONS = {80: 80, 86: 80, 89: 80, 90: 80, 100: 86, 103: 88, 110: 90, 120: 87, 121: 88}


@dataclass(frozen=True, kw_only=True)
class Ptx:
    """One kernel.

    text: the PTX.
    entry: name of the kernel in it.
    num_warps: warps per block; a launch has 32 times as many threads.
    shared_bytes: dynamic shared memory of a launch.
    """

    text: str
    entry: str
    num_warps: int
    shared_bytes: int


def compile_ptx(kernel: Any, signature: Mapping[str, str], constants: Mapping[str, int], capability: int, *, num_warps: int = 4) -> Ptx:
    """Compile a Triton kernel for one compute capability.

    The PTX takes the parameters that are no constants, in the kernel's order, and after them two pointers that may be null.

    Args:
        kernel: a function of `triton.jit`.
        signature: type per parameter that is no constant, in Triton's words ("*fp16", "i32"); ":16" after it says that the number, or
            the address in bytes, is a multiple of 16, which wide loads need.
        constants: value per parameter that is one.
        capability: 80 for 8.0, and so on.

    Raises:
        ExportError: a capability without a known PTX version, parameters that are not the kernel's, a kernel that needs scratch memory,
            or a process in which Triton interprets.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    problems = _problems(kernel, signature, constants, capability)
    if problems:
        raise ExportError(
            listed("A kernel cannot be compiled:", problems, "Correct the call; compile in a process without TRITON_INTERPRET.")
        )
    types = {name: signature[name].split(":")[0] if name in signature else "constexpr" for name in kernel.arg_names}
    multiples = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if signature.get(name, "").endswith(":16")
    }
    compiled = triton_compile(
        ASTSource(fn=kernel, signature=types, constexprs=dict(constants), attrs=multiples),
        target=GPUTarget("cuda", capability, 32),
        options={"ptx_version": _PTX_VERSIONS[capability], "num_warps": num_warps, "enable_fp_fusion": True},
    )
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise ExportError(
            f"Expected a kernel without scratch memory, found {metadata.name} with {metadata.global_scratch_size} bytes of it and"
            f" {metadata.profile_scratch_size} for profiling: nobody would allocate them. Change the kernel, or unset Triton's profiling."
        )
    return Ptx(text=compiled.asm["ptx"], entry=metadata.name, num_warps=num_warps, shared_bytes=metadata.shared)


def _problems(kernel: Any, signature: Mapping[str, str], constants: Mapping[str, int], capability: int) -> list[str]:
    if not hasattr(kernel, "cache_key"):
        return ["expected a function of triton.jit, found one that Triton interprets (TRITON_INTERPRET was set when it was imported)"]
    problems = []
    if capability not in _PTX_VERSIONS:
        known = ", ".join(map(str, _PTX_VERSIONS))
        problems.append(f"compute capability: expected one of {known}, found {capability}")
    given = [*signature, *constants]
    if sorted(given) != sorted(kernel.arg_names):
        problems.append(f"parameters of {kernel.__name__}: expected each of {', '.join(kernel.arg_names)} once, found {', '.join(given)}")
    return problems
