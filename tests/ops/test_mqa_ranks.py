"""Ranks that run the same indexer choose the same keys, whatever threads and chunks of queries each of them has."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ascend_deep import ops


def choose(rank: int, store: str) -> None:
    """Rank 0 takes all queries on one thread, rank 1 one at a time on two; both must have the same list."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(rank + 1)
    g = torch.Generator().manual_seed(12)
    q, kv = torch.randn(1, 9, 16, 64, generator=g), torch.randn(1, 3001, 64, generator=g)
    weights = torch.randn(1, 9, 16, generator=g)
    rows = [slice(None)] if rank == 0 else [slice(i, i + 1) for i in range(9)]
    mine = torch.cat([ops.mqa_topk(q[:, r], kv, weights[:, r], topk=512, scale=0.37, sorted=True)[1] for r in rows], 1)
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine)
    dist.destroy_process_group()
    assert torch.equal(theirs[0], theirs[1])


def test_two_ranks_choose_the_same_keys(tmp_path: Path) -> None:
    mp.spawn(choose, args=(str(tmp_path / "store"),), nprocs=2)
