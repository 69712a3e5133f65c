"""Launches of the matrix product kernels: the GEMM ops on CUDA through Triton.

Arguments are those of the ops; ``gemm_limits`` checks a call before it gets here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.triton import gemm_vector
from ascend_deep.native.triton.gemm_kernels import gemm_kernel, sum_kernel
from ascend_deep.native.triton.gemm_layouts import blocks_of
from ascend_deep.native.triton.gemm_plan import DECODE_ROWS, Tile, parts_for, tile_for, vector_for
from ascend_deep.native.triton.launch import Rows, key_of, repeat
from ascend_deep.native.triton.launch import launch as launch_kernel
from ascend_deep.native.triton.plan import power_of_two

__all__ = [
    "gemm_bf16",
    "gemm_bf16_acc_",
    "gemm_bf16_out",
    "gemm_scaled",
    "launch",
    "m_grouped_gemm_bf16",
    "m_grouped_gemm_bf16_masked",
    "m_grouped_gemm_scaled",
    "m_grouped_gemm_scaled_masked",
]

DENSE, PSUM, LABELS, MASKED = range(4)
_GROUPINGS = {"psum": PSUM, "labels": LABELS}


@dataclass(frozen=True)
class _Operand:
    """A matrix [rows, K], or one per group, in the order of its storage."""

    tensor: Tensor
    k_major: bool
    tma: bool


def _operand(x: Tensor) -> _Operand:
    """``x`` [rows, K] or [groups, rows, K] of any strides; ``tma``: the copy engine can read it."""
    rows, inner = x.shape[-2:]
    k_major = x.stride(-1) == 1 or inner == 1
    if not k_major and x.dtype == torch.float8_e4m3fn:
        # The tensor cores take fp8 only with K contiguous.
        x, k_major = x.contiguous(), True
    if not k_major and x.stride(-2) != 1:
        return _Operand(x, True, False)
    pitch = x.stride(-2 if k_major else -1)
    contiguous = x.stride(-1 if k_major else -2) == 1
    tight = x.dim() == 2 or x.shape[0] == 1 or x.stride(0) == pitch * (rows if k_major else inner)
    aligned = pitch * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return _Operand(x, k_major, contiguous and tight and aligned and pitch >= (inner if k_major else rows))


def _descriptor(x: _Operand, rows: int, depth: int) -> Rows:
    t = x.tensor
    groups = t.shape[0] if t.dim() == 3 else 1
    if x.k_major:
        return Rows(t, groups * t.shape[-2], t.shape[-1], t.stride(-2), (rows, depth))
    return Rows(t, groups * t.shape[-1], t.shape[-2], t.stride(-1), (depth, rows))


def launch(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    *,
    alpha: float | None = None,
    layout: Tensor | None = None,
    grouping: int = DENSE,
    alignment: int = 1,
    expected: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    tile: Tile | None = None,
) -> None:
    """``out = c + alpha * a @ b.mT`` for one or more groups; see ``gemm_kernel``.

    Args:
        a: [M, K], or [G, M, K] with masks.
        b: [N, K] or [G, N, K].
        c: [M, N] or ``None``; may be ``out``.
        out: [M, N] or [G, M, N] with contiguous rows; with masks also contiguous groups.
        layout: the int32 tensor of ``grouping``.
        expected: about how many rows a group has (for the choice of a tile).
        scales: f32 of a [.., M, ceil(K/128)] and of b [.., ceil(N/128) or N, ceil(K/128)].
        tile: overrides the plan (for measurements).
    """
    m, n, k = a.shape[-2], b.shape[-2], a.shape[-1]
    groups = b.shape[0] if b.dim() == 3 else 1
    if m == 0 or n == 0 or groups == 0:
        return
    sfa, sfb = scales or (None, None)
    tensors = (a, b, c, out, sfa, sfb, layout)
    known = None
    if tile is None:
        key = key_of(tensors, "gemm", alpha, grouping, alignment, expected)
        if repeat(key, tensors):
            return
        known = (key, tensors)
    if m == 1 and grouping == DENSE and tile is None and gemm_vector.takes(b, scales):
        plan = vector_for(n, k, b.element_size())
        if plan is not None:
            gemm_vector.vector(a, b, c, out, alpha, scales, plan, known and (known[0], tensors[:6]))
            return
    rows = m if grouping == DENSE else max(1, expected or -(-m // groups))
    if grouping == LABELS:
        # A tile has rows of one group.
        rows = min(rows, alignment & -alignment)
    tile = tile or tile_for(rows, n, k, scaled=scales is not None, groups=groups, grouped=grouping != DENSE)
    if grouping == LABELS:
        tile = replace(tile, rows=min(tile.rows, alignment & -alignment))
    if a.dim() == 3:
        a = a.contiguous() if a.stride(0) != m * a.stride(1) or a.stride(2) != 1 else a
        a = a.as_strided((groups * m, k), (a.stride(1), 1), a.storage_offset())
    left, right = _operand(a), _operand(b)
    tma = left.tma and right.tma and k > 0 and (groups == 1 or right.k_major or k % tile.depth == 0)
    if grouping == MASKED:
        m_tiles = -(-m // tile.rows)
    elif grouping == PSUM:
        # Each group, and what is behind the last, may have a tile that is not full.
        m_tiles = -(-m // tile.rows) + groups + 1
    else:
        m_tiles = -(-m // tile.rows)
    work = out if tile.splits == 1 else out.new_empty((tile.splits, m, n), dtype=torch.float32)
    gran_n = 1 if sfb is not None and sfb.shape[-2] == n and n > 1 else 128
    grid = (m_tiles * -(-n // tile.columns), tile.splits, groups if grouping == MASKED else 1)
    args = (
        _descriptor(left, tile.rows, tile.depth) if tma else left.tensor,
        _descriptor(right, tile.columns, tile.depth) if tma else right.tensor,
        c,
        work,
        sfa,
        sfb,
        layout,
        1.0 if alpha is None else float(alpha),
        m,
        n,
        k,
        groups,
        alignment,
        m_tiles,
        *left.tensor.stride()[-2:],
        right.tensor.stride(0) if right.tensor.dim() == 3 else 0,
        *right.tensor.stride()[-2:],
        *((0, 0) if c is None else c.stride()),
        m * n,
        work.stride(-2),
        *((0, 0) if sfa is None else sfa.stride()[-2:]),
        *((0, 0, 0) if sfb is None else (sfb.stride(0) if sfb.dim() == 3 else 0, *sfb.stride()[-2:])),
    )
    options = {
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "GP": power_of_two(groups + 1) if grouping == PSUM else 1,
        "GROUPING": grouping,
        "SWAP": tile.swap,
        "SPLITS": tile.splits,
        "SCALED": scales is not None,
        "GRAN_N": gran_n,
        "HAS_C": c is not None and tile.splits == 1,
        "TMA": tma,
        "A_K_MAJOR": left.k_major,
        "B_K_MAJOR": right.k_major,
        "SUPER": tile.height,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }
    launch_kernel(gemm_kernel, grid, args, options, known if tile.splits == 1 else None)
    if tile.splits > 1:
        _sum(work, c, out, alpha, tile.splits)


def _sum(work: Tensor, c: Tensor | None, out: Tensor, alpha: float | None, splits: int) -> None:
    """``out = c + alpha * work.sum(0)``."""
    m, n = out.shape
    block = min(power_of_two(n, 32), 256)
    args = (
        work,
        c,
        out,
        1.0 if alpha is None else float(alpha),
        m,
        n,
        m * n,
        *((0, 0) if c is None else c.stride()),
        out.stride(-2),
    )
    options = {"SPLITS": splits, "HAS_C": c is not None, "BLOCK": block, "num_warps": 2}
    launch_kernel(sum_kernel, (-(-n // block), m, 1), args, options)


def _logical(a: Tensor, b: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """A as [.., M, K] and B as [.., N, K]."""
    return (a if layout[0] == "n" else a.mT), (b if layout[1] == "t" else b.mT)


def _dtype(c: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    return out_dtype or (torch.bfloat16 if c is None else c.dtype)


def gemm_bf16(
    a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, out_dtype: torch.dtype | None, alpha: float | None
) -> Tensor:
    """The op ``gemm_bf16``."""
    left, right = _logical(a, b, layout)
    out = a.new_empty((left.shape[0], right.shape[0]), dtype=_dtype(c, out_dtype))
    launch(left, right, c, out, alpha=alpha)
    return out


def gemm_bf16_out(d: Tensor, a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, alpha: float | None) -> None:
    """The op ``gemm_bf16_out``."""
    launch(*_logical(a, b, layout), c, d, alpha=alpha)


def gemm_bf16_acc_(d: Tensor, a: Tensor, b: Tensor, *, layout: str) -> None:
    """The op ``gemm_bf16_acc_``."""
    launch(*_logical(a, b, layout), d, d)


def gemm_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    c: Tensor | None,
    *,
    layout: str,
    out_dtype: torch.dtype | None,
    alpha: float | None,
    **_: Any,
) -> Tensor:
    """The op ``gemm_scaled`` for fp8 operands and scales per 128 elements of K."""
    left, right = _logical(a, b, layout)
    out = a.new_empty((left.shape[0], right.shape[0]), dtype=_dtype(c, out_dtype))
    if c is None and alpha in (None, 1.0) and _for_warp_groups(left, right, sfb, out):
        from ascend_deep.native.triton.gemm_fp8 import gemm_fp8

        gemm_fp8(left, sfa, right, sfb, out, parts=parts_for(*out.shape))
    else:
        launch(left, right, c, out, alpha=alpha, scales=(sfa, sfb))
    return out


def _for_warp_groups(a: Tensor, b: Tensor, sfb: Tensor, out: Tensor) -> bool:
    """Whether the fp8 kernel of Hopper takes a [M, K] and b [N, K] or [G, N, K]."""
    n = out.shape[1]
    rows = out.shape[0] > DECODE_ROWS and out.dtype == torch.bfloat16 and n % 8 == 0
    blocks = sfb.shape[-2] == -(-n // 128) and n > 1
    tight = b.dim() == 2 or (b.is_contiguous() and b.shape[0] * n < 1 << 31)
    if not rows or not blocks or not tight or torch.cuda.get_device_capability(a.device) != (9, 0):
        return False
    return all(x.stride(-1) == 1 and x.stride(-2) % 16 == 0 and x.data_ptr() % 16 == 0 for x in (a, b))


def _grouped(
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    layout: str,
    grouping: str,
    alignment: int,
    expected_m: int | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    left, right = _logical(a, b, layout)
    out = a.new_empty((left.shape[0], right.shape[1]), dtype=out_dtype or torch.bfloat16)
    rows = left.shape[0] // max(right.shape[0], 1)
    aligned = grouping == "psum" and alignment % 128 == 0
    if scales is not None and aligned and rows > DECODE_ROWS and _for_warp_groups(left, right, scales[1], out):
        from ascend_deep.native.triton.gemm_fp8 import gemm_fp8

        blocks = blocks_of(grouped_layout, left.shape[0], alignment, 128)
        gemm_fp8(left, scales[0], right, scales[1], out, blocks=blocks)
        return out
    launch(
        left,
        right,
        None,
        out,
        layout=grouped_layout,
        grouping=_GROUPINGS[grouping],
        alignment=alignment,
        expected=expected_m,
        scales=scales,
    )
    return out


def m_grouped_gemm_bf16(
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    layout: str,
    grouping: str,
    alignment: int,
    expected_m: int | None,
    zero_padding: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """The op ``m_grouped_gemm_bf16``; padding rows come out as zeros at no cost, asked for or not."""
    return _grouped(a, b, grouped_layout, None, layout, grouping, alignment, expected_m, out_dtype)


def m_grouped_gemm_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    grouped_layout: Tensor,
    *,
    layout: str,
    grouping: str,
    alignment: int,
    expected_m: int | None,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> Tensor:
    """The op ``m_grouped_gemm_scaled`` for fp8 operands and scales per 128 elements of K."""
    return _grouped(a, b, grouped_layout, (sfa, sfb), layout, grouping, alignment, expected_m, out_dtype)


def m_grouped_gemm_bf16_masked(a: Tensor, b: Tensor, masked_m: Tensor, *, expected_m: int) -> Tensor:
    """The op ``m_grouped_gemm_bf16_masked``."""
    out = a.new_empty((*a.shape[:2], b.shape[1]))
    launch(a, b, None, out, layout=masked_m, grouping=MASKED, expected=expected_m)
    return out


def m_grouped_gemm_scaled_masked(
    a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, masked_m: Tensor, *, expected_m: int, **_: Any
) -> Tensor:
    """The op ``m_grouped_gemm_scaled_masked`` for fp8 operands and scales per 128 elements of K."""
    out = a.new_empty((*a.shape[:2], b.shape[1]), dtype=torch.bfloat16)
    flat = sfa.reshape(-1, sfa.shape[2])
    launch(a, b, None, out, layout=masked_m, grouping=MASKED, expected=expected_m, scales=(flat, sfb))
    return out
