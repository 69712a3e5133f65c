"""What keeps a graph from being captured (npugraph_ex, aclgraph): a look at the host in the middle of it.

A captured graph replays device work only. An op whose result the host has to read, such as a count that becomes a size,
stops the capture with an error of the runtime that names neither the op nor the line. So the graph is read before it is
handed over, and the sentence here names both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ascend_deep import ops
from ascend_deep.lowering.torchair import ON_HOST
from ascend_deep.native.torch_npu import soc

__all__ = ["HostSync", "NotCapturable", "capture_sizes", "host_syncs", "pick", "require_capturable"]

# ATen ops that read values on the host: results or sizes that depend on data.
_READS = {
    "_local_scalar_dense": "reads a value",
    "item": "reads a value",
    "tolist": "reads values",
    "numpy": "reads values",
    "equal": "compares values",
    "is_nonzero": "reads a value",
    "allclose": "compares values",
    "nonzero": "has a size that depends on values",
    "nonzero_numpy": "has a size that depends on values",
    "argwhere": "has a size that depends on values",
    "masked_select": "has a size that depends on values",
    "unique": "has a size that depends on values",
    "_unique2": "has a size that depends on values",
    "unique_consecutive": "has a size that depends on values",
    "unique_dim": "has a size that depends on values",
    "bincount": "has a size that depends on values",
}


@dataclass(frozen=True)
class HostSync:
    """One node that stops a capture: its name, what it does, and where in the model it was written."""

    node: str
    what: str
    source: str

    def __str__(self) -> str:
        return f"{self.node} {self.what}{f', at {self.source}' if self.source else ''}"


class NotCapturable(RuntimeError):
    """The graph looks at the host; the message lists where."""


def host_syncs(gm: fx.GraphModule) -> list[HostSync]:
    """Every node of a Dynamo or ATen graph that a capture would stop at, in graph order."""
    found = []
    for node in gm.graph.nodes:
        what = _reads(node)
        if what is not None:
            found.append(HostSync(node.name, what, _source(node)))
    return found


def _reads(node: fx.Node) -> str | None:
    if node.op == "call_method":
        return _of_name(str(node.target), node)
    if node.op != "call_function":
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        space, name = node.target.namespace, node.target._schema.name.split("::")[1]
        if space == "ascend_deep":
            return _of_ours(name, node)
        return _of_name(name, node) if space == "aten" else None
    return _of_name(getattr(node.target, "__name__", ""), node)


def _of_name(name: str, node: fx.Node) -> str | None:
    if name == "repeat_interleave":
        repeats = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
        sized = node.kwargs.get("output_size") is not None
        # repeat_interleave(repeats) and tensor repeats without output_size have a size that depends on values.
        return None if sized or isinstance(repeats, int) else "has a size that depends on values"
    if name == "bincount" and len(node.args) + len(node.kwargs) > 2:
        return "has a size that depends on values, whatever minlength is"
    if name in ("cpu", "numpy") or (name in ("to", "_to_copy", "copy_") and _leaves_device(node)):
        return "copies to the host"
    if name in ("where", "index", "getitem") and _is_implicit_nonzero(node, name):
        return "has a size that depends on values"
    if name in ("setitem", "index_put", "index_put_") and _is_implicit_nonzero(node, name) and _value_is_tensor(node):
        return "writes a number of values that depends on a mask"
    return _READS.get(name)


def _leaves_device(node: fx.Node) -> bool:
    """True for a copy to the CPU of something that is on a device."""
    wanted = [*node.args[1:], node.kwargs.get("device")]
    to_host = any(str(w) == "cpu" for w in wanted if isinstance(w, (str, torch.device)))
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    value = None if source is None else source.meta.get("val", source.meta.get("example_value"))
    return to_host and isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _is_implicit_nonzero(node: fx.Node, name: str) -> bool:
    """``torch.where(mask)``, and indexing by a boolean mask."""
    if name == "where":
        return len(node.args) + len(node.kwargs) == 1
    indices = node.args[1] if len(node.args) > 1 else ()
    for index in indices if isinstance(indices, (list, tuple)) else (indices,):
        value = index.meta.get("val", index.meta.get("example_value")) if isinstance(index, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8):
            return True
    return False


def _value_is_tensor(node: fx.Node) -> bool:
    """A number is filled in without looking; a tensor has as many values as the mask has ones."""
    value = node.args[2] if len(node.args) > 2 else None
    return isinstance(value, fx.Node)


def _of_ours(name: str, node: fx.Node) -> str | None:
    if node.kwargs.get("cpu_sync") is True:  # dispatch and combine between ranks
        return f"waits for the number of rows that {name} exchanges; cpu_sync=False does not"
    if name not in ON_HOST or name not in ops.OPS:
        return None

    def value(n: fx.Node) -> Any:
        return n.meta.get("val", n.meta.get("example_value"))

    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    if soc.current() is None:
        return None  # not an NPU process: nothing will be captured
    choice = ops.provider(name, "npu", args, kwargs)
    if choice.provider is not None:
        return None
    why = "; ".join(map(str, choice.refusals))
    return f"runs the reference body of {name}, which reads counts ({why})"


def _source(node: fx.Node) -> str:
    """``file:line`` of the innermost frame of the model."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', str(node.meta.get("stack_trace") or node.stack_trace or ""))
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def require_capturable(gm: fx.GraphModule) -> None:
    """Raises NotCapturable, with every place, if the graph looks at the host."""
    found = host_syncs(gm)
    if found:
        raise NotCapturable(
            f"the graph cannot be captured for npugraph_ex: {'; '.join(map(str, found[:5]))}"
            f"{f'; and {len(found) - 5} more' if len(found) > 5 else ''}. Rewrite these lines, or use downstream='npu'."
        )


def capture_sizes(largest: int, waste: float = 0.25, multiple: int = 8) -> tuple[int, ...]:
    """Numbers of tokens to capture graphs for: each batch runs in the next larger one, padded.

    Args:
        largest: the largest number of tokens, at least 1.
        waste: at most this part of a captured graph may be padding (beyond the first ``multiple`` tokens), in (0, 1).
        multiple: sizes beyond 1, 2 and 4 are multiples of it.

    Returns:
        Ascending sizes, the last one is ``largest``.

    Raises:
        ValueError: an argument is out of range.
    """
    if largest < 1 or multiple < 1 or not 0 < waste < 1:
        raise ValueError(
            f"capture_sizes: largest is {largest}, multiple {multiple} and waste {waste}; they must be at least 1, at "
            "least 1, and between 0 and 1."
        )
    sizes = [s for s in (1, 2, 4) if s < min(largest, multiple)]
    size = multiple
    while size < largest:
        sizes.append(size)
        step = max(int(size * waste / (1 - waste)) // multiple * multiple, multiple)
        size += step
    return (*sizes, largest)


def pick(sizes: Sequence[int], tokens: int) -> int | None:
    """The smallest captured size that holds ``tokens``; ``None`` if none does."""
    return next(_fitting(sizes, tokens), None)


def _fitting(sizes: Sequence[int], tokens: int) -> Iterator[int]:
    return (s for s in sorted(sizes) if s >= tokens)
