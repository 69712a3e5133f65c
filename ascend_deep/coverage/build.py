"""Tiny random models of the families, with weights that make every number matter.

Initialisation leaves correction biases at zero, norms at one and gates so small that all experts look alike; then a
dropped bias or a wrong scale changes nothing. ``randomise`` fills such tensors, the same in every build.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep import hf_experts
from ascend_deep.coverage.families import SIZES, Family
from ascend_deep.models import small_fields, transformers

__all__ = ["Built", "blocks_of", "build", "experts_of", "inputs", "moe_layers", "randomise"]

_LENGTHS = {"static": (2, 9), "other": (3, 7)}


@dataclass(frozen=True)
class Built:
    """A model and its config."""

    model: nn.Module
    config: Any


def build(family: Family, implementation: str | None) -> Built:
    """A model of ``family`` with random weights, the same for every experts implementation, in evaluation mode."""
    torch.manual_seed(11)
    config_class, model_class = _classes(family)
    sizes = {**SIZES, "mlp_layer_types": ["sparse"] * family.layers}
    values = {**small_fields(config_class, family.layers, sizes), **family.fields}
    config = config_class(**values)
    extra = {} if family.own_experts or implementation is None else {"experts_implementation": implementation}
    if model_class is not None:
        model = model_class._from_config(config, dtype=torch.float32, **extra)
    else:
        hf = transformers()
        auto = hf.AutoModelForCausalLM if config_class in hf.AutoModelForCausalLM._model_mapping else hf.AutoModel
        model = auto.from_config(config, dtype=torch.float32, **extra)
    randomise(model)
    return Built(model.eval(), config)


def _classes(family: Family) -> tuple[Any, Any]:
    """(config class, model class); the model class is None where the auto classes know it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers()
    found: dict[str, Any] = {}
    for kind, name in (("configuration", family.config), ("modeling", family.model)):
        if name:
            path = f"transformers.models.{family.folder}.{kind}_{family.folder}"
            found[kind] = getattr(importlib.import_module(path), name)
    return found.get("configuration") or CONFIG_MAPPING[family.model_type], found.get("modeling")


def experts_of(family: Family, model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that hold experts."""
    if family.own_experts:
        return [m for m in model.modules() if type(m).__name__ == family.own_experts]
    return [m for m in model.modules() if hf_experts.is_decorated(m)]


def blocks_of(family: Family, model: nn.Module) -> list[nn.Module]:
    """The modules around the experts: the MoE blocks, or the decoder layers where router and experts lie in these."""
    inner = set(map(id, experts_of(family, model)))
    return [m for m in model.modules() if any(id(child) in inner for child in m.children())]


def moe_layers(family: Family, model: nn.Module, config: Any) -> int:
    """Number of times that a call of ``model`` runs experts: those of another modality do not count."""
    ran: list[nn.Module] = []
    hooks = [m.register_forward_hook(lambda m, *_: ran.append(m)) for m in experts_of(family, model)]
    with torch.no_grad():
        model(**inputs(family, config))
    for hook in hooks:
        hook.remove()
    return len(ran)


def randomise(model: nn.Module) -> None:
    """Fill parameters and buffers in place: what init left constant, and gates and experts, which it left tiny."""
    generator = torch.Generator().manual_seed(7)

    def randn(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            # What init leaves out (the experts of Qwen3-Omni's talker) holds whatever was in memory: do not look at it.
            stacked = tensor.dim() == 3 and name.endswith("_linear.weight")
            if stacked or (_matters(name) and tensor.dim() >= 2):
                tensor.copy_(randn(tensor) * 0.2)
                continue
            low, high = float(tensor.min()), float(tensor.max())
            if low == high and low in (0.0, 1.0):
                tensor.copy_(randn(tensor) * 0.1 + low)
        for module in model.modules():
            table = getattr(module, "tid2eid", None)  # expert ids of every token: init sends all to expert 0
            if isinstance(table, Tensor):
                experts: Any = module.num_experts
                order = torch.rand(len(table), experts, generator=generator).argsort(-1)
                table.copy_(order[:, : table.shape[1]])


def _matters(name: str) -> bool:
    return any(part in name for part in ("expert", "router", "gate.weight", "gate.proj", ".gate."))


def inputs(family: Family, config: Any, sizes: str = "static") -> Mapping[str, Any]:
    """Keyword arguments of a call: "static" sizes, or the "other" ones of the second call of a dynamic compile."""
    batch, length = _LENGTHS[sizes]
    generator = torch.Generator().manual_seed(batch)
    if family.inputs == "image":
        pixels = torch.randn(batch, config.num_channels, *_pair(config.image_size), generator=generator)
        which = torch.arange(batch) % int(config.num_experts)
        return {"pixel_values": pixels, "dataset_index": which}
    vocabulary = int(config.vocab_size)

    def ids() -> Tensor:
        return torch.randint(3, vocabulary, (batch, length), generator=generator)

    if family.inputs == "embeddings":
        return {
            "inputs_embeds": torch.randn(batch, length, config.hidden_size, generator=generator),
            "use_cache": False,
        }
    if family.inputs == "decoder":
        return {"input_ids": ids(), "decoder_input_ids": ids(), "use_cache": False}
    return {"input_ids": ids(), "use_cache": False}


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
