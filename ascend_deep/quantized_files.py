"""Quantised models in files: one safetensors file with every tensor of the model and a list of what is quantised.

``save`` writes it, ``load`` puts quantised layers into a model of the same class, whose own weights are not needed (it
may be on the meta device), and reads their tensors. Tensors that share memory are stored once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep import quantize_loops
from ascend_deep.hf_experts import Spec
from ascend_deep.quantize import Quantized
from ascend_deep.quantize_recipes import Recipe
from ascend_deep.quantized_modules import QuantizedExperts, QuantizedLinear, QuantizedModule

__all__ = ["load", "save"]

_FORMAT = "ascend_deep.quantized"
_VERSION = "1"


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors is needed to store quantised models: pip install safetensors.") from error
    return safetensors


def save(model: nn.Module, path: str | Path, entries: tuple[Quantized, ...]) -> None:
    """Write the tensors of ``model`` and ``entries``, what ``prepare`` said about its layers.

    Raises:
        ValueError: the model holds no quantised layer, or a tensor without data.
        FileNotFoundError, IsADirectoryError, OSError: there is no such folder, ``path`` is one, or cannot be written.
        ImportError: safetensors is not installed.
    """
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"save: path is {str(path)!r}, and there is no folder {Path(path).parent}.")
    if Path(path).is_dir():
        raise IsADirectoryError(f"save: path is {str(path)!r}, which is a folder; it takes the name of a file.")
    known = {e.module: e for e in entries}
    layers = {
        p: _describe(m, known.get(_told_of(p, m.in_loop)))
        for p, m in model.named_modules()
        if isinstance(m, QuantizedModule)
    }
    if not layers:
        raise ValueError("save: the model has no quantised layer; call prepare(model, quantize=...) first.")
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in model.state_dict().items():
        if tensor.device.type == "meta":
            raise ValueError(f"save: {name} has no data (meta device).")
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        # A copy where memory is shared in part: safetensors stores whole tensors only.
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        tensors[name] = tensor if whole else tensor.contiguous().clone()
    manifest = json.dumps({"layers": layers, "aliases": aliases})
    metadata = {"format": _FORMAT, "version": _VERSION, "manifest": manifest}
    safetensors = _safetensors()
    try:
        safetensors.torch.save_file(tensors, str(path), metadata=metadata)
    except safetensors.SafetensorError as error:
        raise OSError(f"save: {path} cannot be written: {error}.") from error


def load(model: nn.Module, path: str | Path) -> tuple[Quantized, ...]:
    """Make ``model`` the quantised model of a file, in place; what ``prepare`` had said about its layers.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a file of ``save``, or one of another model; the message names the difference.
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    if not Path(path).is_file():
        raise FileNotFoundError(f"load: there is no file {path}.")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT or metadata.get("version") != _VERSION:
                raise ValueError(f"load: {path} was not written by this version of Prepared.save.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"load: {path} is no safetensors file, or damaged: {error}.") from error
    manifest = json.loads(metadata["manifest"])
    for alias, name in manifest["aliases"].items():
        tensors[alias] = tensors[name]
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    for name, layer in manifest["layers"].items():
        if layer.get("in_loop"):
            wrong = quantize_loops.make_room(model, name.rpartition(".")[0])
            if wrong is not None:
                raise ValueError(f"load: {path} is of another model: {name.rpartition('.')[0]}: {wrong}")
    made = {name: _make(model, name, layer, tensors, path) for name, layer in manifest["layers"].items()}
    expected = _names_after(model, made)
    missing, unknown = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
    if missing or unknown:
        first = f"it lacks {missing[0]}" if missing else f"it has {unknown[0]}, which the model has not"
        raise ValueError(f"load: {path} is of another model: {first} ({len(missing) + len(unknown)} names differ).")
    _check_sizes(model, made, tensors, path)
    for name, new in made.items():
        parent, _, leaf = name.rpartition(".")
        if isinstance(new, quantize_loops.LoopExperts):
            quantize_loops.settle(model.get_submodule(parent), new)
        else:
            model.get_submodule(parent)._modules[leaf] = new
    held = {n: t.to(device) for n, t in tensors.items()}
    for name, new in made.items():
        for leaf in [n for n in new.state_dict() if n.endswith("_scale_inv")]:
            held[f"{name}.{leaf}"] = new.recipe.stored(held[f"{name}.{leaf}"])  # files have no strides
    model.load_state_dict(held, assign=True)
    for alias, name in manifest["aliases"].items():
        _tie(model, alias, name)
    return tuple(_entry(name, layer) for name, layer in manifest["layers"].items())


# -- details --------------------------------------------------------------------------------------------------------
def _describe(module: QuantizedModule, entry: Quantized | None) -> dict[str, Any]:
    told = {k: v for k, v in asdict(entry).items() if k not in ("module", "recipe")} if entry is not None else {}
    spec = asdict(module.spec) if isinstance(module, QuantizedExperts) else None
    return {"recipe": module.recipe.to_dict(), "spec": spec, "told": told, "in_loop": module.in_loop}


def _entry(name: str, layer: Mapping[str, Any]) -> Quantized:
    unknown = {"kind": "unknown", "weight_error": float("nan"), "output_error": float("nan")}
    told = {**unknown, "bytes_before": 0, "bytes_after": 0, **layer["told"]}
    return Quantized(
        module=_told_of(name, layer.get("in_loop", False)), recipe=Recipe.from_dict(layer["recipe"]), **told
    )


def _told_of(path: str, in_loop: bool) -> str:
    """The path under which ``prepare`` lists the layer at ``path``: a loop's experts go by the module with the loop."""
    return path.rpartition(".")[0] if in_loop else path


def _make(
    model: nn.Module, name: str, layer: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str | Path
) -> QuantizedModule:
    try:
        model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(
            f"load: {path} is of another model: it has a layer {name}, which the model has not."
        ) from error

    def pair(what: str) -> tuple[Tensor, Tensor]:
        return tensors[f"{name}.{what}_q"], tensors[f"{name}.{what}_scale_inv"]

    def bias(what: str) -> nn.Parameter | None:
        held = tensors.get(f"{name}.{what}")
        return nn.Parameter(held, requires_grad=False) if held is not None else None

    recipe = Recipe.from_dict(layer["recipe"])
    try:
        if layer["spec"] is None:
            return QuantizedLinear(*pair("weight"), bias("bias"), recipe)
        spec = Spec(**layer["spec"])
        kind = quantize_loops.LoopExperts if layer.get("in_loop") else QuantizedExperts
        return kind(
            pair("gate_up_proj"), pair("down_proj"), bias("gate_up_proj_bias"), bias("down_proj_bias"), spec, recipe
        )
    except KeyError as error:
        raise ValueError(f"load: {path} is damaged: it lacks {error}.") from error


def _check_sizes(
    model: nn.Module, made: Mapping[str, QuantizedModule], tensors: Mapping[str, Tensor], path: str | Path
) -> None:
    """Raise before anything is changed: sizes that differ, and buffers that no file can fill."""
    for name, new in made.items():
        for size in ("in_features", "out_features", "num_experts"):
            stored, wanted = getattr(new, size, None), getattr(model.get_submodule(name), size, None)
            if stored is not None and wanted is not None and stored != wanted:
                raise ValueError(
                    f"load: {path} is of another model: {name} has {size} {stored}, and {wanted} in the model."
                )
    for name, have in model.state_dict().items():
        if name in tensors and have.shape != tensors[name].shape:
            found, wanted = list(tensors[name].shape), list(have.shape)
            raise ValueError(f"load: {path} is of another model: {name} is {found}, and {wanted} in the model.")
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta" and name not in tensors:
            raise ValueError(
                f"load: the buffer {name} of the model is on the meta device and in no file, since it is not "
                "persistent; make the model on a device with memory."
            )


def _names_after(model: nn.Module, made: Mapping[str, QuantizedModule]) -> set[str]:
    """Names in ``state_dict`` once the quantised layers are in."""
    inside = tuple(f"{name}." for name in made)
    names = {n for n in model.state_dict() if not n.startswith(inside)}
    return names | {f"{name}.{n}" for name, new in made.items() for n in new.state_dict()}


def _tie(model: nn.Module, alias: str, name: str) -> None:
    """Make the parameter ``alias`` the parameter ``name``."""
    owner, _, leaf = name.rpartition(".")
    parameter = model.get_submodule(owner)._parameters.get(leaf)
    place, _, last = alias.rpartition(".")
    if parameter is not None and last in model.get_submodule(place)._parameters:
        model.get_submodule(place)._parameters[last] = parameter
