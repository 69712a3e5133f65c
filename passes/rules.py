"""The rules of the normal form (``normal_form.py``): reading rules by name of the call, simplifying rules by term.

A reading rule gets a ``Call`` and returns its term, or ``None`` if it does not apply. A simplifying rule gets the parts
of a term in the making and returns a smaller term, or ``None``. Both tables are at the end of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ascend_deep.passes.normal_form import Call, Read, Simplify, Term, ValueTable, numel

__all__ = ["READING", "SIMPLIFYING"]


# -- movement -------------------------------------------------------------------------------------------------------
def read_reshape(call: Call) -> Term | None:
    """view, reshape, _unsafe_view, flatten, unflatten, squeeze, unsqueeze: the same elements in another shape."""
    return call.make("Reshape", [call.args["self"]], call.shape)


def read_copy(call: Call) -> Term | None:
    """clone, contiguous, alias: the same value."""
    return call.args["self"]


def read_permute(call: Call) -> Term | None:
    """permute, transpose, t, T and mT as a permutation of dims counted from the front."""
    x, rank = call.args["self"], len(call.shape)
    if call.name == "aten.permute":
        dims = [int(d) % rank for d in call.args["dims"]]
    else:
        dims = list(range(rank))
        if call.name == "aten.numpy_T":
            dims.reverse()
        elif rank >= 2:
            swapped = {"aten.t": (0, 1), "aten.mT": (rank - 2, rank - 1)}
            a, b = swapped.get(call.name) or (call.dim("dim0"), call.dim("dim1"))
            dims[a], dims[b] = b, a
    return call.make("Permute", [x], dims)


def read_expand(call: Call) -> Term | None:
    """expand: repeats along dims of size 1 and new leading dims."""
    return call.make("Expand", [call.args["self"]], call.shape)


def read_repeat(call: Call) -> Term | None:
    """repeat along one dim: a new dim before it, expanded and flattened."""
    x = call.args["self"]
    counts = list(call.args["repeats"])
    more = [d for d, c in enumerate(counts) if not (isinstance(c, int) and c == 1)]
    if len(counts) != len(x.shape) or len(more) != 1:
        return None
    before, after = x.shape[: more[0]], x.shape[more[0] :]
    shape = (*before, counts[more[0]], *after)
    wide = call.table.make("Expand", (_reshape(call, x, (*before, 1, *after)),), shape, shape, x.dtype)
    return call.make("Reshape", [wide], call.shape)


def read_repeat_interleave(call: Call) -> Term | None:
    """repeat_interleave by a constant along dim 0: a new second dim, expanded and flattened."""
    x, count, dim = call.args["self"], call.args["repeats"], call.args.get("dim")
    flat = len(x.shape) == 1
    if isinstance(count, Term) or (dim is None and not flat) or (dim is not None and call.dim() != 0):
        return None
    shape = (x.shape[0], count, *x.shape[1:])
    narrow = _reshape(call, x, (x.shape[0], 1, *x.shape[1:]))
    wide = call.table.make("Expand", (narrow,), shape, shape, x.dtype)
    return call.make("Reshape", [wide], call.shape)


def _reshape(call: Call, x: Term, shape: tuple[Any, ...]) -> Term:
    return call.table.make("Reshape", (x,), shape, shape, x.dtype)


def read_cast(call: Call) -> Term | None:
    """_to_copy, to and type_as that change the dtype alone."""
    return call.make("Cast", [call.args["self"]], [call.dtype])


def reshape_same(table: ValueTable, args: Any, attrs: Any, shape: Any, dtype: Any) -> Term | None:
    """Reshape to the shape that x has is x."""
    return args[0] if args[0].shape == shape else None


def reshape_of_reshape(table: ValueTable, args: Any, attrs: Any, shape: Any, dtype: Any) -> Term | None:
    """Reshape of a Reshape is one Reshape."""
    inner = args[0]
    return table.make("Reshape", inner.args, attrs, shape, dtype) if inner.op == "Reshape" else None


def permute_identity(table: ValueTable, args: Any, attrs: Any, shape: Any, dtype: Any) -> Term | None:
    """Permute by the identity is x."""
    return args[0] if list(attrs) == sorted(attrs) else None


def permute_of_permute(table: ValueTable, args: Any, attrs: Any, shape: Any, dtype: Any) -> Term | None:
    """Permute of a Permute is one Permute, of the composed dims."""
    inner = args[0]
    if inner.op != "Permute":
        return None
    return table.make("Permute", inner.args, tuple(inner.attrs[d] for d in attrs), shape, dtype)


def expand_same(table: ValueTable, args: Any, attrs: Any, shape: Any, dtype: Any) -> Term | None:
    """Expand to the shape that x has is x."""
    return args[0] if args[0].shape == shape else None


def expand_of_expand(table: ValueTable, args: Any, attrs: Any, shape: Any, dtype: Any) -> Term | None:
    """Expand of an Expand is one Expand."""
    inner = args[0]
    return table.make("Expand", inner.args, attrs, shape, dtype) if inner.op == "Expand" else None


def cast_same(table: ValueTable, args: Any, attrs: Any, shape: Any, dtype: Any) -> Term | None:
    """Cast to the dtype that x has is x. No other cast vanishes."""
    return args[0] if args[0].dtype == dtype else None


# -- parts ----------------------------------------------------------------------------------------------------------
def read_split(call: Call) -> Term | None:
    """split, chunk and unbind: the tuple, which ``read_item`` takes apart."""
    x, dim = call.args["self"], call.dim()
    length = x.shape[dim]
    if call.name == "aten.split":
        step = call.args["split_size"]
    elif call.name == "aten.chunk":
        step = -(-length // call.args["chunks"])
    else:
        step = 1
    return call.table.make("Split", (x,), (dim, step, call.name == "aten.unbind"), (), None)


def read_split_sizes(call: Call) -> Term | None:
    """split_with_sizes: the tuple, by sizes."""
    x, dim = call.args["self"], call.dim()
    return call.table.make("SplitSizes", (x,), (dim, *call.args["split_sizes"]), (), None)


def read_item(call: Call) -> Term | None:
    """Items of a split, a sort or a topk."""
    pack, i = call.args["0"], call.args["1"]
    if pack.op == "Split":
        dim, step, drop = pack.attrs
        return _part(call, pack.args[0], dim, i * step, 1, 1 if drop else call.shape[dim])
    if pack.op == "SplitSizes":
        dim, *lengths = pack.attrs
        return _part(call, pack.args[0], dim, sum(lengths[:i]), 1, lengths[i])
    if pack.op == "Sort":
        return call.make("Sorted" if i == 0 else "Order", pack.args, pack.attrs)
    if pack.op == "TopK":
        return call.make("TopValues" if i == 0 else "TopIds", pack.args, pack.attrs)
    return None


def read_slice(call: Call) -> Term | None:
    """slice, narrow and select, with start counted from the front."""
    x, dim = call.args["self"], call.dim()
    length = x.shape[dim]
    if call.name == "aten.select":
        start, step, count = call.args["index"], 1, 1
    else:
        start, step = call.args["start"] or 0, call.args.get("step", 1)
        count = call.shape[dim]
    if isinstance(start, int) and start < 0:
        start = start + length
    return _part(call, x, dim, start, step, count)


def _part(call: Call, x: Term, dim: int, start: Any, step: Any, count: Any) -> Term:
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    part = call.table.make("Part", (x,), (dim, start, step, count), shape, x.dtype)
    return call.make("Reshape", [part], call.shape)


def part_whole(table: ValueTable, args: Any, attrs: Any, shape: Any, dtype: Any) -> Term | None:
    """A Part that takes everything is x."""
    return args[0] if attrs[2] == 1 and args[0].shape == shape else None


# -- products -------------------------------------------------------------------------------------------------------
def read_gemm(call: Call) -> Term | None:
    """mm, bmm, matmul: Gemm."""
    a = call.args["self"]
    b = call.args.get("mat2", call.args.get("other"))
    return call.make("Gemm", [a, b]) if b is not None and len(a.shape) >= 2 and len(b.shape) >= 2 else None


def read_gemm_add(call: Call) -> Term | None:
    """addmm and baddbmm with factors 1: Gemm plus a tensor."""
    a = call.args.get("mat1", call.args.get("batch1"))
    b = call.args.get("mat2", call.args.get("batch2"))
    if a is None or b is None or call.args["alpha"] != 1 or call.args["beta"] != 1:
        return None
    return call.make("aten.add", sorted([call.args["self"], call.make("Gemm", [a, b])], key=_number), [("alpha", 1)])


def read_linear(call: Call) -> Term | None:
    """linear: Gemm with the transposed weight, plus the bias."""
    x, w, bias = call.args["input"], call.args["weight"], call.args["bias"]
    if len(w.shape) != 2:
        return None
    product = call.make("Gemm", [x, call.table.make("Permute", (w,), (1, 0), (w.shape[1], w.shape[0]), w.dtype)])
    return product if bias is None else call.make("aten.add", sorted([product, bias], key=_number), [("alpha", 1)])


def read_einsum(call: Call) -> Term | None:
    """einsum of two operands, letters renamed in order of appearance."""
    tensors = call.args["tensors"]
    if len(tensors) != 2:
        return None
    names: dict[str, str] = {}
    equation = "".join(
        names.setdefault(c, chr(ord("a") + len(names))) if c.isalpha() else c
        for c in call.args["equation"].replace(" ", "")
    )
    return call.make("Einsum", tensors, [equation])


def read_grouped_gemm(call: Call) -> Term | None:
    """_grouped_mm without bias, and the custom op of the same contract."""
    if call.name == "aten._grouped_mm":
        if call.args["bias"] is not None or call.args["offs"] is None:
            return None
        return call.make("GroupedGemm", [call.args["self"], call.args["mat2"], call.args["offs"]])
    return call.make("GroupedGemm", [call.args["input"], call.args["weight"], call.args["offs"]])


# -- order and counting ---------------------------------------------------------------------------------------------
def read_sort(call: Call) -> Term | None:
    """sort: the pair; argsort: the permutation."""
    attrs = (call.dim(), bool(call.args["descending"]), bool(call.args.get("stable") or False))
    if call.name == "aten.sort":
        return call.table.make("Sort", (call.args["self"],), attrs, (), None)
    return call.make("Order", [call.args["self"]], attrs)


def read_topk(call: Call) -> Term | None:
    """topk: the pair."""
    attrs = (call.args["k"], call.dim(), bool(call.args["largest"]))
    return call.table.make("TopK", (call.args["self"],), attrs, (), None)


def read_int_div(call: Call) -> Term | None:
    """floor_divide, or div with a rounding mode, of integers by a constant."""
    x, k = call.args["self"], call.args["other"]
    if isinstance(k, Term) or not isinstance(x, Term) or call.dtype is None or call.dtype.is_floating_point:
        return None
    if call.name == "aten.div" and call.args.get("rounding_mode") not in ("floor", "trunc"):
        return None
    return call.make("IntDiv", [x], [k])


def read_range(call: Call) -> Term | None:
    """arange from 0 in steps of 1."""
    if call.args.get("start", 0) != 0 or call.args.get("step", 1) != 1 or call.args.get("end") is None:
        return None
    return call.make("Range", [], [call.args["end"]])


def read_counts(call: Call) -> Term | None:
    """histc over [0, E) with E bins, bincount with minlength E (of ids below E): how often each id occurs."""
    if call.name == "aten.histc":
        bins, low, high = call.args["bins"], call.args["min"], call.args["max"]
        if low != 0 or high not in (bins - 1, bins):
            return None
        return call.make("Counts", [call.args["self"]], [bins])
    if call.args["weights"] is not None or not call.args["minlength"]:
        return None
    bins = call.args["minlength"]
    return call.table.make("Counts", (call.args["self"],), (bins,), (bins,), call.dtype)


def read_one_hot_sum(call: Call) -> Term | None:
    """Sum of one_hot over every dim but the last."""
    x, dims = call.args["self"], call.args["dim"]
    if x.op == "Cast":
        x = x.args[0]
    if x.op == "Reshape" and x.shape[-1] == x.args[0].shape[-1]:
        x = x.args[0]
    rank = len(call.args["self"].shape)
    if x.op != "aten.one_hot" or call.args.get("keepdim") or dims is None:
        return None
    if sorted(int(d) % rank for d in dims) != list(range(rank - 1)):
        return None
    return call.make("Counts", [x.args[0]], [x.shape[-1]])


def read_running_sum(call: Call) -> Term | None:
    """cumsum of counts: where each group ends."""
    counts = call.args["self"]
    while counts.op == "Cast":
        counts = counts.args[0]
    if counts.op != "Counts" or call.dim() != 0:
        return None
    return call.table.make("Offsets", counts.args, counts.attrs, counts.attrs, call.dtype)


def counts_of_order(table: ValueTable, args: Any, attrs: Any, shape: Any, dtype: Any) -> Term | None:
    """Counting does not see order, shape, or a cast of the ids."""
    inner = args[0]
    if inner.op in ("Sorted", "Reshape", "Cast", "Permute"):
        return table.make("Counts", inner.args, attrs, shape, dtype)
    return None


def read_inverse(call: Call) -> Term | None:
    """empty[p] = arange(n), as index_put or scatter: the inverse of the permutation p."""
    if call.name == "aten.index_put":
        indices, source = call.args["indices"], call.args["values"]
        if call.args["accumulate"] or len(indices) != 1:
            return None
        p = indices[0]
    else:
        p, source = call.args["index"], call.args.get("src")
        if call.args.get("reduce") is not None or len(call.shape) != 1:
            return None
    if not isinstance(source, Term) or source.op != "Range" or p is None or p.op != "Order":
        return None
    return call.make("Inverse", [p])


def order_of_order(table: ValueTable, args: Any, attrs: Any, shape: Any, dtype: Any) -> Term | None:
    """argsort of a permutation is its inverse."""
    inner = args[0]
    plain = len(inner.shape) == 1 and not attrs[1]
    return table.make("Inverse", (inner,), (), shape, dtype) if inner.op == "Order" and plain else None


# -- rows -----------------------------------------------------------------------------------------------------------
def read_rows(call: Call) -> Term | None:
    """x[i], index_select along dim 0, embedding, gather along dim 0 with a row index."""
    if call.name == "aten.index":
        indices = call.args["indices"]
        if len(indices) != 1 or indices[0] is None or indices[0].dtype == torch.bool:
            return None
        return call.make("Rows", [call.args["self"], indices[0]])
    if call.name == "aten.embedding":
        return call.make("Rows", [call.args["weight"], call.args["indices"]])
    if call.dim() != 0:
        return None
    x, i = call.args["self"], call.args["index"]
    if call.name == "aten.gather":
        i = _row_index(i, x.shape)
    return None if i is None else call.make("Rows", [x, i])


def read_add_rows(call: Call) -> Term | None:
    """index_add, scatter_add with a row index, index_put with accumulate: rows added to a base."""
    base = call.args["self"]
    if call.name == "aten.index_put":
        indices, source = call.args["indices"], call.args["values"]
        if not call.args["accumulate"] or len(indices) != 1:
            return None
        i = indices[0]
    else:
        source = call.args.get("source", call.args.get("src"))
        if call.dim() != 0 or call.args.get("alpha", 1) != 1:
            return None
        i = call.args["index"] if call.name == "aten.index_add" else _row_index(call.args["index"], base.shape)
    return None if i is None else call.make("AddRows", [base, i, source])


def _row_index(index: Term, shape: tuple[Any, ...]) -> Term | None:
    """i [n], if ``index`` is i as a column repeated over all other dims."""
    if index.op != "Expand" or index.shape[1:] != shape[1:] or numel(index.args[0].shape) != index.shape[0]:
        return None
    column = index.args[0]
    return column.args[0] if column.op == "Reshape" and len(column.args[0].shape) == 1 else None


def read_mask(call: Call) -> Term | None:
    """masked_fill with a number, where with a number."""
    if call.name == "aten.masked_fill":
        value = call.args["value"]
        return None if isinstance(value, Term) else call.make("Mask", [call.args["self"], call.args["mask"]], [value])
    if "other" not in call.args:  # one-argument where gives indices
        return None
    m, x, other = call.args["condition"], call.args["self"], call.args["other"]
    if isinstance(x, Term) or not isinstance(other, Term):
        return None
    return call.make("Mask", [other, m], [x])


def read_commutative(call: Call) -> Term | None:
    """add and mul of two tensors, operands in table order."""
    a, b = call.args["self"], call.args["other"]
    if not isinstance(b, Term) or call.args.get("alpha", 1) != 1:
        return None
    attrs = [("alpha", 1)] if call.name == "aten.add" else []
    return call.make(call.name, sorted([a, b], key=_number), attrs)


def _number(term: Term) -> int:
    return term.number


_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as")

READING: Mapping[str, tuple[Read, ...]] = {
    **{f"aten.{name}": (read_reshape,) for name in _RESHAPES},
    **{f"aten.{name}": (read_copy,) for name in ("clone", "contiguous", "alias", "lift_fresh_copy")},
    **{f"aten.{name}": (read_permute,) for name in ("permute", "transpose", "t", "swapaxes", "numpy_T", "mT")},
    **{f"aten.{name}": (read_cast,) for name in ("_to_copy", "to", "type_as")},
    **{f"aten.{name}": (read_expand,) for name in ("expand", "expand_as", "broadcast_to")},
    "aten.repeat": (read_repeat,),
    "aten.repeat_interleave": (read_repeat_interleave,),
    **{f"aten.{name}": (read_split,) for name in ("split", "chunk", "unbind")},
    "aten.split_with_sizes": (read_split_sizes,),
    "getitem": (read_item,),
    **{f"aten.{name}": (read_slice,) for name in ("slice", "narrow", "select")},
    **{f"aten.{name}": (read_gemm,) for name in ("mm", "bmm", "matmul")},
    **{f"aten.{name}": (read_gemm_add,) for name in ("addmm", "baddbmm")},
    "aten.linear": (read_linear,),
    "aten.einsum": (read_einsum,),
    "aten._grouped_mm": (read_grouped_gemm,),
    "transformers.grouped_mm_fallback": (read_grouped_gemm,),
    **{f"aten.{name}": (read_sort,) for name in ("sort", "argsort")},
    "aten.topk": (read_topk,),
    **{f"aten.{name}": (read_int_div,) for name in ("floor_divide", "div")},
    "aten.arange": (read_range,),
    **{f"aten.{name}": (read_counts,) for name in ("histc", "bincount")},
    "aten.sum": (read_one_hot_sum,),
    "aten.cumsum": (read_running_sum,),
    "aten.index_put": (read_inverse, read_add_rows),
    "aten.scatter": (read_inverse,),
    **{f"aten.{name}": (read_rows,) for name in ("index", "index_select", "embedding", "gather")},
    **{f"aten.{name}": (read_add_rows,) for name in ("index_add", "scatter_add")},
    **{f"aten.{name}": (read_mask,) for name in ("masked_fill", "where")},
    **{f"aten.{name}": (read_commutative,) for name in ("add", "mul")},
}

SIMPLIFYING: Mapping[str, tuple[Simplify, ...]] = {
    "Reshape": (reshape_same, reshape_of_reshape),
    "Permute": (permute_of_permute, permute_identity),
    "Expand": (expand_same, expand_of_expand),
    "Cast": (cast_same,),
    "Part": (part_whole,),
    "Counts": (counts_of_order,),
    "Order": (order_of_order,),
}
