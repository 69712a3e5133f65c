"""What a batch of products computes as ``einsum_bf16``: found by running it, as in ``gemm_family``.

    out[.., i, j] = sum over k of a[.., i, k] b[.., k, j]        a and b of one batch, either of their last dims first

The op keeps the batch in the middle, [M, B, K], so the operands are read through a view and the result is put back in
order, which is a copy of the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from ascend_deep.passes import gemm_family
from ascend_deep.passes._types import Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.region import Region

__all__ = ["emit", "solve"]

_aten = torch.ops.aten
# b is [B, N, K], or [B, K, N].
_EQUATIONS = {"t": "bhr,hdr->bhd", "n": "bhd,hdr->bhr"}


def solve(region: Region) -> Solution | Refusal:
    """The member of ``einsum_bf16`` that ``region`` computes."""
    output = region.outputs[0]
    dtype: torch.dtype = output.meta["val"].dtype
    dims = gemm_family.plan(region)
    if isinstance(dims, Refusal):
        return Refusal(dims.reason, output)
    left: list[str] | None = None
    for seed, gain in ((41, 1.0), (42, 30.0)):
        tensors = gemm_family.inputs_of(region, dims, seed, gain)
        try:
            (want,) = region.program.run(dims, tensors)
        except Exception as error:  # any op may refuse these sizes
            return Refusal(f"the block did not run at small sizes: {type(error).__name__}.", output)
        found = list(_fitting(tensors, want))
        left = found if left is None else [f for f in left if f in found]
    if not left:
        return Refusal(
            "it is not the plain product of two batches of matrices with float32 sums: dims are in another order, or "
            "something is rounded, scaled or added.",
            output,
        )
    notes = ("same products, other summation order.",)
    return Solution("einsum_bf16", {"layout": left[0], "out_dtype": dtype}, notes)


def emit(build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution) -> Sequence[fx.Node]:
    """One ``einsum_bf16`` between views, and the order of the block."""
    layout = str(solution.attrs["layout"])
    value: Tensor = region.inputs["a"].meta["val"]
    a, b = (_batch(build, inputs[role], region.inputs[role].meta["val"]) for role in ("a", "b"))
    a = build.call(_aten.permute.default, a, [1, 0, 2] if layout[0] == "n" else [2, 0, 1])
    call = build.call(
        torch.ops.ascend_deep.einsum_bf16.default,
        a,
        b,
        None,
        eq=_EQUATIONS[layout[1]],
        out_dtype=solution.attrs["out_dtype"],
    )
    out = build.call(_aten.transpose.int, call, 0, 1)
    out = build.call(_aten.clone.default, out, memory_format=torch.contiguous_format)
    if value.dim() > 3:
        sizes = [build.call(_aten.sym_size.int, inputs["a"], i) for i in range(value.dim() - 2)]
        ends = [build.call(_aten.sym_size.int, out, i) for i in (1, 2)]
        out = build.call(_aten.view.default, out, [*sizes, *ends])
    return [out]


def _fitting(tensors: Mapping[str, Tensor], want: Tensor) -> Iterator[str]:
    """Letters for how the last two dims of a and b are stored, with which the exact product agrees with ``want``."""
    a, b = tensors["a"].double(), tensors["b"].double()
    if a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2] or want.dim() != a.dim():
        return
    for turned, stored in itertools.product("nt", "nt"):
        left = a if turned == "n" else a.mT
        right = b if stored == "n" else b.mT
        if left.shape[-1] != right.shape[-2]:
            continue
        exact = left @ right
        if exact.shape == want.shape and gemm_family.agrees(want, exact, left.abs() @ right.abs()):
            yield turned + stored


def _batch(build: Builder, node: fx.Node, value: Tensor) -> fx.Node:
    return build.call(_aten.flatten.using_ints, node, 0, -3) if value.dim() > 3 else node
