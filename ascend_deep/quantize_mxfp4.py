"""Experts whose weights are MXFP4 already, as gpt-oss has them: their bytes become those of ``QuantizedExperts``.

    blocks  uint8 [E, N, K / 32, 16]   two E2M1 codes per byte along K, the low nibble first
    scales  uint8 [E, N, K / 32]       UE8M0, 2^(code - 127)

Nothing is dequantised: ``blocks`` is [E, N, K / 2] read as FP4 pairs, and ``scales`` are the powers of two of recipe
(1, 32). Two kinds of module are adopted:

* ``Mxfp4GptOssExperts`` of transformers. Loaded for its own kernels it holds their layouts, and transformers' own
  conversion gives back what a checkpoint has. It runs on a GPU with kernels from elsewhere only, so its attributes
  decide, and there is no comparison with it.
* Any module with ``gate_up_proj_blocks``, ``gate_up_proj_scales``, ``down_proj_blocks``, ``down_proj_scales`` (such as
  a ``GptOssExperts`` that dequantises in its forward). Its activation is found by running it and its forward is
  compared with ``moe_experts`` on the dequantised weights.

Contract: ``transformers/integrations/mxfp4.py`` and the OCP microscaling formats, version 1.0.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep import hf_experts
from ascend_deep.quantize_recipes import Recipe, alignment_of, format_of, without
from ascend_deep.quantized_modules import QuantizedExperts

__all__ = ["HOME", "adopt", "holds_blocks"]

HOME = "transformers.integrations.mxfp4"
_NAMES = ("gate_up_proj", "down_proj")
_GROUP = 32
_NAN = 255


def holds_blocks(module: nn.Module) -> bool:
    """True for experts of transformers in MXFP4, and for modules that hold its blocks and scales under its names."""
    if type(module).__module__ == HOME:
        return type(module).__name__.endswith("Experts")
    return all(
        isinstance(getattr(module, f"{n}_{part}", None), Tensor) for n in _NAMES for part in ("blocks", "scales")
    )


def adopt(path: str, module: Any, target: str, cache: dict[Any, Any]) -> QuantizedExperts | str:
    """The module with the same bytes that runs our ops, or one sentence that says why there is none.

    Args:
        path: of the module in the model.
        target: hardware, as recipes are listed by it.
        cache: activations that were found so far.
    """
    reason = without("fp4", target)
    if reason is not None:
        return f"the target is {target}, and {reason}."
    if not path:
        return "it is the whole model, and there is nothing to put another module into."
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "it has hooks, which would see other experts."
    pairs, rows = [], []
    for name in _NAMES:
        found = _stored(module, name)
        if isinstance(found, str):
            return found
        pairs.append(found)
        rows.append(int(found[0].shape[1]))
    depths = [p[0].shape[2] * 2 for p in pairs]
    if len({p[0].shape[0] for p in pairs}) != 1 or rows[0] != 2 * depths[1] or rows[1] != depths[0]:
        shapes = " and ".join(str(list(p[0].shape)) for p in pairs)
        return f"its pairs have shapes {shapes}, which are no gate, up and down of the same experts."
    biases = [getattr(module, f"{n}_bias", None) for n in _NAMES]
    if (biases[0] is None) != (biases[1] is None):
        return "only one of its two products has a bias."
    ours = type(module).__module__ == HOME
    activation = _documented(module) if ours else _activation(module, cache)
    if isinstance(activation, str):
        return activation
    (act, alpha, limit), interleaved = activation
    spec = hf_experts.Spec(act, alpha, limit, interleaved, "enk", True, biases[0] is not None)
    recipe = Recipe(
        "fp4", target, (1, _GROUP), _GROUP, True, alignment_of(target), format_of("fp4", target, (1, _GROUP))
    )
    new = QuantizedExperts(pairs[0], pairs[1], _held(biases[0]), _held(biases[1]), spec, recipe)
    new.train(module.training)
    return (None if ours else _differs(module, new)) or new


def _held(bias: Tensor | None) -> nn.Parameter | None:
    if bias is None or isinstance(bias, nn.Parameter):
        return bias
    return nn.Parameter(bias, requires_grad=False)


# -- data -----------------------------------------------------------------------------------------------------------
def _stored(module: Any, name: str) -> tuple[Tensor, Tensor] | str:
    """FP4 pairs [E, N, K / 2] and f32 scales [E, N, K / 32] of one weight, from blocks and scales of a checkpoint."""
    blocks, scales = getattr(module, f"{name}_blocks", None), getattr(module, f"{name}_scales", None)
    if blocks is None and getattr(module, f"{name}_precision_config", None) is not None:
        try:  # transformers' own way back from the layouts of its kernels, used when it saves a model
            reverse = sys.modules[HOME].Mxfp4ReverseDeserialize(None)
            found = reverse.convert({}, model=module, full_layer_name=f"{name}_blocks")
            blocks, scales = found[f"{name}_blocks"], found[f"{name}_scales"]
        except Exception as error:
            return f"transformers does not give back the blocks of {name}: {type(error).__name__}: {str(error)[:100]}"
    if not isinstance(blocks, Tensor) or not isinstance(scales, Tensor):
        return f"{name} has no blocks and scales; prepare the model after its weights are loaded."
    if blocks.device.type == "meta" or scales.device.type == "meta":
        return f"{name} has no data yet (meta device); prepare the model after its weights are loaded."
    for what, tensor in (("blocks", blocks), ("scales", scales)):
        if tensor.dtype != torch.uint8:
            return f"its {name}_{what} are {str(tensor.dtype).removeprefix('torch.')}; MXFP4 has uint8."
    if blocks.dim() != 4 or blocks.shape[3] != _GROUP // 2 or blocks.shape[:3] != scales.shape:
        return (
            f"its {name} has blocks {list(blocks.shape)} and scales {list(scales.shape)}; MXFP4 has [E, N, G, 16] and "
            "[E, N, G]."
        )
    if bool((scales == _NAN).any()):
        return f"its {name}_scales hold the code 255, which stands for NaN."
    from ascend_deep.ops import _sf

    return blocks.detach().flatten(2).contiguous(), _sf.decode_ue8m0(scales.detach())


# -- activation -----------------------------------------------------------------------------------------------------
def _documented(module: Any) -> tuple[tuple[str, float, float | None], bool] | str:
    """The activation of ``Mxfp4GptOssExperts``: that of gpt-oss, with the module's own numbers."""
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if not isinstance(alpha, float) or not (limit is None or isinstance(limit, (int, float))):
        return "it has no alpha and limit, which the activation of gpt-oss has."
    return ("swiglu_oai", alpha, None if limit is None else float(limit)), True


def _activation(module: Any, cache: dict[Any, Any]) -> tuple[tuple[str, float, float | None], bool] | str:
    """The activation that the module's ``_apply_gate`` computes, on halves that it says are interleaved or not."""
    if not hasattr(module, "_apply_gate") or not hasattr(module, "config"):
        return "its activation is no method of its own (_apply_gate), so it is not known what it computes."
    interleaved = not getattr(module, "is_concatenated", True)
    probe = hf_experts.activation_of(module, True, cache)
    return probe if isinstance(probe, str) else (probe, interleaved)


def _differs(module: Any, new: QuantizedExperts) -> str | None:
    """A sentence if the module and ``moe_experts`` on the dequantised weights disagree on five random tokens."""
    from ascend_deep import ops

    w13, w2 = (
        new.recipe.dequantise(getattr(new, f"{n}_q"), getattr(new, f"{n}_scale_inv")).to(torch.bfloat16) for n in _NAMES
    )
    b13, b2 = new.gate_up_proj_bias, new.down_proj_bias
    count, hidden = new.num_experts, int(w2.shape[1])
    generator = torch.Generator().manual_seed(34)
    dtype = torch.bfloat16 if b13 is None else b13.dtype
    x = torch.randn(5, hidden, generator=generator, dtype=torch.float32).to(w2.device, dtype)
    slots = min(2, count)
    ids = torch.stack([torch.randperm(count, generator=generator)[:slots] for _ in range(5)]).to(w2.device)
    weights = (0.2 + torch.rand(5, slots, generator=generator, dtype=torch.float32)).to(w2.device, dtype)
    spec = new.spec
    cast = [None if b is None else b.detach().to(dtype) for b in (b13, b2)]
    with torch.no_grad():
        try:
            wanted = module(x, ids, weights)
        except Exception as error:
            return f"it does not run on five tokens: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
        got = ops.moe_experts(
            x, ids, weights, w13.to(dtype), cast[0], w2.to(dtype), cast[1], act=spec.act, alpha=spec.alpha,
            limit=spec.limit, interleaved=spec.interleaved,
        )  # fmt: skip
    if not isinstance(wanted, Tensor) or wanted.shape != got.shape:
        return "it returns something else than one row per token."
    tolerance = ops.op("moe_experts").tolerance[dtype]
    scale = float(wanted.abs().max())
    error_ = float((wanted.double() - got.double()).abs().max())
    # The module rounds after every step, the op once: allow for both, relative to the largest value.
    if not error_ <= 4 * tolerance.rtol * scale + tolerance.atol:
        return (
            f"its forward computes something else than experts with these weights: it differs by {error_:.2g} of "
            f"{scale:.2g}."
        )
    return None
