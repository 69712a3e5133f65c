"""Hand-off to torchair, the graph compiler of torch_npu.

Our ops are expanded while AOT Autograd traces: torchair takes a table of decompositions for that, and ours calls the
kernel of the ``torch_npu`` provider, so a compiled graph holds the same vendor ops as an eager call, and torchair's own
converters turn them into graph engine ops. Sizes stay symbolic. A call that the provider refuses is expanded by the
op's reference body where that is plain tensor code; otherwise compiling fails with the refusal, before the engine is
asked.

``register_converters`` teaches torchair our ops the other way round, by its public registration call, for graphs that
are given to torchair directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ascend_deep import ops
from ascend_deep.lowering import _torch_compat
from ascend_deep.native.torch_npu import soc

__all__ = ["ON_HOST", "NoGraphEngineOp", "backend", "decompositions", "expand", "register_converters"]

_DEVICE = "npu"

# Ops whose reference bodies read counts on the host. All others are tensor code and can be traced.
ON_HOST = frozenset(
    {
        "k_grouped_gemm_bf16",
        "k_grouped_gemm_bf16_acc_",
        "k_grouped_gemm_scaled",
        "k_grouped_gemm_scaled_acc_",
        "m_grouped_gemm_bf16",
        "m_grouped_gemm_scaled",
        "moe_experts",
        "moe_experts_backward",
        "paged_kv_write_",
        "paged_mqa_logits",
        "paged_mqa_logits_metadata",
        "paged_mqa_topk",
    }
)


class NoGraphEngineOp(RuntimeError):
    """An op of ours has no expansion for these arguments; the message says which and why, and what to do."""


def expand(name: str, *args: Any, **kwargs: Any) -> Any:
    """What op ``name`` does on an NPU, as calls of vendor and ATen ops. To be run under tracing or on real tensors.

    Raises:
        NoGraphEngineOp: no provider takes the call, and the reference body cannot be traced.
    """
    if kwargs.get("cpu_sync"):
        raise NoGraphEngineOp(
            f"ascend_deep::{name} cannot be lowered to the graph engine with cpu_sync=True, which waits for the number "
            "of rows on the host; use cpu_sync=False (parallelize: max_tokens_per_rank)."
        )
    with soc.in_graph():
        choice = ops.provider(name, _DEVICE, args, kwargs)
        if choice.provider is not None:
            return choice.provider.kernels[name](*args, **kwargs)
    if name not in ON_HOST:
        # Traced below functionalisation, where nothing may be changed in place.
        return _torch_compat.functional(ops.reference(name))(*args, **kwargs)
    why = "; ".join(map(str, choice.refusals)) or "there is no provider for NPUs."
    raise NoGraphEngineOp(
        f"ascend_deep::{name} cannot be lowered to the graph engine: {why} Disable the recogniser that made it, or use "
        "downstream='aot_eager'."
    )


@functools.cache
def decompositions() -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
    """Every op of ours to its expansion, in the form that torchair and AOT Autograd take, and what torchair lacks."""
    ours = {definition.overload: functools.partial(expand, name) for name, definition in ops.OPS.items()}
    return {**ours, **_missing()}


def _missing() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """ATen ops that torchair of torch_npu 2.13 does not convert, written in ops that it does."""
    aten = torch.ops.aten
    return {
        aten.squeeze.dims: _squeeze,
        aten.amax.default: _amax,
        aten.__rshift__.Scalar: _right_shift,
        aten.__lshift__.Scalar: _left_shift,
        aten.bitwise_and.Scalar: functools.partial(_bits, aten.bitwise_and.Tensor),
        aten.bitwise_or.Scalar: functools.partial(_bits, aten.bitwise_or.Tensor),
    }


def _guards() -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
    """The run-time check that ``prepare`` puts before experts, if it was used, is left out: no engine can call it."""
    guard = getattr(torch.ops.ascend_deep, "loop_guard", None)
    return {guard.default: lambda idx, stack: idx.clone()} if guard is not None else {}


def _squeeze(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """``squeeze`` of several dimensions, which torchair of torch_npu 2.13 does not convert, one by one."""
    for dim in sorted((d % x.dim() for d in dims), reverse=True):
        x = torch.ops.aten.squeeze.dim(x, dim)
    return x


def _amax(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    """``amax``, whose converter in torchair of torch_npu 2.13 raises, one dimension after the other."""
    for d in sorted((d % x.dim() for d in dim or range(x.dim())), reverse=True):
        x = torch.ops.aten.max.dim(x, d, keepdim)[0]
    return x


def _right_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """``x >> bits`` of integers, which torchair of torch_npu 2.13 does not convert."""
    return torch.ops.aten.div.Tensor_mode(x, 1 << bits, rounding_mode="floor")


def _left_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """``x << bits`` of integers, which torchair of torch_npu 2.13 does not convert."""
    return torch.ops.aten.mul.Tensor(x, 1 << bits)


def _bits(op: Callable[..., torch.Tensor], x: torch.Tensor, mask: int) -> torch.Tensor:
    """``x & mask`` and the like, of which torchair of torch_npu 2.13 converts the form with two tensors."""
    return op(x, torch.ops.aten.full.default([], mask, dtype=x.dtype, device=x.device))


def backend(config: Any = None) -> Callable[..., Any]:
    """torchair's backend with our decompositions. ``config``: a ``torchair.CompilerConfig``, ``None``: the default."""
    import torchair

    made: Callable[..., Any] = torchair.get_npu_backend(
        compiler_config=config or torchair.CompilerConfig(), custom_decompositions={**decompositions(), **_guards()}
    )
    return made


# -- converters -------------------------------------------------------------------------------------------------------
def register_converters() -> tuple[str, ...]:
    """Register a graph engine converter for each of our ops; returns their names.

    Only needed where torchair sees our ops itself, as with a prepared model and ``backend=torchair.get_npu_backend()``.
    A converter traces the op's expansion on the values' metadata and runs torchair's own converters over the result.
    """
    from torchair import register_fx_node_ge_converter

    for name, definition in ops.OPS.items():
        register_fx_node_ge_converter(definition.overload)(functools.partial(_convert, name))
    return tuple(ops.OPS)


def _convert(name: str, *args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
    values = [_meta(a) for a in args]
    tensors = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
    mode = next(getattr(values[i], "fake_mode", None) for i in tensors)

    def body(*given: torch.Tensor) -> Any:
        full = list(values)
        for i, tensor in zip(tensors, given, strict=True):
            full[i] = tensor
        return expand(name, *full, **kwargs)

    traced = _torch_compat.trace(body, [values[i] for i in tensors], mode, _missing())
    return _Converting(traced).run(*(args[i] for i in tensors))


def _meta(value: Any) -> Any:
    """The fake tensor behind a graph engine tensor; other values as they are."""
    return value.meta if hasattr(value, "meta") and hasattr(value, "tensor") else value


class _Converting(fx.Interpreter):
    """Runs torchair's converter of each node on graph engine tensors."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        from torchair._ge_concrete_graph import fx2ge_converter as fx2ge

        node_args, node_kwargs = list(args), dict(kwargs)
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, dict(kwargs))
        converter = fx2ge.get_or_auto_gen_converter(target)
        meta = self._current.meta["val"]
        if converter.require_meta:
            node_kwargs["meta_outputs"] = meta
        out = converter(*node_args, **node_kwargs)
        fx2ge.set_ge_outputs(out, meta)
        return out

    def run_node(self, n: fx.Node) -> Any:
        self._current = n
        return super().run_node(n)
