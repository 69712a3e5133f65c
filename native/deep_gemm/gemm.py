"""Dense products through DeepGEMM, for every platform of ``gemm_differences``.

As in ``indexer``, the library is an argument, so that a test can pass a stand-in and look at every call. The library
writes into a tensor of the caller and adds to it where C is given; C and D are the same tensor in all our calls, which
is the one form that every version takes. ``gemm_limits`` has checked a call before it gets here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.deep_gemm.gemm_differences import Gemm

__all__ = ["aligned", "gemm_bf16", "gemm_bf16_acc_", "gemm_bf16_out", "gemm_scaled", "scales", "sizes", "starting"]


_DENSE = {layout: "bf16_gemm_" + layout for layout in ("nt", "nn", "tn", "tt")}


def sizes(a: Tensor, b: Tensor, layout: str) -> tuple[int, int, int]:
    """M, N and K (of the tensors as stored: fp4 pairs count once) from the last two dimensions."""
    m, k = a.shape[-2:] if layout[0] == "n" else (a.shape[-1], a.shape[-2])
    return m, b.shape[-2] if layout[1] == "t" else b.shape[-1], k


def aligned(row: Gemm, x: Tensor) -> Tensor:
    """``x``, or a copy whose first element is where the copy engine can read it. Limits see no addresses."""
    return x.clone(memory_format=torch.preserve_format) if x.data_ptr() % row.unit else x


def starting(c: Tensor | None, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """D with C in it (or zeros), for the library to add to."""
    d = like.new_empty(shape, dtype=dtype)
    return d.zero_() if c is None else d.copy_(c)


def _options(row: Gemm, **given: Any) -> dict[str, Any]:
    options = {name: value for name, value in given.items() if value is not None}
    if row.compiled_dims is not None:
        options["compiled_dims"] = row.compiled_dims
    return options


def gemm_bf16(
    library: Any,
    row: Gemm,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    *,
    layout: str,
    out_dtype: torch.dtype | None,
    alpha: float | None,
) -> Tensor:
    """The op ``gemm_bf16``."""
    m, n = a.shape[layout[0] == "t"], b.shape[layout[1] == "n"]
    function = getattr(library, _DENSE[layout])
    if c is None and alpha is None and row.compiled_dims is not None and not (a.data_ptr() | b.data_ptr()) & 15:
        # The short way of the common call.
        d = a.new_empty((m, n)) if out_dtype is None else a.new_empty((m, n), dtype=out_dtype)
        function(a, b, d, None, row.compiled_dims)
        return d
    dtype = out_dtype or (torch.bfloat16 if c is None else c.dtype)
    d = a.new_empty((m, n), dtype=dtype) if c is None else starting(c, a, (m, n), dtype)
    added = None if c is None else d
    function(aligned(row, a), aligned(row, b), d, **_options(row, c=added, alpha=None if alpha == 1 else alpha))
    return d


def gemm_bf16_out(
    library: Any, row: Gemm, d: Tensor, a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, alpha: float | None
) -> None:
    """The op ``gemm_bf16_out``; ``d`` has contiguous rows at multiples of ``row.unit`` bytes."""
    if c is not None and c.data_ptr() != d.data_ptr():
        d.copy_(c)
    added = None if c is None else d
    function = getattr(library, "bf16_gemm_" + layout)
    function(aligned(row, a), aligned(row, b), d, **_options(row, c=added, alpha=None if alpha == 1 else alpha))


def gemm_bf16_acc_(library: Any, row: Gemm, d: Tensor, a: Tensor, b: Tensor, *, layout: str) -> None:
    """The op ``gemm_bf16_acc_``."""
    gemm_bf16_out(library, row, d, a, b, d, layout=layout, alpha=None)


def scales(row: Gemm, sf: Tensor, gran_mn: int) -> Tensor:
    """Scales [.., MN, columns] with the strides that the library takes as they are, or that it converts itself.

    f32: contiguous, or rows next to each other with a pitch of 4 n. Words: rows next to each other, with such
    a pitch on SM100 and without gaps on Ascend.
    """
    mn, columns = sf.shape[-2:]
    if sf.dtype == torch.float32 and sf.is_contiguous():
        return sf
    if sf.dtype == torch.float32 and gran_mn > 1:
        return sf.contiguous()
    pitch = mn if row.sf_dtype == torch.int16 else -(-mn // 4) * 4
    wanted = (*((columns * pitch,) if sf.dim() == 3 else ()), 1, pitch)
    if sf.stride() == wanted:
        return sf
    out = sf.new_zeros((*sf.shape[:-2], columns, pitch)).mT[..., :mn, :]
    return out.copy_(sf)


def k_major(row: Gemm, x: Tensor, transposed: bool) -> Tensor:
    """An operand [.., MN, K] of a scaled product (``transposed``: it is stored [.., K, MN])."""
    x = x.mT if transposed else x
    if x.stride(-1) != 1 and (row.fp8_k_major or x.stride(-2) != 1):
        x = x.contiguous()
    return aligned(row, x)


def recipes(row: Gemm, recipe_a: Sequence[int], recipe_b: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The block sizes, as one triple where a and b agree along K, which is the form that every platform knows."""
    if recipe_a[1] == recipe_b[1]:
        return {"recipe": (int(recipe_a[0]), int(recipe_b[0]), int(recipe_a[1]))}
    return {"recipe_a": (int(recipe_a[0]), int(recipe_a[1])), "recipe_b": (int(recipe_b[0]), int(recipe_b[1]))}


def gemm_scaled(
    library: Any,
    row: Gemm,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    c: Tensor | None,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    layout: str,
    out_dtype: torch.dtype | None,
    alpha: float | None,
) -> Tensor:
    """The op ``gemm_scaled``."""
    if (
        c is None
        and alpha is None
        and layout == "nt"
        and row.compiled_dims is not None
        and row.sf_dtype == torch.float32
    ):
        dtype, must_add = row.scaled[recipe_b[0]]
        straight = a.stride(1) == 1 == b.stride(1) and sfa.is_contiguous() and sfb.is_contiguous()
        if straight and not must_add and not (a.data_ptr() | b.data_ptr()) & 15:
            # The short way of the common call.
            d = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
            recipe = (1, recipe_b[0], recipe_b[1])
            library.fp8_fp4_gemm_nt((a, sfa), (b, sfb), d, None, recipe, None, None, row.compiled_dims)
            return d
    left, right = k_major(row, a, layout[0] == "t"), k_major(row, b, layout[1] == "n")
    dtype, must_add = row.scaled[int(recipe_b[0])]
    shape = (left.shape[0], right.shape[0])
    if c is None and not must_add:
        d, added = a.new_empty(shape, dtype=out_dtype or dtype), None
    else:
        d = added = starting(c, a, shape, out_dtype or (dtype if c is None else c.dtype))
    library.fp8_fp4_gemm_nt(
        (left, scales(row, sfa, int(recipe_a[0]))),
        (right, scales(row, sfb, int(recipe_b[0]))),
        d,
        **_options(row, c=added, alpha=None if alpha == 1 else alpha),
        **recipes(row, recipe_a, recipe_b),
    )
    return d
