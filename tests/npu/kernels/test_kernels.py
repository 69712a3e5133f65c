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
# FP8 as the codes that it has in memory: Triton for Ascend has no such type.
CODES = {**OPERANDS, "a": "*u8", "b": "*u8"}
SCALED = {**GEMM, "SCALED": True, "BK": 128}
LOGITS: dict[str, Any] = {
    **{"H": 24, "D": 128, "QUERIES": 2, "BLOCK_H": 32, "BLOCK_D": 128, "BLOCK_T": 64, "NEGATIVE": True},
    **{"HAS_QSF": False, "HAS_KVSF": False, "HAS_KS": True, "HAS_KE": True, "MASK": 0, "COMPRESSED": False},
    **{"CLEAN": True, "BITS": False, "EVEN": False, "PRECISION": "ieee", "STAGES": 2},
}
PAGED: dict[str, Any] = {
    **{"H": 24, "D": 128, "TOKENS": 2, "BLOCK_H": 32, "BLOCK_D": 128, "BLOCK_T": 64, "NEGATIVE": True},
    **{"HAS_QSF": False, "HAS_INDICES": True, "PLANAR": False, "WHOLE": False, "CLEAN": True, "BITS": False},
    **{"PRECISION": "ieee", "STAGES": 2},
}
MANY_KEYS = {"BLOCK_T": 512, "QUERIES": 16}
MANY_PAGED = {"BLOCK_T": 512, "TOKENS": 16}
VECTOR = {"BN": 8, "BK": 512, "SCALED": False, "HAS_C": False, "EVEN": False, "STAGES": 2}
LARGE = {"BM": 256, "BN": 512}


def indexer(dtype: str, out: str = "*fp32") -> dict[str, str]:
    """Pointers of the two kernels of the indexer: queries and keys of ``dtype``."""
    floats = dict.fromkeys(("q_sf", "kv_sf", "weights", "mask"), "*fp32")
    indices = dict.fromkeys(("ks", "ke", "lens", "table", "indices"), I32)
    return {**floats, **indices, **dict.fromkeys(("q", "kv", "cache"), dtype), "out": out}


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
    "scaled FP8": ("gemm_kernels", "gemm_kernel", CODES, SCALED, LARGE, "cc"),
    "scaled FP8, labels": ("gemm_kernels", "gemm_kernel", CODES, {**SCALED, "GROUPING": 2}, LARGE, "cc"),
    "scaled FP8, psum": ("gemm_kernels", "gemm_kernel", CODES, {**SCALED, "GROUPING": 1}, LARGE, "cc"),
    "scaled FP8, masked": ("gemm_kernels", "gemm_kernel", CODES, {**SCALED, "GROUPING": 3}, LARGE, "cc"),
    "scaled FP8, few rows": (
        "gemm_kernels",
        "gemm_kernel",
        {**CODES, "out": "*fp32"},
        {**SCALED, "BM": 16, "SWAP": True, "SPLITS": 3, "GRAN_N": 1},
        LARGE,
        "cc",
    ),
    "scaled FP8, one row": (
        "gemm_vector",
        "vector_kernel",
        {**CODES, "x": "*u8", "w": "*u8"},
        {**VECTOR, "SCALED": True},
        {"BN": 128},
        "ub",
    ),
    "logits": ("mqa_logits", "logits_kernel", indexer("*bf16"), LOGITS, MANY_KEYS, "cc"),
    "logits for a selection": (
        "mqa_logits",
        "logits_kernel",
        indexer("*bf16", I32),
        {**LOGITS, "BITS": True, "CLEAN": False, "HAS_KS": False, "HAS_KE": False, "EVEN": True},
        MANY_KEYS,
        "cc",
    ),
    "logits with a mask, compressed": (
        "mqa_logits",
        "logits_kernel",
        indexer("*fp16"),
        {**LOGITS, "COMPRESSED": True, "MASK": 2},
        MANY_KEYS,
        "cc",
    ),
    "FP8 logits": (
        "mqa_logits",
        "logits_kernel",
        indexer("*u8"),
        {**LOGITS, "HAS_QSF": True, "HAS_KVSF": True},
        MANY_KEYS,
        "cc",
    ),
    "paged logits": ("paged", "paged_kernel", indexer("*bf16"), PAGED, MANY_PAGED, "cc"),
    "paged FP8 logits": (
        "paged",
        "paged_kernel",
        indexer("*u8"),
        {**PAGED, "PLANAR": True, "HAS_QSF": True},
        MANY_PAGED,
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
    "FP8 by its name": ("gemm_kernels", "gemm_kernel", FP8, SCALED, "triton-ascend", "type fp8"),
    "pages through descriptors": (
        "paged",
        "paged_kernel",
        {**indexer("*bf16"), "keys": "*bf16"},
        {**PAGED, "WHOLE": True},
        "triton-ascend",
        "object has no attribute 'load'",
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
