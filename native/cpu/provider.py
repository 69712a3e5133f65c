"""The CPU provider: our C++ kernels, loaded when the first call asks for them.

Limits are those of ``native/cpu/*.cpp``; a call outside them runs the op's reference body.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ascend_deep.native._provider import Provider
from ascend_deep.native.cpu import gemm_provider, gemm_quant_provider, mqa_provider
from ascend_deep.native.cpu.build import LIBRARY
from ascend_deep.native.cpu.coded import code_calls

__all__ = ["CPU", "isa"]

_PATH = Path(__file__).resolve().parent / LIBRARY
_BUILD = "python -m ascend_deep.native.cpu.build"
_ACTS = gemm_quant_provider.ACTS
_FLOATS = (torch.float32, torch.bfloat16)
_LIBRARY = torch.library.Library("ascend_deep_cpu", "IMPL")  # kept: what it registers goes with it
_NOT_OURS = ("AutogradCPU", "ADInplaceOrView")


@functools.cache
def _unavailable() -> str | None:
    if not _PATH.exists():
        return f"the C++ kernels are not built; `{_BUILD}` builds them."
    try:
        torch.ops.load_library(str(_PATH))
        for name, fake in {**_SAME, **_CODED}.items():
            torch.library.register_fake(f"ascend_deep_cpu::{name}", fake)
            # Nothing is to be done for autograd here: the ops have their own. Its fallback would only call once more.
            for key in _NOT_OURS:
                _LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    except (OSError, RuntimeError) as error:
        return f"the C++ kernels do not load ({str(error).splitlines()[0]}); `{_BUILD}` builds them again."
    return None


def isa(name: str = "") -> str:
    """The instruction sets of this CPU, lowest first, the one in use with a star.

    A name switches to that one for the rest of the process (tests do this); the environment variable
    ``ASCEND_DEEP_CPU_ISA`` does so from the start. Raises RuntimeError for one that the CPU does not have, or if the
    kernels are not built.
    """
    missing = _unavailable()
    if missing is not None:
        raise RuntimeError(missing)
    text: str = torch.ops.ascend_deep_cpu.isa(name)
    return text


def _fake_experts(x: torch.Tensor, *_: Any, out_dtype: torch.dtype | None, **__: Any) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


def _fake_route(logits: torch.Tensor, *_: Any, topk: int, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], topk)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _fake_swiglu(h: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return h.new_empty((*h.shape[:-1], h.shape[-1] // 2))


# Ops whose kernel is an op of the library with the same arguments and, on a fake tensor, these results.
_SAME: Mapping[str, Callable[..., Any]] = {
    "moe_experts": _fake_experts,
    "moe_route": _fake_route,
    "swiglu": _fake_swiglu,
    **gemm_provider.SAME,
}


def _fake_experts_coded(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    out = rest[-4] >> 8 & 3  # as in coded.cpp
    return x.new_empty(x.shape, dtype=(x.dtype, *_FLOATS)[out])


def _fake_route_coded(
    logits: torch.Tensor, bias: torch.Tensor | None, code: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_route(logits, topk=code >> 8 & 0xFFFF)


# What stands in compiled graphs instead of ops of _SAME, see coded.py.
_CODED: Mapping[str, Callable[..., Any]] = {
    "moe_experts_coded": _fake_experts_coded,
    "moe_layer": _fake_experts_coded,
    "moe_route_coded": _fake_route_coded,
}


def _kernel(name: str) -> Callable[..., Any]:
    """``torch.ops.ascend_deep_cpu.<name>``, which is there once the library is loaded."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return _overload(name)(*args, **kwargs)

    return run


@functools.cache
def _overload(name: str) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(torch.ops.ascend_deep_cpu, name).default
    return overload


def _experts_limits(
    x: torch.Tensor,
    idx: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    b13: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    w3: torch.Tensor | None = None,
    *,
    act: str,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> str | None:
    if act not in _ACTS:
        return f"act is {act!r}, the kernel has {', '.join(sorted(_ACTS))}."
    if x.dtype not in _FLOATS or w13.dtype != x.dtype or w2.dtype != x.dtype:
        return (
            f"x, w13 and w2 have the dtypes {x.dtype}, {w13.dtype} and {w2.dtype}; the kernel takes float32 for all "
            "three, or bfloat16."
        )
    for name, bias in (("b13", b13), ("b2", b2)):
        if bias is not None and bias.dtype not in _FLOATS:
            return f"{name} has dtype {bias.dtype}; the kernel takes float32 and bfloat16."
    if weights.dtype not in _FLOATS:
        return f"weights has dtype {weights.dtype}; the kernel takes float32 and bfloat16."
    if out_dtype not in (None, *_FLOATS):
        return f"out_dtype is {out_dtype}; the kernel writes float32 and bfloat16."
    if w3 is not None and w3.stride()[1:] != w13.stride()[1:]:
        return (
            f"w3 has strides {tuple(w3.stride())} and w13 {tuple(w13.stride())}; the kernel wants the last two of both "
            "to be the same."
        )
    for name, w in (("w13", w13), ("w2", w2)):
        if w.dim() == 3 and 1 not in w.stride()[1:] and min(w.shape[1:]) > 1:
            return f"{name} has strides {tuple(w.stride())}; the kernel wants 1 in one of the last two dimensions."
    return None


def _route_limits(logits: torch.Tensor, bias: torch.Tensor | None, **_: Any) -> str | None:
    if logits.dtype not in (*_FLOATS, torch.float16):
        return f"logits has dtype {logits.dtype}; the kernel takes float32, bfloat16 and float16."
    return None


def _swiglu_limits(h: torch.Tensor, row_weight: torch.Tensor | None, *, act: str, **_: Any) -> str | None:
    if act not in _ACTS:
        return f"act is {act!r}, the kernel has {', '.join(sorted(_ACTS))}."
    if h.dtype not in _FLOATS:
        return f"h has dtype {h.dtype}; the kernel takes float32 and bfloat16."
    return None


CPU = Provider(
    name="native.cpu",
    device="cpu",
    unavailable=_unavailable,
    kernels={
        **{name: _kernel(name) for name in _SAME},
        **mqa_provider.KERNELS,
        **gemm_provider.KERNELS,
        **gemm_quant_provider.KERNELS,
    },
    direct={name: functools.partial(_overload, name) for name in _SAME},
    limits={
        "moe_experts": _experts_limits,
        "moe_route": _route_limits,
        "swiglu": _swiglu_limits,
        **mqa_provider.LIMITS,
        **gemm_quant_provider.LIMITS,
    },
    finish=code_calls,
    version="2",
)
