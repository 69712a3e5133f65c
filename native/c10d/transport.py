"""The one collective that expert parallelism is made of: rows to every rank, rows from every rank.

A group is named, as torch names it, and its size is given; the rank of this process is never asked for, so that all
ranks run, and compile, the same program. A group of one needs no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["exchange", "group_problem", "require_group"]


def group_problem(group: str, size: int) -> str | None:
    """Why rows cannot be exchanged in ``group``, a torch group name, as one of ``size`` ranks; ``None`` if they can."""
    if size == 1:
        return None
    if not dist.is_available():
        return f"group_size is {size}, and this torch was built without torch.distributed."
    if not dist.is_initialized():
        return f"group_size is {size}, and torch.distributed is not initialised in this process."
    resolve: Any = dist.distributed_c10d._resolve_process_group
    try:
        found = resolve(group)
    except (RuntimeError, ValueError, KeyError):
        return f"group is {group!r}; torch.distributed knows no process group of that name."
    if found.size() != size:
        return f"group_size is {size}, but group {group!r} has {found.size()} ranks."
    return None


def require_group(op: str, group: str, size: int) -> None:
    """Raise ``ValueError`` where ``group_problem`` has something to say."""
    problem = group_problem(group, size)
    if problem is not None:
        raise ValueError(f"{op}: {problem}")


def exchange(rows: Tensor, received: Sequence[int], sent: Sequence[int], group: str, size: int) -> Tensor:
    """Rows for every rank, in rank order, for rows of every rank, in rank order.

    Args:
        rows: [sum(sent), ...], any dtype, freshly made: in a group of one it is returned as it is.
        received, sent: how many rows come from, and go to, every rank.

    Returns:
        [sum(received), ...], contiguous.
    """
    if size == 1:
        return rows
    raw = rows.contiguous()
    # Backends move bytes, but not all of them know the 8-bit floats.
    bits = raw.view(torch.uint8) if raw.dtype.itemsize == 1 and raw.dtype != torch.uint8 else raw
    functional = torch.ops._c10d_functional
    out = functional.wait_tensor(functional.all_to_all_single(bits, list(received), list(sent), group))
    return out if out.dtype == raw.dtype else out.view(raw.dtype)
