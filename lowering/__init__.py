"""Hand-off of the rewritten graph to the compiler below: Inductor, torchair, npugraph_ex, AOT eager or eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx

from ascend_deep.lowering import _torch_compat, inductor

__all__ = ["Stage", "choose", "emit", "hand_off", "lookup", "stubs_folder"]


class Stage(Protocol):
    """The rewriting that has to happen to a Dynamo graph before the downstream compiler takes it."""

    def run(self, gm: fx.GraphModule) -> None:
        """Rewrite ``gm`` in place. A second call on the same module does nothing."""

    def uuid(self) -> str:
        """Content hash of everything that decides what ``run`` does; part of compile cache keys."""


def choose(downstream: str, example_inputs: Sequence[Any]) -> str:
    """``downstream`` with ``"auto"`` resolved: Inductor, or ``"npu"`` (torchair) when an input is on an NPU."""
    if downstream != "auto":
        return downstream
    on_npu = any(isinstance(x, torch.Tensor) and x.device.type == "npu" for x in example_inputs)
    return "npu" if on_npu else "inductor"


def hand_off(
    downstream: str,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    stage: Stage,
    mode: str | None,
    inductor_options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Run ``stage`` on ``gm`` and compile the result with ``downstream``.

    Args:
        downstream: a resolved name, see ``choose``.
        mode: ``mode=`` of torch.compile; only Inductor has modes.
        inductor_options: config patches for Inductor.

    Raises:
        RuntimeError: the downstream compiler is not installed, in one sentence.
    """
    if downstream == "inductor":
        return inductor.compile(gm, example_inputs, stage, mode, inductor_options)
    backend = lookup(downstream)
    stage.run(gm)
    if downstream == "npu":
        from ascend_deep.lowering import torchair

        backend = torchair.backend()
    if downstream == "npugraph_ex":
        from ascend_deep.lowering import npugraph_check

        npugraph_check.require_capturable(gm)
    return backend(gm, example_inputs)


def stubs_folder() -> Path:
    """Where stand-ins for CANN are made and kept, if a conversion needs them."""
    return Path(_torch_compat.cache_dir()) / "ascend_deep_cann"


def emit(gm: fx.GraphModule, example_inputs: Sequence[Any], family: str, folder: Path) -> list[Path]:
    """Write the graph that Ascend's graph engine would get for a rewritten graph; returns the files.

    Args:
        family: of the processor, see ``native/torch_npu/soc.py``.
        folder: gets a folder of its own for each graph that Dynamo hands over.

    Raises:
        RuntimeError: torch_npu is not usable here, or an op cannot be converted; one sentence.
    """
    from ascend_deep.lowering import torchair_emit

    graphs = torchair_emit.convert(gm, example_inputs, family, stubs_folder())
    number = sum(1 for _ in folder.glob("compile_*")) if folder.is_dir() else 0
    return torchair_emit.write(graphs, folder / f"compile_{number}")


def lookup(name: str) -> Callable[..., Any]:
    """The backend of torch.compile that a resolved name stands for.

    Raises:
        RuntimeError: it is not installed, in one sentence.
    """
    import torch._dynamo

    if name not in torch._dynamo.list_backends(exclude_tags=()):
        package = {"npu": "torch_npu with torchair", "npugraph_ex": "torch_npu with npugraph_ex"}.get(name, name)
        raise RuntimeError(
            f"option 'downstream' is {name!r}, which needs {package}; it is not installed in this environment "
            "(`ascend-deep doctor` says what is missing)."
        )
    return torch._dynamo.lookup_backend(name)
