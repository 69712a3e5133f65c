"""What a product computes as ``gemm_bf16``: found by running it, for the recognisers of dense products.

The region runs in its own dtypes on random bfloat16 operands at small sizes, and is compared with the exact product of
these operands. Products of two bfloat16 numbers are exact in float32, so a region that sums them in float32 is within
a few roundings of the exact result, and one that rounds anything in between is not. That decides the layout, the
factor of the product (``alpha``, one of the numbers that stand in the block) and what is added.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.normal_form import size
from ascend_deep.passes.region import Dims, Region

__all__ = ["LAYOUTS", "agrees", "emit", "inputs_of", "plan", "probes", "solve"]

LAYOUTS = ("nt", "nn", "tn", "tt")

_aten = torch.ops.aten
_LEAD = (12, 2, 6, 4, 9)
_SMALL = 8
_K, _N = 21, 11
# Of a float32 sum of 21 exact products, relative to the size of the result; a rounding to bfloat16 is 4e-3 of a term.
_EXACT = 4e-6


def plan(region: Region, k: int = _K, n: int = _N, first: int = 0) -> Dims | Refusal:
    """Small sizes to run a region at: few rows of ``a``, ``k`` along the sum, ``n`` columns. Equal sizes stay equal."""
    literals: dict[int, int] = {}
    symbols: dict[str, int] = {}
    rows = itertools.islice(itertools.cycle(_LEAD), first, None)

    def give(value: Any, small: Iterator[int] | int) -> None:
        """A size for ``value`` and for every symbol in it. Sizes that are small already stay."""
        if isinstance(value, int):
            if value not in literals:
                kept = value <= _SMALL and not isinstance(small, int)
                literals[value] = value if kept or value < 2 else small if isinstance(small, int) else next(small)
            return
        for name in sorted(str(s) for s in value.free_symbols):
            if name not in symbols:
                symbols[name] = small if isinstance(small, int) else next(small)

    a, b = ([size(s) for s in region.inputs[role].meta["val"].shape] for role in ("a", "b"))
    # What both have is summed over, but for the leading dims of batches.
    shared = [s for s in a if any(s == o for o in b) and s not in a[:-2]]
    # A block may split its rows, and then their number is the product of what it is split into.
    split = [size(s) for s in region.outputs[0].meta["val"].shape[:-1]]
    whole = [s for s in a if s not in shared]
    if len(split) > len(whole) == 1 and all(isinstance(s, int) for s in (*split, *whole)):
        for s in split:
            give(s, rows)
        literals.setdefault(math.prod(split), math.prod(literals[s] for s in split))
    for s in whole:
        give(s, rows)
    # A block may flatten its rows, and then it holds the product of their literal sizes.
    for i, j in itertools.combinations(range(len(a) + 1), 2):
        run = a[i:j]
        if j - i > 1 and all(isinstance(s, int) and s in literals for s in run):
            want = math.prod(literals[s] for s in run)
            if literals.setdefault(math.prod(run), want) != want:
                return Refusal("its sizes coincide in a way that leaves no small sizes to run the block at.")
    for s in shared:
        give(s, k)
    for s in b:
        give(s, n)
    dims = Dims(symbols, literals)
    if any(size < 1 for node in region.inputs.values() for size in dims.shape(node)):
        return Refusal("its sizes depend on one another in a way that leaves no small sizes to run the block at.")
    return dims


def solve(region: Region, out_dtypes: Sequence[torch.dtype]) -> Solution | Refusal:
    """The member of ``gemm_bf16`` that ``region`` computes, a plain product with what is added."""
    output = region.outputs[0]
    dtype: torch.dtype = output.meta["val"].dtype
    if dtype not in out_dtypes:
        return Refusal(f"the product gives {dtype}, and gemm_bf16 gives bfloat16 or float32.", output)
    dims = plan(region)
    if isinstance(dims, Refusal):
        return Refusal(dims.reason, output)
    left: list[tuple[str, float]] | None = None
    for seed, gain in ((41, 1.0), (42, 30.0)):
        tensors = inputs_of(region, dims, seed, gain)
        try:
            (want,) = region.program.run(dims, tensors)
        except Exception as error:  # any op may refuse these sizes
            return Refusal(f"the block did not run at small sizes: {type(error).__name__}.", output)
        found = list(_fitting(tensors, want, _factors(region)))
        left = found if left is None else [f for f in left if f in found]
    assert left is not None
    if not left:
        return Refusal(
            "it is not the plain product of the two operands with float32 sums: something is rounded, scaled or added "
            "that gemm_bf16 has no argument for.",
            output,
        )
    layout, alpha = left[0]
    # What is added must have the dtype of the op's result; a rounding of the sum then follows the op.
    added = region.inputs["bias"].meta["val"].dtype if "bias" in region.inputs else dtype
    attrs = {"layout": layout, "out_dtype": added, "alpha": None if alpha == 1.0 else alpha}
    return Solution("gemm_bf16", attrs, ("same products, other summation order.",))


def probes(region: Region, solution: Solution) -> Sequence[Probe]:
    """Random operands in the region's dtypes: order 1, one row, large and small values, more columns than rows."""
    cases = (
        ("order 1", 1, 1.0, (_K, _N, 0)),
        ("many columns", 2, 1.0, (33, 40, 1)),
        ("large", 3, 3000.0, (_K, _N, 2)),
        ("small", 4, 1e-6, (64, _N, 0)),
    )
    found = []
    for case, seed, gain, (k, n, first) in cases:
        dims = plan(region, k, n, first)
        if isinstance(dims, Dims):
            found.append(Probe(case, seed, dims, inputs_of(region, dims, seed, gain)))
    return found


def emit(build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution) -> Sequence[fx.Node]:
    """One ``gemm_bf16`` on matrices, and the block's own shape."""
    layout = str(solution.attrs["layout"])
    out: Tensor = region.outputs[0].meta["val"]
    a, b = (_as_matrix(build, inputs[role], region.inputs[role].meta["val"]) for role in ("a", "b"))
    sizes: list[Any] = []

    def rows_and_columns() -> list[Any]:
        if not sizes:
            sizes.append(build.call(_aten.sym_size.int, a, 0 if layout[0] == "n" else 1))
            sizes.append(build.call(_aten.sym_size.int, b, 0 if layout[1] == "t" else 1))
        return sizes

    added = inputs.get("bias")
    if added is not None:
        added = build.call(_aten.expand.default, added, rows_and_columns())
    result = build.call(torch.ops.ascend_deep.gemm_bf16.default, a, b, added, **solution.attrs)
    if solution.attrs["out_dtype"] != out.dtype:
        result = build.call(_aten._to_copy.default, result, dtype=out.dtype)
    if out.dim() != 2:
        rows, columns = rows_and_columns()
        lead = [rows] if layout[0] == "t" else _leading(build, inputs["a"], region.inputs["a"].meta["val"])
        result = build.call(_aten.view.default, result, [*_with_ones(lead, out), columns])
    return [result]


# -- solving --------------------------------------------------------------------------------------------------------
def _factors(region: Region) -> tuple[float, ...]:
    return tuple(dict.fromkeys((1.0, *(c for c in region.constants() if c != 0.0 and math.isfinite(c)))))


def _fitting(tensors: Mapping[str, Tensor], want: Tensor, factors: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Layouts and factors with which the exact product agrees with ``want``."""
    a, b = (_matrix(tensors[role]).double() for role in ("a", "b"))
    bias = tensors["bias"].double() if "bias" in tensors else None
    for layout in LAYOUTS:
        left = a if layout[0] == "n" else a.t()
        right = b if layout[1] == "n" else b.t()
        if left.shape[1] != right.shape[0] or left.shape[0] * right.shape[1] != want.numel():
            continue
        exact, size_of_terms = left @ right, left.abs() @ right.abs()
        if want.shape[-1] != exact.shape[1]:
            continue
        for alpha in factors:
            total, scale = alpha * exact, abs(alpha) * size_of_terms
            if bias is not None:
                try:
                    total, scale = (total + bias).reshape(want.shape), (scale + bias.abs()).reshape(want.shape)
                except RuntimeError:
                    continue
            if agrees(want, total.reshape(want.shape), scale.reshape(want.shape)):
                yield layout, alpha


def agrees(want: Tensor, exact: Tensor, terms: Tensor) -> bool:
    """True if ``want`` is ``exact`` (f64) but for one rounding of the result, and float32 roundings of the sum.

    Those grow with the size of the terms: ``terms`` is the sum of their magnitudes.
    """
    rounding = _EXACT if want.dtype == torch.float32 else torch.finfo(want.dtype).eps
    return bool(((exact - want.double()).abs() <= _EXACT * terms + rounding * exact.abs()).all())


def _matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def inputs_of(region: Region, dims: Dims, seed: int, gain: float) -> dict[str, Tensor]:
    """Random operands in the region's dtypes."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    drawn: dict[fx.Node, Tensor] = {}  # x @ x.t() has one operand in two roles
    for role, node in region.inputs.items():
        if node in drawn:
            tensors[role] = drawn[node]
            continue
        value = torch.randn(dims.shape(node), generator=generator, dtype=torch.float64)
        # What is added must show beside the product, whatever the gain.
        tensors[role] = (value * (gain if role != "bias" else gain * gain)).to(node.meta["val"].dtype)
        drawn[node] = tensors[role]
    return tensors


# -- writing --------------------------------------------------------------------------------------------------------
def _as_matrix(build: Builder, node: fx.Node, value: Tensor) -> fx.Node:
    if value.dim() == 2:
        return node
    if value.dim() < 2:
        return build.call(_aten.unsqueeze.default, node, 0)
    return build.call(_aten.flatten.using_ints, node, 0, -2)


def _leading(build: Builder, node: fx.Node, value: Tensor) -> list[Any]:
    """All sizes of ``node`` but the last, without ones."""
    places = [i for i, s in enumerate(value.shape[:-1]) if not (isinstance(s, int) and s == 1)]
    return [build.call(_aten.sym_size.int, node, i) for i in places]


def _with_ones(lead: Sequence[Any], out: Tensor) -> list[Any]:
    """``lead`` with the ones that the leading sizes of ``out`` have; split rows are split the same way."""
    wanted = list(out.shape[:-1])
    longer = [s for s in wanted if not (isinstance(s, int) and s == 1)]
    if len(longer) != len(lead):
        open_ = next((i for i, s in enumerate(wanted) if not isinstance(s, int)), None)
        if open_ is None:
            open_ = max(range(len(wanted)), key=wanted.__getitem__)
        return [-1 if i == open_ else s for i, s in enumerate(wanted)]
    given = iter(lead)
    return [1 if isinstance(s, int) and s == 1 else next(given) for s in wanted]
