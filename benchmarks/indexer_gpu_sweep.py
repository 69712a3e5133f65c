"""Tile sizes of the CUDA indexer kernels: times every candidate and prints the best (``native/triton/plan.py``).

python benchmarks/indexer_gpu_sweep.py            # needs a CUDA device of compute capability 9.0
python benchmarks/indexer_gpu_sweep.py --part 0/8 # only compiles its share, to fill Triton's cache in parallel
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from ascend_deep.native.triton import indexer
from ascend_deep.native.triton.indexer import Values
from ascend_deep.native.triton.plan import Block, Long, Tile, long_for

SHAPES = ((4096, 4096), (2048, 65536), (64, 65536))
HEADS, DEPTH, TOPK = 64, 128, 2048


def tiles(dtype: torch.dtype) -> Iterator[Tile]:
    """Candidates of the logits kernel that fit into shared memory and registers."""
    wide = ((128, 64, 4), (128, 128, 4), (256, 64, 4), (256, 128, 8))
    for (columns, keys, warps), stages in itertools.product(wide, (2, 3, 4)):
        size = (columns + stages * keys) * DEPTH * dtype.itemsize
        if size < 220_000:
            yield Tile(columns, keys, warps, stages)


def selections() -> Iterator[tuple[int, int, Block | Long]]:
    """(rows, keys, candidate) of the selection."""
    for rows, keys in ((4096, 4096), (4096, 8192)):
        for warps, registers in itertools.product((4, 8, 16), (0, 96, 128, 168)):
            if 16 <= keys // warps // 32 <= 64:
                yield rows, keys, Block(keys, warps, registers)
    for rows in (512, 64):
        base = long_for(65536, TOPK)
        samples = (Block(4096, 8), Block(2048, 4), Block(2048, 8), Block(4096, 16))
        picks = (Block(4096, 8), Block(4096, 4), Block(4096, 16))
        marks = (Block(4096, 4), Block(4096, 8), Block(8192, 8))
        for sample, mark, pick in itertools.product(samples, marks, picks):
            yield rows, 65536, replace(base, sample=sample, mark=mark, pick=pick)


def operands(queries: int, keys: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, kv and weights as the launch takes them, random."""
    q = torch.randn(1, queries, HEADS, DEPTH, device="cuda").to(dtype)
    kv = torch.randn(1, keys, DEPTH, device="cuda").to(dtype)
    return q, kv, torch.randn(1, queries, HEADS, device="cuda")


def milliseconds(call: Callable[[], object], rounds: int = 7, graph: bool = False) -> float:
    """Median time of a call on the device; as a CUDA graph, without the host's share, if ``graph``."""
    call()
    if graph:
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        call = captured.replay
        call()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(3):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 3)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="", help="i/n: compile only, every n-th candidate from the i-th on")
    parser.add_argument("--select", action="store_true", help="only the selection")
    parser.add_argument("--programs", action="store_true", help="also vary the number of programs of a launch")
    options = parser.parse_args()
    share, parts = (int(x) for x in options.part.split("/")) if options.part else (0, 1)
    number = 0
    for dtype, (queries, keys) in itertools.product((torch.bfloat16, torch.float8_e4m3fn), SHAPES):
        if options.select or (options.part and keys != SHAPES[0][1]):
            continue
        q, kv, w = operands(queries, keys, dtype)
        kv_sf = torch.rand(1, keys, 1, device="cuda") + 0.5 if dtype.itemsize == 1 else None
        out = torch.empty(1, queries, keys, device="cuda")
        flops = 2 * queries * keys * HEADS * DEPTH
        results = []
        for tile in tiles(dtype):
            number += 1
            if number % parts != share:
                continue
            counts = (1056, 2112, 4224) if options.programs else (tile.programs,)
            for programs in counts:
                one = Tile(tile.columns, tile.keys, tile.warps, tile.stages, programs)

                call = partial(indexer.launch_logits, q, None, kv, kv_sf, w, None, None, None, out, scale=0.7, tile=one)

                try:
                    results.append((milliseconds(call, 1 if options.part else 7), one))
                except Exception as error:
                    print("does not run:", one, str(error).splitlines()[0][:100])
        if not options.part:
            print(f"{dtype} S={queries} T={keys}")
            for time, one in sorted(results, key=lambda r: r[0])[:8]:
                print(f"  {time:8.4f} ms {flops / time / 1e9:7.1f} TFLOP/s  {one}")
    for (rows, keys), group in itertools.groupby(selections(), key=lambda s: s[:2]):
        values = Values(torch.randn(1, rows, keys, device="cuda").view(torch.int32), masked=False)
        scores = torch.empty(1, rows, TOPK, device="cuda")
        idx = torch.empty(1, rows, TOPK, dtype=torch.int64, device="cuda")
        results_s = []
        for _, _, cut in group:
            number += 1
            if number % parts != share:
                continue

            select = partial(indexer.select_rows, values, None, None, scores, idx, rank_last=False, plan=cut)
            try:
                results_s.append((milliseconds(select, 1 if options.part else 9, graph=not options.part), cut))
            except Exception as error:
                print("does not run:", cut, str(error).splitlines()[0][:100])
        if not options.part:
            print(f"select {rows} x {keys}, topk {TOPK}; torch.topk {_torch_topk(values.data):.4f} ms")
            for time, cut in sorted(results_s, key=lambda r: r[0])[:10]:
                print(f"  {time:8.4f} ms  {cut}")


def _torch_topk(values: torch.Tensor) -> float:
    return milliseconds(partial(values.view(torch.float32).topk, TOPK, dim=-1))


if __name__ == "__main__":
    main()
