"""The C++ matrix products: every instruction set, format and layout gives what the reference gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native.cpu import gemm_provider, gemm_quant_provider
from ascend_deep.native.cpu.provider import CPU

NAMES = tuple(sorted({*gemm_provider.SAME, *gemm_provider.KERNELS, *gemm_quant_provider.KERNELS}))
FP8 = torch.float8_e4m3fn


def taken(name: str, sample: ops.Sample) -> bool:
    choice = ops.provider(name, "cpu", sample.args, sample.kwargs)
    return choice.provider is CPU


def results(name: str, function: Any, sample: ops.Sample) -> tuple[Tensor, ...]:
    """What a call returns, or writes into a copy of its first argument (which may also be an addend)."""
    args = sample.args
    if name.endswith(("_out", "_acc_")):
        d = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype).copy_(args[0])
        args = tuple(d if a is args[0] else a for a in args)
        assert function(*args, **sample.kwargs) is None
        return (d,)
    out = function(*args, **sample.kwargs)
    return (out,) if isinstance(out, Tensor) else tuple(out)


def as_numbers(t: Tensor) -> Tensor:
    return t.to(torch.float64) if t.is_floating_point() else t


def close(a: Tensor, b: Tensor, *, rtol: float, atol: float, name: str) -> None:
    def message(found: str) -> str:
        return f"{name}: {found}"

    torch.testing.assert_close(as_numbers(a), as_numbers(b), rtol=rtol, atol=atol, equal_nan=True, msg=message)


@pytest.mark.parametrize("name", NAMES)
def test_samples_on_every_instruction_set(name: str, each_isa: str) -> None:
    exact = name in ("quant_fp8", "quant_fp4", "dequant")
    count = 0
    for sample in ops.op(name).samples():
        if not taken(name, sample):
            continue
        count += 1
        wanted = results(name, ops.reference(name), sample)
        got = results(name, CPU.kernels[name], sample)
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride(), sample.name
            if exact or not b.is_floating_point():
                close(a, b, rtol=0, atol=0, name=sample.name)
                continue
            # E4M3: a neighbour, where the f32 sum before it lay next to a tie.
            rtol = {torch.bfloat16: 8e-3, FP8: 0.13}.get(b.dtype, 2e-5)
            size = float(as_numbers(b).nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
            close(a, b, rtol=rtol, atol=3e-6 * size, name=sample.name)
    assert count >= 2
