"""The indexer on a GPU: our ops against eager, Inductor and DeepGEMM, in one run.

    python benchmarks/indexer_gpu.py [--json FILE] [--quick]

Every row is the median of interleaved repetitions on random data, 64 heads of 128, k = 2048. "eager" is the indexer as
models write it: f32 products of bf16 operands, ReLU, weighted sum over heads. All but eager and Inductor run as CUDA
graphs: times are those of the device, and the host's share is a table of its own. TFLOP/s count the products only
(2 S T H D). The peak is that of a bf16 matrix product of 8192, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.deep_gemm.provider import DEEP_GEMM
from ascend_deep.native.triton.provider import TRITON
from ascend_deep.ops import mqa_logits, mqa_topk

HEADS, DEPTH, TOPK, SCALE = 64, 128, 2048, 0.088
SHAPES = {"prefill 4096": (4096, 4096), "prefill 8192": (8192, 8192), "long": (2048, 65536), "decode": (64, 65536)}


def scores_of_models(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[S, T] scores of q [S, H, D], k [T, D] and weights [S, H], as models spell it."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * SCALE
    return torch.matmul(weights.unsqueeze(-2), torch.relu(scores)).squeeze(-2)


def fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and one scale per row."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds on the device of each call; every round runs all of them."""
    repeat = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        # Short calls are timed in groups, so that the gaps between launches do not count.
        repeat[name] = max(1, min(20, int(0.004 / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeat[name]):
                call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / repeat[name])
    return {name: statistics.median(values) for name, values in times.items()}


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph, so that only work on the device is timed."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def ceilings() -> dict[str, float]:
    """Measured bf16 matrix rate in TFLOP/s and copy rate in TB/s."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    found = interleaved({"mm": partial(torch.mm, a, b), "copy": partial(target.copy_, source)}, 15)
    return {"bf16 TFLOP/s": 2 * 8192**3 / found["mm"] / 1e9, "copy TB/s": 8 * source.numel() / found["copy"] / 1e9}


def deep_gemm_calls(q: Tensor, kv: Tensor, kv_sf: Tensor, weights: Tensor) -> dict[str, Callable[[], Any]]:
    """The library called directly, with and without ``torch.topk``; empty if it is not there."""
    if DEEP_GEMM.unavailable() is not None:
        return {}
    import deep_gemm

    queries, keys = q.shape[0], kv.shape[0]
    ks = torch.zeros(queries, dtype=torch.int32, device="cuda")
    ke = torch.full((queries,), keys, dtype=torch.int32, device="cuda")
    direct = partial(deep_gemm.fp8_mqa_logits, q, (kv, kv_sf), weights, ks, ke)

    def direct_topk() -> Tensor:
        out: Tensor = direct().topk(TOPK, dim=-1)[1]
        return out

    return {"DeepGEMM": direct, "DeepGEMM + torch.topk": direct_topk}


def measure(queries: int, keys: int, rounds: int, inductor: bool = True) -> dict[str, float]:
    """Milliseconds of every implementation at one shape."""
    q = torch.randn(queries, HEADS, DEPTH, device="cuda").bfloat16()
    k = torch.randn(keys, DEPTH, device="cuda").bfloat16()
    w = torch.randn(queries, HEADS, device="cuda") * HEADS**-0.5
    q8, q8_sf = fp8(q)
    k8, k8_sf = fp8(k)
    folded = w * q8_sf.squeeze(-1) * SCALE
    four = (q8.unsqueeze(0), None, k8.unsqueeze(0), k8_sf.unsqueeze(0), folded.unsqueeze(0), None, None, None)
    logit_options = {"scale": 1.0, "max_seqlen_k": 0, "clean": True, "out_dtype": None}
    topk_options = {"scale": 1.0, "topk": TOPK, "outside": "pad", "sorted": False}
    topk_options |= {"return_scores": False, "index_dtype": torch.int32}
    plain: dict[str, Any] = {"return_scores": False, "index_dtype": torch.int32}
    compiled = torch.compile(scores_of_models, fullgraph=True)
    slow: dict[str, Callable[[], Any]] = {
        "eager": partial(scores_of_models, q, k, w),
        "Inductor": partial(compiled, q, k, w),
    }
    fast: dict[str, Callable[[], Any]] = {
        "ours bf16": partial(mqa_logits, q, k, w, scale=SCALE),
        "ours bf16 top-k": partial(mqa_topk, q, k, w, topk=TOPK, scale=SCALE, **plain),
        "ours fp8": partial(TRITON.kernels["mqa_logits"], *four, **logit_options),
        "ours fp8 top-k": partial(TRITON.kernels["mqa_topk"], *four, **topk_options),
    }
    direct = deep_gemm_calls(q8, k8, k8_sf.squeeze(-1), folded)
    if direct:
        fast |= direct
        fast["deep_gemm provider"] = partial(DEEP_GEMM.kernels["mqa_logits"], *four, **logit_options)
        fast["deep_gemm provider top-k"] = partial(DEEP_GEMM.kernels["mqa_topk"], *four, **topk_options)
    found = interleaved(slow if inductor else {}, max(rounds // 4, 3))
    # Eager holds tens of gigabytes at the long shape; its cache must not slow the others down.
    torch.cuda.empty_cache()
    return found | interleaved({name: captured(call) for name, call in fast.items()}, rounds)


def overhead(rounds: int = 400) -> dict[str, float]:
    """Microseconds on the host that a call of the op takes above the direct call of the library, small shape."""
    if DEEP_GEMM.unavailable() is not None:
        return {}
    import deep_gemm

    q, q_sf = fp8(torch.randn(64, HEADS, DEPTH, device="cuda"))
    k, k_sf = fp8(torch.randn(256, DEPTH, device="cuda"))
    w = torch.randn(64, HEADS, device="cuda") * q_sf.squeeze(-1)
    ks, ke = torch.zeros(64, dtype=torch.int32, device="cuda"), torch.full((64,), 256, dtype=torch.int32, device="cuda")
    flat = k_sf.squeeze(-1)
    four = (q.unsqueeze(0), None, k.unsqueeze(0), k_sf.unsqueeze(0), w.unsqueeze(0), None, None, None)
    options = {"scale": 1.0, "max_seqlen_k": 0, "clean": True, "out_dtype": None}
    calls: dict[str, Callable[[], Any]] = {
        "direct": partial(deep_gemm.fp8_mqa_logits, q, (k, flat), w, ks, ke),
        "provider": partial(DEEP_GEMM.kernels["mqa_logits"], *four, **options),
        "op": partial(torch.ops.ascend_deep.mqa_logits.default, *four, **options),
        "op to native.triton": partial(mqa_logits, q.float().bfloat16(), k.float().bfloat16(), w, scale=SCALE),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
            if i % 16 == 0:
                torch.cuda.synchronize()
    return {name: statistics.median(values[20:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="without eager and Inductor")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(0, "not run: no CUDA device\n")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": ceilings(),
        "shapes": {},
    }
    peak = result["ceilings"]["bf16 TFLOP/s"]
    print(f"{result['device']}, torch {result['torch']}, {result['ceilings']}")
    for label, (queries, keys) in SHAPES.items():
        torch.cuda.empty_cache()
        found = measure(queries, keys, options.rounds, inductor=not options.quick)
        flops = 2 * queries * keys * HEADS * DEPTH
        rows = {
            name: {"ms": ms, "TFLOP/s": flops / ms / 1e9, "of bf16 peak": flops / ms / 1e9 / peak}
            for name, ms in found.items()
        }
        result["shapes"][label] = {"queries": queries, "keys": keys, "rows": rows}
        print(f"\n{label}: S = {queries}, T = {keys}")
        for name, row in rows.items():
            print(f"  {name:26s} {row['ms']:9.4f} ms {row['TFLOP/s']:8.1f} TFLOP/s {row['of bf16 peak']:6.2f} of peak")
    result["host microseconds"] = overhead()
    print("\nhost microseconds:", {name: round(value, 1) for name, value in result["host microseconds"].items()})
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
