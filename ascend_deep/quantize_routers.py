"""Which linear layers choose the experts: ``prepare(quantize=...)`` leaves them, whatever their names are.

In a block whose experts run as one op a linear layer is a router if it has as many outputs as there are experts, or if
its result reaches the weights that the op gets and not the tokens. The second is found by running the block once, with
zeros for what the experts give; a block that does not run keeps all its linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep import loop_experts
from ascend_deep.hf_experts import SPEC
from ascend_deep.loop_runs import quiet
from ascend_deep.loop_state import Experts
from ascend_deep.quantized_modules import QuantizedExperts

__all__ = ["routers"]


def routers(model: nn.Module) -> dict[str, str]:
    """Paths of the routers in ``model``, each with the sentence that says so."""
    found: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        state = vars(module).get(loop_experts.ATTRIBUTE)
        if state is not None:
            found |= _of_loop(model, path, module, state)
        elif (isinstance(module, QuantizedExperts) and not module.in_loop) or hasattr(module, SPEC):
            count = getattr(module, "num_experts", None)
            parent = path.rpartition(".")[0]
            inside = {id(m) for m in module.modules()}
            if isinstance(count, int) and path:
                found |= _by_size(parent, model.get_submodule(parent), count, inside)
    return found


def _by_size(path: str, block: nn.Module, count: int, inside: set[int]) -> dict[str, str]:
    return {
        name: f"it has an output for each of the {count} experts of its block, so it is their router, excluded by "
        "'router' in exclude."
        for name, _ in _linears(path, block, inside)
        if block.get_submodule(name.removeprefix(f"{path}." if path else "")).out_features == count
    }


def _linears(path: str, block: nn.Module, inside: set[int]) -> list[tuple[str, nn.Linear]]:
    """The linear layers of ``block`` outside of the experts, by their paths in the model."""
    return [
        (f"{path}.{name}" if path and name else path or name, m)
        for name, m in block.named_modules()
        if isinstance(m, nn.Linear) and id(m) not in inside
    ]


def _of_loop(model: nn.Module, path: str, module: nn.Module, state: Any) -> dict[str, str]:
    entry_path = state.loop.entry
    if path != entry_path and not path.startswith(f"{entry_path}." if entry_path else ""):
        entry_path = path  # a copy that has another place in its model
    entry = model.get_submodule(entry_path)
    inside = {id(m) for m in _watched(state)}
    found = _by_size(entry_path, entry, _count(state), inside)
    others = [(name, m) for name, m in _linears(entry_path, entry, inside) if name not in found]
    if not others:
        return found
    try:
        reached = _reaching(entry, module, state, [m for _, m in others])
    except Exception as error:  # it runs the model's code
        return found | {
            name: "it is in a block with experts that did not run alone, so a router cannot be told from it: "
            f"{type(error).__name__}."
            for name, _ in others
        }
    return found | {
        name: "its result reaches the weights of the experts of its block and not their tokens, so it is a part of "
        "their router, which is excluded by 'router' in exclude."
        for (name, _), is_one in zip(others, reached, strict=True)
        if is_one
    }


def _count(state: Any) -> int:
    if isinstance(state, Experts):
        w2 = state._argument(2)
        assert w2 is not None
        return int(w2.shape[0])
    return int(state.experts.num_experts)


def _watched(state: Any) -> tuple[nn.Module, ...]:
    return getattr(state, "watch", state).watched  # type: ignore[no-any-return]


class _Seen:
    """In the place of a loop's experts: keeps what they are called with, and gives zeros."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.tokens: list[Tensor] = []
        self.weights: list[Tensor] = []

    def usable(self, training: bool) -> bool:
        return True

    def __call__(self, number: int, x: Tensor, idx: Tensor, weights: Tensor | None, base: Tensor | None) -> Tensor:
        call = self.state.calls[number]
        self.tokens.append(x)
        dtype = x.dtype
        if weights is not None:
            self.weights.append(weights)
            if call.out != "x":
                dtype = weights.dtype if call.out == "weights" else torch.promote_types(x.dtype, weights.dtype)
        out = x.new_zeros((x.numel() // x.shape[-1], x.shape[-1]) if call.flat else x.shape, dtype=dtype)
        return out if base is None else base + out.view(base.shape)


def _reaching(entry: nn.Module, module: nn.Module, state: Any, layers: list[nn.Linear]) -> list[bool]:
    """For each layer: whether its result reaches the weights and not the tokens."""
    like = next(p for p in entry.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    marks = [torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=True) for _ in layers]
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out, mark=mark: out + mark.to(out.dtype))
        for layer, mark in zip(layers, marks, strict=True)
    ]
    seen = _Seen(state)
    buffers = [(b, b.detach().clone()) for b in entry.buffers()]
    x = torch.randn(state.loop.shape, generator=torch.Generator().manual_seed(39), dtype=torch.float32).to(like)
    setattr(module, loop_experts.ATTRIBUTE, seen)
    try:
        with torch.inference_mode(False), torch.enable_grad(), quiet(entry, state.modes[0], seed=40):
            entry(x)
    finally:
        setattr(module, loop_experts.ATTRIBUTE, state)
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    if not seen.tokens:
        raise RuntimeError("its experts were not called.")
    to_weights, to_tokens = _connected(seen.weights, marks), _connected(seen.tokens, marks)
    return [a and not b for a, b in zip(to_weights, to_tokens, strict=True)]


def _connected(results: list[Tensor], marks: list[Tensor]) -> list[bool]:
    reached = [False] * len(marks)
    for result in results:
        if result.requires_grad:
            grads = torch.autograd.grad(result.sum(), marks, allow_unused=True, retain_graph=True)
            reached = [r or g is not None for r, g in zip(reached, grads, strict=True)]
    return reached
