"""Our Triton kernels on the way to Ascend: what compiles, beside a tile that must not fit, and what cannot be compiled.

No provider runs them on NPUs. This says how far the kernels are from that.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu.kernels.compiling import compile_kernel

NEW, OLD = "Ascend950PR_9599", "Ascend910B1"
I32 = "*i32"
OPERANDS = {"a": "*bf16", "b": "*bf16", "c": "*bf16", "out": "*bf16", "layout": I32, "sfa": "*fp32", "sfb": "*fp32"}
GEMM: dict[str, Any] = {
    **{"BM": 64, "BN": 128, "BK": 64, "GP": 16, "GROUPING": 0, "SWAP": False, "SPLITS": 1, "SCALED": False},
    **{"GRAN_N": 128, "HAS_C": False, "TMA": False, "A_K_MAJOR": True, "B_K_MAJOR": True, "SUPER": 8, "STAGES": 2},
}
K_GROUPED = {
    "BM": 64,
    "BN": 128,
    "BK": 64,
    "GP": 16,
    "SIZES": False,
    "HAS_C": False,
    "TMA": False,
    "SUPER": 8,
    "STAGES": 2,
}
VECTOR = {"BN": 8, "BK": 512, "SCALED": False, "HAS_C": False, "EVEN": False, "STAGES": 2}
LARGE = {"BM": 256, "BN": 512}

Case = tuple[str, str, dict[str, str], dict[str, Any], dict[str, Any], str]
# Module, kernel, pointers, constants, what makes the tile too large, the buffer that then overflows.
CASES: dict[str, Case] = {
    "dense": ("gemm_kernels", "gemm_kernel", OPERANDS, {**GEMM, "HAS_C": True, "A_K_MAJOR": False}, LARGE, "cc"),
    "labels": ("gemm_kernels", "gemm_kernel", OPERANDS, {**GEMM, "GROUPING": 2}, LARGE, "cc"),
    "psum": ("gemm_kernels", "gemm_kernel", OPERANDS, {**GEMM, "GROUPING": 1}, LARGE, "cc"),
    "masked": ("gemm_kernels", "gemm_kernel", OPERANDS, {**GEMM, "GROUPING": 3}, LARGE, "cc"),
    "few rows": (
        "gemm_kernels",
        "gemm_kernel",
        {**OPERANDS, "out": "*fp32"},
        {**GEMM, "BM": 16, "SWAP": True, "SPLITS": 4},
        LARGE,
        "cc",
    ),
    "sum of splits": (
        "gemm_kernels",
        "sum_kernel",
        {"work": "*fp32", "c": "*fp32", "out": "*bf16"},
        {"SPLITS": 3, "HAS_C": True, "BLOCK": 1024},
        {"BLOCK": 1 << 20},
        "ub",
    ),
    "k-grouped": (
        "gemm_k_grouped",
        "k_grouped_kernel",
        {**OPERANDS, "a_at": "*bf16", "b_at": "*bf16", "out": "*fp32"},
        K_GROUPED,
        LARGE,
        "cc",
    ),
    "k-grouped, sizes": (
        "gemm_k_grouped",
        "k_grouped_kernel",
        {**OPERANDS, "a_at": "*bf16", "b_at": "*bf16", "out": "*fp32"},
        {**K_GROUPED, "SIZES": True},
        LARGE,
        "cc",
    ),
    "one row": ("gemm_vector", "vector_kernel", {**OPERANDS, "x": "*bf16", "w": "*bf16"}, VECTOR, {"BN": 128}, "ub"),
    "labels of blocks": (
        "gemm_layouts",
        "labels_kernel",
        {"labels": I32, "out": I32},
        {"BLOCK": 128},
        {"BLOCK": 1 << 18},
        "ub",
    ),
    "ends of groups": (
        "gemm_layouts",
        "ends_kernel",
        {"psum": I32, "out": I32},
        {"GP": 32},
        {"GP": 1 << 18},
        "ub",
    ),
    "groups of blocks": (
        "gemm_layouts",
        "blocks_kernel",
        {"psum": I32, "out": I32},
        {"GP": 32, "BLOCK": 128},
        {"GP": 1 << 18},
        "ub",
    ),
    "padding of psum": (
        "gemm_layouts",
        "padding_kernel",
        {"out": "*bf16", "layout": I32},
        {"KIND": 1, "GP": 32, "BM": 32, "BN": 128},
        {"BM": 1024, "BN": 1024},
        "ub",
    ),
    "padding of masked": (
        "gemm_layouts",
        "padding_kernel",
        {"out": "*bf16", "layout": I32},
        {"KIND": 2, "GP": 32, "BM": 32, "BN": 128},
        {"BM": 1024, "BN": 1024},
        "ub",
    ),
    "padding of labels": (
        "gemm_layouts",
        "padding_kernel",
        {"out": "*bf16", "layout": I32},
        {"KIND": 0, "GP": 32, "BM": 32, "BN": 128},
        {"BM": 1024, "BN": 1024},
        "ub",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_compiles_and_a_larger_tile_does_not_fit(name: str) -> None:
    module, kernel, pointers, constants, larger, buffer = CASES[name]
    good = compile_kernel(module, kernel, pointers, constants, NEW)
    assert good.hivm is not None, good
    assert "hivm" in good.hivm
    bad = compile_kernel(module, kernel, pointers, {**constants, **larger}, NEW)
    assert bad.hivm is None and f"{buffer} overflow, requires" in bad.error, bad


def test_a_tile_of_the_950_is_too_large_for_the_910b() -> None:
    wide = {**GEMM, "BM": 128, "BN": 256}
    for processor in (NEW, OLD):
        assert compile_kernel("gemm_kernels", "gemm_kernel", OPERANDS, wide, processor).hivm is not None
    # With C there is one tile more on the chip.
    assert compile_kernel("gemm_kernels", "gemm_kernel", OPERANDS, {**wide, "HAS_C": True}, NEW).hivm is not None
    bad = compile_kernel("gemm_kernels", "gemm_kernel", OPERANDS, {**wide, "HAS_C": True}, OLD)
    assert bad.hivm is None and "ub overflow, requires" in bad.error, bad


FP8 = {**OPERANDS, "a": "*fp8e4nv", "b": "*fp8e4nv"}
# What these versions of the compilers turn down. If one of these compiles, it belongs above.
REFUSED: dict[str, tuple[str, str, dict[str, str], dict[str, Any], str, str]] = {
    "scaled FP8": (
        "gemm_kernels",
        "gemm_kernel",
        FP8,
        {**GEMM, "SCALED": True, "BK": 128},
        "triton-ascend",
        "type fp8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled(name: str) -> None:
    module, kernel, pointers, constants, tool, reason = REFUSED[name]
    found = compile_kernel(module, kernel, pointers, constants, NEW)
    assert found.hivm is None and found.tool == tool and reason in found.error, found


@pytest.mark.parametrize("module", ["gemm_fp8", "select", "select_long"])
def test_kernels_written_for_the_threads_of_a_gpu_do_not_import(module: str) -> None:
    with pytest.raises(ImportError, match=r"triton\.experimental"):
        compile_kernel(module, "any", {}, {}, NEW)
