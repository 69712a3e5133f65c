"""The classes of ``hf_loops`` and a forward of each that is made of ``torch.ops.ascend_deep.moe_experts``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KNOWN", "MARK", "Known"]

MARK = "_ascend_deep_forward"
"""On functions that were put in the place of a module's forward, and what put them there."""


@dataclass(frozen=True)
class Known:
    """One class.

    Attributes:
        file: of transformers' models, as ``models.dbrx.modeling_dbrx``.
        note: for people.
        activation: path of the activation below the module.
        parts: paths of the modules that the forward reads, or passes by.
        weights: paths of the parameters, first product first.
        experts: number of experts with weights.
        forward: takes the module, (act, alpha, limit) and the arguments of the module's own forward.
        small: a module of the same class with small sizes, from the class.
        arguments: of a call with some number of tokens, from the module, a generator and a dtype.
        router: a forward for ``module.router``, if that is replaced too.
    """

    file: str
    note: str
    activation: str
    parts: tuple[str, ...]
    weights: tuple[str, ...]
    experts: Callable[[Any], int]
    forward: Callable[..., Tensor]
    small: Callable[[Any], nn.Module]
    arguments: Callable[[Any, int, torch.Generator, torch.dtype], tuple[Tensor, ...]]
    router: Callable[..., Any] | None = None


def _experts(
    how: tuple[str, float, float | None], x: Tensor, idx: Tensor, weights: Tensor, w13: Tensor, w2: Tensor,
    w3: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    act, alpha, limit = how
    return torch.ops.ascend_deep.moe_experts(
        x, idx, weights, w13, None, w2, None, w3, act=act, alpha=alpha, limit=limit, interleaved=False,
        weight_layout="enk", weight_on_input=False, expert_offset=0, out_dtype=out_dtype,
    )  # fmt: skip


# -- DBRX: gate, up and down in matrices [E * I, H] -------------------------------------------------------------------
def _dbrx(module: Any, how: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    batch, mlp = hidden_states.shape[0], module.mlp
    shape = (-1, module.ffn_hidden_size, module.hidden_size)
    w1, v1, w2 = (p.view(shape) for p in (mlp.w1, mlp.v1, mlp.w2))
    x = hidden_states.reshape(-1, module.hidden_size)
    out = _experts(how, x, top_k_index, top_k_weights, w1, w2.transpose(1, 2), v1)
    return out.view(batch, -1, module.hidden_size)


def _dbrx_small(kind: Any) -> nn.Module:
    return kind(SimpleNamespace(hidden_size=10, ffn_hidden_size=6, moe_num_experts=5, ffn_act_fn={"name": "silu"}))  # type: ignore[no-any-return]


def _dbrx_arguments(module: Any, tokens: int, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x = torch.randn(1, tokens, module.hidden_size, generator=g).to(dtype)
    return x, *_routing(tokens, module.num_experts, g, dtype)


# -- LongCat-Flash: the last experts return the token itself ----------------------------------------------------------
def _longcat(module: Any, how: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    count = module.num_routed_experts
    wide = torch.promote_types(hidden_states.dtype, top_k_weights.dtype)
    w13 = module.gate_up_proj if not module.zero_expert_num else module.gate_up_proj[:count]
    out = _experts(how, hidden_states, top_k_index, top_k_weights, w13, module.down_proj, out_dtype=wide)
    if module.zero_expert_num:
        share = torch.where(top_k_index >= count, top_k_weights, 0.0).sum(-1, keepdim=True)
        out = out + hidden_states * share
    return out.to(hidden_states.dtype)


def _longcat_small(kind: Any) -> nn.Module:
    config = SimpleNamespace(
        expert_ffn_hidden_size=6, hidden_size=10, n_routed_experts=5, zero_expert_num=3, hidden_act="silu"
    )
    return kind(config)  # type: ignore[no-any-return]


def _longcat_arguments(module: Any, tokens: int, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x = torch.randn(tokens, module.hidden_size, generator=g).to(dtype)
    # The router's weights are f32 whatever the dtype of the tokens.
    wide = torch.promote_types(dtype, torch.float32)
    return x, *_routing(tokens, module.total_experts, g, wide)


# -- JetMoE: sorted tokens, split by a list of sizes ------------------------------------------------------------------
def _jetmoe(module: Any, how: Any, layer_input: Tensor) -> Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    order, _, gates, sizes, _ = module.router(x)
    chosen = module.router.top_k
    every = torch.arange(sizes.shape[0], device=x.device)
    expert = torch.repeat_interleave(every, sizes, output_size=order.shape[0])
    idx = torch.empty_like(order).scatter(0, order, expert).view(-1, chosen)
    weights = torch.zeros_like(gates).scatter(0, order, gates).view(-1, chosen)
    out = _experts(how, x, idx, weights, module.input_linear.weight, module.output_linear.weight)
    return out.view(layer_input.shape) + module.bias


def _jetmoe_router(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the router's own forward, with the sizes as a tensor: a list of numbers would end the graph."""
    logits = router.layer(hidden_states).float()
    top_logits, top_indices = logits.topk(router.top_k, dim=1)
    gates = torch.softmax(top_logits, dim=1).type_as(hidden_states)
    flat = top_indices.flatten()
    sizes = (flat[:, None] == torch.arange(router.num_experts, device=flat.device)).sum(0)
    order = flat.sort(0)[1]
    return order, order.div(router.top_k, rounding_mode="trunc"), gates.flatten()[order], sizes, logits


_jetmoe_router.__name__ = "forward"  # a pickled module comes back with its class's forward
setattr(_jetmoe_router, MARK, "ascend_deep.hf_loops")


def _jetmoe_small(kind: Any) -> nn.Module:
    config = SimpleNamespace(
        hidden_size=10, intermediate_size=6, activation_function="silu", num_local_experts=5, num_experts_per_tok=2
    )
    return kind(config)  # type: ignore[no-any-return]


def _jetmoe_arguments(module: Any, tokens: int, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randn(1, tokens, module.input_size, generator=g).to(dtype),)


def _routing(tokens: int, experts: int, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ids and weights [T, K]: uneven, the last experts more often than the others."""
    chosen = min(3, experts)
    score = torch.rand(tokens, experts, generator=g) + torch.arange(experts) / experts
    return score.topk(chosen, dim=-1)[1], (0.2 + torch.rand(tokens, chosen, generator=g)).to(dtype)


KNOWN = {
    "DbrxExperts": Known(
        "models.dbrx.modeling_dbrx", "weights [E*I, H]", "mlp.activation_fn", ("mlp",),
        ("mlp.w1", "mlp.v1", "mlp.w2"), lambda m: m.num_experts, _dbrx, _dbrx_small, _dbrx_arguments,
    ),
    "LongcatFlashExperts": Known(
        "models.longcat_flash.modeling_longcat_flash", "experts that return the token itself are added", "act_fn",
        ("identity_expert",), ("gate_up_proj", "down_proj"), lambda m: m.num_routed_experts, _longcat, _longcat_small,
        _longcat_arguments,
    ),
    "JetMoeMoE": Known(
        "models.jetmoe.modeling_jetmoe", "sizes stay on the device", "activation",
        ("router", "router.layer", "input_linear", "output_linear"), ("input_linear.weight", "output_linear.weight"),
        lambda m: m.input_linear.num_experts, _jetmoe, _jetmoe_small, _jetmoe_arguments, _jetmoe_router,
    ),
}  # fmt: skip
