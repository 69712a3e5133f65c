"""Every private torch name that the project uses, in one place, with what differs between 2.11 and 2.14."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.utils import detect_fake_mode
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_export_module, aot_module_simplified
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import guard_scalar, statically_known_true

__all__ = [
    "TORCH",
    "CustomGraphPass",
    "RestartAnalysis",
    "aot_export_module",
    "aot_module_simplified",
    "backward_at_once",
    "cache_dir",
    "compile_fx",
    "fake_mode_of",
    "functional",
    "get_decompositions",
    "guard_scalar",
    "stable_topological_sort",
    "statically_known_true",
    "trace",
    "unset_fake_temporarily",
]

TORCH: tuple[int, int] = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])  # type: ignore[assignment]


def backward_at_once() -> Any:
    """Within this context AOT Autograd compiles the backward with the forward, and not when it first runs."""
    name = "force_non_lazy_backward_lowering"
    return functorch_config.patch({name: True}) if hasattr(functorch_config, name) else nullcontext()


def fake_mode_of(inputs: Sequence[Any]) -> FakeTensorMode:
    """The fake mode of the compile that is going on, or of ``inputs``, else a new one."""
    found = detect_fake_mode(list(inputs))
    return found if isinstance(found, FakeTensorMode) else FakeTensorMode(allow_non_fake_inputs=True)


def functional(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` without changes in place, for use below AOT Autograd's own functionalisation.

    There ``torch.func.functionalize`` wraps the arguments and does nothing else, because its dispatch key is off.
    """
    made: Callable[..., Any] = dispatch_functionalize(function, FunctionalTensorMode())
    return made


def trace(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    mode: FakeTensorMode | None,
    decompositions: Mapping[torch._ops.OpOverload, Callable[..., Any]] | None = None,
) -> torch.fx.GraphModule:
    """``function`` as a graph of ATen and custom ops, traced on ``inputs``, which are fake tensors of ``mode``."""
    with mode or nullcontext():
        return make_fx(function, dict(decompositions or {}), _allow_non_fake_inputs=True)(*inputs)
