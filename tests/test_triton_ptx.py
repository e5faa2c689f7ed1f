"""Every kernel that ships becomes PTX without a GPU, for each architecture, in a form that the CUDA driver can load."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the extra tensorrt is not installed")

from domino_deploy.errors import ExportError
from domino_deploy.plugins import triton_cell, triton_certified, triton_kernels, triton_tuning
from domino_deploy.plugins.ptx import compile_ptx

CAPABILITIES = {80: ("sm_80", 80), 90: ("sm_90a", 80), 100: ("sm_100a", 86), 120: ("sm_120a", 87)}
WIDTHS = {"R", "E", "G", "C"}  # of rows; multiples of 16, as in every published drafter
WEIGHTS = {"codebook", "embedding", "w_ih", "w_hh", "weights"}
POINTERS = {
    **dict.fromkeys(["keys", "thresholds", "merged", "anchor_ids", "draft_ids", "token_ids", "candidates"], "i64"),
    **dict.fromkeys(["contenders", "tile_ids"], "i32"),
    **dict.fromkeys(["base", "z", "s", "x", "y", "state", "next_state", "scales", "mean", "errors"], "fp32"),
    **dict.fromkeys(["tile_values", "corrected_logits", "log_probs", "highest", "sums"], "fp32"),
    "quantised": "i8",
}
KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        triton_kernels.correction_tiles_kernel,
        triton_kernels.reduce_tiles_kernel,
        triton_kernels.correction_kernel,
        triton_kernels.argmax_kernel,
        triton_kernels.top_k_tiles_kernel,
        triton_kernels.top_k_merge_kernel,
        triton_kernels.top_k_finish_kernel,
        triton_kernels.unpack_kernel,
        triton_certified.certified_kernel,
        triton_certified.pool_kernel,
        triton_cell.begin_kernel,
        triton_cell.finish_kernel,
        triton_cell.gru_cell_kernel,
        triton_cell.projection_kernel,
    )
}
KINDS = {True: triton_tuning.ONE, False: triton_tuning.MANY}


def constants(name, is_one):
    """What the kernel's constants are for one row, or for many."""
    tuning = KINDS[is_one]
    blocks = {"gru_cell_kernel": tuning.cell, "projection_kernel": tuning.projection}.get(name, tuning.correction)
    known = {
        "BLOCK_V": triton_tuning.ARGMAX_COLUMNS if name == "argmax_kernel" else blocks.rows,
        "BLOCK_R": blocks.columns,
        "BLOCK_C": blocks.columns,
        "BLOCK_W": blocks.rows,
        "BLOCK_G": blocks.rows // 4,
        "BLOCK_B": 1 if is_one else triton_tuning.MOST_ROWS,
        "BLOCK_N": 16,
        "BLOCK_T": triton_tuning.REDUCED_TILES,
        "BLOCK_K": triton_tuning.POOL_CANDIDATES,
        "BLOCK": triton_tuning.MERGED_KEYS,
        "K": 64,
        "IS_TABLE": False,
        "IS_FIRST": False,
        "IS_MAPPED": False,
        "IS_QUANTISED": True,
        "IS_POOL_MARKED": False,
        "IS_EXACT": True,
    }
    return known, blocks.warps


def compiled(name, *, capability=90, dtype="bf16", is_one=True, **changed):
    kernel = KERNELS[name]
    known, warps = constants(name, is_one)
    known = {**known, **changed}
    chosen = {parameter.name: known[parameter.name] for parameter in kernel.params if parameter.is_constexpr}
    signature = {}
    for parameter in kernel.arg_names:
        if parameter in chosen:
            continue
        if parameter in WEIGHTS:
            signature[parameter] = f"*{dtype}:16"
        elif parameter in POINTERS:
            signature[parameter] = f"*{'i8' if parameter == 'candidates' and name == 'certified_kernel' else POINTERS[parameter]}:16"
        elif parameter == "slack":
            signature[parameter] = "fp32"
        else:
            signature[parameter] = "i32:16" if parameter in WIDTHS or parameter.endswith("stride") else "i32"
    return signature, compile_ptx(kernel, signature, chosen, capability, num_warps=warps)


def entry_types(text, entry):
    """Types of the entry's parameters, in order."""
    header = re.search(rf"\.visible \.entry {entry}\((.*?)\)", text, re.DOTALL)
    assert header is not None
    return re.findall(r"\.param \.(\w+)", header[1])


def check(signature, ptx, name, capability):
    target, version = CAPABILITIES[capability]
    assert ptx.entry == name
    assert f".target {target}\n" in ptx.text
    found = re.search(r"\.version (\d+)\.(\d+)", ptx.text)
    assert found is not None
    assert int(found[1]) * 10 + int(found[2]) <= version
    words = {"i32": "u32", "fp32": "f32"}
    types = ["u64" if kind.startswith("*") else words[kind.split(":")[0]] for kind in signature.values()]
    # The driver is told of two more pointers, which may be null.  Triton 3.9 says b32 for a float.
    found_types = entry_types(ptx.text, name)
    assert [{"b32": "f32"}.get(kind, kind) for kind in found_types] == [*types, "u64", "u64"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_for_every_architecture(name, capability):
    signature, ptx = compiled(name, capability=capability)
    check(signature, ptx, name, capability)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["correction_kernel", "certified_kernel", "gru_cell_kernel", "projection_kernel"])
def test_batch_goes_through_tensor_cores(name, capability):
    signature, ptx = compiled(name, capability=capability, is_one=False)
    check(signature, ptx, name, capability)
    assert re.search(r"mma\S*\.tf32", ptx.text)
    assert ptx.shared_bytes <= 163 * 1024  # of a block on sm_80 (CUDA C++ Programming Guide, "Compute Capabilities")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", ["correction_tiles_kernel", "correction_kernel", "certified_kernel", "gru_cell_kernel"])
def test_rows_are_read_sixteen_bytes_at_a_time(name, dtype):
    text = compiled(name, dtype=dtype)[1].text
    wide, narrow = len(re.findall(r"ld\.global\S*\.v4\.b32", text)), len(re.findall(r"ld\.global\S*\.b(8|16)\b", text))
    assert wide >= 8
    assert narrow == 0


@pytest.mark.parametrize("flags", [{"IS_QUANTISED": False}, {"IS_POOL_MARKED": True}, {"IS_EXACT": False}])
def test_every_form_of_the_certified_kernel_compiles(flags):
    check(*compiled("certified_kernel", **flags), "certified_kernel", 90)


@pytest.mark.parametrize("flags", [{"IS_TABLE": True}, {"IS_FIRST": True}, {"IS_MAPPED": True}])
def test_every_form_of_the_gru_step_compiles(flags):
    check(*compiled("gru_cell_kernel", **flags), "gru_cell_kernel", 90)


def test_every_kernel_is_compiled_here():
    shipped = {name for module in (triton_kernels, triton_certified, triton_cell) for name in vars(module) if name.endswith("_kernel")}
    assert shipped == set(KERNELS)


def test_the_tensorrt_kernel_takes_inputs_then_scalars_then_outputs():
    names = [parameter.name for parameter in KERNELS["correction_tiles_kernel"].params if not parameter.is_constexpr]
    assert names == ["base", "z", "s", "codebook", "V", "R", "tile_values", "tile_ids"]


def test_what_cannot_be_compiled_is_refused_all_at_once():
    with pytest.raises(ExportError) as caught:
        compile_ptx(KERNELS["unpack_kernel"], {"keys": "*i64", "tokens": "*i64"}, {"BLOCK_B": 32}, 75)
    message = str(caught.value)
    assert "expected one of 80, 86, 89, 90, 100, 103, 110, 120, 121, found 75" in message
    assert "expected each of keys, token_ids, corrected_logits, B, BLOCK_B once, found keys, tokens, BLOCK_B" in message


def test_an_interpreted_kernel_is_refused():
    with pytest.raises(ExportError, match="found one that Triton interprets"):
        compile_ptx(lambda keys: None, {"keys": "*i64"}, {}, 90)


def test_a_kernel_with_scratch_memory_is_refused(monkeypatch):
    class Compiled:
        metadata = SimpleNamespace(name="unpack_kernel", global_scratch_size=64, profile_scratch_size=0)

    monkeypatch.setattr("triton.compiler.compile", lambda *args, **options: Compiled())
    with pytest.raises(ExportError, match="found unpack_kernel with 64 bytes"):
        compiled("unpack_kernel")
