"""State outside of a module and its arguments, by the names under which code asks for it."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

__all__ = ["BY_NAME", "LIBRARIES", "MODES", "Left", "asks", "is_foreign"]

LIBRARIES = ("torch", "math", "numpy", "builtins", "functools", "itertools", "operator", "typing", "einops")
"""Packages whose functions compute from their arguments, except for what is named here."""

BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "vars", "dir", "globals", "locals", "eval", "exec", "open",
           "input", "id", "compile", "__import__")  # fmt: skip
"""Builtins that may read anything."""

MODES = (
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_inference", "is_autocast_cpu_enabled",
    "is_autocast_cache_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype",
    "get_default_dtype", "get_default_device", "get_device_module", "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode", "get_float32_matmul_precision",
    "get_num_threads", "get_num_interop_threads", "is_warn_always_enabled", "is_compiling", "is_dynamo_compiling",
    "is_exporting", "is_scripting", "is_tracing", "is_in_onnx_export", "is_anomaly_enabled", "is_deterministic",
    "initial_seed", "get_rng_state", "is_available", "is_initialized", "device_count", "current_device", "get_rank",
    "get_world_size", "is_vulkan_available", "current_accelerator",
)  # fmt: skip
"""Functions that say what state torch is in."""

_REACHING = (
    "get_buffer", "buffers", "named_buffers", "state_dict", "__dict__", "_buffers", "_parameters", "_modules",
    "__getattribute__", "__getattr__", "attrgetter", "methodcaller", "getattr_static", "getmembers", "get_extra_state",
)  # fmt: skip
_STATES = ("backends", "compiler", "distributed", "cuda", "npu", "xpu", "mps", "accelerator", "random", "version",
           "_dynamo", "_inductor")  # fmt: skip


class Left(Exception):
    """Something was read that cannot be watched; the text is the sentence."""


def asks(names: Sequence[str]) -> str | None:
    """A sentence if a chain of attributes asks for a mode, or reads something of a module by its name."""
    for name in names:
        if name in MODES:
            return f"its code asks {name}(), so what it computes depends on a mode."
        if name in _REACHING:
            return f"the code around its experts uses {name!r}, which may read anything of its module."
    return None


def is_foreign(value: Any, names: Sequence[str]) -> bool:
    """Whether a function or a module, reached by ``names`` from a global, may depend on more than its arguments."""
    if any(name in _STATES for name in names[:-1]):
        return True
    if isinstance(value, (types.BuiltinFunctionType, types.BuiltinMethodType)):
        owner = getattr(value, "__self__", None)
        home = value.__module__ or getattr(owner, "__module__", None) or getattr(owner, "__name__", None)
        return (home or type(owner).__module__).split(".")[0] not in LIBRARIES
    return False
