"""Mixture-of-experts blocks as people write them by hand, for the tests of ``prepare``; and blocks that are almost one.

Every block takes tokens [B, S, 16] and has 6 experts. ``SPELLINGS`` are mixtures of experts; ``NEAR_MISSES`` compute
something else than ``moe_experts``, each with a part of the reason that has to be given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ascend_deep

HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 24, 6, 2


class Expert(nn.Module):
    """gate, up and down, as in Hugging Face models."""

    def __init__(self, act: Callable[[Tensor], Tensor] | None = None, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.up_proj = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.down_proj = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.act_fn = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Llama(nn.Module):
    """w1, w2 and w3, as in Mistral's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class Fused(nn.Module):
    """Gate and up interleaved in one matrix, biases, a limit and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(HIDDEN, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, HIDDEN)
        self.alpha, self.limit = 1.375, 2.25

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)[..., ::2], self.gate_up(x)[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down((up + 1) * gate * torch.sigmoid(self.alpha * gate))


class Router(nn.Module):
    """Softmax over all experts, then the best, renormalised and scaled."""

    def __init__(self, top_k: int = TOP_K) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, EXPERTS)
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.proj(x)
        weights, idx = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float), self.top_k, dim=-1)
        weights = 1.7 * weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(x.dtype), idx


def experts(make: Callable[[], nn.Module] = Expert, count: int = EXPERTS) -> nn.ModuleList:
    return nn.ModuleList([make() for _ in range(count)])


class Block(nn.Module):
    """A router and experts."""

    def __init__(self, make: Callable[[], nn.Module] = Expert, top_k: int = TOP_K) -> None:
        super().__init__()
        self.router = Router(top_k)
        self.experts = experts(make)


class Mixtral(Block):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits, routing_weights, selected_experts = self.router(hidden_states)
        final_hidden_states = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = torch.nn.functional.one_hot(selected_experts, num_classes=EXPERTS).permute(2, 1, 0)
        for expert_idx in range(EXPERTS):
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        final_hidden_states = final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return final_hidden_states, router_logits


class OnlyHit(Block):
    """Loop over the experts that have tokens; the auxiliary loss is returned too."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        logits, weights, selected = self.router(x)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for number in hit:
            position, token = torch.where(mask[number[0]])
            out.index_add_(0, token, self.experts[number[0]](x[token]) * weights[token, position, None])
        aux = (logits.softmax(-1).mean(0) * mask.sum((1, 2))).sum()
        return {"out": out.view(shape), "aux": 0.01 * aux}


class Mistral(Block):
    def __init__(self) -> None:
        super().__init__(Llama)

    def forward(self, inputs: Tensor) -> Tensor:
        squashed = inputs.view(-1, inputs.shape[-1])
        _, weights, selected = self.router(squashed)
        results = torch.zeros_like(squashed)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(selected == i)
            results[token] += weights[token, nth, None] * expert(squashed[token])
        return results.view_as(inputs)


class Masks(Block):
    """Boolean masks over tokens with two leading dimensions; experts with biases."""

    def __init__(self) -> None:
        super().__init__(lambda: Expert(nn.ReLU(), bias=True))

    def forward(self, x: Tensor) -> Tensor:
        _, weights, selected = self.router(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            chosen = selected == e
            mask = chosen.any(-1)
            if not mask.any():
                continue
            scale = (weights * chosen).sum(-1)
            out[mask] += scale[mask].unsqueeze(-1) * self.experts[e](x[mask])
        return out


class DeepSeek(nn.Module):
    """Two loops: repeated tokens in training, sorted tokens on the host in evaluation; shared experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared_experts, self.num_experts_per_tok = experts(), Expert(), TOP_K
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.register_buffer("e_score_correction_bias", torch.randn(EXPERTS))

    def forward(self, hidden_states: Tensor) -> Tensor:
        identity, orig_shape = hidden_states, hidden_states.shape
        scores = self.gate(hidden_states.view(-1, HIDDEN)).sigmoid()
        topk_idx = torch.topk(scores + self.e_score_correction_bias, TOP_K, dim=-1, sorted=False)[1]
        topk_weight = scores.gather(1, topk_idx)
        topk_weight = topk_weight / (topk_weight.sum(-1, keepdim=True) + 1e-20) * 2.5
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        flat_topk_idx = topk_idx.view(-1)
        if self.training:
            hidden_states = hidden_states.repeat_interleave(self.num_experts_per_tok, dim=0)
            y = torch.empty_like(hidden_states)
            for i, expert in enumerate(self.experts):
                y[flat_topk_idx == i] = expert(hidden_states[flat_topk_idx == i])
            y = (y.view(*topk_weight.shape, -1) * topk_weight.unsqueeze(-1)).sum(dim=1)
            y = y.to(hidden_states.dtype).view(*orig_shape)
        else:
            y = self.moe_infer(hidden_states, topk_idx, topk_weight).view(*orig_shape)
        return y + self.shared_experts(identity)

    @torch.no_grad()
    def moe_infer(self, x: Tensor, topk_ids: Tensor, topk_weight: Tensor) -> Tensor:
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert: Any = cnts.sum(dim=0)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        tokens_per_expert = tokens_per_expert.cpu().numpy()
        outputs, start_idx = [], 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start_idx:end_idx]))
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        return (
            new_x.view(*topk_ids.shape, -1)
            .type(topk_weight.dtype)
            .mul_(topk_weight.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(new_x.dtype)
        )


class Bincount(Block):
    """DeepSeek's reference inference code."""

    def __init__(self) -> None:
        super().__init__(Llama)
        self.shared_experts = Llama()

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        x = x.view(-1, HIDDEN)
        _, weights, indices = self.router(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
        for i in range(EXPERTS):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        z = self.shared_experts(x)
        return (y + z).view(shape)


class Grouped(nn.Module):
    """torchtitan: sorted tokens and counts go into a module of stacked weights, tokens weighted before."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.shared = Router(), GroupedExperts(), Expert()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        x = x.view(-1, dim)
        _, scores, selected = self.router(x)
        counts = torch.histc(selected.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
        order = torch.argsort(selected.view(-1), stable=True)
        scores = scores.view(-1)[order]
        token = (order // TOP_K).reshape(-1, 1).expand(-1, dim)
        routed = torch.gather(x, dim=0, index=token)
        routed = (routed.to(torch.float32) * scores.reshape(-1, 1)).to(x.dtype)
        routed = self.experts(routed, counts)
        out = self.shared(x)
        out = out.scatter_add(dim=0, index=token, src=routed)
        return out.reshape(batch, length, dim)


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        sizes = counts.long().tolist()
        out = []
        for e, part in enumerate(torch.split(x[: sum(sizes)], split_size_or_sections=sizes, dim=0)):
            h = F.silu(torch.matmul(part, self.w1[e].transpose(-2, -1)))
            h = h * torch.matmul(part, self.w3[e].transpose(-2, -1))
            out.append(torch.matmul(h, self.w2[e].transpose(-2, -1)))
        return torch.cat(out, dim=0)


class Stacked(nn.Module):
    """Weights of all experts in one tensor each, [E, in, out], with biases; gate and up in one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * WIDTH) / 4)
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(tokens)
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            token, slot = (idx == e).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            gate, up = (tokens[token] @ self.gate_up_proj[e] + self.gate_up_bias[e]).chunk(2, dim=-1)
            y = (F.gelu(gate) * up) @ self.down_proj[e] + self.down_bias[e]
            out = out.index_add(0, token, y * weights[token, slot].unsqueeze(1))
        return out.reshape(x.shape)


class Top1(nn.Module):
    """One expert per token, no gate, in containers of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = experts(lambda: nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, HIDDEN)))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = choice == e
            if mask.any():
                out[mask] = expert(x[mask]) * weight[mask].unsqueeze(-1)
        return out


class Interleaved(Block):
    def __init__(self) -> None:
        super().__init__(Fused)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        _, weights, idx = self.router(flat)
        return self.mixture(flat, idx, weights).reshape(x.shape) * 0.5

    def mixture(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in idx.unique().tolist():
            token, slot = torch.where(idx == e)
            out.index_put_((token,), self.experts[e](x[token]) * weights[token, slot, None], accumulate=True)
        return out


class Parallel(nn.Module):
    """A list per matrix; every token on its own, ids read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.up = nn.ModuleList([nn.Linear(HIDDEN, WIDTH) for _ in range(EXPERTS)])
        self.down = nn.ModuleList([nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        rows = []
        for t in range(flat.shape[0]):
            row = torch.zeros_like(flat[0])
            for k in range(TOP_K):
                e = int(idx[t, k])
                row = row + weights[t, k] * self.down[e](F.relu(self.up[e](flat[t])).square())
            rows.append(row)
        return torch.stack(rows).view_as(x)


class ListOfExperts(nn.ModuleList):
    """An experts module of its own, called with ids and weights."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        final = torch.zeros_like(hidden_states)
        mask = F.one_hot(top_k_index, num_classes=EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            idx, top_x = torch.where(mask[e].squeeze(0))
            current = hidden_states[None, top_x].reshape(-1, hidden_states.shape[-1])
            current = self[e](current) * top_k_weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = ListOfExperts([Expert(nn.GELU(approximate="tanh")) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        return self.experts(flat, idx, weights).reshape(x.shape)


class Dense(Block):
    """Every expert on every token, then the chosen ones are gathered."""

    def forward(self, x: Tensor) -> Tensor:
        _, weights, idx = self.router(x)
        every = torch.stack([expert(x) for expert in self.experts], dim=-2)
        chosen = every.gather(-2, idx.unsqueeze(-1).expand(*idx.shape, HIDDEN))
        return (chosen * weights.unsqueeze(-1)).sum(-2)


class OnShared(Block):
    """The loop adds to what the shared expert computed, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Expert()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        out = self.shared(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(idx == e)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


class Local(nn.Module):
    """Experts 2 to 4 of six; the others are on other processes, whose results would be added."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.first, self.last = Router(), 2, 5
        held = [Llama() if self.first <= e < self.last else None for e in range(EXPERTS)]
        self.experts = nn.ModuleList(held)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, HIDDEN)
        _, weights, indices = self.router(flat)
        y = torch.zeros_like(flat)
        counts = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
        for i in range(self.first, self.last):
            if counts[i] == 0:
                continue
            idx, top = torch.where(indices == i)
            y[idx] += self.experts[i](flat[idx]) * weights[idx, top, None]
        return y.view(x.shape)


SPELLINGS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mixtral": (Mixtral, "silu, loop over 6 modules"),
    "only_hit": (OnlyHit, "silu, loop over 6 modules"),
    "mistral": (Mistral, "gelu_tanh, loop over 6 modules"),
    "masks": (Masks, "relu, bias, loop over 6 modules"),
    "deepseek": (DeepSeek, "silu, loop over 6 modules"),
    "bincount": (Bincount, "gelu_tanh, loop over 6 modules"),
    "grouped": (Grouped, "silu, loop over 6 experts"),
    "stacked": (Stacked, "gelu, bias, loop over 6 experts"),
    "top1": (Top1, "relu, no gate, bias, loop over 6 modules"),
    "interleaved": (Interleaved, "swiglu_oai, alpha=1.375, limit=2.25, interleaved, bias, loop over 6 modules"),
    "parallel": (Parallel, "relu2, no gate, bias, loop over 6 modules"),
    "nested": (Nested, "gelu_tanh, loop over 6 modules"),
    "dense": (Dense, "silu, loop over 6 modules"),
    "local": (Local, "gelu_tanh, loop over 3 modules"),
    "on_shared": (OnShared, "silu, loop over 6 modules"),
}


def assert_noticed(make: Callable[[], nn.Module], change: Callable[[Any], Any], message: str) -> None:
    """A block is swapped; after ``change`` it warns with ``message`` and computes what its own loop does.

    Raises:
        AssertionError: the block is not swapped, the change makes no difference, or results differ.
    """
    torch.manual_seed(8)
    block = make()
    original = copy.deepcopy(block)
    assert len(ascend_deep.prepare(block).swapped) == 1
    x = torch.randn(2, 9, HIDDEN)
    with torch.no_grad():
        before = original(x)
        torch.testing.assert_close(block(x), before, rtol=1e-4, atol=1e-5)
        change(original), change(block)
        with pytest.warns(UserWarning, match=message):
            got = block(x)
        assert torch.equal(got, original(x))
        assert not torch.allclose(got, before, rtol=1e-2)
