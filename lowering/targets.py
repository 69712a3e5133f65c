"""What is known of each Ascend processor, with where it is written, and a roofline that reads it.

Every predicted figure is a prediction: peak rates, no overheads, never compared with hardware. ``None`` is a figure
that no public source of ours gives; a roofline leaves out the bound that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy

__all__ = ["COSTS", "TARGETS", "Cost", "Prediction", "Target", "cost", "predict"]

_ZERO = sympy.Integer(0)
_KB, _MB, _GB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Target:
    """One processor.

    Attributes:
        name: as ``options={"target": ...}`` takes it.
        device: the model whose figures these are, as ``get_device_name`` gives it.
        cores: cube cores, each with two vector cores.
        clock: of the cube, Hz.
        flops_per_cycle: of one cube core, by precision; multiply and add count as two.
        unified, l1, l0a, l0b, l0c: on-chip buffers of one core, bytes.
        l2: bytes.
        memory: bytes.
        bandwidth: of the memory, bytes per second.
        link: to other processors, bytes per second and direction.
        sources: where each group of figures is from.
    """

    name: str
    device: str
    cores: int
    clock: float
    flops_per_cycle: Mapping[str, int]
    unified: int
    l1: int
    l0a: int
    l0b: int
    l0c: int
    l2: int
    memory: int
    bandwidth: float | None
    link: float | None
    sources: Mapping[str, str]

    def peak(self, precision: str) -> float:
        """Floating (or integer) operations per second. Raises KeyError for a precision that it does not have."""
        return self.cores * self.clock * self.flops_per_cycle[precision]


_CUBE = 2 * 16 * 16 * 16  # bf16 and f16: a 16 x 16 x 16 product per cycle
_A2_RATES = {"bf16": _CUBE, "f16": _CUBE, "int8": 2 * _CUBE, "int4": 4 * _CUBE}
_A5_RATES = {"bf16": _CUBE, "f16": _CUBE, "int8": 2 * _CUBE, "fp8": 2 * _CUBE, "fp4": 4 * _CUBE}
_CONFIG = "CANN platform_config"
_A2_SOURCES = {
    "cores, clock, rates": f"{_CONFIG}/Ascend910B2.ini: cube_core_cnt, cube_freq, DtypeMKN",
    "buffers, memory": f"{_CONFIG}/Ascend910B2.ini: ub_size, l1_size, l0_*_size, l2_size, memory_size",
    "bandwidth": "ddr_rate of 32 bytes x cube cores x clock, as for the Ascend910B4 with 960 GB/s",
}
_A5_SOURCES = {
    "cores": "device spec that bishengir-compile prints",
    "clock": f"{_CONFIG}/Ascend950PR_9579.ini and DeepGEMM-Ascend's tests: 1650 MHz; another file says 1800",
    "rates": "asc-devkit documentation of architecture 3510; DeepGEMM-Ascend's tests for fp8 and fp4",
    "buffers, memory": "device spec that bishengir-compile prints; Ascend950PR_9599.ini",
}

TARGETS: Mapping[str, Target] = {
    t.name: t
    for t in (
        Target(
            "ascend950", "Ascend950PR_9589", 32, 1.65e9, _A5_RATES, 248 * _KB, 512 * _KB, 64 * _KB, 64 * _KB, 256 * _KB,
            128 * _MB, 128 * _GB, 1.5e12, None,
            {**_A5_SOURCES, "bandwidth": f"{_CONFIG}/Ascend950PR_9579.ini, about 1.5 TB/s, of a part with 28 cores"},
        ),
        Target(
            "ascend950dt", "Ascend950DT_9582", 32, 1.65e9, _A5_RATES, 248 * _KB, 512 * _KB, 64 * _KB, 64 * _KB,
            256 * _KB, 128 * _MB, 128 * _GB, 3.5e12, None,
            {**_A5_SOURCES, "bandwidth": "hardware model of DeepGEMM-Ascend's tests, which does not name the part"},
        ),
        Target(
            "ascend910b", "Ascend910B2", 24, 1.8e9, _A2_RATES, 192 * _KB, 512 * _KB, 64 * _KB, 64 * _KB, 128 * _KB,
            192 * _MB, 64 * _GB, 24 * 32 * 1.8e9, None, _A2_SOURCES,
        ),
        Target(
            "ascend910_93", "Ascend910_9392", 24, 1.8e9, _A2_RATES, 192 * _KB, 512 * _KB, 64 * _KB, 64 * _KB, 128 * _KB,
            192 * _MB, 64 * _GB, 24 * 32 * 1.8e9, None,
            {**_A2_SOURCES, "all": "taken to be one die like the Ascend910B2; 24 cores by the vendor's core table"},
        ),
    )
}  # fmt: skip


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
