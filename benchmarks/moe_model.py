"""A whole compiled model against what a user would run otherwise: every eager experts implementation, and Inductor.

The model is a Qwen3-MoE with random weights. Every contender holds the same weights; all are timed in turns within one
run, and ratios are of medians, as in ``moe_kernel``. The floor counts the expert and dense weights that a forward pass
must read once, at the rate at which torch sums a large tensor, and its multiplications at the rate of a large matrix
product; attention scores are not counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

from ascend_deep import huge_pages
from benchmarks.moe_kernel import DTYPES, MAX_GATHER_BYTES, Row, Shape, floor_probes, in_turns

__all__ = ["LAYERS", "measure"]

LAYERS = 4
_VOCABULARY = 4096


def build(shape: Shape, dtype: torch.dtype, implementation: str) -> nn.Module:
    """The model, the same weights whatever the implementation."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=_VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        moe_intermediate_size=shape.intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=shape.hidden // 64,
        num_key_value_heads=max(1, shape.hidden // 256),
        head_dim=64,
        num_experts=shape.experts,
        num_experts_per_tok=shape.topk,
        norm_topk_prob=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM._from_config(config, dtype=dtype, experts_implementation=implementation).eval()


def contenders(shape: Shape, dtype: torch.dtype, tokens: int, compiled: bool) -> dict[str, Any]:
    """Name to model. ``batched_mm`` only where the weights that it gathers fit into memory."""
    gathered = tokens * shape.topk * shape.weights_per_expert() * dtype.itemsize
    implementations = ["eager", "grouped_mm"] + (["batched_mm"] if gathered <= MAX_GATHER_BYTES else [])
    ours = torch.compile(build(shape, dtype, "grouped_mm"), backend="ascend_deep")
    found: dict[str, Any] = {"ascend_deep": ours}
    for implementation in implementations:
        model = build(shape, dtype, implementation)
        found["eager loop" if implementation == "eager" else implementation] = model
        if compiled and implementation != "eager":
            found[f"{implementation}, compiled"] = torch.compile(build(shape, dtype, implementation))
    return found


def measure(shape: Shape, name: str, tokens: int, repeats: int, compiled: bool, huge: bool = False) -> list[Row]:
    """Times of a forward pass over ``tokens`` tokens, in the form of ``moe_kernel.measure``."""
    dtype = DTYPES[name]
    torch._dynamo.reset()
    ids = torch.randint(0, _VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    models = contenders(shape, dtype, tokens, compiled)
    for model in models.values() if huge else ():
        huge_pages(model)
    active: list[int] = []
    probes, floor_of = floor_probes({torch.float32, dtype}, huge)
    calls: dict[str, Callable[[], object]] = {**probes, **{n: partial(m, ids) for n, m in models.items()}}
    with torch.no_grad():
        truth = _logits(models["eager loop"].double()(ids))
        models["eager loop"].to(dtype)
        active += _active_experts(models["eager loop"], ids)
        errors = {n: _error(_logits(call()), truth) for n, call in calls.items() if n not in probes}
        times = in_turns(calls, repeats)
    total = sum(p.numel() for p in models["eager loop"].parameters())
    dense = total - LAYERS * shape.experts * shape.weights_per_expert() - _VOCABULARY * shape.hidden
    floor = floor_of(
        times,
        (dense + sum(active) * shape.weights_per_expert()) * dtype.itemsize,
        2 * tokens * (dense + LAYERS * shape.topk * shape.weights_per_expert()),
    )
    return [floor.row(name, tokens), *(floor.compare(name, tokens, n, times[n], e) for n, e in errors.items())]


def _logits(output: object) -> Tensor:
    logits = output.logits  # type: ignore[attr-defined]
    assert isinstance(logits, Tensor)
    return logits.double()


def _error(got: Tensor, truth: Tensor) -> float:
    """Median over tokens: a token whose experts differ by rounding of the router says nothing about the kernel."""
    return float(((got - truth).abs().amax(-1) / truth.abs().max()).median())


def _active_experts(model: nn.Module, ids: Tensor) -> list[int]:
    """Number of experts that got a token, by layer."""
    found: list[int] = []
    hooks = [
        m.register_forward_hook(lambda _m, args, _out: found.append(int(args[1].unique().numel())))
        for n, m in model.named_modules()
        if n.endswith("mlp.experts")
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    return found
