"""Blocks that are almost a mixture of experts, each with a part of the reason that ``prepare`` has to give."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.front.loop_blocks import EXPERTS, HIDDEN, TOP_K, Block, Expert, Router, experts


class Loop(Block):
    """A plain loop with three places to go wrong: ``ids``, ``term`` and ``after``."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        idx = self.ids(idx)
        out = torch.zeros_like(flat)
        for e in range(self.count()):
            token, slot = torch.where(idx == e)
            token, slot = self.chosen(token, slot)
            out.index_add_(0, token, self.term(e, flat[token], weights[token, slot, None]))
        return out.view_as(x)

    def ids(self, idx: Tensor) -> Tensor:
        return idx

    def count(self) -> int:
        return EXPERTS

    def chosen(self, token: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        return token, slot

    def term(self, e: int, x: Tensor, weight: Tensor) -> Tensor:
        return self.experts[e](x) * weight


class Sine(Loop):
    def __init__(self) -> None:
        super().__init__(lambda: Expert(torch.sin))


class Stretched(Loop):
    """Smooth, close to silu, and not silu."""

    def __init__(self) -> None:
        super().__init__(lambda: Expert(lambda g: g * torch.sigmoid(1.01 * g)))


class Clamped(Loop):
    """A limit on the gate alone, at a number that random tokens of size one do not reach."""

    def __init__(self) -> None:
        super().__init__(lambda: Expert(lambda g: nn.functional.silu(g.clamp(max=60.0))))


class Square(Loop):
    def term(self, e: int, x: Tensor, weight: Tensor) -> Tensor:
        return self.experts[e](x) * weight.square()


class Detached(Loop):
    def term(self, e: int, x: Tensor, weight: Tensor) -> Tensor:
        return self.experts[e](x) * weight.detach()


class FrozenInput(Loop):
    def term(self, e: int, x: Tensor, weight: Tensor) -> Tensor:
        return self.experts[e](x.detach()) * weight


class Residual(Loop):
    def term(self, e: int, x: Tensor, weight: Tensor) -> Tensor:
        return (self.experts[e](x) + x) * weight


class Unfinished(Loop):
    """The last expert is never called."""

    def count(self) -> int:
        return EXPERTS - 1


class Swapped(Loop):
    """Expert 1 computes for tokens of expert 2 and the other way round."""

    def term(self, e: int, x: Tensor, weight: Tensor) -> Tensor:
        return self.experts[{1: 2, 2: 1}.get(e, e)](x) * weight


class Capacity(Loop):
    """At most sixteen tokens per expert."""

    def chosen(self, token: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        return token[:16], slot[:16]


class Overwrites(Block):
    """The last expert of a token wins."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            out[token] = self.experts[e](flat[token]) * weights[token, slot, None]
        return out.view_as(x)


class Hashed(Block):
    """Ids from a table, which may repeat; ``+=`` with an index counts a repeated row once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randint(0, EXPERTS, (64, TOP_K)))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights = self.router(flat)[1]
        idx = self.table[torch.arange(flat.shape[0]) % 64]
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            out[token] += self.experts[e](flat[token]) * weights[token, slot, None]
        return out.view_as(x)


class ZeroExperts(Block):
    """Two more ids than experts; for them the token itself is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.router.proj = nn.Linear(HIDDEN, EXPERTS + 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS + 2):
            token, slot = torch.where(idx == e)
            y = self.experts[e](flat[token]) if e < EXPERTS else flat[token]
            out.index_add_(0, token, y * weights[token, slot, None])
        return out.view_as(x)


class Counting(Loop):
    """The loop keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(EXPERTS))

    def term(self, e: int, x: Tensor, weight: Tensor) -> Tensor:
        self.load[e] += x.shape[0]
        return self.experts[e](x) * weight


class Normed(Loop):
    """Experts with a norm of their own."""

    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.down_proj = nn.Sequential(nn.LayerNorm(24), expert.down_proj)


class Tied(Loop):
    """Two experts share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[3].up_proj.weight = self.experts[1].up_proj.weight


class Hooked(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.experts[4].up_proj.register_forward_hook(lambda module, args, out: 2 * out)


class Parametrised(Loop):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            nn.utils.parametrizations.weight_norm(expert.down_proj)


class Lora(nn.Module):
    """What PEFT puts around a linear layer."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 0.7 * self.lora_b(self.lora_a(x))


class AllLora(Loop):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.up_proj = Lora(expert.up_proj)


class OneLora(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.experts[2].down_proj = Lora(self.experts[2].down_proj)


class Different(Loop):
    """One expert has another activation."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[5].act_fn = nn.ReLU()


class Aliased(Block):
    """The loop adds to the tokens that it reads."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN).clone()
        _, weights, idx = self.router(flat)
        out = flat
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            out = out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, slot, None])
        return out.view_as(x)


class FirstHundred(Block):
    """Tokens after the hundredth get nothing."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, slot = torch.where(idx[:100] == e)
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, slot, None])
        return out.view_as(x)


class Experimental(nn.Module):
    """Modules one after the other: a list, and no choice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts()

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return x


class Weighted(nn.Module):
    """Every expert on every token, with dense weights: no ids anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = experts(), nn.Linear(HIDDEN, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., e, None] * expert(x) for e, expert in enumerate(self.experts))  # type: ignore[return-value]


NEAR_MISSES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sine": (Sine, "no part of its forward"),
    "stretched": (Stretched, "no part of its forward"),
    "clamped": (Clamped, "no part of its forward"),
    "square": (Square, "no part of its forward"),
    "detached": (Detached, "the gradient of 'weights' differs"),
    "frozen_input": (FrozenInput, "the gradient of 'flat' differs"),
    "residual": (Residual, "no part of its forward"),
    "unfinished": (Unfinished, ""),
    "swapped": (Swapped, ""),
    "capacity": (Capacity, "computes something else on some tokens"),
    "overwrites": (Overwrites, "no part of its forward"),
    "hashed": (Hashed, "its ids may repeat"),
    "zero_experts": (ZeroExperts, "ids that are not an expert's"),
    "counting": (Counting, "changes attributes or buffers"),
    "normed": (Normed, "no part of its forward"),
    "tied": (Tied, "share a parameter"),
    "hooked": (Hooked, "a hook is attached to experts.4.up_proj"),
    "parametrised": (Parametrised, "parametrised"),
    "all_lora": (AllLora, "beside gate, up and down"),
    "one_lora": (OneLora, ""),
    "different": (Different, ""),
    "aliased": (Aliased, ""),
    "first_hundred": (FirstHundred, "computes something else on some tokens"),
    "experimental": (Experimental, "no part of its forward"),
    "weighted": (Weighted, "no part of its forward"),
}

__all__ = ["NEAR_MISSES", "Loop", "Lora", "Router"]
