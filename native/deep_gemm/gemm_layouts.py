"""Grouped layouts as the library reads them: int32, inside the buffer, and no surprises in padding rows.

The ops clamp ends and counts, allow padding rows anywhere in a block of labels, and an empty group may end before it
starts. The library reads the label of the first row of a tile, subtracts ends as unsigned numbers, and writes behind a
count that is too large. On CUDA each function is one small Triton kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["block_labels", "clear_padding", "counts", "ends", "keep_rows"]


def _triton(x: Tensor) -> bool:
    return x.device.type == "cuda"


def ends(psum: Tensor, rows: int, alignment: int) -> Tensor:
    """int32 [G]: the end of each group, not below its start and not above ``rows``."""
    if _triton(psum):
        from ascend_deep.native.triton.gemm_layouts import ends as on_device

        return on_device(psum, rows, alignment)
    clamped = psum.clamp(0, rows)
    starts = (clamped + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    starts = torch.nn.functional.pad(starts[:-1], (1, 0)).clamp(max=rows)
    return torch.maximum(clamped, starts).to(torch.int32)


def counts(masked_m: Tensor, rows: int) -> Tensor:
    """int32 [G]: the rows of each group, in [0, ``rows``]."""
    return masked_m.clamp(0, rows).to(torch.int32)


def block_labels(labels: Tensor, groups: int, block: int) -> Tensor:
    """int32 [M]: for all rows of a block of ``block`` the group of those that have one, or -1."""
    if _triton(labels):
        from ascend_deep.native.triton.gemm_layouts import block_labels as on_device

        return on_device(labels, groups, block)
    known = torch.where((labels >= 0) & (labels < groups), labels, -1)
    padded = torch.nn.functional.pad(known, (0, -known.shape[0] % block), value=-1).view(-1, block)
    return padded.amax(1).repeat_interleave(block)[: labels.shape[0]].to(torch.int32)


def _rows_in_groups(layout: Tensor, rows: int, grouping: str, alignment: int, groups: int) -> Tensor:
    """bool: the rows of [rows] (``masked``: [G, rows]) that belong to a group; ``layout`` as the op has it."""
    at = torch.arange(rows, device=layout.device)
    if grouping == "labels":
        return (layout >= 0) & (layout < groups)
    if grouping == "masked":
        return at < layout.unsqueeze(1)
    end = layout.clamp(0, rows)
    start = (end + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    start = torch.nn.functional.pad(start[:-1], (1, 0))
    return ((at.unsqueeze(1) >= start) & (at.unsqueeze(1) < end)).any(1)


def clear_padding(out: Tensor, layout: Tensor, grouping: str, alignment: int, groups: int) -> None:
    """Zeros in the rows of ``out`` [M, N], or [G, M, N] if ``masked``, that belong to no group."""
    if out.numel() == 0:
        return
    if _triton(out):
        from ascend_deep.native.triton.gemm_layouts import clear_padding as on_device

        on_device(out, layout, grouping, alignment, groups)
        return
    used = _rows_in_groups(layout, out.shape[-2], grouping, alignment, groups)
    out.masked_fill_(~used.unsqueeze(-1), 0)


def keep_rows(x: Tensor, psum: Tensor, alignment: int) -> Tensor:
    """A copy of ``x`` [R, M] with zeros in padding rows."""
    used = _rows_in_groups(psum, x.shape[0], "psum", alignment, psum.shape[0])
    return torch.where(used.unsqueeze(1), x, torch.zeros((), dtype=x.dtype, device=x.device))
