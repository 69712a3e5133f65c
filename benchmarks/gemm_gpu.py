"""The CUDA half of ``benchmarks/gemm.py``: our ops against cuBLAS, DeepGEMM called directly, and torch's own products.

    python -m benchmarks.gemm --device cuda --shapes all --tokens 1 16 128 4096

Contenders run as CUDA graphs, so times are those of the device; what the host costs is below the table. Our op has the
provider that takes it in brackets, and the other providers that would take the call follow. Before each call a gigabyte
is read, which empties the caches and keeps the device busy until the graph has been launched.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native import table
from ascend_deep.native.deep_gemm.provider import DEEP_GEMM
from benchmarks.gemm import Case, Contender

__all__ = ["cases", "clean", "heading", "missing", "probes", "timed", "tiny"]

_BF16, _FP8, _F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
_CLEAN = 1 << 28  # numbers that are read to empty the caches
_SQUARE = 8192
_GROUPS = 8
_RECIPES: dict[str, tuple[int, int]] = {"recipe_a": (1, 128), "recipe_b": (128, 128)}
_PLAIN: dict[str, Any] = {"layout": "nt", "out_dtype": None, "alpha": None}


def missing() -> str | None:
    return None if torch.cuda.is_available() else "torch sees no CUDA device."


def heading() -> str:
    versions = [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    for name in ("triton", "sgl-deep-gemm", "deep-gemm"):
        try:
            versions.append(f"{name} {importlib.import_module('importlib.metadata').version(name)}")
        except ModuleNotFoundError:
            continue
    return f"GEMM ops on {torch.cuda.get_device_name()}, {', '.join(versions)}"


class _Captured:
    """A call as a CUDA graph; returns what the call returned, computed again."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call  # a graph does not keep what it reads
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = call()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.out


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds on the device. Nothing waits before: what is still running hides the launch."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@lru_cache(1)
def _large() -> tuple[Tensor, Tensor]:
    return torch.randn(_CLEAN, device="cuda"), torch.empty(_CLEAN, device="cuda")


def clean() -> None:
    torch.amax(_large()[0])


@lru_cache(1)
def probes() -> dict[str, tuple[Callable[[], object], float]]:
    a, b = (torch.randn(_SQUARE, _SQUARE, device="cuda").to(_BF16) for _ in range(2))
    source, target = _large()
    return {
        "matmul": (_Captured(partial(torch.mm, a, b)), 2.0 * _SQUARE**3),
        # Not as a graph: those copy with another engine, which is slower.
        "copy": (partial(target.copy_, source), 8.0 * _CLEAN),
    }


def _library() -> Any:
    """The ``deep_gemm`` module, or ``None``."""
    return None if DEEP_GEMM.unavailable() is not None else importlib.import_module("deep_gemm")


def _ours(op: str, args: tuple[Any, ...], given: dict[str, Any], nbytes: int) -> dict[str, Contender]:
    """The op, and every other provider that takes the call."""
    chosen = table.choose(op, "cuda", args, given)
    overload = getattr(torch.ops.ascend_deep, op).default
    found = {f"{op} ({chosen.name})": Contender(_Captured(lambda: overload(*args, **given)), nbytes, ours=True)}
    for provider in table.PRIORITY["cuda"]:
        if provider is not chosen.provider and provider.refusal(op, args, given) is None:
            kernel = provider.kernels[op]
            found[provider.name] = Contender(_Captured(partial(kernel, *args, **given)), nbytes, ours=True)
    return found


def _dense_bf16(title: str, n: int, k: int, m: int) -> Iterator[Case]:
    a, b = torch.randn(m, k, device="cuda").to(_BF16), (torch.randn(n, k, device="cuda") / k**0.5).to(_BF16)
    nbytes = 2 * (m * k + n * k + m * n)
    contenders = _ours("gemm_bf16", (a, b, None), _PLAIN, nbytes)
    library = _library()
    if library is not None:
        d = torch.empty(m, n, device="cuda", dtype=_BF16)
        contenders["DeepGEMM"] = Contender(_Captured(lambda: (library.bf16_gemm_nt(a, b, d), d)[1]), nbytes)
    contenders["torch.mm"] = Contender(_Captured(partial(torch.mm, a, b.t())), nbytes)
    yield Case(f"{title} {n} x {k} bf16", m, 2.0 * m * n * k, contenders, lambda _: a.double() @ b.double().t())


def _dense_fp8(title: str, n: int, k: int, m: int) -> Iterator[Case]:
    x, w = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda") / k**0.5
    a, sfa = ops.quant_fp8(x, gran=(1, 128))
    b, sfb = ops.quant_fp8(w, gran=(128, 128))
    nbytes = m * k + n * k + 2 * m * n + sfa.nbytes + sfb.nbytes
    contenders = _ours("gemm_scaled", (a, sfa, b, sfb, None), {**_RECIPES, **_PLAIN}, nbytes)
    library = _library()
    if library is not None:
        d = torch.empty(m, n, device="cuda", dtype=_BF16)
        direct = _Captured(lambda: (library.fp8_gemm_nt((a, sfa), (b, sfb), d), d)[1])
        contenders["DeepGEMM"] = Contender(direct, nbytes)
    x16, w16 = x.to(_BF16), w.to(_BF16)
    contenders["torch.mm bf16"] = Contender(_Captured(partial(torch.mm, x16, w16.t())), 2 * (m * k + n * k + m * n))

    def truth(name: str) -> Tensor | None:
        if "bf16" in name:
            return None
        left = ops.dequant(a, sfa, gran=(1, 128)).double()
        return left @ ops.dequant(b, sfb, gran=(128, 128)).double().t()

    yield Case(f"{title} {n} x {k} fp8", m, 2.0 * m * n * k, contenders, truth)


def _groups(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, int, dict[str, Any]]:
    """The experts of a MoE layer, groups of m rows aligned to 128: rows, weights, ends, step, attributes of the op."""
    step = -(-m // 128) * 128
    x = torch.randn(_GROUPS * step, k, device="cuda")
    w = torch.randn(_GROUPS, n, k, device="cuda") / k**0.5
    ends = torch.arange(_GROUPS, device="cuda", dtype=torch.int32) * step + m
    given: dict[str, Any] = {
        "layout": "nt",
        "grouping": "psum",
        "alignment": 128,
        "expected_m": None,
        "zero_padding": True,
        "out_dtype": None,
    }
    return x, w, ends, step, given


def _grouped_bf16(n: int, k: int, m: int) -> Iterator[Case]:
    x, w, ends, step, given = _groups(m, n, k)
    a, b = x.to(_BF16), w.to(_BF16)
    del x, w
    rows = a.shape[0]
    nbytes = 2 * (_GROUPS * (n * k + m * k) + rows * n)
    contenders = _ours("m_grouped_gemm_bf16", (a, b, ends), given, nbytes)
    library = _library()
    if library is not None:
        d = torch.empty(rows, n, device="cuda", dtype=_BF16)
        direct = partial(library.m_grouped_bf16_gemm_nt_contiguous, a, b, d, ends, use_psum_layout=True)
        contenders["DeepGEMM"] = Contender(_Captured(direct), nbytes)
    starts = torch.arange(1, _GROUPS + 1, device="cuda", dtype=torch.int32) * step
    contenders["torch._grouped_mm"] = Contender(_Captured(lambda: torch._grouped_mm(a, b.mT, offs=starts)), nbytes)
    yield Case(f"{_GROUPS} groups {n} x {k} bf16", m, 2.0 * _GROUPS * m * n * k, contenders, lambda _: None)


def _grouped_fp8(n: int, k: int, m: int) -> Iterator[Case]:
    x, w, ends, _, given = _groups(m, n, k)
    a, sfa = ops.quant_fp8(x, gran=(1, 128))
    b, sfb = ops.quant_fp8(w, gran=(128, 128))
    del x, w
    rows = a.shape[0]
    nbytes = _GROUPS * (n * k + m * k) + 2 * rows * n + sfa.nbytes + sfb.nbytes
    contenders = _ours("m_grouped_gemm_scaled", (a, sfa, b, sfb, ends), {**_RECIPES, **given}, nbytes)
    library = _library()
    if library is not None:
        d = torch.empty(rows, n, device="cuda", dtype=_BF16)
        direct = library.m_grouped_fp8_fp4_gemm_nt_contiguous
        called = partial(direct, (a, sfa), (b, sfb), d, ends, use_psum_layout=True)
        contenders["DeepGEMM"] = Contender(_Captured(called), nbytes)
    yield Case(f"{_GROUPS} groups {n} x {k} fp8", m, 2.0 * _GROUPS * m * n * k, contenders, lambda _: None)


def _einsum(tokens: int) -> Iterator[Case]:
    """The absorbed projection of latent attention: 128 heads, 512 -> 128."""
    h, r, d = 128, 512, 128
    a, b = torch.randn(tokens, h, r, device="cuda").to(_BF16), torch.randn(h, d, r, device="cuda").to(_BF16)
    nbytes = 2 * (a.numel() + b.numel() + tokens * h * d)
    eq = "bhr,hdr->bhd"
    contenders = _ours("einsum_bf16", (a, b, None), {"eq": eq, "out_dtype": None}, nbytes)
    library = _library()
    if library is not None:
        out = torch.empty(tokens, h, d, device="cuda", dtype=_BF16)
        contenders["DeepGEMM"] = Contender(_Captured(lambda: (library.einsum(eq, a, b, out), out)[1]), nbytes)
    contenders["torch.einsum"] = Contender(_Captured(partial(torch.einsum, eq, a, b)), nbytes)
    truth = partial(torch.einsum, eq, a.double(), b.double())
    yield Case(f"{eq} {h} x {d} x {r}", tokens, 2.0 * tokens * h * r * d, contenders, lambda _: truth())


def cases(
    kinds: Sequence[str], shapes: Mapping[str, tuple[int, int]], tokens: Sequence[int]
) -> list[Callable[[], Iterator[Case]]]:
    """What to measure, as functions that make the operands when their turn comes."""
    found: list[Callable[[], Iterator[Case]]] = []
    for m in tokens:
        if "dense" in kinds:
            for title, (n, k) in shapes.items():
                found += [partial(_dense_bf16, title, n, k, m), partial(_dense_fp8, title, n, k, m)]
        if "grouped" in kinds:
            sizes = ((4096, 7168), (7168, 3072))[: 1 if len(shapes) < 3 else 2]
            found += [partial(make, n, k, m) for n, k in sizes for make in (_grouped_bf16, _grouped_fp8)]
        if "einsum" in kinds:
            found.append(partial(_einsum, m))
    return found


def tiny() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Op and direct call of the library on small operands, each with a new result, to compare costs on the host."""
    library = _library()
    if library is None:
        return {}
    m, n, k = 128, 256, 512
    x, w = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    a, b = x.to(_BF16), w.to(_BF16)
    a8, sfa = ops.quant_fp8(x, gran=(1, 128))
    b8, sfb = ops.quant_fp8(w, gran=(128, 128))
    groups, ends = b.repeat(2, 1, 1), torch.tensor([0, m], device="cuda", dtype=torch.int32)

    def result() -> Tensor:
        return torch.empty((m, n), device="cuda", dtype=_BF16)

    recipe = (1, 128, 128)
    return {
        "gemm_bf16": (lambda: ops.gemm_bf16(a, b), lambda: library.bf16_gemm_nt(a, b, result())),
        "gemm_scaled": (
            lambda: ops.gemm_scaled(a8, sfa, b8, sfb, recipe_a=(1, 128), recipe_b=(128, 128)),
            lambda: library.fp8_gemm_nt((a8, sfa), (b8, sfb), result(), recipe=recipe),
        ),
        "m_grouped_gemm_bf16": (
            lambda: ops.m_grouped_gemm_bf16(a, groups, ends),
            lambda: library.m_grouped_bf16_gemm_nt_contiguous(a, groups, result(), ends, use_psum_layout=True),
        ),
    }
