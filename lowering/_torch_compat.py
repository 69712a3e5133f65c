"""Every private torch name that the project uses, in one place, with what differs between 2.11 and 2.14."""

from __future__ import annotations

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._functorch.aot_autograd import aot_export_module
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import guard_scalar, statically_known_true

__all__ = [
    "TORCH",
    "CustomGraphPass",
    "RestartAnalysis",
    "aot_export_module",
    "cache_dir",
    "compile_fx",
    "guard_scalar",
    "stable_topological_sort",
    "statically_known_true",
    "unset_fake_temporarily",
]

TORCH: tuple[int, int] = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])  # type: ignore[assignment]
