"""The CPU half of ``benchmarks/gemm.py``: our ops against ``torch.mm`` in float32, and against dequantising first.

Every contender has so many copies of its weights that they do not fit into the caches together, as the layers of a
model do not, and takes the next one in every turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native.cpu.provider import CPU, isa
from benchmarks.gemm import Case, Contender, seconds

__all__ = ["cases", "clean", "heading", "missing", "probes", "timed", "tiny"]

timed = seconds
_ALL_COPIES = 512 << 20  # bytes of the copies of a weight, at least
_COPY = 32 << 20
_SQUARE = 2048
_GROUPS = 4


def missing() -> str | None:
    return CPU.unavailable()


def heading() -> str:
    return f"GEMM ops on {torch.get_num_threads()} threads, {isa()}"


class _Turn:
    """Which copy of the weights is next."""

    number = 0


def clean() -> None:
    """From now on, other copies of the weights."""
    _Turn.number += 1


class _Copies:
    """The tensors of a weight, in as many copies as do not fit into the caches."""

    def __init__(self, *tensors: Tensor) -> None:
        count = max(2, -(-_ALL_COPIES // max(sum(t.nbytes for t in tensors), 1 << 20)))
        self.all = [tensors, *(tuple(t.clone() for t in tensors) for _ in range(count - 1))]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.all[0])

    def __call__(self) -> tuple[Tensor, ...]:
        return self.all[_Turn.number % len(self.all)]


@lru_cache(1)
def _probe_operands() -> tuple[Tensor, Tensor]:
    return torch.randn(_SQUARE, _SQUARE), torch.ones(2, _COPY)


def probes() -> dict[str, tuple[Callable[[], object], float]]:
    square, target = _probe_operands()
    return {
        "matmul": (partial(torch.mm, square, square), 2.0 * _SQUARE**3),
        "copy": (partial(target[0].copy_, target[1]), 8.0 * _COPY),
    }


class _Operands:
    """One product [M, K] x [N, K] in all the forms that contenders take."""

    def __init__(self, tokens: int, n: int, k: int) -> None:
        generator = torch.Generator().manual_seed(n + k + tokens)
        self.x = torch.randn(tokens, k, generator=generator)
        w = torch.randn(n, k, generator=generator) / k**0.5
        self.x16 = self.x.bfloat16()
        self.x8, self.x_sf = ops.quant_fp8(self.x, gran=(1, 128))
        self.x_mx, self.x_mx_sf = ops.quant_fp8(self.x, gran=(1, 32), ue8m0=True)
        self.w, self.w16 = _Copies(w), _Copies(w.bfloat16())
        self.w8 = _Copies(*ops.quant_fp8(w, gran=(128, 128)))
        self.w4 = _Copies(*ops.quant_fp4(w))

    def f32(self) -> Tensor:
        return torch.mm(self.x, self.w()[0].t())

    def bf16(self) -> Tensor:
        return ops.gemm_bf16(self.x16, self.w16()[0])

    def torch_bf16(self) -> Tensor:
        return torch.mm(self.x16, self.w16()[0].t())

    def fp8(self) -> Tensor:
        w, sf = self.w8()
        return ops.gemm_scaled(self.x8, self.x_sf, w, sf, recipe_a=(1, 128), recipe_b=(128, 128))

    def fp4(self) -> Tensor:
        w, sf = self.w4()
        return ops.gemm_scaled(self.x_mx, self.x_mx_sf, w, sf, recipe_a=(1, 32), recipe_b=(1, 32))

    def fp8_dequantised(self) -> Tensor:
        w = ops.dequant(*self.w8(), gran=(128, 128))
        return torch.mm(ops.dequant(self.x8, self.x_sf, gran=(1, 128)), w.t())

    def fp4_dequantised(self) -> Tensor:
        w = ops.dequant(*self.w4(), gran=(1, 32))
        return torch.mm(ops.dequant(self.x_mx, self.x_mx_sf, gran=(1, 32)), w.t())

    def truth(self, name: str) -> Tensor | None:
        if "fp4" in name:
            return self.fp4_dequantised()
        if "fp8" in name:
            return self.fp8_dequantised()
        return self.x16.float() @ self.w16()[0].float().t() if "bf16" in name else None

    def dense(self, title: str) -> Case:
        (m, k), n = self.x.shape, self.w.all[0][0].shape[0]

        def moved(weight: int, element: int, result: int) -> int:
            return weight + m * k * element + m * n * result

        sixteen = moved(self.w16.nbytes, 2, 2)
        return Case(
            f"{title} {n} x {k}",
            m,
            2.0 * m * n * k,
            {
                "gemm_bf16": Contender(self.bf16, sixteen, ours=True),
                "gemm_scaled fp8": Contender(self.fp8, moved(self.w8.nbytes, 1, 2), ours=True),
                "gemm_scaled fp8 x fp4": Contender(self.fp4, moved(self.w4.nbytes, 1, 2), ours=True),
                "torch.mm bf16": Contender(self.torch_bf16, sixteen),
                "dequantise fp8, torch.mm": Contender(self.fp8_dequantised, moved(self.w8.nbytes + 8 * n * k, 9, 4)),
                "dequantise fp4, torch.mm": Contender(self.fp4_dequantised, moved(self.w4.nbytes + 8 * n * k, 9, 4)),
                "torch.mm f32": Contender(self.f32, moved(self.w.nbytes, 4, 4)),
            },
            self.truth,
        )


def _dense(title: str, n: int, k: int, tokens: int) -> Iterator[Case]:
    yield _Operands(tokens, n, k).dense(title)


def _grouped(n: int, k: int, tokens: int) -> Iterator[Case]:
    """The experts of a MoE layer: uneven groups of ``tokens`` rows on average, labels, no alignment."""
    generator = torch.Generator().manual_seed(tokens)
    rows = _GROUPS * tokens
    labels = torch.randint(_GROUPS, (rows,), generator=generator).sort().values.int()
    x, w = torch.randn(rows, k, generator=generator), torch.randn(_GROUPS, n, k, generator=generator) / k**0.5
    x16, (x8, x_sf) = x.bfloat16(), ops.quant_fp8(x, gran=(1, 128))
    w32, w16, w8 = _Copies(w), _Copies(w.bfloat16()), _Copies(*ops.quant_fp8(w, gran=(128, 128)))
    counts = torch.bincount(labels, minlength=_GROUPS).tolist()
    ends = torch.bincount(labels, minlength=_GROUPS).cumsum(0).int()

    def loop() -> Tensor:
        parts = zip(x.split(counts), w32()[0], strict=True)
        return torch.cat([rows_of @ weight.t() for rows_of, weight in parts])

    def dequantised() -> Tensor:
        parts = zip(x8.split(counts), x_sf.split(counts), *w8(), strict=True)
        return torch.cat(
            [ops.dequant(a, s, gran=(1, 128)) @ ops.dequant(b, t, gran=(128, 128)).t() for a, s, b, t in parts]
        )

    def sixteen() -> Tensor:
        return ops.m_grouped_gemm_bf16(x16, w16()[0], labels, grouping="labels", alignment=1)

    def eight() -> Tensor:
        codes, sf = w8()
        return ops.m_grouped_gemm_scaled(
            x8, x_sf, codes, sf, labels, recipe_a=(1, 128), recipe_b=(128, 128), grouping="labels", alignment=1
        )

    def torch_grouped() -> Tensor:
        return torch._grouped_mm(x16, w16()[0].transpose(1, 2), ends)

    active = sum(c > 0 for c in counts) * n * k
    out, source = rows * n, rows * k
    yield Case(
        f"{_GROUPS} groups {n} x {k}",
        rows,
        2.0 * rows * n * k,
        {
            "m_grouped_gemm_bf16": Contender(sixteen, 2 * (active + source + out), ours=True),
            "m_grouped_gemm_scaled fp8": Contender(eight, active + source + 2 * out, ours=True),
            "torch._grouped_mm bf16": Contender(torch_grouped, 2 * (active + source + out)),
            "dequantise fp8, loop": Contender(dequantised, 9 * active + 5 * source + 4 * out),
            "loop of torch.mm f32": Contender(loop, 4 * (active + source + out)),
        },
        lambda name: dequantised() if "fp8" in name else None,
    )


def _einsum(tokens: int) -> Iterator[Case]:
    """The absorbed projection of latent attention: 128 heads, 512 -> 128."""
    eq, h, r, d = "bhr,hdr->bhd", 128, 512, 128
    generator = torch.Generator().manual_seed(tokens)
    a, b = torch.randn(tokens, h, r, generator=generator), torch.randn(h, d, r, generator=generator) / r**0.5
    a16, b32, b16 = a.bfloat16(), _Copies(b), _Copies(b.bfloat16())
    numbers = b.numel() + a.numel() + tokens * h * d
    yield Case(
        f"{eq} {h} x {d} x {r}",
        tokens,
        2.0 * tokens * h * r * d,
        {
            "einsum_bf16": Contender(lambda: ops.einsum_bf16(eq, a16, b16()[0]), 2 * numbers, ours=True),
            "torch.einsum bf16": Contender(lambda: torch.einsum(eq, a16, b16()[0]), 2 * numbers),
            "torch.einsum f32": Contender(lambda: torch.einsum(eq, a, b32()[0]), 4 * numbers),
        },
        lambda name: torch.einsum(eq, a16.double(), b16()[0].double()) if "bf16" in name else None,
    )


def cases(
    kinds: Sequence[str], shapes: Mapping[str, tuple[int, int]], tokens: Sequence[int]
) -> list[Callable[[], Iterator[Case]]]:
    """What to measure, as functions that make the operands when their turn comes."""
    found: list[Callable[[], Iterator[Case]]] = []
    for m in tokens:
        if "dense" in kinds:
            found += [partial(_dense, title, n, k, m) for title, (n, k) in shapes.items()]
        if "grouped" in kinds:
            found += [
                partial(_grouped, n, k, m) for n, k in ((4096, 4096), (4096, 2048))[: 1 if len(shapes) < 3 else 2]
            ]
        if "einsum" in kinds:
            found.append(partial(_einsum, m))
    return found


def tiny() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Op and kernel on the smallest operands, to compare what calling them costs."""
    a = torch.randn(1, 16).bfloat16()
    x, sf = ops.quant_fp8(a, gran=(1, 128))
    library = torch.ops.ascend_deep_cpu
    plain = {"layout": "nt", "out_dtype": None, "alpha": None}
    blocks = {"recipe_a": (1, 128), "recipe_b": (1, 128)}
    bf16, scaled = library.gemm_bf16.default, library.gemm_scaled.default
    return {
        "gemm_bf16": (lambda: ops.gemm_bf16(a, a), lambda: bf16(a, a, None, **plain)),
        "gemm_scaled": (
            lambda: ops.gemm_scaled(x, sf, x, sf, **blocks),  # type: ignore[arg-type]
            lambda: scaled(x, sf, x, sf, None, **blocks, **plain),
        ),
    }
