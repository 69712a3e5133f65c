"""Expert loops that are written by hand, with quantised experts: what ``prepare(model, quantize=...)`` makes of them.

A loop that ``moe_experts`` takes the place of (``loop_experts``) is one call in an otherwise unchanged forward. Here
that call goes to ``QuantizedExperts`` instead, which is registered as the submodule ``quantized_experts`` of the module
with the loop; the experts' own parameters are taken away. What is left of the experts' modules computes nothing, so a
call that the loop was not tested for (another mode, autocast) raises instead of running the loop. So does every call
after an expert was changed (a hook, another module); compiled graphs look when they run, as those of loops do.

The loop stays as ``moe_experts``, with a sentence, if its experts have no gate, if weights multiply the tokens before
the first product, if parameters are read by others, if another block has the same experts, or if the module does not
run without them.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep import loop_experts
from ascend_deep.hf_experts import Spec
from ascend_deep.loop_masks import ids_of
from ascend_deep.loop_runs import quiet
from ascend_deep.loop_state import _LIVE, Call, Experts
from ascend_deep.quantize import Quantized, Refused, calc_diff, excluded
from ascend_deep.quantize_recipes import Recipe
from ascend_deep.quantized_modules import QuantizedExperts

__all__ = ["NAME", "LoopExperts", "QuantizedLoop", "quantise", "release"]

NAME = "quantized_experts"
_ROWS = 16


class LoopExperts(QuantizedExperts):
    """``QuantizedExperts`` that a rewritten forward calls; they have no place of their own in the model's code."""

    in_loop = True


class _Watch(Experts):
    """The structure of experts whose parameters were taken away: what may not change. Holds no tensor.

    Args:
        experts: whose structure, as it was noted, is watched.
        memo: of a ``copy.deepcopy``; the copies are watched then, as they are now.
    """

    def __init__(self, experts: Experts, memo: dict[int, Any] | None = None) -> None:
        vars(self).update(vars(experts))
        self.stacks = ()
        self.w13 = self.b13 = self.w2 = self.b2 = None
        self._known = ([], [], [])
        if memo is not None:
            self.watched = tuple(copy.deepcopy(m, memo) for m in self.watched)
            self.links = tuple((copy.deepcopy(m, memo), n) for m, n in self.links)
            self._hooks = []
            self._note_structure()


class QuantizedLoop:
    """What a module with a quantised loop carries in place of ``loop_state.Experts``; its forward calls it alike.

    Args:
        path: of the module, for messages.
        experts: its submodule.
        offset: as ``Experts.constants`` has it.
        watch: its experts' structure; and calls, modes and what else ``Experts`` knows of the loop.
        holders: where its experts' parameters were, as (module, name).
        original: those experts, with the parameters, to go back to; ``None`` if they were not kept.
    """

    def __init__(
        self,
        path: str,
        experts: Any,
        offset: int,
        watch: _Watch,
        holders: Sequence[tuple[nn.Module, str]],
        original: tuple[Experts, list[tuple[nn.Module, str, nn.Parameter]]] | None = None,
    ) -> None:
        self.path, self.experts, self.offset, self.watch = path, experts, offset, watch
        self.calls, self.modes, self.autocast, self.loop = watch.calls, watch.modes, watch.autocast, watch.loop
        self.holders, self.original = tuple(holders), original
        self._broken: str | None = None
        self._place = 0
        self._register()

    def usable(self, training: bool) -> bool:
        """Whether the loop was tested for this call; raises if its experts were changed."""
        if not torch.compiler.is_compiling():  # compiled graphs look when they run
            wrong = self._changed_structure()
            if wrong is not None:
                raise RuntimeError(
                    f"{self.path}: {wrong} Its experts are quantised and would not see that; make the change before "
                    "prepare, or leave these experts out of it with exclude."
                )
        return training in self.modes and (
            self.autocast or not torch.is_autocast_enabled(self.experts.down_proj_q.device.type)
        )

    def _changed_structure(self) -> str | None:
        if self._broken is not None:
            return self._broken
        for module, name in self.holders:
            if name in vars(module) or module._parameters.get(name) is not None:
                return f"the parameter {name!r} was given to one of its experts after prepare."
        return self.watch._changed_structure()

    # -- what ``loop_guard`` asks, beside the structure ---------------------------------------------------------------
    def _register(self) -> None:
        """Make the guard of compiled graphs find this object by the address of the weights."""
        _LIVE.pop(self._place, None)
        held = getattr(self.experts, "down_proj_q", None)
        if held is not None and held.device.type != "meta":
            self._place = held.data_ptr()
            _LIVE[self._place] = self  # type: ignore[assignment]  # it has what the guard asks for

    def _up_to_date(self) -> bool:
        return True

    def _moved(self) -> str:
        return "its experts were changed."

    def own_loop(self) -> None:
        """Its experts have no weights of their own any more: raises."""
        raise RuntimeError(
            f"{self.path}: its experts are quantised, and its loop was not tested for this call (training or "
            "evaluation, autocast, a number that it reads and that was changed); prepare it without quantize for that."
        )

    def __call__(self, number: int, x: Tensor, idx: Tensor, weights: Tensor | None, base: Tensor | None) -> Tensor:
        """The value of the replaced statements; see ``loop_state.Call``."""
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
        dtype = x.dtype
        if call.out == "weights":
            dtype = scale.dtype
        elif call.out == "promote":
            dtype = torch.promote_types(x.dtype, scale.dtype)
        if torch.compiler.is_compiling():
            ids = torch.ops.ascend_deep.loop_guard(ids, self.experts.down_proj_q)
        out = self.experts.run(tokens, ids - self.offset if self.offset else ids, scale, dtype)
        out = out if call.flat else out.view(x.shape)
        if base is None:
            return out
        return base.add_(out.view(base.shape)) if call.in_place else base + out.view(base.shape)

    # -- what ``loop_experts`` asks of what a module carries --------------------------------------------------------
    @property
    def stays(self) -> bool:
        """Without its experts' parameters the module cannot have its own forward back."""
        return True

    def refresh(self) -> str | None:
        """The tensors, which are those of a submodule, may have moved. A sentence if the experts were changed."""
        self._register()
        return self._changed_structure()

    def copied(self, memo: dict[int, Any]) -> QuantizedLoop:
        """The same for the copy that ``memo`` has of the module; without the originals."""
        wrong = self._changed_structure()
        holders = [(copy.deepcopy(m, memo), n) for m, n in self.holders]
        twin = QuantizedLoop(
            self.path, copy.deepcopy(self.experts, memo), self.offset, _Watch(self.watch, memo), holders
        )
        twin._broken = wrong
        return twin

    def __reduce__(self) -> Any:
        # A pickled module comes back with its own forward, and that has no parameters to run with.
        raise pickle.PicklingError(
            f"{self.path}: its experts are quantised, and a pickled model would run its loop without them; write it "
            "with Prepared.save(file) and read it with ascend_deep.load_quantized(model, file)."
        )


# -- putting in -----------------------------------------------------------------------------------------------------
def quantise(
    model: nn.Module, paths: Sequence[str], recipe: Recipe, exclude: Sequence[str], keep_master: bool
) -> tuple[list[Quantized], list[Refused]]:
    """Quantise the experts of the swapped loops at ``paths``, in place."""
    done: list[Quantized] = []
    left: list[Refused] = []
    loops = {p: e for p in paths if isinstance(e := vars(model.get_submodule(p)).get(loop_experts.ATTRIBUTE), Experts)}
    # All are looked at before the first is changed: blocks may have the same experts.
    unfit = {
        p: excluded(p, exclude, False) or _unfit(model, p, model.get_submodule(p), e, recipe)
        or _shared(model, model.get_submodule(p), e)
        for p, e in loops.items()
    }  # fmt: skip
    for path, experts in loops.items():
        module = model.get_submodule(path)
        kind = type(module).__name__
        made = unfit[path] or _quantise(model, path, module, experts, recipe, keep_master)
        if isinstance(made, str):
            left.append((path, kind, f"not quantised: {made}"))
        else:
            done.append(made)
    return done, left


def _unfit(model: nn.Module, path: str, module: nn.Module, experts: Experts, recipe: Recipe) -> str | None:
    spec = experts.loop.spec
    if not spec.gated:
        return "its experts have no gate, and only gated activations are quantised."
    if any(call.on_input for call in experts.calls):
        return "its routing weights multiply the tokens before the first product, which quantised experts do not."
    if hasattr(module, NAME):
        return f"it has an attribute {NAME!r} already."
    held = {id(p) for _, _, p in _sites(experts)}
    own = {id(m) for m, _, _ in _sites(experts)}
    for name, parent in model.named_modules():
        if id(parent) not in own and any(id(p) in held for p in parent._parameters.values()):
            return f"a parameter of its experts is shared with {name}, which reads it too."
    for _, name, parameter in _sites(experts):
        if parameter.device.type == "meta":
            return f"{name} of its experts has no data (meta device)."
        if not bool(torch.isfinite(parameter).all()):
            return f"{name} of its experts has values that are not finite."
    w2 = experts._argument(2)
    assert w2 is not None
    if recipe.kind == "fp4" and (w2.shape[1] % 2 or w2.shape[2] % 2):
        return f"its sizes are {w2.shape[1]} and {w2.shape[2]}; FP4 stores pairs and needs even numbers."
    return None


def _shared(model: nn.Module, module: nn.Module, experts: Experts) -> str | None:
    """A sentence if another module than ``module`` has the same experts: it would run without their parameters."""
    holders = {id(m) for m, _, _ in _sites(experts)}
    inside = {id(m) for m in module.modules()}
    above = {id(m) for m in module.modules() if m is not module and any(id(c) in holders for c in m.modules())}
    for name, parent in model.named_modules():
        if id(parent) not in inside and any(id(child) in above for child in parent._modules.values()):
            return f"its experts are also those of {name or type(parent).__name__}, which runs them too."
    return None


def _sites(experts: Experts) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter of the experts: the module that holds it, its name there, itself."""
    return [
        (holder, name, holder._parameters[name])  # type: ignore[misc]
        for stack in experts.stacks
        if stack is not None
        for family in stack.sites
        for holder, name in family
    ]


@torch.no_grad()
def _quantise(
    model: nn.Module, path: str, module: nn.Module, experts: Experts, recipe: Recipe, keep_master: bool
) -> Quantized | str:
    from ascend_deep import ops

    w13, b13, w2, b2 = (None if (t := experts._argument(i)) is None else t.detach() for i in range(4))
    assert w13 is not None and w2 is not None
    act, alpha, limit, interleaved, offset = experts.constants
    if (b13 is None) != (b2 is None):
        zeros = w13.new_zeros(w13.shape[:2]) if b13 is None else w2.new_zeros(w2.shape[:2])
        b13, b2 = (zeros, b2) if b13 is None else (b13, zeros)
    spec = Spec(act, alpha, limit, interleaved, "enk", True, b13 is not None)
    (d13, s13), (d2, s2) = recipe.quantise(w13), recipe.quantise(w2)
    held = [None if b is None else nn.Parameter(b.clone(), requires_grad=False) for b in (b13, b2)]
    new = LoopExperts((d13, s13), (d2, s2), held[0], held[1], spec, recipe)
    new.train(module.training)
    generator = torch.Generator().manual_seed(35)
    count = new.num_experts
    x = torch.randn(_ROWS, w2.shape[1], generator=generator, dtype=torch.float32).to(w2)
    slots = min(2, count)
    ids = torch.stack([torch.randperm(count, generator=generator)[:slots] for _ in range(_ROWS)]).to(w2.device)
    shares = (0.2 + torch.rand(_ROWS, slots, generator=generator, dtype=torch.float32)).to(w2)
    wanted = ops.moe_experts(
        x, ids, shares, w13, b13, w2, b2, act=act, alpha=alpha, limit=limit, interleaved=interleaved
    )
    error = max(
        calc_diff(recipe.dequantise(d, s)[e], w[e].float()) for d, s, w in ((d13, s13, w13), (d2, s2, w2))
        for e in range(count)
    )  # fmt: skip
    sites = _sites(experts)
    entry = Quantized(
        path, type(module).__name__, recipe, error, calc_diff(new(x, ids, shares), wanted),
        sum(p.nbytes for _, _, p in sites), sum(t.nbytes for t in (d13, s13, d2, s2)),
    )  # fmt: skip
    state = QuantizedLoop(path, new, offset, _Watch(experts), [(m, n) for m, n, _ in sites], (experts, sites))
    wrong = _put(model, module, state, w2)
    if wrong is None and not keep_master:
        state.original = None
    return wrong or entry


def _put(model: nn.Module, module: nn.Module, state: QuantizedLoop, like: Tensor) -> str | None:
    """Take the experts' parameters away; a sentence, and nothing is changed, if the module does not run without."""
    assert state.original is not None
    for holder, name, _ in state.original[1]:
        holder._parameters[name] = None
    module.add_module(NAME, state.experts)
    setattr(module, loop_experts.ATTRIBUTE, state)
    entry = model.get_submodule(state.loop.entry)
    x = torch.randn(state.loop.shape, generator=torch.Generator().manual_seed(36), dtype=torch.float32).to(like)
    buffers = [(b, b.detach().clone()) for b in entry.buffers()]
    wrong = None
    for mode in state.modes:
        try:
            with torch.no_grad(), quiet(entry, mode, seed=37):
                entry(x)
        except Exception as error:
            text = str(error).splitlines()
            wrong = (
                f"it does not run without its experts' parameters: {type(error).__name__}: {text[0] if text else ''}"
            )
            break
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    if wrong is not None:
        _take_out(module, state)
    return wrong


def make_room(model: nn.Module, path: str) -> str | None:
    """Replace the loop of the module at ``path`` and take its experts' parameters away, for ``settle``; they may be on
    the meta device. A sentence, if the module is not there or has no such loop."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return "there is no such module."
    if isinstance(vars(module).get(loop_experts.ATTRIBUTE), QuantizedLoop):
        return None
    if loop_experts.installed(model, path) is None:
        cache: dict[Any, Any] = {}
        for owner in loop_experts.owners(model):
            if owner != path and not owner.startswith(f"{path}." if path else ""):
                continue
            found = loop_experts.resolve(model, owner, cache)
            if isinstance(found, loop_experts.Loop) and found.path == path:
                wrong = loop_experts.install(model, found, False)
                if wrong is not None:
                    return wrong
                break
        else:
            return "it has no loop over experts."
    experts = vars(module)[loop_experts.ATTRIBUTE]
    holders = [(m, n) for m, n, _ in _sites(experts)]
    state = QuantizedLoop(path, None, experts.constants[4], _Watch(experts), holders)
    for holder, name, _ in _sites(experts):
        holder._parameters[name] = None
    module.add_module(NAME, nn.Module())  # a place for the experts
    setattr(module, loop_experts.ATTRIBUTE, state)
    return None


def settle(module: nn.Module, new: LoopExperts) -> None:
    """Put ``new`` where ``make_room`` made room."""
    module._modules[NAME] = new
    vars(module)[loop_experts.ATTRIBUTE].experts = new
    vars(module)[loop_experts.ATTRIBUTE].refresh()


# -- taking out -----------------------------------------------------------------------------------------------------
def _take_out(module: nn.Module, state: QuantizedLoop) -> None:
    assert state.original is not None
    experts, sites = state.original
    device = state.experts.down_proj_q.device
    for holder, name, parameter in sites:
        if parameter.device != device:
            parameter.data = parameter.data.to(device)
        holder._parameters[name] = parameter
    del module._modules[NAME]
    setattr(module, loop_experts.ATTRIBUTE, experts)
    experts.refresh()


def release(model: nn.Module) -> list[str]:
    """Give every loop whose experts were kept its own parameters back; the paths of those that were not kept."""
    gone = []
    for path, module in list(model.named_modules()):
        state = vars(module).get(loop_experts.ATTRIBUTE)
        if isinstance(state, QuantizedLoop):
            if state.original is None:
                gone.append(path)
            else:
                _take_out(module, state)
    return gone
