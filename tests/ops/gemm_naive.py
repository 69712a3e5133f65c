"""The GEMM ops in float64, row by row, written from their documentation and sharing no code with them.

All of it is differentiable, and nothing touches a padding row: autograd of these bodies is what gradients have to be.
"""

from __future__ import annotations

from collections.abc import Sequence

import mqa_naive
import torch
from torch import Tensor


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 sum(x y) / sum(x^2 + y^2) in float64: DeepGEMM's measure of a difference."""
    x, y = x.double(), y.double()
    denominator = (x * x + y * y).sum()
    return 0.0 if denominator == 0 else float(1 - 2 * (x * y).sum() / denominator)


def dense(a: Tensor, b: Tensor, c: Tensor | None, layout: str, alpha: float | None) -> Tensor:
    left = a.double() if layout[0] == "n" else a.double().t()
    right = b.double().t() if layout[1] == "n" else b.double()
    rows = [torch.stack([(row * column).sum() for column in right]) if len(right) else row.new_zeros(0) for row in left]
    product = torch.stack(rows) if rows else left.new_zeros(0, len(right))
    product = product * (1.0 if alpha is None else alpha)
    return product if c is None else c.double() + product


def einsum(eq: str, a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    """Each operand as [.., .., ..] over all letters of the equation, multiplied and summed."""
    left, right, out = eq.replace("->", ",").split(",")
    letters = sorted(set(left + right))

    def spread(t: Tensor, names: str) -> Tensor:
        order = [names.index(i) for i in letters if i in names]
        t = t.double().permute(order)
        for at, letter in enumerate(letters):
            if letter not in names:
                t = t.unsqueeze(at)
        return t

    product = (spread(a, left) * spread(b, right)).sum([letters.index(i) for i in letters if i not in out])
    kept = [i for i in letters if i in out]
    product = product.permute([kept.index(i) for i in out])
    return product if c is None else c.double() + product


def members(index: Sequence[int], grouping: str, rows: int, alignment: int, groups: int) -> list[list[int]]:
    """The rows of each group, found one by one."""
    if grouping == "labels":
        return [[r for r in range(rows) if index[r] == g] for g in range(groups)]
    found, start = [], 0
    for entry in index:
        end = entry if grouping == "psum" else start + entry
        found.append([r for r in range(rows) if start <= r < end])
        start = end
        while start % alignment:
            start += 1
    return found


def m_grouped(a: Tensor, b: Tensor, index: Tensor, layout: str, grouping: str, alignment: int) -> Tensor:
    weights = b.double() if layout == "nt" else b.double().transpose(1, 2)
    out = [a.new_zeros(weights.shape[1], dtype=torch.float64)] * a.shape[0]
    for g, own in enumerate(members(index.tolist(), grouping, a.shape[0], alignment, b.shape[0])):
        for r in own:
            out[r] = weights[g] @ a[r].double()
    return torch.stack(out) if out else a.new_zeros(0, weights.shape[1], dtype=torch.float64)


def masked(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    out = []
    for g, count in enumerate(counts.tolist()):
        for r in range(a.shape[1]):
            out.append(b[g].double() @ a[g, r].double() if r < count else b.new_zeros(b.shape[1], dtype=torch.float64))
    return (
        torch.stack(out).view(a.shape[0], a.shape[1], b.shape[1])
        if out
        else a.new_zeros(a.shape[0], 0, b.shape[1], dtype=torch.float64)
    )


def k_grouped(a: Tensor, b: Tensor, index: Tensor, c: Tensor | None, grouping: str, alignment: int) -> Tensor:
    out = []
    for own in members(index.tolist(), grouping, a.shape[0], alignment, len(index)):
        total = a.new_zeros(a.shape[1], b.shape[1], dtype=torch.float64)
        for r in own:
            total = total + a[r].double()[:, None] * b[r].double()
        out.append(total)
    product = torch.stack(out)
    return product if c is None else c.double() + product


def hc(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    rows = [torch.stack([(row * column).sum() for column in b.double()]) for row in a.double()]
    product = torch.stack(rows) if rows else a.new_zeros(0, b.shape[0], dtype=torch.float64)
    return product, (a.double() ** 2).sum(1)


def numbers(data: Tensor, sf: Tensor, gran: Sequence[int], transposed: bool = False) -> Tensor:
    """A quantised operand [..., MN, K] in float64; ``transposed``: it is stored [..., K, MN]."""
    values = mqa_naive.numbers(data, None)
    if transposed:
        values = values.transpose(-1, -2)
    groups = -(-values.shape[-1] // gran[1])
    if sf.dtype != torch.float32:
        per = {torch.int32: 4, torch.int16: 2}[sf.dtype]
        words = [(sf.long() >> (8 * i)) & 255 for i in range(per)]
        codes = torch.stack(words, -1).flatten(-2)[..., :groups]
        sf = torch.where(codes == 255, torch.nan, torch.exp2(codes.double() - 127))
    scales = sf.double().repeat_interleave(gran[0], -2)[..., : values.shape[-2], :]
    return values * scales.repeat_interleave(gran[1], -1)[..., : values.shape[-1]]
