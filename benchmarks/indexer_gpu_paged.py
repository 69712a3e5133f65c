"""The indexer over a paged key cache on a GPU: our op, DeepGEMM and the reference, in one run.

    python -m benchmarks.indexer_gpu_paged [--queries 64] [--keys 65536] [--rounds 21]

64 heads of 128, fp8 operands with a scale per vector, pages of 64 keys out of order, k = 2048, every context full. Each
query has keys of its own, so the keys, 132 bytes each, are read from memory once: GB/s count them alone. Medians of
interleaved CUDA graphs; the reference as calls, of which it makes some for every query.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ascend_deep import ops
from ascend_deep.native.deep_gemm.provider import DEEP_GEMM
from ascend_deep.ops import paged_mqa_logits, paged_mqa_topk
from benchmarks._arguments import count
from benchmarks.indexer_gpu import DEPTH, HEADS, SCALE, TOPK, captured, ceilings, fp8, interleaved

PAGE = 64


def measure(queries: int, next_n: int, keys: int, rounds: int) -> dict[str, float]:
    """Milliseconds of every implementation."""
    columns = -(-keys // PAGE)
    pages = queries * columns
    q, q_sf = fp8(torch.randn(queries, next_n, HEADS, DEPTH, device="cuda"))
    weights = torch.randn(queries, next_n, HEADS, device="cuda") * HEADS**-0.5 * q_sf.squeeze(-1) * SCALE
    cache = torch.empty(pages, PAGE * (DEPTH + 4), dtype=torch.uint8, device="cuda")
    cache[:, : PAGE * DEPTH] = torch.randn(pages, PAGE * DEPTH, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    cache[:, PAGE * DEPTH :] = (torch.rand(pages, PAGE, device="cuda") + 0.5).view(torch.uint8)
    cache = cache.view(pages, PAGE, 1, DEPTH + 4)
    table = torch.randperm(pages, device="cuda").view(queries, columns).int()
    lens = torch.full((queries, next_n), keys, dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"max_context_len": keys, "fmt": "fp8"}
    given = (q, cache, weights, lens, table)
    chosen = {**options, "topk": TOPK, "return_scores": False, "index_dtype": torch.int32}
    fast: dict[str, Callable[[], Any]] = {
        "ours": partial(paged_mqa_logits, *given, **options),
        "ours, top-k": partial(paged_mqa_topk, *given, **chosen),
    }
    if DEEP_GEMM.unavailable() is None and next_n <= 2:
        import deep_gemm

        plan = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE, deep_gemm.get_num_sms())
        folded = weights.flatten(0, 1)
        fast["DeepGEMM"] = partial(deep_gemm.fp8_paged_mqa_logits, q, cache, folded, lens, table, plan, keys)
    reference = ops.reference("paged_mqa_logits")
    rest: dict[str, Any] = {"scale": 1.0, "clean": True, "out_dtype": None}
    slow: dict[str, Callable[[], Any]] = {
        "reference": partial(reference, q, None, cache, weights, lens, table, None, None, **options, **rest)
    }
    return interleaved(slow, 3) | interleaved({name: captured(call) for name, call in fast.items()}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=count, default=64)
    parser.add_argument("--keys", type=count, default=65536)
    parser.add_argument("--rounds", type=count, default=21)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(0, "not run: no CUDA device\n")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ceilings()}")
    for next_n in (1, 2, 4):
        print(f"\n{options.queries} queries of {next_n}, {options.keys} keys each")
        for name, ms in measure(options.queries, next_n, options.keys, options.rounds).items():
            flops = 2 * options.queries * next_n * options.keys * HEADS * DEPTH
            read = options.queries * options.keys * (DEPTH + 4)
            print(f"  {name:14s} {ms:9.4f} ms {flops / ms / 1e9:8.1f} TFLOP/s {read / ms / 1e6:8.0f} GB/s", flush=True)


if __name__ == "__main__":
    main()
