"""Every call of a vendor op, asked of our limits with the tensors that it really gets: what is emitted is allowed."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ascend_deep.native.torch_npu import soc
from ascend_deep.native.torch_npu.checks import CHECKS, refusal

__all__ = ["Emitted"]


class Emitted(TorchDispatchMode):
    """Fails on a call that the limits of ``target`` refuse; ``seen`` are the ops that were called."""

    def __init__(self, target: soc.Target) -> None:
        super().__init__()
        self.target = target
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("npu::"):
            op = name.removeprefix("npu::")
            self.seen.add(op)
            assert op in CHECKS, f"{op} is emitted without limits"
            sentence = refusal(op, self.target, *args, **(kwargs or {}))
            assert sentence is None, sentence
        return func(*args, **(kwargs or {}))
