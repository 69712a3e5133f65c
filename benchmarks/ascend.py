"""The published tables for Ascend NPUs, measured where there is one, beside the vendor's own figures.

    benchmarks/ascend.sh                 all rows
    benchmarks/ascend.sh --list          rows and published figures, without a device

A row runs the op as users call it; the provider table chooses who computes it, and the row says who that was. What no
provider takes is not measured, since the reference body's time says nothing. "not built" rows have no op in this
version. Times are medians of single calls on the device, each behind a write of twice the L2. The vendor's figures are
quoted: we have measured none of them, and this script has never run on an NPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ascend_deep import ops

__all__ = ["ROWS", "Measured", "Row", "main", "measure"]

_README = "DeepGEMM-Ascend README, Ascend 950DT, CANN 9.2, quoted at second hand"
_DEEP_EP = "DeepEP-Ascend proof of concept, Ascend 950DT, 16384 tokens, hidden 7168, top 6 of 256"
_NO_NPU = "there is no Ascend NPU that this process can use"
_L2_TWICE = 256 << 20


@dataclass(frozen=True)
class Row:
    """One line of a published table.

    Attributes:
        name: as ``--only`` takes it.
        shape: for people.
        published: the vendor's figure, with its unit.
        source: who published it, and where.
        call: makes op name, positional and keyword arguments on a device, and the floating point operations of a call,
            for sizes divided by an integer; ``None``: there is no op yet.
    """

    name: str
    shape: str
    published: str
    source: str
    call: Callable[[str, int], tuple[str, tuple[Any, ...], dict[str, Any], float]] | None = None


@dataclass(frozen=True)
class Measured:
    """A row on this machine: who computed it, or why nobody did."""

    name: str
    shape: str
    provider: str
    milliseconds: float | None
    tflops: float | None
    note: str
    published: str
    source: str


def _random(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def _dense(kind: str) -> Callable[[str, int], tuple[str, tuple[Any, ...], dict[str, Any], float]]:
    def make(device: str, divide: int) -> tuple[str, tuple[Any, ...], dict[str, Any], float]:
        m, n, k = (size // divide for size in (4096, 7168, 16384))
        a, b = _random(device, m, k), _random(device, n, k)
        plain: dict[str, Any] = {"layout": "nt", "out_dtype": None, "alpha": None}
        if kind == "bf16":
            return "gemm_bf16", (a, b, None), plain, 2.0 * m * n * k
        args = (*_quantised(a, kind), *_quantised(b, kind), None)
        return "gemm_scaled", args, {**plain, "recipe_a": (1, 32), "recipe_b": (1, 32)}, 2.0 * m * n * k

    return make


def _quantised(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """MX data and packed scales."""
    if kind == "fp4":
        return ops.quant_fp4(x, sf_format="ue8m0x2")
    return ops.quant_fp8(x, gran=(1, 32), ue8m0=True, sf_format="ue8m0x2")


def _grouped(groups: int, rows: int) -> Callable[[str, int], tuple[str, tuple[Any, ...], dict[str, Any], float]]:
    def make(device: str, divide: int) -> tuple[str, tuple[Any, ...], dict[str, Any], float]:
        each, n, k = rows // divide, 6144 // divide, 7168 // divide
        each = max(256, each // 256 * 256) if divide == 1 else each
        a, b = _random(device, groups * each, k), _random(device, groups * n, k)
        data, sf = _quantised(b, "fp8")
        ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * each
        args = (*_quantised(a, "fp8"), data.view(groups, n, k), sf.contiguous().view(groups, n, -1), ends)
        kwargs: dict[str, Any] = {"recipe_a": (1, 32), "recipe_b": (1, 32), "layout": "nt", "grouping": "psum"}
        kwargs |= {"alignment": 256 if divide == 1 else 1, "expected_m": each, "zero_padding": False, "out_dtype": None}
        return "m_grouped_gemm_scaled", args, kwargs, 2.0 * groups * each * n * k

    return make


def _mqa(device: str, divide: int) -> tuple[str, tuple[Any, ...], dict[str, Any], float]:
    queries, keys, heads, depth = 2048 // divide, 8192 // divide, 64, 128
    q, kv = _random(device, queries * heads, depth), _random(device, keys, depth)
    q8, q_sf = ops.quant_fp8(q, gran=(1, 32), ue8m0=True)
    kv8, kv_sf = ops.quant_fp8(kv, gran=(1, 32), ue8m0=True)
    shapes = (1, queries, heads)
    weights = _random(device, *shapes)
    args = (q8.view(*shapes, depth), q_sf.view(*shapes, -1), kv8[None], kv_sf[None], weights, None, None, None)
    kwargs = {"scale": 0.088, "max_seqlen_k": 0, "clean": False, "out_dtype": None}
    return "mqa_logits", args, kwargs, 2.0 * queries * keys * heads * depth


ROWS: tuple[Row, ...] = (
    Row("dense-bf16", "4096 x 7168 x 16384", "431 TFLOPS (limit 432)", _README, _dense("bf16")),
    Row("dense-fp8", "4096 x 7168 x 16384", "861 TFLOPS (limit 865)", _README, _dense("fp8")),
    Row("dense-fp4", "4096 x 7168 x 16384", "1701 TFLOPS (limit 1730)", _README, _dense("fp4")),
    Row("m-grouped-4", "4 x 8192 x 6144 x 7168, fp8", "818 to 862 TFLOPS", _README, _grouped(4, 8192)),
    Row("m-grouped-8", "8 x 4096 x 6144 x 7168, fp8", "831 TFLOPS (8 experts)", _README, _grouped(8, 4096)),
    Row("mqa-logits", "2048 queries, 8192 keys, 64 heads of 128, fp8", "565 to 743 TFLOPS", _README, _mqa),
    Row("mega-moe", "384 experts", "846.3 TFLOPS", _README),
    Row("dispatch-ep8", "8 processors, fp8", "373 to 375 GB/s", _DEEP_EP),
    Row("combine-ep8", "8 processors, bf16", "345 to 347 GB/s", _DEEP_EP),
    Row("dispatch-ep128", "128 processors, fp8", "313 to 320 GB/s", _DEEP_EP),
    Row("combine-ep128", "128 processors, bf16", "272 to 278 GB/s", _DEEP_EP),
)


def measure(row: Row, device: str, rounds: int, divide: int = 1) -> Measured:
    """Run one row on ``device``; sizes are divided by ``divide``."""

    def result(provider: str, milliseconds: float | None, tflops: float | None, note: str) -> Measured:
        return Measured(row.name, row.shape, provider, milliseconds, tflops, note, row.published, row.source)

    if row.call is None:
        return result("-", None, None, "not built")
    name, args, kwargs, operations = row.call(device, divide)
    choice = ops.provider(name, device, args, kwargs)
    if choice.provider is None:
        return result("-", None, None, "no provider: " + "; ".join(map(str, choice.refusals)))
    with ops.strict():
        times = _times(lambda: ops.op(name).overload(*args, **kwargs), device, rounds)
    median = statistics.median(times)
    spread = f"{min(times):.3g} to {max(times):.3g} ms over {len(times)} calls"
    return result(choice.provider.name, median, operations / median / 1e9, spread)


def _times(call: Callable[[], Any], device: str, rounds: int) -> list[float]:
    """Milliseconds of single calls with cold caches; the first two are not counted."""
    flush = torch.empty(_L2_TWICE if device == "npu" else 1 << 20, dtype=torch.int8, device=device)
    times = []
    for _ in range(rounds + 2):
        flush.zero_()
        if device == "npu":
            begin, end = (_npu().Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            _npu().synchronize()
            times.append(float(begin.elapsed_time(end)))
        else:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
    return times[2:]


def _npu() -> Any:
    """``torch.npu``, which is there once torch_npu is imported."""
    return torch.npu  # type: ignore[attr-defined]


def _missing() -> str | None:
    """Why nothing can be measured here, one sentence."""
    try:
        import torch_npu  # noqa: F401
    except ImportError as error:
        return f"{_NO_NPU}: torch_npu cannot be imported ({str(error).splitlines()[0]})."
    if not _npu().is_available():
        return f"{_NO_NPU}: torch_npu finds none (npu-smi info lists them)."
    return None


def _table(rows: Sequence[Measured], device: str) -> str:
    lines = [f"{'row':15} {'shape':46} {'provider':10} {'ms':>9} {'TFLOPS':>8}  vendor's figure"]
    for r in rows:
        ms, rate = ("-" if v is None else f"{v:.4g}" for v in (r.milliseconds, r.tflops))
        lines.append(f"{r.name:15} {r.shape:46} {r.provider:10} {ms:>9} {rate:>8}  {r.published}")
        lines.append(f"{'':15} {r.note}")
    sources = sorted({r.source for r in rows})
    lines += ["", f"Measured on {device}. The vendor's figures are quoted and were not measured here:"]
    return "\n".join([*lines, *(f"  {s}" for s in sources)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/ascend.sh", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--list", action="store_true", help="print the rows and the published figures, and stop")
    parser.add_argument("--only", choices=[r.name for r in ROWS], action="append", help="this row; may be repeated")
    parser.add_argument("--rounds", type=int, default=30, help="calls per row")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args(argv)
    chosen = [r for r in ROWS if options.only is None or r.name in options.only]
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it takes 1 or more.")
    if options.list:
        for r in chosen:
            print(f"{r.name:15} {r.shape:46} {r.published:26} {'' if r.call else 'not built; '}{r.source}")
        return 0
    reason = _missing()
    if reason is not None:
        print(f"benchmarks/ascend.sh: {reason}", file=sys.stderr)
        return 1
    found = [measure(row, "npu", options.rounds) for row in chosen]
    print(_table(found, str(_npu().get_device_name(0))))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in found], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
