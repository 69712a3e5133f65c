"""Inductor as the downstream compiler.

From torch 2.12 on, the rewriting runs as Inductor's ``pre_grad_custom_pass``: it has a ``uuid``, so the FX and AOT
caches key on it and a warm start skips capture and recognition altogether. Before 2.12 pre-grad passes are not part
of the cache key, so there the rewriting runs ahead of Inductor and the caches key on the rewritten graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch._inductor
import torch._inductor.config
from torch import fx

from ascend_deep.lowering import _torch_compat
from ascend_deep.lowering.direct import KernelPass
from ascend_deep.native import table

if TYPE_CHECKING:
    from ascend_deep.lowering import Stage

__all__ = ["compile"]


class _StagePass(_torch_compat.CustomGraphPass):
    """A stage as a graph pass. It changes the owning module in place, which AOT Autograd may already hold."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __call__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        assert module is not None
        self._stage.run(module)

    def uuid(self) -> str:
        return self._stage.uuid()


class _Chain(_torch_compat.CustomGraphPass):
    """Passes in sequence, for versions of torch that take a single one."""

    def __init__(self, passes: Sequence[Any]) -> None:
        self._passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        for one in self._passes:
            one(graph if module is None else module.graph)

    def uuid(self) -> Any:
        ids = [one.uuid() if hasattr(one, "uuid") else None for one in self._passes]
        return None if None in ids else str(ids)


def compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    stage: Stage,
    mode: str | None,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile ``gm`` with Inductor, ``stage`` applied first, after a user's own ``pre_grad_custom_pass``."""
    patches = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    patches.update(options)
    # Compiled code from a cache names the kernels, so their library has to be there whatever the stage does.
    table.fingerprint()
    patches["post_grad_custom_post_pass"] = _with(patches, "post_grad_custom_post_pass", KernelPass())
    if _torch_compat.TORCH < (2, 12):
        stage.run(gm)
        return cast("Callable[..., Any]", _torch_compat.compile_fx(gm, list(example_inputs), config_patches=patches))
    patches["pre_grad_custom_pass"] = _with(patches, "pre_grad_custom_pass", _StagePass(stage))
    return cast("Callable[..., Any]", _torch_compat.compile_fx(gm, list(example_inputs), config_patches=patches))


def _with(patches: Mapping[str, Any], name: str, ours: _torch_compat.CustomGraphPass) -> _torch_compat.CustomGraphPass:
    """``ours`` after the passes that the user has set for hook ``name`` of Inductor, if any."""
    hooks = patches.get(name, getattr(torch._inductor.config, name))
    before = [] if hooks is None else list(hooks) if isinstance(hooks, (list, tuple)) else [hooks]
    return _Chain([*before, ours]) if before else ours
