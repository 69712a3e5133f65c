"""What a module whose loop was replaced carries: its experts' parameters in one storage, and the call of the op.

The parameters stay the module's own objects, under their names. Where experts have parameters of their own, their data
become slices of one tensor [E, ..] that the op reads; nothing is copied when the module is called. Writing into a
parameter (an optimiser, ``load_state_dict``, ``copy_``) writes into that tensor. Autograd gets from the tensor to the
parameters through one node, so every parameter has its own gradient.

Data can be moved away from the slices (``model.to(dtype)``, ``p.data = ...``, a parameter that is replaced), and an
expert can be changed so that it computes something else (a LoRA layer, a hook, a parametrisation). Every eager call
looks whether that happened: data are collected anew, and for anything else the module's own loop runs, with a warning.
A compiled graph looks too, when it runs (``loop_guard``): it cannot change what it computes, so it stops with an error,
and the next call compiles anew.
"""

from __future__ import annotations

import copy
import operator
import types
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep.loop_checks import INTERNALS
from ascend_deep.loop_masks import ids_of
from ascend_deep.loop_reads import settings

_OURS = ("forward", "_apply", "__deepcopy__", "_ascend_deep_loop")

__all__ = ["Call", "Experts", "Stack"]

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One place that calls the op: how its values become arguments.

    Attributes:
        k: where the number of choices per token is read: ``idx`` or ``weights`` (their last size), or a number.
        on_input: weights multiply the tokens before the first product.
        out: dtype of the result: that of ``x``, of ``weights``, or ``promote``, the wider one.
        flat: the result is [T, H], whatever the shape of the tokens.
        no_grad: the loop ran without autograd.
        base: the result is added to a value that the place passes.
        in_place: that value is written into.
        mask: the ids are a mask [.., E] with at most one one per row.
    """

    k: str | int
    on_input: bool
    out: str
    flat: bool
    no_grad: bool
    base: bool = False
    in_place: bool = False
    mask: bool = False


@dataclass(frozen=True)
class Stack:
    """One argument of the op: families side by side along dimension 1, [E, out, in] or [E, out].

    Attributes:
        sites: for each family, its parameters as (module, name); a single one if it holds all experts.
        stacked: a single parameter holds all experts.
        transposed: the matrices are stored [in, out].
    """

    sites: tuple[tuple[tuple[nn.Module, str], ...], ...]
    stacked: bool
    transposed: bool

    @property
    def direct(self) -> bool:
        """One parameter is the argument as it is."""
        return self.stacked and len(self.sites) == 1

    def parameters(self) -> list[Any]:
        """The parameters as they are now, family by family."""
        return [module._parameters.get(name) for family in self.sites for module, name in family]

    def slices(self, base: Tensor) -> list[Tensor]:
        """The place of each parameter in ``base``, in the order of ``parameters``."""
        found: list[Tensor] = []
        along = base.dim() - 1 if self.transposed else 1
        for part in base.chunk(len(self.sites), along):
            found += [part] if self.stacked else part.unbind(0)
        return found

    def copied(self, memo: dict[int, Any]) -> Stack:
        """The same for the copies that ``memo`` has of the modules."""
        sites = tuple(tuple((copy.deepcopy(m, memo), n) for m, n in family) for family in self.sites)
        return Stack(sites, self.stacked, self.transposed)


class _Collect(torch.autograd.Function):
    """The stacked tensor as a function of the parameters whose data it holds. Saves nothing, so it may run often."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, stack: Stack, *parameters: Tensor) -> Tensor:
        ctx.stack = stack
        return base.view_as(base)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, *ctx.stack.slices(grads[0]))


class Experts:
    """The experts of one module, and the calls of the op in its forward. Called by the rewritten forward.

    Args:
        path: name of the module, for messages.
        stacks: w13, b13, w2, b2; ``None`` where there is no bias.
        constants: (act, alpha, limit, interleaved, expert_offset) of ``moe_experts``.
        calls: the places in the forward.
        watched: modules whose children, class, hooks and attributes must not change: the experts and all in them.
        links: attributes of the module that must not change: what holds the experts, activations, numbers.
        dtypes: of parameters for which the loop is known to be what the op computes.
        modes: values of ``training`` for which it is.
        autocast: whether it is under autocast too.
        loop: what was found, kept for those who ask.
        outside: globals that must not change, as ``loop_reads.Reads`` has them.
    """

    def __init__(
        self,
        path: str,
        stacks: Sequence[Stack | None],
        constants: tuple[Any, ...],
        calls: tuple[Call, ...],
        watched: tuple[nn.Module, ...],
        links: tuple[tuple[nn.Module, str], ...],
        dtypes: tuple[torch.dtype, ...],
        modes: tuple[bool, ...],
        autocast: bool,
        loop: Any,
        outside: tuple[tuple[dict[str, Any] | types.CellType, str], ...] = (),
    ) -> None:
        self.path, self.stacks, self.constants, self.calls = path, tuple(stacks), constants, calls
        self.watched, self.links = watched, links
        self.dtypes, self.modes, self.autocast = dtypes, modes, autocast
        self.loop, self.outside = loop, outside
        self.w13: Any = None
        self.b13: Any = None
        self.w2: Any = None
        self.b2: Any = None
        self.fresh = False
        self.device = ""
        self._place = 0
        self._warned = ""
        self._identities: tuple[list[dict[str, Any]], list[str], list[Any]] = ([], [], [])
        self._classes: tuple[list[nn.Module], list[type]] = ([], [])
        self._hooks: list[Any] = []
        self._known: tuple[list[Any], list[int], list[bool]] = ([], [], [])
        self._note_structure()
        wrong = self._collect()
        if wrong is not None:
            raise ValueError(wrong)
        self.fresh = True  # a copy may be compiled before it is called

    # -- calls --------------------------------------------------------------------------------------------------------
    def usable(self, training: bool) -> bool:
        """Whether the op may take this call. Eager calls look at every expert; compiled graphs look when they run."""
        if training not in self.modes:
            return False
        if not self.autocast and self.device != "meta" and torch.is_autocast_enabled(self.device):
            return False
        return self.fresh if torch.compiler.is_compiling() else self.refresh() is None

    def own_loop(self) -> None:
        """The module's own loop is about to run: it may."""

    @property
    def stays(self) -> bool:
        """Whether the module cannot have its own forward back."""
        return False

    def __call__(self, number: int, x: Tensor, idx: Tensor, weights: Tensor | None, base: Tensor | None) -> Tensor:
        """The value of the replaced statements; see ``Call``."""
        call = self.calls[number]
        if call.no_grad:
            with torch.no_grad():
                return self._run(call, x, idx, weights, base)
        return self._run(call, x, idx, weights, base)

    def _run(self, call: Call, x: Tensor, idx: Tensor, weights: Tensor | None, base: Tensor | None) -> Tensor:
        k: Any = call.k
        if k == "idx":
            k = idx.shape[-1]
        elif k == "weights":
            assert weights is not None
            k = weights.shape[-1]
        tokens, ids = x.reshape(-1, x.shape[-1]), ids_of(idx) if call.mask else idx.reshape(-1, k)
        scale = weights.reshape(-1, k) if weights is not None else tokens.new_ones(ids.shape)
        out_dtype = None
        if call.out == "weights":
            out_dtype = scale.dtype
        elif call.out == "promote":
            out_dtype = torch.promote_types(x.dtype, scale.dtype)
        w13, b13, w2, b2 = (self._argument(i) for i in range(4))
        if torch.compiler.is_compiling() and any(s is not None and not s.direct for s in self.stacks):
            ids = torch.ops.ascend_deep.loop_guard(ids, self.w13 if self.w13 is not None else self.w2)
        act, alpha, limit, interleaved, offset = self.constants
        out = torch.ops.ascend_deep.moe_experts(
            tokens,
            ids,
            scale,
            w13,
            b13,
            w2,
            b2,
            None,
            act=act,
            alpha=alpha,
            limit=limit,
            interleaved=interleaved,
            weight_layout="enk",
            weight_on_input=call.on_input,
            expert_offset=offset,
            out_dtype=out_dtype,
        )
        out = out if call.flat else out.view(x.shape)
        if base is None:
            return out
        return base.add_(out.view(base.shape)) if call.in_place else base + out.view(base.shape)

    def _argument(self, index: int) -> Tensor | None:
        stack = self.stacks[index]
        if stack is None:
            return None
        if stack.direct:
            module, name = stack.sites[0][0]
            tensor = getattr(module, name)
        else:
            tensor = (self.w13, self.b13, self.w2, self.b2)[index]
        return tensor.transpose(1, 2) if stack.transposed else tensor

    # -- state --------------------------------------------------------------------------------------------------------
    def refresh(self) -> str | None:
        """Collect the parameters' data again if they were moved. A sentence if the op cannot compute the loop now."""
        wrong = self._changed_structure()
        if wrong is None and not self._up_to_date():
            wrong = self._collect()
        self.fresh = wrong is None
        if wrong is not None and wrong != self._warned:
            self._warned = wrong
            warnings.warn(f"{self.path}: {wrong} Its own loop runs instead of moe_experts.", stacklevel=4)
        return wrong

    def _note_structure(self) -> None:
        found: list[tuple[dict[str, Any], str]] = [(o, n) for o, n in self.outside if isinstance(o, dict)]
        inherited: dict[tuple[type, str], None] = {}
        for module, name in self.links:
            if "." in name:  # a number of a config
                found.append((vars(getattr(module, name.partition(".")[0])), name.partition(".")[2]))
                continue
            found.append((module._modules if name in module._modules else vars(module), name))
            if name not in module._modules and name not in vars(module):
                inherited[type(module), name] = None
        for module in self.watched:
            self._hooks += [getattr(module, name) for name in _HOOKS]
            found += [(module._modules, name) for name in module._modules]
            own = vars(module)
            found.append((own, "forward"))  # nothing, unless somebody puts another one on the instance
            inherited[type(module), "forward"] = None
            if not type(module).__module__.startswith("torch.nn"):
                found += [(own, n) for n in own if n not in INTERNALS and n not in _OURS]
            else:
                found += [(own, n) for n in settings(module)]
        # Looked at on the classes: on an instance a property would run.
        read: list[tuple[Any, str]] = list(inherited)
        cells = [(o, n) for o, n in self.outside if not isinstance(o, dict)]
        read += [(cell, "cell_contents") for cell, _ in cells]
        self._cells = [name for _, name in cells]
        self._inherited = ([k for k, _ in read], [n for _, n in read], [getattr(k, n, None) for k, n in read])
        self._classes = (list(self.watched), [type(m) for m in self.watched])
        self._identities = ([held for held, _ in found], [n for _, n in found], [held.get(n) for held, n in found])

    def _changed_structure(self) -> str | None:
        # Runs on every call, hence loops in C first and the search for the culprit after.
        modules, kinds = self._classes
        if list(map(type, modules)) != kinds:
            changed = next(m for m, kind in zip(modules, kinds, strict=True) if type(m) is not kind)
            return f"one of its experts' modules became a {type(changed).__name__} after prepare."
        holders, names, values = self._identities
        if not all(map(operator.is_, map(dict.get, holders, names), values)):
            found = zip(holders, names, values, strict=True)
            place, name = next((held, n) for held, n, value in found if held.get(n) is not value)
            if any(place is scope for scope, _ in self.outside):
                return f"the global {name!r}, which its loop reads, was replaced after prepare."
            if any(place is vars(module) for module, n in self.links if n == name) or any(
                n.endswith(f".{name}") for _, n in self.links
            ):
                return f"{name!r}, which its loop reads, was replaced after prepare."
            return f"{name!r} of one of its experts was replaced after prepare."
        heirs, names, values = self._inherited
        if [getattr(m, n, None) for m, n in zip(heirs, names, strict=True)] != values:
            index = next(i for i, k in enumerate(heirs) if getattr(k, names[i], None) != values[i])
            variables = index - len(names) + len(self._cells)
            if variables >= 0:
                return f"the variable {self._cells[variables]!r} of a function, which its loop reads, was changed."
            return f"{names[index]!r} of a class, which its loop reads, was changed after prepare."
        if any(self._hooks):
            return "a hook was attached to one of its experts after prepare."
        return None

    def _up_to_date(self) -> bool:
        known, places, needs = self._known
        current = [p for s in self.stacks if s is not None for p in s.parameters()]
        return (
            len(current) == len(known)
            and all(map(operator.is_, current, known))
            and [p.data_ptr() for p in known] == places
            and [p.requires_grad for p in known] == needs
        )

    def _moved(self) -> str:
        """What is not as it was, of parameters that the op can still read."""
        known, _, needs = self._known
        current = [p for s in self.stacks if s is not None for p in s.parameters()]
        same = len(current) == len(known) and all(map(operator.is_, current, known))
        frozen = [p.requires_grad for p in known] != needs
        if same and frozen:
            return "requires_grad of one of its experts' parameters was changed."
        return "the data of its experts' parameters were moved to another place."

    def _collect(self) -> str | None:
        """Make the parameters' data slices of one tensor per stack. A sentence if they are not plain and equal."""
        every = [p for s in self.stacks if s is not None for p in s.parameters()]
        for p in every:
            if type(p) is not nn.Parameter or p.layout != torch.strided:
                return f"one of its experts' parameters is a {type(p).__name__}, and no plain parameter."
        first = every[0]
        if any(p.dtype != first.dtype or p.device != first.device for p in every):
            return "its experts' parameters have different dtypes or devices."
        if first.dtype not in self.dtypes:
            return f"its loop was not compared with moe_experts in {first.dtype}."
        if len({id(p) for p in every}) != len(every):
            return "two of its experts share a parameter."
        if first.device.type != "meta" and len({p.data_ptr() for p in every if p.numel()}) != len(every):
            return "two of its experts' parameters share their memory."
        _LIVE.pop(self._place, None)
        for index, name in enumerate(("w13", "b13", "w2", "b2")):
            stack = self.stacks[index]
            if stack is None or stack.direct:
                continue
            setattr(self, name, _stacked(stack))
        self._known = (every, [p.data_ptr() for p in every], [p.requires_grad for p in every])
        self.device = first.device.type
        guarded = self.w13 if self.w13 is not None else self.w2
        if guarded is not None and guarded.device.type != "meta":
            self._place = guarded.data_ptr()
            _LIVE[self._place] = self
        return None

    def release(self) -> None:
        """Give every parameter a storage of its own again."""
        for stack in self.stacks:
            if stack is not None and not stack.direct:
                for p in stack.parameters():
                    if isinstance(p, nn.Parameter):
                        p.data = p.data.clone(memory_format=torch.contiguous_format)

    def copied(self, memo: dict[int, Any]) -> Experts:
        """The same for the copies that ``memo`` has of the modules."""
        stacks = [s.copied(memo) if s is not None else None for s in self.stacks]
        watched = tuple(copy.deepcopy(m, memo) for m in self.watched)
        links = tuple((copy.deepcopy(m, memo), n) for m, n in self.links)
        fields = (self.constants, self.calls, watched, links, self.dtypes, self.modes, self.autocast, self.loop,
                  self.outside)  # fmt: skip
        return Experts(self.path, stacks, *fields)

    def __reduce__(self) -> Any:
        # A pickled module comes back with its own forward.
        return (_nothing, ())


def _nothing() -> None:
    return None


def _stacked(stack: Stack) -> Tensor:
    parameters = stack.parameters()
    with torch.inference_mode(False), torch.no_grad():
        count = len(parameters) // len(stack.sites)
        joined = [
            parameters[i * count].data
            if stack.stacked
            else torch.stack([p.data for p in parameters[i * count :][:count]])
            for i in range(len(stack.sites))
        ]
        along = joined[0].dim() - 1 if stack.transposed else 1
        base = torch.cat(joined, along) if len(joined) > 1 else joined[0]
        for parameter, place in zip(parameters, stack.slices(base), strict=True):
            parameter.data = place
    if not any(p.requires_grad for p in parameters):
        return base
    with torch.inference_mode(False), torch.enable_grad():
        return _Collect.apply(base, stack, *parameters)  # type: ignore[no-any-return]


# -- compiled graphs look too -----------------------------------------------------------------------------------------
_LIVE: weakref.WeakValueDictionary[Any, Experts] = weakref.WeakValueDictionary()
_LIBRARY: list[torch.library.Library] = []


def _loop_guard(idx: Tensor, stack: Tensor) -> Tensor:
    """A copy of ``idx``, if the experts of the module that owns ``stack`` are what they were when it was compiled."""
    experts = _LIVE.get(stack.data_ptr())
    if experts is not None and (experts._changed_structure() is not None or not experts._up_to_date()):
        why = experts._moved()
        why = experts.refresh() or why
        raise RuntimeError(
            f"{experts.path} changed after it was compiled: {why} This call was stopped, because the compiled graph "
            f"was made for the experts as they were; the next call compiles anew."
        )
    return idx.clone()


def register_guard() -> None:
    """Define ``ascend_deep::loop_guard``; once per process."""
    if hasattr(torch.ops.ascend_deep, "loop_guard"):
        return
    library = torch.library.Library("ascend_deep", "FRAGMENT")
    _LIBRARY.append(library)
    library.define("loop_guard(Tensor idx, Tensor stack) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("loop_guard", _loop_guard, "CompositeExplicitAutograd")
    torch.library.register_fake("ascend_deep::loop_guard", lambda idx, stack: torch.empty_like(idx), lib=library)
