"""Calls of the vendor's matrix products and quantisation: one function per op, with the vendor's own signature.

Blocks of scales, by the vendor's names: G-B is 1 x 128 for x and 128 x 128 for the weight, B-B 128 x 128 for both, MX
1 x 32 for both with E8M0 scales, K-C one scale per row of x and per column of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ascend_deep.native.torch_npu._call import Call, T, known, listed, named, transposed
from ascend_deep.native.torch_npu.formats import E8M0, FP4_PAIRS, FP8, dtype_of

__all__ = ["CHECKS"]

_GMM_SOURCE = "aclnnGroupedMatmulV5"


def _grouped_matmul(
    c: Call,
    x: Sequence[T],
    weight: Sequence[T],
    *,
    bias: Sequence[T] | None = None,
    scale: Sequence[T] | None = None,
    offset: Sequence[T] | None = None,
    antiquant_scale: Sequence[T] | None = None,
    antiquant_offset: Sequence[T] | None = None,
    per_token_scale: Sequence[T] | None = None,
    group_list: T | None = None,
    activation_input: Sequence[T] | None = None,
    activation_quant_scale: Sequence[T] | None = None,
    activation_quant_offset: Sequence[T] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> None:
    c.need(len(x) == 1 and len(weight) == 1, f"is used with one x and one weight here, not {len(x)} and {len(weight)}")
    unused = (offset, antiquant_scale, antiquant_offset, activation_input)
    c.need(all(q is None for q in unused), "is used without offsets and quantised weights alone here")
    a, w = x[0], weight[0]
    quantised = scale is not None or per_token_scale is not None
    four = x_dtype is not None or weight_dtype is not None
    if quantised:
        c.need(group_type == 0, f"is used with scales for group_type 0 here, not {group_type}")
        c.need(bias is None, "takes no bias with scales of blocks, and is used without one here", _GMM_SOURCE)
        _grouped_scales(c, a, w, scale, per_token_scale, (x_dtype, weight_dtype), (scale_dtype, per_token_scale_dtype))
        output = dtype_of(output_dtype)
        c.need(output is not None, f"needs an output_dtype for quantised operands, not {output_dtype}", _GMM_SOURCE)
        c.within("quantised_outputs", output, "output_dtype")
    else:
        c.need(not four and scale_dtype is None, "takes x_dtype and scale_dtype together with scales only")
        c.within("dtypes", a.dtype, "x")
        c.dtype("weight", w, a.dtype)
        same = output_dtype is None or dtype_of(output_dtype) == a.dtype
        c.need(same, f"gives the dtype of x, {named(a.dtype)}, and not output_dtype {output_dtype}", _GMM_SOURCE)
    for what, found in (
        ("split_item", split_item),
        ("group_type", group_type),
        ("group_list_type", group_list_type),
        ("act_type", act_type),
    ):
        if found is None:
            c.refuse(f"needs {what}")
        c.within(what, found, what)
    if group_list is None:
        c.refuse("needs a group_list for one x and one weight")
        return
    c.rank("x", a, 2)
    c.rank("group_list", group_list, 1)
    c.dtype("group_list", group_list, torch.int64)
    groups = group_list.shape[0]
    c.at_least("groups_min", groups, "the number of groups")
    c.at_most("groups_max", groups, "the number of groups")
    if group_type == 2:
        c.rank("weight", w, 2)
        c.same("the inner size of x", a.shape[1], "the inner size of weight", w.shape[0])
        c.need(bias is None, "takes no bias when it groups the inner dimension")
        c.need(transposed(a), "takes x transposed when it groups the inner dimension")
    else:
        c.rank("weight", w, 3)
        inner, packed = a.shape[1], four and not transposed(w)  # pairs along the columns of weight, not along K
        c.same("the columns of x", 2 * inner if packed else inner, "the inner size of weight", w.shape[1])
        c.same("the entries of group_list", groups, "the experts of weight", w.shape[0])
        c.need(not transposed(a) or 1 in a.shape, "does not take x transposed")
    last = w.shape[-2] if transposed(w) else w.shape[-1]
    c.at_most("inner_max", last, "the innermost size of weight")
    c.at_most("inner_max", a.shape[0] if group_type == 2 else a.shape[1], "the innermost size of x")
    if bias is not None:
        c.need(len(bias) == 1, f"takes one bias with one weight, not {len(bias)}")
        row = c.row("bias")
        if row is not None:
            accepted = row.value[a.dtype]
            c.need(
                bias[0].dtype in accepted,
                f"takes a bias of {listed(accepted)} with x of {named(a.dtype)}, not {named(bias[0].dtype)}",
                row.source,
            )
        c.rank("bias", bias[0], 2)
        c.same("the rows of bias", bias[0].shape[0], "the experts of weight", w.shape[0])
        c.same("the columns of bias", bias[0].shape[1], "those of the result", w.shape[2])


def _grouped_scales(
    c: Call,
    a: T,
    w: T,
    scale: Sequence[T] | None,
    per_token: Sequence[T] | None,
    fours: tuple[int | None, int | None],
    codes: tuple[int | None, int | None],
) -> None:
    """The scales of a quantised grouped product on one x [M, K] and one weight [G, K, N]."""
    row = c.row("quantised")
    if row is None:
        c.refuse("takes no FP8 or FP4 operands on this processor", _GMM_SOURCE)
        return
    if scale is None or per_token is None:
        c.refuse("is used with scales of both operands here, and one is missing")
        return
    c.need(len(scale) == 1 and len(per_token) == 1, "takes one scale and one per_token_scale")
    c.rank("x", a, 2)
    c.rank("weight", w, 3)
    _four_bits(c, ("x", "weight"), (a, w), fours, row.value)
    sf, own = scale[0], per_token[0]
    k, n, groups = a.shape[1], w.shape[2], w.shape[0]
    if fours[0] is not None:
        k = 2 * k
        n = n if transposed(w) else 2 * n
        c.need(not known(k) or k > 2, f"takes more than 2 columns of FP4, not {k}", _GMM_SOURCE)
    if _mx(c, codes, ("scale", "per_token_scale"), (sf, own)):
        _sizes(c, "per_token_scale", own, (a.shape[0], _ceil(k, 64), 2))
        _sizes(c, "scale", sf, (groups, _ceil(k, 64), n, 2))
        return
    c.need(fours[0] is None, "takes FP4 with E8M0 scales only", _GMM_SOURCE)
    c.dtype("scale", sf, torch.float32)
    c.dtype("per_token_scale", own, torch.float32)
    if len(own.shape) == 1:
        _sizes(c, "per_token_scale", own, (a.shape[0],))
        _sizes(c, "scale", sf, (groups, n))
        return
    _sizes(c, "per_token_scale", own, (a.shape[0], _ceil(k, 128)))
    _sizes(c, "scale", sf, (groups, _ceil(k, 128), _ceil(n, 128)))
    _same_way(c, ("weight", "scale"), w, sf)


def _four_bits(
    c: Call, names: tuple[str, str], operands: tuple[T, T], fours: tuple[int | None, int | None], others: Sequence[Any]
) -> None:
    """Both operands are FP4, or neither is and both have a dtype of ``others``."""
    for name, operand, four in zip(names, operands, fours, strict=True):
        if four is None:
            c.need(operand.dtype in others, f"takes {listed(others)} for {name}, not {named(operand.dtype)}")
            continue
        c.need(four == FP4_PAIRS, f"is used with {FP4_PAIRS} (FP4 pairs) for {name}_dtype here, not {four}")
        bytes_ = operand.dtype in (torch.uint8, torch.int8)
        c.need(bytes_, f"takes FP4 pairs in bytes for {name}, not {named(operand.dtype)}")
    c.need((fours[0] is None) == (fours[1] is None), "is used with FP4 for both operands or for none here")


def _mx(c: Call, codes: tuple[int | None, int | None], names: tuple[str, str], scales: tuple[T, T]) -> bool:
    """Whether the scales are E8M0, both of them; their dtype then is that of bytes."""
    c.need((codes[0] is None) == (codes[1] is None), f"takes E8M0 for both {names[0]} and {names[1]}, or for none")
    if codes[0] is None:
        return False
    for name, scale, code in zip(names, scales, codes, strict=True):
        c.need(code == E8M0, f"takes {E8M0} (E8M0) for {name}_dtype, not {code}")
        c.dtype(name, scale, torch.uint8)
    return True


def _sizes(c: Call, name: str, tensor: T, wanted: tuple[Any, ...]) -> None:
    c.rank(name, tensor, len(wanted))
    for i, (found, size) in enumerate(zip(tensor.shape, wanted, strict=True)):
        differ = known(found) and known(size) and found != size
        c.need(not differ, f"takes {size} for size {i} of {name}, not {found}")


def _same_way(c: Call, names: tuple[str, str], data: T, scale: T) -> None:
    """An operand and its scales are transposed in memory both or neither; sizes of 1 can be read either way."""
    clear = 1 not in tuple(data.shape)[-2:] and 1 not in tuple(scale.shape)[-2:]
    ok = not clear or transposed(data) == transposed(scale)
    c.need(ok, f"takes {names[0]} and {names[1]} both transposed in memory or neither")


def _ceil(a: Any, b: int) -> Any:
    return (a + b - 1) // b


def _quant_matmul(
    c: Call,
    x1: T,
    x2: T,
    scale: T,
    *,
    offset: T | None = None,
    pertoken_scale: T | None = None,
    bias: T | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: T | None = None,
) -> None:
    c.rank("x1", x1, 2, 3, 4, 5, 6)
    c.rank("x2", x2, 2, 3, 4, 5, 6)
    four = x1_dtype is not None or x2_dtype is not None
    if four and c.row("blocks") is None:
        c.refuse("takes no FP4 on this processor", "aclnnQuantMatmulV5")
    row = c.row("dtypes")
    _four_bits(c, ("x1", "x2"), (x1, x2), (x1_dtype, x2_dtype), row.value if row is not None else (torch.int8,))
    if not four:
        c.dtype("x2", x2, x1.dtype)
    c.same("the columns of x1", x1.shape[-1], "the rows of x2", x2.shape[-2])
    c.need(offset is None and y_scale is None, "is used without offset and y_scale here")
    for name, x in (("x1", x1), ("x2", x2)):
        last = x.shape[-2] if transposed(x) else x.shape[-1]
        c.at_most("inner_max", 2 * last if four else last, f"the innermost size of {name}")
    c.within("outputs", torch.int8 if output_dtype is None else dtype_of(output_dtype) or output_dtype, "output_dtype")
    if group_sizes is not None:
        c.need(bias is None, "is used without bias for scales of blocks here")
        _blocks(c, x1, x2, scale, pertoken_scale, tuple(group_sizes), (pertoken_scale_dtype, scale_dtype), four)
        return
    c.need(not four and scale_dtype is None, "takes FP4 and E8M0 with group_sizes only", "aclnnQuantMatmulV5")
    c.rank("scale", scale, 1)
    c.within("scale", scale.dtype, "scale")
    size = scale.shape[0]
    ok = not known(size) or size in (1, x2.shape[-1])
    c.need(ok, f"takes 1 or {x2.shape[-1]} scales, as many as columns, not {size}")
    if x1.dtype == torch.float8_e4m3fn:
        c.dtype("scale", scale, torch.float32)
        c.need(pertoken_scale is not None, "is used with a scale per row of FP8 here")
    if pertoken_scale is not None:
        c.rank("pertoken_scale", pertoken_scale, 1)
        c.dtype("pertoken_scale", pertoken_scale, torch.float32)
        c.same("pertoken_scale", pertoken_scale.shape[0], "the rows of x1", x1.shape[-2])


def _blocks(
    c: Call,
    x1: T,
    x2: T,
    scale: T,
    own: T | None,
    sizes: tuple[int, ...],
    codes: tuple[int | None, int | None],
    four: bool,
) -> None:
    """Scales of blocks (rows of x1, columns of x2, K), for matrices."""
    row = c.row("blocks")
    if row is None:
        c.refuse("takes no scales of blocks for these dtypes on this processor", "aclnnQuantMatmulV5")
        return
    c.need(sizes in row.value, f"takes {listed(row.value)} for group_sizes, not {list(sizes)}", row.source)
    if own is None:
        c.refuse("takes scales of blocks for both operands, and pertoken_scale is missing")
        return
    c.need(x1.dtype != torch.int8 or four, "is used without scales of blocks for int8 here")
    c.rank("x1", x1, 2)
    c.rank("x2", x2, 2)
    m, k, n = x1.shape[0], x1.shape[1], x2.shape[1]
    if four:
        k = 2 * k
        c.need(
            not transposed(x1) and transposed(x2), "takes FP4 with x1 as it is and x2 transposed", "aclnnQuantMatmulV5"
        )
        even = not known(k) or (k % 2 == 0 and _ceil(k, 32) % 2 == 0)
        c.need(even, f"takes an even number of blocks of 32 columns of FP4, not {k} columns", "aclnnQuantMatmulV5")
    mx = _mx(c, codes, ("pertoken_scale", "scale"), (own, scale))
    c.need(mx == (sizes[2] == 32), "takes E8M0 scales with blocks of 32, and float32 with 128", "aclnnQuantMatmulV5")
    if mx:
        _sizes(c, "pertoken_scale", own, (m, _ceil(k, 64), 2))
        _sizes(c, "scale", scale, (_ceil(k, 64), n, 2))
        return
    c.need(not four, "takes FP4 with E8M0 scales only", "aclnnQuantMatmulV5")
    c.dtype("scale", scale, torch.float32)
    c.dtype("pertoken_scale", own, torch.float32)
    _sizes(c, "pertoken_scale", own, (_ceil(m, sizes[0]), _ceil(k, 128)))
    _sizes(c, "scale", scale, (_ceil(k, 128), _ceil(n, 128)))
    _same_way(c, ("x1", "pertoken_scale"), x1, own)
    _same_way(c, ("x2", "scale"), x2, scale)


def _dynamic_mx_quant(
    c: Call,
    input: T,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = FP4_PAIRS,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> None:
    c.within("dtypes", input.dtype, "input")
    c.need(len(input.shape) >= 1, "takes a tensor with dimensions")
    c.at_most("rank_max", len(input.shape), "the number of dimensions")
    c.need(-len(input.shape) <= axis < len(input.shape), f"takes an axis of input, not {axis}")
    c.need(round_mode == "rint", f"is used with round_mode 'rint' here, not {round_mode!r}")
    c.need(dst_type == FP8, f"is used for float8_e4m3fn ({FP8}) here, not {dst_type}")
    c.need(scale_alg in (0, 1), f"takes scale_alg 0 or 1 for FP8, not {scale_alg}", "aclnnDynamicMxQuantV3")
    c.need(dst_type_max == 0.0, f"takes dst_type_max 0 for FP8, not {dst_type_max}", "aclnnDynamicMxQuantV3")
    if input.dtype == torch.float32:
        c.within("float32_block_size", block_size, "block_size of float32")
        c.at_least("float32_size_min", input.shape[axis], "the quantised size of float32")
    c.within("block_size", block_size, "block_size")
    if max_low_bound != 0.0:
        c.need(max_low_bound > 0, f"takes a max_low_bound from 0 on, not {max_low_bound}", "aclnnDynamicMxQuantV3")
        c.need(scale_alg == 1, f"takes max_low_bound with scale_alg 1 only, not {scale_alg}", "aclnnDynamicMxQuantV3")
        if c.row("low_bound") is None:
            release = "of unknown release" if c.target.cann is None else str(c.target.cann)
            c.refuse(
                f"ignores max_low_bound before CANN 9.2.0-beta.1, and this CANN is {release}", "aclnnDynamicMxQuantV3"
            )


CHECKS: Mapping[str, Callable[..., None]] = {
    "npu_grouped_matmul": _grouped_matmul,
    "npu_quant_matmul": _quant_matmul,
    "npu_dynamic_mx_quant": _dynamic_mx_quant,
}
