"""Quantises the operands of indexer ops to fp8, where the user allows it (``Options.allow_fp8``).

This is the one step that changes what a model computes: it runs behind the proof of the exact rewrite, on its op, and
says in the match how much it changes, measured on random operands of the model's sizes. Scores are exact sums of the
quantised products, so all of the effect is that of rounding q and k to three bits of mantissa.

One scale per vector, s = max(amax, 1e-4) / 448, on CPUs and SM90; on SM100 and Ascend, whose kernels take nothing else,
one power of two per 32 elements. Scales are positive, so kernels may take them out of the ReLU.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep import ops
from ascend_deep.native import logits_rows
from ascend_deep.native.deep_gemm.differences import platform
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.probe import isolated

__all__ = ["effect", "make_contiguous", "quantise", "quantised"]

_aten = torch.ops.aten
_FP8 = torch.float8_e4m3fn
_LARGEST = 448.0
_LEAST = 1e-4
_MX = 32
_HALF = (torch.bfloat16, torch.float16)


def quantised(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """``x`` [..., D] as fp8 and f32 scales [..., D / group]; what ``quantise`` writes into graphs."""
    data, sf = _quantised(lambda op, *args, **kw: op(*args, **kw), x, int(x.shape[-1]), group)
    return data, sf


def _quantised(call: Any, x: Any, depth: int, group: int) -> tuple[Any, Any]:
    """The calls of ``quantised``; groups of less than a vector have scales that are powers of two."""
    whole = group == depth
    grouped = x if whole else call(_aten.unflatten.int, x, -1, [depth // group, group])
    wide = call(_aten._to_copy.default, grouped, dtype=torch.float32)
    amax = call(_aten.amax.default, call(_aten.abs.default, wide), [-1], True)
    sf = call(_aten.div.Tensor, call(_aten.clamp_min.default, amax, _LEAST), _LARGEST)
    if not whole:
        sf = call(_aten.exp2.default, call(_aten.ceil.default, call(_aten.log2.default, sf)))
    data = call(_aten.clamp.default, call(_aten.div.Tensor, wide, sf), -_LARGEST, _LARGEST)
    data = call(_aten._to_copy.default, data, dtype=_FP8)
    if whole:
        return data, sf
    return call(_aten.flatten.using_ints, data, -2, -1), call(_aten.squeeze.dim, sf, -1)


def quantise(call: fx.Node, gradients: bool) -> str:
    """Give an ``mqa_topk`` or ``mqa_logits`` node fp8 operands, if it may have them; what was done, as a note.

    Args:
        call: the node that calls the op; its q and kv are changed in place.
        gradients: whether a gradient may flow through the scores.
    """
    q, q_sf, kv = call.args[0], call.args[1], call.args[2]
    value, keys = q.meta.get("val"), kv.meta.get("val")  # type: ignore[union-attr]
    if q_sf is not None or not isinstance(value, Tensor) or not isinstance(keys, Tensor):
        return "allow_fp8: the operands are not known at compile time and stay as they are."
    if value.dtype not in _HALF:
        name = str(value.dtype).removeprefix("torch.")
        return f"allow_fp8: the operands are {name} and stay so; only half precision is quantised."
    returns_scores = op_name(call) == "ascend_deep.mqa_logits" or bool(call.kwargs["return_scores"])
    if gradients and returns_scores:
        return "allow_fp8: gradients may flow through the scores, so the operands stay in half precision."
    depth, heads = value.shape[3], value.shape[2]
    if not isinstance(depth, int) or not isinstance(heads, int):
        return "allow_fp8: the number of heads or their depth is symbolic, so the operands stay in half precision."
    group, refusal = _group(value, depth)
    if refusal:
        return refusal
    with call.graph.inserting_before(call):
        build = Builder(call.graph, origin=call, fake_mode=getattr(value, "fake_mode", None))
        new_q = _quantised(build.call, q, depth, group)
        new_kv = _quantised(build.call, kv, depth, group)
    call.args = (*new_q, *new_kv, *call.args[4:])
    if op_name(call) == "ascend_deep.mqa_logits":
        make_contiguous(call, getattr(value, "fake_mode", None))
    error, kept = effect(heads, depth, _chosen(call), group)
    return (
        f"allow_fp8: q and k are quantised to fp8; on random operands scores change by up to {error:.1e} of the "
        f"largest and {kept:.1f} % of the chosen keys stay."
    )


def make_contiguous(call: fx.Node, fake_mode: Any) -> fx.Node:
    """Users of an ``mqa_logits`` node with fp8 operands get contiguous scores, as the block made them.

    On CUDA such scores have padded rows (``native.logits_rows``). The copy is a node that Inductor puts into the first
    of the users. Elsewhere nothing changes. Returns the node that the users read.
    """
    q, kv = call.args[0].meta["val"], call.args[2].meta["val"]  # type: ignore[union-attr]
    out_dtype: Any = call.kwargs["out_dtype"]
    with fake_mode if fake_mode is not None else nullcontext():
        value = logits_rows.empty_scores(q, kv, call.kwargs["max_seqlen_k"], out_dtype)
    call.meta["val"] = value
    if not logits_rows.padded(q.device.type, q.dtype, kv.dtype, call.kwargs["max_seqlen_k"], value.dtype):
        return call
    with call.graph.inserting_after(call):
        build = Builder(call.graph, origin=call, fake_mode=fake_mode)
        copy = build.call(_aten.clone.default, call, memory_format=torch.contiguous_format)
    call.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return copy


def _group(value: Tensor, depth: int) -> tuple[int, str]:
    """Elements per scale on the device of ``value``, or why its kernels do not take fp8."""
    kind = value.device.type
    if kind == "cpu":
        return depth, ""
    capability = torch.cuda.get_device_capability(value.device) if kind == "cuda" else None
    if kind == "cuda" and (capability is None or capability < (9, 0)):
        return 0, "allow_fp8: the device has no fp8 products, so the operands stay in half precision."
    row = platform(kind, capability)
    if row is None or not row.mx_scales:
        return depth, ""
    if depth % _MX:
        return 0, f"allow_fp8: {row.platform} has a scale per {_MX} elements, and the depth of the heads is {depth}."
    return _MX, ""


def _chosen(call: fx.Node) -> int:
    """Keys that the op chooses; 0 for ``mqa_logits``. A symbolic number counts as when the graph was traced."""
    k = call.kwargs.get("topk", 0)
    size = k.meta.get("val") if isinstance(k, fx.Node) else k
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 0
    return int(size) if isinstance(size, int) else 0


def effect(heads: int, depth: int, topk: int, group: int, seed: int = 41) -> tuple[float, float]:
    """What quantising does on random operands: the largest change of a score relative to the largest score of all, and
    the share in % of chosen keys that stay, when ``topk`` (at most 512) of four times as many keys are chosen."""
    topk = min(topk, 512) or 64
    keys, queries = 4 * topk, 16
    with isolated():
        g = torch.Generator().manual_seed(seed)
        q, kv = (torch.randn(*s, generator=g).bfloat16() for s in ((1, queries, heads, depth), (1, keys, depth)))
        weights = torch.randn(1, queries, heads, generator=g)
        exact = ops.mqa_logits(q, kv, weights)
        (q8, q_sf), (kv8, kv_sf) = quantised(q, group), quantised(kv, group)
        rounded = ops.mqa_logits(q8, kv8, weights, q_sf=q_sf, kv_sf=kv_sf)
        error = float((rounded - exact).abs().max() / exact.abs().max())
        before, after = (torch.zeros_like(x).scatter(-1, x.topk(topk).indices, 1.0) for x in (exact, rounded))
        return error, float(100 * (before * after).sum() / before.sum())
