"""``prepare(model, quantize=...)``: which linear layers and experts are quantised, how far off they are, what stays.

A layer is quantised only if all that reads its weight is its own ``forward``. It stays, with a sentence, if its weight
is shared, if hooks or other code read it, if it is excluded (output layers and routers by default), or if its values
are not finite. Each quantised layer is compared with the original: DeepGEMM's measure of difference, of the weights
and of the results on random rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep import hf_experts
from ascend_deep.quantize_mxfp4 import holds_blocks
from ascend_deep.quantize_originals import Missed, bring_back
from ascend_deep.quantize_readers import output_layers, read_by_others, shared_storage
from ascend_deep.quantize_recipes import Recipe
from ascend_deep.quantized_modules import QuantizedExperts, QuantizedLinear, QuantizedModule

__all__ = ["EXCLUDED", "Quantized", "Refused", "calc_diff", "excluded", "experts", "linears", "put", "release"]

EXCLUDED = ("lm_head", "output_layer", "gate", "router", "shared_expert_gate", "score", "classifier")
"""What is not quantised by default: output layers, and routers, whose choice of experts a rounding changes."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 16


@dataclass(frozen=True)
class Quantized:
    """One layer that is quantised now.

    Attributes:
        module, kind: path, and class of what was there before.
        recipe: the formats.
        weight_error: ``calc_diff`` of the quantised weight and the original.
        output_error: ``calc_diff`` of the results on random rows; it includes the rounding of the activations.
        bytes_before, bytes_after: size of the weights.
    """

    module: str
    kind: str
    recipe: Recipe
    weight_error: float
    output_error: float
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        return (
            f"{self.module} ({self.kind}): {self.recipe.describe()}; calc_diff of the weight {self.weight_error:.1e}, "
            f"of the result {self.output_error:.1e}"
        )


Refused = tuple[str, str, str]  # path, class, reason


def calc_diff(x: Tensor, y: Tensor) -> float:
    """DeepGEMM's measure: 1 - 2 sum(x y) / sum(x² + y²), in f64; 0 for two tensors of zeros."""
    both = squares = 0.0
    for a, b in zip(x.flatten().split(1 << 22), y.flatten().split(1 << 22), strict=True):
        a, b = a.double(), b.double()
        both += float((a * b).sum())
        squares += float((a * a + b * b).sum())
    return 1.0 - 2.0 * both / squares if squares else 0.0


# -- linear layers --------------------------------------------------------------------------------------------------
def linears(
    model: nn.Module,
    recipe: Recipe,
    exclude: Sequence[str],
    keep_master: bool,
    taken: Iterable[str] = (),
    routers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[Quantized], list[Refused]]:
    """Quantise every ``nn.Linear`` that may be, in place.

    Args:
        exclude: patterns for whole paths or their last names.
        taken: paths of modules that compute with their parameters elsewhere.
        routers: paths of layers that choose experts, with a sentence.
    """
    done: list[Quantized] = []
    left: list[Refused] = []
    shared, read, outputs = shared_storage(model), read_by_others(model), output_layers(model)
    taken = tuple(taken)
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or type(module).__module__ == "transformers.integrations.finegrained_fp8":
            continue  # quantised by transformers: see quantize_adopt
        if module._parameters.get("weight", module) is None:
            continue  # a part of experts that are quantised as a whole
        kind = type(module).__name__
        reason = excluded(path, exclude, module in outputs) or routers.get(path)
        reason = reason or _unfit(path, module, shared, read, recipe, taken)
        if reason is None:
            done.append(_quantise_linear(model, path, module, recipe, keep_master))
        else:
            left.append((path, kind, reason))
    return done, left


def excluded(path: str, exclude: Sequence[str], is_output: bool) -> str | None:
    """Why ``exclude`` leaves the layer at ``path`` as it is, or ``None``; ``is_output``: of the whole model."""
    name = path.rpartition(".")[2]
    for pattern in exclude:
        if fnmatch(path, pattern) or fnmatch(name, pattern):
            return f"it is excluded by {pattern!r} in exclude."
    if is_output and "lm_head" in exclude:
        return "it is the output layer of the model, excluded by 'lm_head' in exclude."
    return None


def _unfit(
    path: str,
    module: nn.Linear,
    shared: Mapping[int, list[str]],
    read: Mapping[str, str],
    recipe: Recipe,
    taken: Sequence[str],
) -> str | None:
    """Why this layer cannot be quantised, or ``None``."""
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is a class of its own, which may compute something else than nn.Linear."
    if not path:
        return "it is the whole model, and there is nothing to put the quantised layer into."
    if any(path == t or path.startswith(f"{t}." if t else "") for t in taken):
        return "it is inside a block whose experts run as one op, which reads their weights from one tensor."
    weight = module.weight
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__} and no parameter."
    if weight.dtype not in _FLOATS:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}; float32, bfloat16 and float16 are quantised."
    if weight.device.type == "meta":
        return "its weight has no data (meta device)."
    others = [n for n in shared[weight.untyped_storage().data_ptr()] if n != f"{path}.weight"]
    if others:
        return f"its weight is shared with {others[0]}, which reads it too."
    if "forward" in vars(module) or any(
        (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    ):
        return "it has hooks or a forward of its own, which would see another layer."
    reader = read.get(path.rpartition(".")[2])
    if reader is not None:
        return f"{reader} reads the weight of a layer of this name itself."
    if recipe.kind == "fp4" and module.in_features % 2:
        return f"it has {module.in_features} inputs; FP4 stores pairs and needs an even number."
    if not bool(torch.isfinite(weight).all()):
        return "its weight has values that are not finite."
    return None


@torch.no_grad()
def _quantise_linear(model: nn.Module, path: str, module: nn.Linear, recipe: Recipe, keep_master: bool) -> Quantized:
    weight = module.weight.detach()
    data, scales = recipe.quantise(weight)
    new = QuantizedLinear(data, scales, module.bias, recipe)
    new.train(module.training)
    generator = torch.Generator().manual_seed(31)
    x = torch.randn(_ROWS, module.in_features, generator=generator, dtype=torch.float32).to(weight.device)
    wanted = x @ weight.float().t()
    got = new(x) if module.bias is None else new(x) - module.bias.float()
    entry = Quantized(
        path, type(module).__name__, recipe, calc_diff(new.dequantize(), weight), calc_diff(got, wanted),
        weight.nbytes, data.nbytes + scales.nbytes,
    )  # fmt: skip
    put(model, module, new, keep_master)
    return entry


# -- experts --------------------------------------------------------------------------------------------------------
def experts(
    model: nn.Module, recipe: Recipe, exclude: Sequence[str], keep_master: bool, cache: dict[Any, Any]
) -> tuple[list[Quantized], list[Refused]]:
    """Quantise the experts of transformers that have a gate, in place."""
    done: list[Quantized] = []
    left: list[Refused] = []
    shared = shared_storage(model)
    for path, module in list(model.named_modules()):
        if not hf_experts.is_decorated(module) or holds_blocks(module):
            continue  # MXFP4 experts: see quantize_mxfp4
        if not isinstance(getattr(module, "down_proj", None), Tensor):
            continue
        kind = type(module).__name__
        reason = excluded(path, exclude, False) or _unfit_experts(path, module, shared, recipe)
        spec = reason or hf_experts.resolve(module, True, cache)
        if isinstance(spec, hf_experts.Spec) and not spec.gated:
            spec = "its experts have no gate, and only gated activations are quantised."
        elif isinstance(spec, hf_experts.Spec) and spec.norm:
            spec = "it normalises what every expert gives, which quantised experts do not do."
        if isinstance(spec, str):
            left.append((path, kind, f"not quantised: {spec}"))
        else:
            done.append(_quantise_experts(model, path, module, spec, recipe, keep_master))
    return done, left


def _unfit_experts(path: str, module: Any, shared: Mapping[int, list[str]], recipe: Recipe) -> str | None:
    if not path:
        return "it is the whole model, and there is nothing to put the quantised experts into."
    for name, weight in module.named_parameters(recurse=False):
        if weight.device.type == "meta":
            return f"{name} has no data (meta device)."
        others = [n for n in shared[weight.untyped_storage().data_ptr()] if n != f"{path}.{name}"]
        if others:
            return f"{name} is shared with {others[0]}, which reads it too."
        if not bool(torch.isfinite(weight).all()):
            return f"{name} has values that are not finite."
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "it has hooks, which would see other experts."
    columns = module.down_proj.shape[1 if module.is_transposed else 2]
    hidden = module.down_proj.shape[2 if module.is_transposed else 1]
    if recipe.kind == "fp4" and (columns % 2 or hidden % 2):
        return f"its sizes are {hidden} and {columns}; FP4 stores pairs and needs even numbers."
    return None


@torch.no_grad()
def _quantise_experts(
    model: nn.Module, path: str, module: Any, spec: hf_experts.Spec, recipe: Recipe, keep_master: bool
) -> Quantized:
    turned = spec.weight_layout == "ekn"
    stored = [module.gate_up_proj.detach(), module.down_proj.detach()]
    w13, w2 = (w.transpose(1, 2) if turned else w for w in stored)
    (d13, s13), (d2, s2) = recipe.quantise(w13), recipe.quantise(w2)
    b13 = module.gate_up_proj_bias if spec.bias else None
    b2 = module.down_proj_bias if spec.bias else None
    new = QuantizedExperts((d13, s13), (d2, s2), b13, b2, spec, recipe)
    new.train(module.training)
    count, hidden = new.num_experts, w2.shape[1]
    generator = torch.Generator().manual_seed(32)
    x = torch.randn(_ROWS, hidden, generator=generator).to(w2)
    slots = min(2, count)
    ids = torch.stack([torch.randperm(count, generator=generator)[:slots] for _ in range(_ROWS)]).to(w2.device)
    weights = (0.2 + torch.rand(_ROWS, slots, generator=generator)).to(w2)
    wanted = hf_experts.run_op(module, spec, x, ids, weights)
    error = max(
        calc_diff(recipe.dequantise(d, s)[e], w[e].float()) for d, s, w in ((d13, s13, w13), (d2, s2, w2))
        for e in range(count)
    )  # fmt: skip
    entry = Quantized(
        path, type(module).__name__, recipe, error, calc_diff(new(x, ids, weights), wanted),
        sum(w.nbytes for w in stored), sum(t.nbytes for t in (d13, s13, d2, s2)),
    )  # fmt: skip
    put(model, module, new, keep_master)
    return entry


# -- putting in and taking out --------------------------------------------------------------------------------------
def _places(model: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is module:
                yield parent, name


def put(model: nn.Module, module: nn.Module, new: QuantizedModule, keep_master: bool) -> None:
    """``new`` at every place where ``module`` is."""
    if keep_master:
        new.master.append(module)
        new.missed = Missed.since(module, new)
    for parent, name in list(_places(model, module)):
        parent._modules[name] = new


def release(model: nn.Module) -> list[str]:
    """Put every kept original back; returns the paths of the layers whose original was not kept."""
    gone = []
    for path, module in list(model.named_modules()):
        if not isinstance(module, QuantizedModule) or module.in_loop:
            continue
        if not module.master:
            gone.append(path)
            continue
        (original,) = module.master
        bring_back(original, module, module.missed)
        for parent, name in list(_places(model, module)):
            parent._modules[name] = original
    return gone
