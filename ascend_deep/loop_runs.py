"""Running a module's forward and looking: local variables before every statement, and which statements read experts."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascend_deep.loop_families import Family
from ascend_deep.loop_masks import OneHot
from ascend_deep.loop_source import Block, Source

__all__ = ["Record", "Rig", "quiet"]

_COPIES = (
    "view",
    "_unsafe_view",
    "reshape",
    "clone",
    "_to_copy",
    "detach",
    "alias",
    "squeeze",
    "unsqueeze",
    "contiguous",
)


@dataclass(frozen=True)
class Chosen:
    """Ids that are different from each other in each group of ``k``, and below ``entries``."""

    entries: int
    k: int


@dataclass
class Record:
    """One run of a forward.

    Attributes:
        values: local variables at each mark, tensors cloned.
        touched: for each mark, patterns of the families that the statement after it reads.
        others: marks of statements that read parameters or buffers that are no expert's.
        storages: for marks and names of tensors, where their data are.
        chosen: for marks and names, how ``topk`` or a sort chose a tensor of ids.
        single: marks and names of tensors of zeros and ones that hold at most one one in each row, as one_hot makes.
    """

    values: dict[int, dict[str, Any]] = field(default_factory=dict)
    touched: dict[int, set[str]] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)
    storages: dict[tuple[int, str], int] = field(default_factory=dict)
    chosen: dict[tuple[int, str], Chosen] = field(default_factory=dict)
    single: set[tuple[int, str]] = field(default_factory=set)

    def reads(self, block: Block, index: int, blocks: Sequence[Block]) -> set[str]:
        """Families that statement ``index`` of ``block`` reads, statements inside it included."""
        found = set(self.touched.get(block.marks[index], ()))
        for inner in blocks:
            if inner.parent is not None and inner.parent[0] is block and inner.parent[1] == index:
                for i in range(len(inner.statements)):
                    found |= self.reads(inner, i, blocks)
        return found

    def reads_others(self, block: Block, index: int, blocks: Sequence[Block]) -> bool:
        """Whether statement ``index`` of ``block`` reads parameters or buffers that are no expert's."""
        return block.marks[index] in self.others or any(
            self.reads_others(inner, i, blocks)
            for inner in blocks
            if inner.parent is not None and inner.parent[0] is block and inner.parent[1] == index
            for i in range(len(inner.statements))
        )


class Rig:
    """A copy of a module that can be run with its forward instrumented.

    Args:
        entry: the copy; it takes one tensor [.., ``width``].
        path: of the module whose forward is looked at, below ``entry``.
        source: that forward.
        found: families of parameters of that module.
    """

    def __init__(
        self, entry: nn.Module, path: str, source: Source, found: Sequence[Family], dtype: torch.dtype
    ) -> None:
        self.entry, self.source, self.dtype = entry, source, dtype
        self.module = entry.get_submodule(path)
        self.parameters: Mapping[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        self._families = {id(self.parameters[n]): f.pattern for f in found for n in f.names}
        others = (*self.parameters.values(), *self.module.buffers())
        self._others = {id(t) for t in others if id(t) not in self._families}

    def record(self, shape: tuple[int, ...], training: bool, seed: int) -> Record:
        """Run on random numbers of ``shape``.

        Raises:
            Exception: whatever the module raises.
        """
        record, state = Record(), {"mark": -1}
        ids, masks = _Chosen(), OneHot()
        clones: dict[int, tuple[Tensor, int, Tensor]] = {}

        def keep(value: Any) -> Any:
            """Tensors as they are now; one copy for all marks between which nothing was written."""
            if not isinstance(value, Tensor):
                return value
            known = clones.get(id(value))
            if known is None or known[0] is not value or known[1] != value._version:
                clones[id(value)] = known = (value, value._version, value.detach().clone())
            return known[2]

        def mark(number: int, names: dict[str, Any]) -> None:
            state["mark"] = number
            if number not in record.values:
                with ids.paused(), torch._C.DisableTorchFunction():
                    record.values[number] = {n: keep(v) for n, v in names.items() if not n.startswith("__ascend_deep")}
                    for name, value in names.items():
                        if isinstance(value, Tensor) and value.layout == torch.strided:
                            record.storages[number, name] = value.untyped_storage().data_ptr()
                        if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32):
                            how = ids.find(value)
                            if how is not None:
                                record.chosen[number, name] = how
                            if masks.holds(value):
                                record.single.add((number, name))

        def touch(tensor: Tensor) -> None:
            pattern = self._families.get(id(tensor))
            if pattern is not None and state["mark"] >= 0:
                record.touched.setdefault(state["mark"], set()).add(pattern)
            elif id(tensor) in self._others:
                record.others.add(state["mark"])

        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        forward = self.source.instrumented(mark)
        self.module.forward = types.MethodType(forward, self.module)  # type: ignore[method-assign]
        try:
            with quiet(self.entry, training), _Reads(touch), masks, ids:
                self.entry(x)
        finally:
            del self.module.forward
        return record


@contextmanager
def quiet(module: nn.Module, training: bool, seed: int = 5) -> Iterator[None]:
    """Within this context the module is in the given mode; random state, modes and attributes come back afterwards.

    A forward may set attributes of its module, such as a capacity that it computes from the number of tokens.
    """
    before = [(m, dict(vars(m))) for m in module.modules()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for m, _ in before:
            m.training = training
        try:
            yield
        finally:
            for m, was in before:
                now = vars(m)
                for name in [n for n in now if n not in was]:
                    del now[name]
                now.update(was)


class _Reads(TorchFunctionMode):
    """Calls ``touch`` with every tensor that a torch function takes."""

    def __init__(self, touch: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._touch = touch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, Tensor):
                self._touch(value)
        return func(*args, **(kwargs or {}))


class _Chosen(TorchDispatchMode):
    """Follows the indices that ``topk`` and sorts return along the last dimension.

    Tensors are known by where their data lie: autograd wraps what an op returned, so objects are not the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, tuple[Tensor, Chosen]] = {}
        self._off = False

    def find(self, tensor: Tensor) -> Chosen | None:
        """How the ids were chosen, or ``None`` if that is not known."""
        known = self._known.get(_place(tensor))
        return known[1] if known is not None else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is followed within this context."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._off or not args or not isinstance(args[0], Tensor) or args[0].is_sparse:
            return out
        name, source = func.overloadpacket.__name__, args[0]
        if func._schema.is_mutable:
            for key in [k for k, (held, _) in self._known.items() if held.data_ptr() == source.data_ptr()]:
                del self._known[key]
        elif name in ("topk", "sort") and source.dim():
            place = 2 if name == "topk" else 1
            dim = (kwargs or {}).get("dim", args[place] if len(args) > place else -1)
            if dim in (-1, source.dim() - 1):
                self._note(out[1], Chosen(source.shape[-1], out[1].shape[-1]))
        elif name in _COPIES or name == "slice":
            known = self.find(source)
            last = (args[1] if len(args) > 1 else 0) in (-1, source.dim() - 1)
            if known and isinstance(out, Tensor) and not out.is_floating_point() and (name in _COPIES or last):
                self._note(out, Chosen(known.entries, out.shape[-1]) if name == "slice" else known)
        return out

    def _note(self, tensor: Tensor, chosen: Chosen) -> None:
        self._known[_place(tensor)] = (tensor, chosen)


def _place(tensor: Tensor) -> Any:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
