"""How ``prepare(model, quantize=...)`` quantises for each target: blocks, scales and the padding of expert rows.

    fp8   weights E4M3, one scale per 128 x 128 block, activations E4M3, one scale per token and 128 columns;
          on Ascend, whose kernels take nothing else, one power of two per 32 elements of a row for both
    fp4   weights E2M1, two per byte, activations E4M3, one power of two per 32 elements of a row for both

Where both are powers of two per 32 elements, scales are stored packed on SM100 and Ascend: their libraries take nothing
else, since no shape says that float32 numbers are powers of two.

Sources: the scale-factor formats of DeepGEMM for SM90 and SM100 and of DeepGEMM-Ascend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KINDS", "Recipe", "alignment_of", "format_of", "name_of", "recipe_for", "target_of", "without"]

KINDS = ("fp8", "fp4")


@dataclass(frozen=True)
class Recipe:
    """How a weight and the activations that meet it are quantised.

    Attributes:
        kind: ``"fp8"`` or ``"fp4"``, the format of the weight. Activations are FP8.
        target: what it was chosen for.
        block: rows and columns of a weight that share a scale.
        group: columns of the activations that share a scale.
        ue8m0: scales are powers of two.
        alignment: rows of every expert start at a multiple of it.
        sf_format: how scales are stored, of weights and of activations: ``"fp32"``, or the packed words that the
            libraries of the target take (``ops/_sf.py``); those have a scale for every row.
    """

    kind: str
    target: str
    block: tuple[int, int]
    group: int
    ue8m0: bool
    alignment: int
    sf_format: str = "fp32"

    def describe(self) -> str:
        """Short form for people, e.g. ``"fp8 weights 128x128, fp8 activations 1x128"``."""
        scales = ", scales are powers of two" if self.ue8m0 else ""
        return f"{self.kind} weights {self.block[0]}x{self.block[1]}, fp8 activations 1x{self.group}{scales}"

    def quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """``weight`` [.., N, K] as data (FP8 [.., N, K] or FP4 pairs [.., N, K / 2]) and scales in ``sf_format``."""
        from ascend_deep import ops

        if self.kind == "fp4":
            return ops.quant_fp4(weight, gran_k=self.block[1], sf_format=self.sf_format)
        return ops.quant_fp8(weight, gran=self.block, ue8m0=self.ue8m0, sf_format=self.sf_format)

    def activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [M, K] as E4M3 and scales in ``sf_format``."""
        from ascend_deep import ops

        return ops.quant_fp8(x, gran=(1, self.group), ue8m0=self.ue8m0, sf_format=self.sf_format)

    def stored(self, scales: Tensor) -> Tensor:
        """Scales in ``sf_format``, from float32 [.., rows, groups] or words that lost their strides (files have none).

        Words are laid out as the libraries want them, rows of the weight next to each other.
        """
        from ascend_deep.ops import _sf

        if self.sf_format == "fp32":
            return scales
        if scales.dtype == torch.float32:
            return _sf.pack(_sf.encode_ue8m0(scales), self.sf_format)
        *lead, rows, words = scales.shape
        per = _sf.WORDS[scales.dtype]
        return _sf.empty_packed(scales, lead, rows, words * per, self.sf_format).copy_(scales)

    def dequantise(self, data: Tensor, scales: Tensor) -> Tensor:
        """The numbers that ``data`` and ``scales`` stand for, float32."""
        from ascend_deep import ops

        return ops.dequant(data, scales, gran=self.block, sf_format=self.sf_format, out_dtype=torch.float32)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {**asdict(self), "block": list(self.block)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Recipe:
        """Inverse of ``to_dict``."""
        return Recipe(**{**data, "block": tuple(data["block"])})


_MX = (1, 32)
_RECIPES: Mapping[tuple[str, str], Recipe] = {
    (r.kind, r.target): r
    for r in (
        Recipe("fp8", "cpu", (128, 128), 128, False, 1),
        Recipe("fp8", "sm90", (128, 128), 128, False, 128),
        Recipe("fp8", "sm100", (128, 128), 128, True, 128),
        Recipe("fp8", "ascend950", _MX, 32, True, 256, "ue8m0x2"),
        Recipe("fp4", "cpu", _MX, 32, True, 1),
        Recipe("fp4", "sm100", _MX, 32, True, 128, "ue8m0x4"),
        Recipe("fp4", "ascend950", _MX, 32, True, 256, "ue8m0x2"),
    )
}
_SAME = {"ascend950dt": "ascend950"}
_WITHOUT = {
    ("fp4", "sm90"): "SM90 has no products of FP4",
    ("fp8", "ascend910b"): "its matrix units have no FP8",
    ("fp4", "ascend910b"): "its matrix units have no FP4",
    ("fp8", "ascend910_93"): "its matrix units have no FP8",
    ("fp4", "ascend910_93"): "its matrix units have no FP4",
}


def recipe_for(kind: str, target: str, model: nn.Module) -> Recipe:
    """The recipe of ``kind`` for ``target``; ``"auto"`` is the device that the model is on.

    Raises:
        ValueError: an unknown kind or target, or a target without such products; the message says which there are.
    """
    if kind not in KINDS:
        raise ValueError(f"prepare: quantize is {kind!r}; accepted are 'fp8' and 'fp4'.")
    name = name_of(target, model)
    if (kind, name) in _WITHOUT:
        raise ValueError(f"prepare: quantize is {kind!r} and the target {name}: {_WITHOUT[kind, name]}.")
    if (kind, name) not in _RECIPES:
        known = ", ".join(sorted({t for _, t in _RECIPES} | set(_SAME)))
        raise ValueError(f"prepare: there is no {kind} recipe for target {name!r}; there are recipes for {known}.")
    return _RECIPES[kind, name]


def name_of(target: str, model: nn.Module) -> str:
    """``target`` as recipes are listed by it; ``"auto"`` and ``"cuda"`` are the device that the model is on."""
    return target_of(model) if target in ("auto", "cuda") else _SAME.get(target, target)


def alignment_of(target: str) -> int:
    """Rows of an expert start at multiples of this on ``target``."""
    return next((r.alignment for (_, name), r in _RECIPES.items() if name == target), 128)


def without(kind: str, target: str) -> str | None:
    """Why ``target`` has no products of ``kind``, the rest of a sentence; ``None`` if it has, as far as is known."""
    return _WITHOUT.get((kind, target))


def format_of(kind: str, target: str, block: tuple[int, int]) -> str:
    """How scales that are powers of two are stored on ``target`` for weights with these blocks."""
    recipe = _RECIPES.get((kind, target))
    return recipe.sf_format if recipe is not None and recipe.block == block else "fp32"


def target_of(model: nn.Module) -> str:
    """The name of the device that the parameters of ``model`` are on, as recipes are listed by it."""
    kinds = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    if not kinds:
        return "cpu"
    device = next(iter(kinds))
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return {9: "sm90", 10: "sm100"}.get(major, f"sm{major}{minor}")
    if device.type == "npu":
        from ascend_deep.native.torch_npu import soc

        found = soc.current()
        names = {"950pr": "ascend950", "950dt": "ascend950", "910b": "ascend910b", "910_93": "ascend910_93"}
        return names[found.family] if found is not None else "npu"
    return device.type
