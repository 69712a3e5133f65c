"""``pack_sf``: logical scale factors in the form that a GEMM library wants, and ``unpack_sf``, the way back.

| target   | result                                        | strides of the last two   | takes                         |
|----------|-----------------------------------------------|---------------------------|-------------------------------|
| `sm90`   | f32 [..., rows, G]                            | (1, rows up to 4 n)       | gran_k 128                    |
|          |   with gran_mn > 1                            | contiguous                |                               |
| `sm100`  | int32 [..., MN, ceil(G / 4)]                  | (1, MN up to 4 n)         | gran_k 32 or 128, powers of 2 |
| `ascend` | int16 [..., MN, ceil(K / 64)]                 | (1, MN)                   | gran_k 32 n, powers of 2      |

G = ceil(K / gran_k). Scales of several rows are repeated for the packed forms, and for Ascend, which knows groups of 32
only, wider groups are, which changes nothing. Words as in ``ops/_sf.py``: what is missing behind the last group is 2^0,
what lies between columns in memory is zero (1 for f32).

``grouping`` says what ``grouped_layout`` [E] is:

* ``none``: there is none.
* ``psum``: ends of the row blocks of an m-grouped A; block e starts at the end of the block before it, rounded up to
  ``alignment``. Rows between blocks get 2^0, whatever garbage they hold.
* ``k_psum``, ``k_sizes``: ends (as above) or sizes of blocks along K, which start at the same places; K-groups between
  blocks are left out on ``sm90`` and ``sm100``, where a block starts with a new word, and get 2^0 on ``ascend``. The
  number of columns is a bound that depends on shapes only, G or (G + 3 E) // 4; columns that are not needed are 2^0.

Contract: A.2, B.1 and F of the DeepGEMM operator list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import PackSf, takes
from ascend_deep.ops import _check, _sf
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops._quant_samples import pack_sf_samples

__all__ = ["PACK_SF", "TARGETS", "Target", "pack_sf", "unpack_sf"]

_GROUPINGS = ("none", "psum", "k_psum", "k_sizes")


@dataclass(frozen=True)
class Target:
    """What a library wants. ``sf_format``: of ``ops/_sf.py``; ``grans``: block sizes along K that it takes (empty: all
    multiples of ``gran_k``); ``gran_k``: block size along K of the result, 0: that of the input; ``compact``: whether
    K-blocks are put together without the gaps between them."""

    sf_format: str
    grans: tuple[int, ...]
    gran_k: int
    compact: bool


TARGETS = {
    "sm90": Target("fp32", (128,), 0, True),
    "sm100": Target("ue8m0x4", (32, 128), 0, True),
    "ascend": Target("ue8m0x2", (), 32, False),
}


def pack_sf(
    sf: Tensor,
    *,
    mn: int,
    k: int,
    gran: Sequence[int],
    target: str,
    grouped_layout: Tensor | None = None,
    grouping: str = "none",
    alignment: int = 128,
) -> Tensor:
    """Scales for a library; see the module.

    Args:
        sf: f32 [..., ceil(mn / gran[0]), ceil(k / gran[1])], any strides; one matrix if there is a ``grouped_layout``.
        mn, k: sizes of the operand.
        gran: (gran_mn, gran_k); gran_mn must be 1 if there is a ``grouped_layout``.
        target: ``"sm90"``, ``"sm100"`` or ``"ascend"``.
        grouped_layout: [E] i32, or ``None``.
        grouping: ``"none"``, ``"psum"``, ``"k_psum"`` or ``"k_sizes"``.
        alignment: of the blocks; a multiple of gran_k for blocks along K.

    Returns:
        A new tensor, see the module. Not differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument. On the CPU, and elsewhere with ASCEND_DEEP_DEBUG=1,
            a scale that should be a power of two and is not, is a ``ValueError``; without looking it becomes NaN.
    """
    return call(
        "pack_sf", sf, grouped_layout, mn=mn, k=k, gran=gran, target=target, grouping=grouping, alignment=alignment
    )


def unpack_sf(sf: Tensor, *, k: int, gran_k: int) -> Tensor:
    """Packed words [..., MN, W] back to f32 scales [..., MN, ceil(k / gran_k)], contiguous; plain torch, not an op.

    Args:
        sf: int32 (four codes) or int16 (two), any strides.
        k: size of the operand along K.
        gran_k: elements of K per code, 32 for what ``pack_sf`` makes for Ascend.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    op = "unpack_sf"
    _check.dtypes(op, "sf", sf, tuple(_sf.WORDS))
    if sf.dim() < 2:
        raise ValueError(f"{op}: sf has {sf.dim()} dimensions; it must be [..., MN, W].")
    for name, value, least in (("k", k, 0), ("gran_k", gran_k, 1)):
        if value < least:
            raise ValueError(f"{op}: {name} is {value}; it must be at least {least}.")
    groups = _sf.ceil_div(k, gran_k)
    words = _sf.ceil_div(groups, _sf.WORDS[sf.dtype])
    _check.size(op, "the last size of sf", sf.shape[-1], words, f"the number of words of {groups} groups")
    return _sf.logical(sf, groups)


@takes(PackSf)
def _check_args(x: PackSf) -> None:
    op = "pack_sf"
    sf, grouped_layout, mn, k, gran, target, grouping, alignment = x
    _check.choice(op, "target", target, TARGETS)
    _check.choice(op, "grouping", grouping, _GROUPINGS)
    _check.dtypes(op, "sf", sf, (torch.float32,))
    if sf.dim() < 2:
        raise ValueError(f"{op}: sf has {sf.dim()} dimensions; it must be [..., ceil(mn / gran), ceil(k / gran)].")
    gran_mn, gran_k = _sf.check_gran(op, "gran", gran)
    _sf.check_sf(op, "sf", sf, sf.shape[:-2], mn, k, gran, "gran")
    wants = TARGETS[target]
    if gran_k not in wants.grans if wants.grans else gran_k % wants.gran_k:
        accepted = " or ".join(map(str, wants.grans)) if wants.grans else f"multiples of {wants.gran_k}"
        raise ValueError(f"{op}: gran has {gran_k} elements of K per scale; target {target!r} takes {accepted}.")
    if (grouping == "none") != (grouped_layout is None):
        given = "given" if grouped_layout is not None else "missing"
        raise ValueError(f"{op}: grouping is {grouping!r}, but grouped_layout is {given}.")
    if grouped_layout is not None:
        _check.dtypes(op, "grouped_layout", grouped_layout, (torch.int32,))
        _check.rank(op, "grouped_layout", grouped_layout, "[E]", 1)
        _check.rank(op, "sf", sf, "one matrix if there is a grouped_layout", 2)
        _check.same_device(op, "sf", sf, grouped_layout=grouped_layout)
        if gran_mn != 1:
            raise ValueError(f"{op}: gran has {gran_mn} rows per scale; with a grouped_layout it must be 1.")
        step = gran_k if grouping != "psum" else 1
        torch._check_value(alignment >= 1, lambda: f"{op}: alignment is {alignment}; it must be at least 1.")
        torch._check_value(
            alignment % step == 0,
            lambda: f"{op}: alignment is {alignment}; blocks along K must start at multiples of gran_k = {gran_k}.",
        )
    # The type is exact: fake and functional tensors have no values.
    if type(sf) is Tensor and sf.device.type == "cpu":
        _powers_of_two(x)


def _powers_of_two(x: PackSf) -> None:
    """Raise ``ValueError`` for a scale that the packed form of the target cannot hold; waits for the device."""
    sf, layout, grouping, gran_k = x.sf, x.grouped_layout, x.grouping, x.gran[1]
    if TARGETS[x.target].sf_format == "fp32" or not sf.numel():
        return
    used = sf
    if layout is not None:
        starts, ends = _blocks(layout, grouping, x.alignment, sf.shape[0] if grouping == "psum" else x.k)
        if grouping == "psum":
            used = sf[_inside(sf.shape[0], starts, ends)]
        else:
            columns = _inside(sf.shape[1], starts // gran_k, _sf.ceil_div(ends, gran_k))
            used = sf[:, columns]
    bad = used[(_sf.encode_ue8m0(used) == 255) & ~used.isnan()]
    if bad.numel():
        raise ValueError(
            f"pack_sf: sf holds {float(bad[0]):g}, which is no power of two from 2^-127 to 2^127, and target "
            f"{x.target!r} has no others; quantise again with ue8m0=True: a scale cannot be rounded without its data."
        )


def _blocks(grouped_layout: Tensor, grouping: str, alignment: int, size: int) -> tuple[Tensor, Tensor]:
    """First and last + 1 element of every block, i64 [E]; an end before the start is an empty block."""
    layout = grouped_layout.long()
    whole = _sf.align(layout, alignment)
    if grouping == "k_sizes":
        starts = whole.cumsum(0) - whole
        ends = starts + layout
    else:
        starts, ends = torch.nn.functional.pad(whole[:-1], (1, 0)) if layout.numel() else layout, layout
    return starts, torch.maximum(ends.clamp(max=size), starts)


def _inside(size: int, starts: Tensor, ends: Tensor) -> Tensor:
    """Bool [size]: positions that lie in a block."""
    at = torch.arange(size, device=starts.device)[:, None]
    return ((at >= starts) & (at < ends)).any(1)


def _compacted(starts: Tensor, counts: Tensor, per: int, words: int) -> Tensor:
    """i64 [words * per]: which K-group stands at each place when every block starts with a new word; -1: none."""
    blocks = starts.numel()
    if not blocks:
        return torch.full((words * per,), -1, device=starts.device)
    sizes = _sf.ceil_div(counts, per)
    ends = sizes.cumsum(0)
    word = torch.arange(words, device=starts.device)
    block = torch.searchsorted(ends, word, right=True)
    known = block < blocks
    block = block.clamp(max=blocks - 1)
    offset = ((word - (ends - sizes)[block]) * per)[:, None] + torch.arange(per, device=starts.device)
    valid = known[:, None] & (offset < counts[block][:, None])
    return torch.where(valid, starts[block][:, None] + offset, -1).flatten()


def _columns(target: Target, grouping: str, groups: Any, blocks: Any) -> Any:
    """Number of columns of codes (of scales for f32), before they are packed."""
    per = _sf.WORDS.get(_sf.FORMATS[target.sf_format], 1)
    return (groups + (per - 1) * blocks) // per * per if _along_k(target, grouping) else groups


def _along_k(target: Target, grouping: str) -> bool:
    return grouping in ("k_psum", "k_sizes") and target.compact


@takes(PackSf)
def _reference(x: PackSf) -> Tensor:
    sf, grouped_layout, mn, k, gran, target, grouping, alignment = x
    wants = TARGETS[target]
    packed = wants.sf_format != "fp32"
    gran_k = gran[1]
    if packed and gran[0] != 1:
        sf = sf.repeat_interleave(gran[0], -2)[..., :mn, :]
    if wants.gran_k and gran_k != wants.gran_k:
        sf = sf.repeat_interleave(gran_k // wants.gran_k, -1)
        gran_k = wants.gran_k
        sf = sf[..., : _sf.ceil_div(k, gran_k)]
    if grouped_layout is not None:
        starts, ends = _blocks(grouped_layout, grouping, alignment, mn if grouping == "psum" else k)
        if grouping == "psum":
            sf = torch.where(_inside(sf.shape[0], starts, ends)[:, None], sf, 1.0)
        elif not wants.compact:
            sf = torch.where(_inside(sf.shape[1], starts // gran_k, _sf.ceil_div(ends, gran_k)), sf, 1.0)
        else:
            per = _sf.WORDS.get(_sf.FORMATS[wants.sf_format], 1)
            columns = _columns(wants, grouping, sf.shape[1], grouped_layout.numel())
            source = _compacted(starts // gran_k, _sf.ceil_div(ends - starts, gran_k), per, columns // per)
            # One column of ones at the end: that is what -1 picks.
            sf = torch.nn.functional.pad(sf, (0, 1), value=1.0)[:, source]
    if packed:
        return _sf.pack(_sf.encode_ue8m0(sf), wants.sf_format)
    if gran[0] != 1:
        return sf.clone(memory_format=torch.contiguous_format)
    *lead, rows, columns = sf.shape
    out = _sf.empty_mn_major(sf, lead, rows, columns, torch.float32, _sf.align(rows, 4))
    _sf.fill_storage(out, 1)
    return out.copy_(sf)


@takes(PackSf)
def _fake(x: PackSf) -> Tensor:
    sf, mn, wants = x.sf, x.mn, TARGETS[x.target]
    gran_mn, gran_k = _sf.check_gran("pack_sf", "gran", x.gran)
    groups = _sf.ceil_div(x.k, wants.gran_k or gran_k)
    columns = _columns(wants, x.grouping, groups, 0 if x.grouped_layout is None else x.grouped_layout.shape[0])
    lead = sf.shape[:-2]
    if wants.sf_format != "fp32":
        return _sf.empty_packed(sf, lead, mn, columns, wants.sf_format)
    if gran_mn != 1:
        return sf.new_empty((*sf.shape[:-1], columns))
    return _sf.empty_mn_major(sf, lead, mn, columns, torch.float32, _sf.align(mn, 4))


@takes(PackSf)
def _debug(x: PackSf) -> None:
    _powers_of_two(x)


PACK_SF = OpDef(
    name="pack_sf",
    schema=(
        "(Tensor sf, Tensor? grouped_layout, *, SymInt mn, SymInt k, SymInt[2] gran, str target, str grouping, "
        "SymInt alignment) -> Tensor"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward="scales are moved and packed; gradients go through fp8_linear.",
    debug=_debug,
    tolerance={torch.float32: Tolerance(0.0, 0.0, "bits are moved")},
    samples=pack_sf_samples,
)
