"""What a product of scaled FP8 operands computes as ``gemm_scaled``: blocks of the scales, found by running it.

The shapes of data and scales say which blocks there can be. The region then runs in its own dtypes on random data and
scales, at small sizes whose blocks are as large as in the model, and is compared with the product of the numbers that
data and scales stand for. A block that rounds these numbers, to bfloat16 for instance, is another function.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.normal_form import size
from ascend_deep.passes.region import Dims, Region
from ascend_deep.passes.sizes import few, give_leading

__all__ = ["emit", "probes", "solve"]

_aten = torch.ops.aten
_GRANS = (128, 32, 64, 16, 256)
_LARGEST = 1 << 22
# Sums of float32, relative to the size of the terms.
_EXACT = 1e-5


@dataclass(frozen=True)
class _Form:
    """How the scale of one operand is stored: its block, and what makes it [MN, K] wise.

    ``shape``: ``"grid"`` [.., MN groups, K groups], ``"turned"`` (2-D, K groups first), ``"rows"`` [.., MN], one per
    row, ``"one"``: a single number. ``extra``: dims of size 1 at the end.
    """

    block: tuple[int, int]
    shape: str
    extra: int = 0


def _forms(data: Sequence[Any], scale: Sequence[Any], turned: bool) -> Iterator[_Form]:
    """Ways in which scales of shape ``scale`` may belong to an operand of shape ``data``."""
    *lead, depth = (data[1], data[0]) if turned else data
    if not isinstance(depth, int):
        return
    if all(s == 1 for s in scale):
        yield _Form((1, depth), "one")
    if not scale:
        return
    extra = 0
    while len(scale) > len(data) and scale[-1] == 1:
        scale, extra = scale[:-1], extra + 1
    options = [("grid", list(scale))]
    if len(scale) == 2:
        options.append(("turned", [scale[1], scale[0]]))
    if len(scale) == len(lead) and list(scale) == lead:
        yield _Form((1, depth), "rows", extra)
    for name, (*front, groups) in options:
        if len(front) != len(lead) or not isinstance(groups, int):
            continue
        along = [g for g in _GRANS if -(-depth // g) == groups] if groups > 1 else [depth]
        if front == lead:
            down = [1]
        elif len(lead) == 1 and isinstance(lead[0], int) and isinstance(front[0], int):
            down = [g for g in _GRANS if -(-lead[0] // g) == front[0]] if front[0] > 1 else [lead[0]]
        else:
            continue
        for m, k in itertools.product(down, along):
            yield _Form((m, k), name, extra)


def solve(region: Region) -> Solution | Refusal:
    """The member of ``gemm_scaled`` that ``region`` computes."""
    output = region.outputs[0]
    dtype: torch.dtype = output.meta["val"].dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return Refusal(f"the product gives {dtype}, and gemm_scaled gives bfloat16 or float32.", output)
    shapes = {role: [size(s) for s in node.meta["val"].shape] for role, node in region.inputs.items()}
    ran = False
    for turned_a, turned_b in itertools.product((False, True), (False, True)):
        for fa, fb in itertools.product(
            _forms(shapes["a"], shapes["sfa"], turned_a), _forms(shapes["b"], shapes["sfb"], turned_b)
        ):
            dims = _plan(region, fa, fb, turned_a, turned_b)
            if dims is None:
                continue
            tensors = _inputs(region, dims, 51, 1.0)
            try:
                (want,) = region.program.run(dims, tensors)
            except Exception:  # any op may refuse these sizes
                continue
            ran = True
            if _agrees(want, tensors, fa, fb, turned_a, turned_b):
                layout = ("t" if turned_a else "n") + ("n" if turned_b else "t")
                attrs = {
                    "recipe_a": list(fa.block), "recipe_b": list(fb.block), "layout": layout,
                    "out_dtype": _result(region), "forms": f"{fa.shape}:{fa.extra},{fb.shape}:{fb.extra}",
                }  # fmt: skip
                notes = ("the scaled operands are not written to memory; the sums are in float32.",)
                return Solution("gemm_scaled", attrs, notes)
    if not ran:
        return Refusal("the block did not run at small sizes with blocks of any known shape.", output)
    return Refusal(
        "it is not the product of the scaled operands with float32 sums: something is rounded (scaled operands in "
        "bfloat16, for instance), scaled or added that gemm_scaled has no argument for.",
        output,
    )


def probes(region: Region, solution: Solution) -> Sequence[Probe]:
    """Random data and scales: order 1, one row more, small and large scales."""
    fa, fb, turned_a, turned_b = _read(solution)
    found = []
    for case, seed, gain, rows in (("order 1", 1, 1.0, 5), ("one row", 2, 1.0, 1), ("scales", 3, 1e-3, 7)):
        dims = _plan(region, fa, fb, turned_a, turned_b, rows)
        if dims is not None:
            found.append(Probe(case, seed, dims, _inputs(region, dims, seed, gain)))
    return found


def emit(build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution) -> Sequence[fx.Node]:
    """One ``gemm_scaled`` on matrices, and the block's own shape."""
    fa, fb, turned_a, turned_b = _read(solution)
    values = {role: node.meta["val"] for role, node in region.inputs.items()}
    out: Tensor = region.outputs[0].meta["val"]
    a, b = inputs["a"], inputs["b"]
    if values["a"].dim() > 2:
        a = build.call(_aten.flatten.using_ints, a, 0, -2)
    rows = build.call(_aten.sym_size.int, a, 1 if turned_a else 0)
    columns = build.call(_aten.sym_size.int, b, 1 if turned_b else 0)
    sfa = _scale(build, inputs["sfa"], values["sfa"], fa, rows)
    sfb = _scale(build, inputs["sfb"], values["sfb"], fb, columns)
    attrs = {k: v for k, v in solution.attrs.items() if k != "forms"}
    added = inputs.get("bias")
    if added is not None:
        added = build.call(_aten.expand.default, added, [rows, columns])
    call = build.call(torch.ops.ascend_deep.gemm_scaled.default, a, sfa, b, sfb, added, alpha=None, **attrs)
    if attrs["out_dtype"] != out.dtype:
        call = build.call(_aten._to_copy.default, call, dtype=out.dtype)
    if out.dim() != 2:
        lead: list[Any] = [build.call(_aten.sym_size.int, inputs["a"], i) for i in range(values["a"].dim() - 1)]
        split = [s if isinstance(s, int) else -1 for s in out.shape[:-1]]
        if values["a"].dim() != out.dim() and split.count(-1) <= 1:
            lead = list(split)  # rows that the block splits; of two unknown parts none could be told
        call = build.call(_aten.view.default, call, [*lead, columns])
    return [call]


# -- details --------------------------------------------------------------------------------------------------------
def _result(region: Region) -> torch.dtype:
    """What is added must have the dtype of the op's result."""
    bias = region.inputs.get("bias")
    dtype: torch.dtype = (bias if bias is not None else region.outputs[0]).meta["val"].dtype
    return dtype


def _read(solution: Solution) -> tuple[_Form, _Form, bool, bool]:
    shapes = [part.split(":") for part in str(solution.attrs["forms"]).split(",")]
    blocks = [solution.attrs["recipe_a"], solution.attrs["recipe_b"]]
    fa, fb = (_Form((b[0], b[1]), s, int(extra)) for b, (s, extra) in zip(blocks, shapes, strict=True))
    layout = str(solution.attrs["layout"])
    return fa, fb, layout[0] == "t", layout[1] == "n"


def _plan(region: Region, fa: _Form, fb: _Form, turned_a: bool, turned_b: bool, rows: int = 5) -> Dims | None:
    """Sizes with two groups along each divided dim (the last one half full if it is not full in the model)."""
    shapes = {role: [size(s) for s in node.meta["val"].shape] for role, node in region.inputs.items()}
    a, b = shapes["a"], shapes["b"]
    depth = a[0] if turned_a else a[-1]
    columns = b[1] if turned_b else b[0]
    grans = {fa.block[0], fa.block[1], fb.block[0], fb.block[1], 1}
    literals: dict[int, int] = {g: g for g in grans}
    # A block may split the rows of its data, or join them: the side with more dims says how. Parts that it splits them
    # into stay as they are, since the replacement names them too.
    given, made = (a[1:] if turned_a else a[:-1]), [size(s) for s in region.outputs[0].meta["val"].shape[:-1]]
    finer, coarser = (made, given) if len(made) > len(given) else (given, made)
    if finer is made:
        literals.update({s: s for s in made if isinstance(s, int)})

    def shrink(whole: Any, gran: int, smallest: int) -> bool:
        """A size of two groups for ``whole`` and 2 for its number of groups, if neither is the size of a block."""
        if not isinstance(whole, int):
            return False
        groups = -(-whole // gran)
        if groups < 3 or whole in literals or groups in literals:
            literals.setdefault(whole, whole)
            literals.setdefault(groups, groups)
            return True
        rest = whole % gran
        literals[whole], literals[groups] = (gran + (rest or gran)), 2
        return True

    gran_k = next((f.block[1] for f in (fa, fb) if f.block[1] != depth), depth)
    if not shrink(depth, gran_k, 0):
        return None
    if fb.block[0] > 1 and fb.block[0] != columns:
        shrink(columns, fb.block[0], 0)
    elif isinstance(columns, int):
        literals.setdefault(columns, min(columns, 24))
    else:
        return None
    symbols: dict[str, int] = {}
    give_leading(finer, few(rows), literals, symbols)
    if len(coarser) <= 1 or all(isinstance(s, int) for s in finer):
        whole: Any = 1
        for s in finer:
            whole = whole * s
        wanted = math.prod(Dims(symbols, literals).size(s) for s in finer)
        if isinstance(whole, int) and literals.setdefault(whole, wanted) != wanted:
            return None
        for s in coarser:
            if not isinstance(s, int) and s.is_Symbol:
                symbols.setdefault(str(s), wanted)
    dims = Dims(symbols, literals)
    if any(torch.Size(dims.shape(n)).numel() > _LARGEST for n in region.inputs.values()):
        return None
    return dims


def _inputs(region: Region, dims: Dims, seed: int, gain: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for role, node in region.inputs.items():
        value = torch.randn(dims.shape(node), generator=generator, dtype=torch.float32)
        if role.startswith("sf"):
            value = (value * 0.7).exp() * gain
        elif role == "bias":
            value = value * 40 * gain * gain
        else:
            value = value * 2
        tensors[role] = value.to(node.meta["val"].dtype)
    return tensors


def _numbers(data: Tensor, scale: Tensor, form: _Form, turned: bool) -> Tensor:
    """What data and scales stand for, [MN, K] in float64."""
    matrix = data.double()
    matrix = matrix.t() if turned else matrix.reshape(-1, matrix.shape[-1])
    rows, depth = matrix.shape
    if form.shape == "one":
        return matrix * scale.double().reshape(1, 1)
    if form.shape == "rows":
        return matrix * scale.double().reshape(-1, 1)
    for _ in range(form.extra):
        scale = scale.squeeze(-1)
    grid = scale.double().t() if form.shape == "turned" else scale.double().reshape(-1, scale.shape[-1])
    wide = grid.repeat_interleave(form.block[0], 0)[:rows]
    if grid.shape[1] > 1:
        wide = wide.repeat_interleave(form.block[1], 1)[:, :depth]
    return matrix * wide


def _agrees(want: Tensor, tensors: Mapping[str, Tensor], fa: _Form, fb: _Form, turned_a: bool, turned_b: bool) -> bool:
    try:
        left = _numbers(tensors["a"], tensors["sfa"], fa, turned_a)
        right = _numbers(tensors["b"], tensors["sfb"], fb, turned_b)
        total, scale = left @ right.t(), left.abs() @ right.abs().t()
        if "bias" in tensors:
            total, scale = total + tensors["bias"].double(), scale + tensors["bias"].double().abs()
        if total.numel() != want.numel() or want.shape[-1] != total.shape[-1]:
            return False
    except RuntimeError:
        return False
    total, scale = total.reshape(want.shape), scale.reshape(want.shape)
    rounding = 0.0 if want.dtype == torch.float32 else torch.finfo(want.dtype).eps
    return bool(((want.double() - total).abs() <= _EXACT * scale + rounding * total.abs()).all())


def _scale(build: Builder, node: fx.Node, value: Tensor, form: _Form, rows: fx.Node) -> fx.Node:
    """The scale as [MN groups, K groups]."""
    if form.shape == "one":
        one = build.call(_aten.reshape.default, node, [1, 1])
        return build.call(_aten.expand.default, one, [rows, 1])
    for _ in range(form.extra):
        node = build.call(_aten.squeeze.dim, node, -1)
    if form.shape == "rows":
        return build.call(_aten.reshape.default, node, [-1, 1])
    if form.shape == "turned":
        return build.call(_aten.t.default, node)
    if value.dim() - form.extra > 2:
        return build.call(_aten.flatten.using_ints, node, 0, -2)
    return node
