"""What each op of ours moves and computes, as formulas of its sizes, and the roofline that makes a time of them.

Every predicted figure is a prediction: peak rates, no overheads, never compared with hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy

from ascend_deep.lowering.targets.table import Target

__all__ = ["COSTS", "Cost", "Prediction", "cost", "predict"]

_ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class Cost:
    """What an op moves and computes, as expressions of its sizes: FLOPs, bytes of memory, bytes of links."""

    flops: sympy.Expr
    bytes: sympy.Expr
    link_bytes: sympy.Expr = _ZERO

    def at(self, sizes: Mapping[str, object]) -> Cost:
        """With numbers, or other expressions, for some of the sizes."""
        values = {sympy.Symbol(k, positive=True): v for k, v in sizes.items()}
        return Cost(*(sympy.sympify(e).subs(values) for e in (self.flops, self.bytes, self.link_bytes)))


@dataclass(frozen=True)
class Prediction:
    """Seconds, as a number or an expression of what is still symbolic, and the bound that gives it. Never measured."""

    seconds: sympy.Expr
    bound: str

    def __str__(self) -> str:
        if self.seconds.is_number:
            return f"{float(self.seconds) * 1e6:.3g} us predicted, bound by {self.bound}; not measured"
        return f"{sympy.N(self.seconds, 3)} s predicted, bound by {self.bound}; not measured"


T, K, E, H, I, S, D, N = sympy.symbols("T K E H I S D N", positive=True)
M, G, B, P, Q = sympy.symbols("M G B P Q", positive=True)
# Bytes of an element of the first operand, of the second where it may differ, of the result; of all scale factors.
W, V, O, F = sympy.symbols("W V O F", positive=True)
_ACTIVE = sympy.Min(E, T * K)


def _blocks(size: sympy.Expr, block: sympy.Expr) -> sympy.Expr:
    return sympy.ceiling(size / block)


# Every operand is read once and every result written once; expert weights only of experts that can be active.
COSTS: Mapping[str, Callable[[], Cost]] = {
    "moe_experts": lambda: Cost(6 * T * K * H * I, W * (3 * _ACTIVE * H * I + 2 * T * H + T * K * (2 * H + 6 * I))),
    "moe_route": lambda: Cost(8 * T * E, 4 * T * E + 12 * T * K),
    "swiglu": lambda: Cost(8 * T * I, W * 3 * T * I),
    # A scale of four bytes for every block of P rows and Q columns.
    "swiglu_quant": lambda: Cost(12 * T * I, W * 2 * T * I + T * I + 4 * T * _blocks(I, Q)),
    "quant_fp8": lambda: Cost(4 * M * K, W * M * K + M * K + 4 * _blocks(M, P) * _blocks(K, Q)),
    # M rows, N columns, K products each; B batches, G groups that share the rows.
    "gemm_bf16": lambda: Cost(2 * M * N * K, W * (M * K + N * K) + O * M * N),
    "einsum_bf16": lambda: Cost(2 * B * M * N * K, B * (W * (M * K + N * K) + O * M * N)),
    "m_grouped_gemm_bf16": lambda: Cost(2 * M * N * K, W * (M * K + sympy.Min(G, M) * N * K) + O * M * N),
    "k_grouped_gemm_bf16": lambda: Cost(2 * M * N * K, W * K * (M + N) + O * G * M * N),  # the groups share K
    "gemm_scaled": lambda: Cost(2 * M * N * K, W * M * K + V * N * K + F + O * M * N),
    "m_grouped_gemm_scaled": lambda: Cost(2 * M * N * K, W * M * K + V * sympy.Min(G, M) * N * K + F + O * M * N),
    # S queries, T keys, N heads of depth D; of a choice K are kept, and the scores stay on the chip.
    "mqa_logits": lambda: Cost(2 * S * T * N * D, W * (S * N * D + T * D) + 4 * S * N + O * S * T),
    "mqa_topk": lambda: Cost(2 * S * T * N * D, W * (S * N * D + T * D + S * N) + 8 * S * K),
    # S queries, K keys each, N heads of depth D (values are a part of the key).
    "sparse_mqa_attention": lambda: Cost(4 * S * K * N * D, W * (2 * S * N * D + S * K * D) + 4 * S * K),
}


def cost(op: str, **sizes: object) -> Cost:
    """The cost of op ``op`` with ``sizes`` for its symbols; symbols without a size stay.

    Raises:
        KeyError: there is no formula for that op; the message lists those there are.
    """
    if op not in COSTS:
        raise KeyError(f"there is no cost formula for {op!r}; there are formulas for {', '.join(COSTS)}.")
    return COSTS[op]().at(sizes)


def predict(what: Cost, target: Target, precision: str = "bf16") -> Prediction:
    """The roofline: the longest of computing, moving and sending, each at its peak rate."""
    bounds = {"compute": what.flops / target.peak(precision)}
    if target.bandwidth is not None:
        bounds["memory"] = what.bytes / target.bandwidth
    if target.link is not None and what.link_bytes != 0:
        bounds["link"] = what.link_bytes / target.link
    if all(b.is_number for b in bounds.values()):
        name = max(bounds, key=lambda n: float(bounds[n]))
        return Prediction(sympy.Float(bounds[name]), name)
    return Prediction(sympy.Max(*bounds.values()), " or ".join(bounds))
