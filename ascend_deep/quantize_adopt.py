"""Layers that transformers has quantised already: its finegrained-FP8 modules, computed by our ops.

``FP8Linear`` and ``FP8Experts`` hold E4M3 data (or FP4 pairs) with one scale per block, quantise their input row by row
and multiply: what ``quant_fp8`` and ``gemm_scaled`` do. Their own kernels are Triton or DeepGEMM, fetched at run time,
and run on CUDA alone, so there is nothing to compare with here, and their attributes decide. Data and scales are used
as they are. Activations are quantised by the rule of DeepGEMM's ``per_token_cast_to_fp8``, which these modules call
where DeepGEMM is there.

Experts in MXFP4 are ``quantize_mxfp4``.

Not adopted, with a sentence: static activation scales, one scale for the whole weight, block-diagonal layers, experts
without a gate or whose gate and up share a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep import hf_experts, quantize_mxfp4
from ascend_deep.quantize import Quantized, Refused, calc_diff, put
from ascend_deep.quantize_readers import read_by_others
from ascend_deep.quantize_recipes import Recipe, alignment_of, format_of, name_of
from ascend_deep.quantized_modules import QuantizedExperts, QuantizedLinear, QuantizedModule

__all__ = ["adopt"]

_HOME = "transformers.integrations.finegrained_fp8"
_ROWS = 16


def adopt(
    model: nn.Module, cache: dict[Any, Any], target: str = "auto", kind: str | None = None, keep_master: bool = False
) -> tuple[list[Quantized], list[Refused]]:
    """Replace the quantised modules of ``model``, in place; the originals are kept where they share the memory.

    Args:
        cache: activations that were found so far.
        target: hardware to store scales and to align rows for, ``"auto"``: the device that the model is on.
        kind: what ``prepare`` was asked to quantise to; MXFP4 experts are replaced for ``"fp4"`` only, since they
            multiply activations that are not quantised, and our products quantise them.
        keep_master: keep originals that do not share the memory, too.
    """
    done: list[Quantized] = []
    left: list[Refused] = []
    target = name_of(target, model)
    modules = [
        (p, m) for p, m in model.named_modules() if type(m).__module__ == _HOME or quantize_mxfp4.holds_blocks(m)
    ]
    read = read_by_others(model) if modules else {}
    for path, module in modules:
        name = type(module).__name__
        made: QuantizedModule | str | None = None
        shares = True
        if quantize_mxfp4.holds_blocks(module):
            shares = type(module).__module__ != quantize_mxfp4.HOME
            if kind == "fp4":
                made = quantize_mxfp4.adopt(path, module, target, cache)
            elif not shares:
                made = (
                    "its weights are FP4 and its activations are not quantised, which its own kernels multiply; "
                    "prepare(model, quantize='fp4') takes its weights as they are and quantises the activations to FP8."
                )
        elif isinstance(module, nn.Linear):
            made = _linear(path, module, read, target)
        elif name == "FP8Experts":
            made = _experts(path, module, target, cache)
        if isinstance(made, str):
            left.append((path, name, made))
        elif made is not None:
            done.append(_entry(path, module, made))
            put(model, module, made, keep_master=shares or keep_master)
    return done, left


def _common(path: str, module: Any) -> str | None:
    """What rules out both kinds."""
    if not path:
        return "it is the whole model, and there is nothing to put another module into."
    if module.activation_scheme != "dynamic":
        return f"its activation scales are {module.activation_scheme}; only dynamic ones are computed by our ops."
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "it has hooks, which would see another module."
    if any(p.device.type == "meta" for p in module.parameters()):
        return "its weights have no data yet (meta device); prepare the model after they are loaded."
    return None


def _recipe(module: Any, weight: Tensor, scales: Tensor, target: str) -> Recipe | str:
    """How ``weight`` [.., N, K] and ``scales`` [.., ceil(N / n), ceil(K / k)] of the module are to be read."""
    powers = scales.dtype == getattr(torch, "float8_e8m0fnu", None)
    if weight.dtype == torch.int8:
        kind, block, columns = "fp4", (1, 32), weight.shape[-1] * 2
    elif weight.dtype == torch.float8_e4m3fn:
        if module.block_size is None:
            return "it has one scale for the whole weight; our ops take one per block."
        kind, block, columns = "fp8", (int(module.block_size[0]), int(module.block_size[1])), weight.shape[-1]
    else:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, so it is not quantised."
    if not powers and scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its scales are {str(scales.dtype).removeprefix('torch.')}, which is not known here."
    wanted = (*weight.shape[:-2], -(-weight.shape[-2] // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != wanted:
        return f"its scales have shape {list(scales.shape)}, and blocks of {block[0]}x{block[1]} need {list(wanted)}."
    stored = format_of(kind, target, block) if powers else "fp32"
    return Recipe(kind, target, block, block[1], powers, alignment_of(target), stored)


def _linear(path: str, module: Any, read: dict[str, str], target: str) -> QuantizedLinear | str:
    if type(module).__name__ != "FP8Linear":
        return f"{type(module).__name__} multiplies block by block along its groups, which has no op here."
    reader = read.get(path.rpartition(".")[2])
    if reader is not None:
        return f"{reader} reads the weight of a layer of this name itself."
    refusal = _common(path, module)
    if refusal is not None:
        return refusal
    recipe = _recipe(module, module.weight, module.weight_scale_inv, target)
    if isinstance(recipe, str):
        return recipe
    new = QuantizedLinear(module.weight.data, module.weight_scale_inv.data.float(), module.bias, recipe)
    new.train(module.training)
    return new


def _experts(path: str, module: Any, target: str, cache: dict[Any, Any]) -> QuantizedExperts | str:
    refusal = _common(path, module)
    if refusal is not None:
        return refusal
    if not module.has_gate or module.has_bias:
        return "only experts with a gate and without biases are computed by our ops in this form."
    pairs = []
    for name in ("gate_up_proj", "down_proj"):
        weight, scales = getattr(module, name), getattr(module, f"{name}_scale_inv")
        if weight.dtype == torch.float8_e4m3fn and module.block_size is not None:
            rows = weight.shape[1] // 2 if name == "gate_up_proj" else 0
            if rows % int(module.block_size[0]):
                return (
                    f"gate and up have {rows} rows each, so a block of {module.block_size[0]} would hold rows of both."
                )
        recipe = _recipe(module, weight, scales, target)
        if isinstance(recipe, str):
            return f"{name}: {recipe}"
        pairs.append((weight.data, scales.data.float()))
    found = hf_experts.activation_of(module, True, cache)
    if isinstance(found, str):
        return found
    act, alpha, limit = found
    spec = hf_experts.Spec(act, alpha, limit, not module.is_concatenated, "enk", True, False)
    assert isinstance(recipe, Recipe)
    new = QuantizedExperts(pairs[0], pairs[1], None, None, spec, recipe)
    new.train(module.training)
    return new


@torch.no_grad()
def _entry(path: str, module: Any, new: Any) -> Quantized:
    """What was replaced. The weight is the same; the error of the result is that of rounding activations."""
    generator = torch.Generator().manual_seed(33)
    held = [p for n, p in new.named_parameters() if n.endswith(("_q", "_scale_inv"))]
    size = sum(p.nbytes for p in held)
    device = held[0].device
    if isinstance(new, QuantizedLinear):
        x = torch.randn(_ROWS, new.in_features, generator=generator, dtype=torch.float32).to(device)
        got = new(x) if new.bias is None else new(x) - new.bias.float()
        error = calc_diff(got, x @ new.dequantize().t())
    else:
        error = _error_of_experts(new, generator, device)
    return Quantized(path, type(module).__name__, new.recipe, 0.0, error, size, size)


def _error_of_experts(new: QuantizedExperts, generator: torch.Generator, device: torch.device) -> float:
    """Of two experts that are read alone: all of them in float32 would be large."""
    from ascend_deep import ops

    count = min(2, new.num_experts)
    names = ("gate_up_proj", "down_proj")
    parts = [(getattr(new, f"{n}_q")[:count], getattr(new, f"{n}_scale_inv")[:count]) for n in names]
    b13, b2 = (None if b is None else b.detach()[:count] for b in (new.gate_up_proj_bias, new.down_proj_bias))
    held = [None if b is None else nn.Parameter(b, requires_grad=False) for b in (b13, b2)]
    few = QuantizedExperts(parts[0], parts[1], held[0], held[1], new.spec, new.recipe)
    w13, w2 = (new.recipe.dequantise(*p) for p in parts)
    x = torch.randn(_ROWS, w2.shape[1], generator=generator, dtype=torch.float32).to(device)
    ids = torch.arange(_ROWS, device=device).remainder(count)[:, None]
    weights = (0.2 + torch.rand(_ROWS, 1, generator=generator, dtype=torch.float32)).to(device)
    spec = new.spec
    wanted = ops.moe_experts(
        x, ids, weights, w13, None if b13 is None else b13.float(), w2, None if b2 is None else b2.float(),
        act=spec.act, alpha=spec.alpha, limit=spec.limit, interleaved=spec.interleaved,
    )  # fmt: skip
    return calc_diff(few(x, ids, weights), wanted)
