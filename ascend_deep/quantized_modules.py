"""The modules that ``prepare(model, quantize=...)`` puts in place of linear layers and of experts.

Both hold FP8 or FP4 data and scales (``Recipe.sf_format``), quantise what comes in, and multiply with the ops
``gemm_scaled`` and ``m_grouped_gemm_scaled``. Their tensors are named ``*_q`` and ``*_scale_inv``: code that reads
``.weight`` of such a layer fails instead of computing with numbers that lack their scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep.hf_experts import Spec
from ascend_deep.quantize_originals import Missed
from ascend_deep.quantize_recipes import Recipe

__all__ = ["QuantizedExperts", "QuantizedLinear", "QuantizedModule"]


class QuantizedModule(nn.Module):
    """What both kinds share: the recipe, the module that was replaced (if kept), and dtypes that conversions leave.

    Attributes:
        recipe: how data and scales are to be read.
        master: the module that was replaced, in a list, so that it is no part of ``state_dict``; empty if not kept.
        missed: the conversions that it missed since.
        in_loop: it is called by a rewritten forward, and has no place of its own in the model's code.
    """

    in_loop = False

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.master: list[nn.Module] = []
        self.missed = Missed()

    def __getattr__(self, name: str) -> Any:
        """A weight that is stored quantised is not there, as for ``hasattr``; the error says what is."""
        if f"{name}_q" in self.__dict__.get("_parameters", ()):
            raise AttributeError(
                f"this layer is quantised and has no attribute {name!r}: it is {name}_q times {name}_scale_inv per "
                "block; dequantize() of a linear layer gives it back."
            )
        return super().__getattr__(name)

    def _hold(self, name: str, data: Tensor, scales: Tensor) -> None:
        setattr(self, f"{name}_q", nn.Parameter(data, requires_grad=False))
        setattr(self, f"{name}_scale_inv", nn.Parameter(self.recipe.stored(scales), requires_grad=False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModule:
        """Moves go through; ``.half()`` and ``.to(dtype)`` do not reach data and scales, which have no other dtype."""
        held = {n: p for n, p in self._parameters.items() if n.endswith(("_q", "_scale_inv")) and p is not None}
        dtypes = {n: (p.dtype, p.data) for n, p in held.items()}
        super()._apply(fn, recurse)
        self.missed.note(fn)
        for name, (dtype, before) in dtypes.items():
            now = self._parameters[name]
            assert now is not None
            if now.dtype != dtype:
                self._parameters[name] = nn.Parameter(before.to(now.device), requires_grad=False)
        return self

    def _dtype_of_result(self, x: Tensor) -> torch.dtype:
        kind = x.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _sums(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the products: those of f16 and f32 layers are not rounded to bfloat16."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class QuantizedLinear(QuantizedModule):
    """``nn.Linear`` with a quantised weight.

    Args:
        data, scales: of the weight [N, K], as ``Recipe.quantise`` returns them.
        bias: [N], kept as it is, or ``None``.
    """

    weight_q: Tensor
    weight_scale_inv: Tensor
    bias: Tensor | None

    def __init__(self, data: Tensor, scales: Tensor, bias: nn.Parameter | None, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.out_features = int(data.shape[0])
        self.in_features = int(data.shape[1]) * (2 if recipe.kind == "fp4" else 1)
        self._hold("weight", data, scales)
        self.register_parameter("bias", bias)

    def dequantize(self) -> Tensor:
        """The weight [N, K] in float32, with the rounding of its format."""
        return self.recipe.dequantise(self.weight_q, self.weight_scale_inv)

    def forward(self, x: Tensor) -> Tensor:
        """[.., K] to [.., N] in the dtype of ``x`` (of autocast, if it is on)."""
        from ascend_deep import ops

        recipe, dtype = self.recipe, self._dtype_of_result(x)
        if torch.is_grad_enabled() and (x.requires_grad or self._only_bias_learns()):
            return self._differentiable(x.to(dtype))
        if x.shape[-1] != self.in_features:
            raise ValueError(f"quantised linear layer: x has {x.shape[-1]} columns; it must have {self.in_features}.")
        data, scales = recipe.activations(x.reshape(-1, self.in_features))
        # Libraries that take packed scales add to float32 only, so a bias makes the product float32: rounded once.
        out = torch.float32 if self.bias is not None and recipe.sf_format != "fp32" else _sums(dtype)
        added = None if self.bias is None else self.bias.to(out).expand(data.shape[0], -1)
        y = ops.gemm_scaled(
            data, scales, self.weight_q, self.weight_scale_inv, added,
            recipe_a=(1, recipe.group), recipe_b=recipe.block, out_dtype=out,
        )  # fmt: skip
        return y.to(dtype).view(*x.shape[:-1], self.out_features)

    def _only_bias_learns(self) -> bool:
        """Whether a bias needs the gradient that blocks of 128 x 128 have; with others, the first use of it raises."""
        return self.bias is not None and self.bias.requires_grad and self._has_gradient()

    def _has_gradient(self) -> bool:
        return self.recipe.kind == "fp8" and self.recipe.block == (128, 128)

    def _differentiable(self, x: Tensor) -> Tensor:
        from ascend_deep import ops

        if not self._has_gradient():
            raise RuntimeError(
                f"this linear layer ({self.recipe.describe()}) has no gradient; run it under torch.no_grad(), or "
                "quantise for a target with 128x128 blocks of FP8."
            )
        return ops.fp8_linear(x, self.weight_q, self.weight_scale_inv, self.bias, ue8m0=self.recipe.ue8m0)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.recipe.describe()}"


class QuantizedExperts(QuantizedModule):
    """Experts of a mixture with quantised weights, called as those of transformers are.

    Args:
        w13, s13, w2, s2: data and scales of gate and up [E, 2 I, H] and down [E, H, I], each expert [out, in].
        b13, b2: biases [E, 2 I] and [E, H], or ``None``.
        spec: activation and where the halves lie.
    """

    # The MLP around MXFP4 experts of transformers routes with kernels of its own, unless its experts say this.
    _is_hooked = True

    gate_up_proj_q: Tensor
    gate_up_proj_scale_inv: Tensor
    down_proj_q: Tensor
    down_proj_scale_inv: Tensor
    gate_up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None

    def __init__(
        self,
        w13: tuple[Tensor, Tensor],
        w2: tuple[Tensor, Tensor],
        b13: nn.Parameter | None,
        b2: nn.Parameter | None,
        spec: Spec,
        recipe: Recipe,
    ) -> None:
        super().__init__(recipe)
        self.num_experts = int(w13[0].shape[0])
        self.spec = spec
        self._hold("gate_up_proj", *w13)
        self._hold("down_proj", *w2)
        self.register_parameter("gate_up_proj_bias", b13)
        self.register_parameter("down_proj_bias", b2)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, H], ids and weights [T, K] to [T, H] in the dtype of the tokens. Ids of no expert add nothing."""
        return self.run(hidden_states, top_k_index, top_k_weights, hidden_states.dtype)

    def run(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
        """As ``forward``, with a result of ``dtype``."""
        from ascend_deep import ops

        recipe, experts = self.recipe, self.num_experts
        if torch.is_grad_enabled() and (x.requires_grad or top_k_weights.requires_grad):
            raise RuntimeError("quantised experts have no gradient; run them under torch.no_grad().")
        out = torch.float32 if dtype == torch.float32 else _sums(x.dtype)
        products: dict[str, Any] = {
            "recipe_a": (1, recipe.group), "recipe_b": recipe.block, "alignment": recipe.alignment, "out_dtype": out,
        }  # fmt: skip
        data, scales = recipe.activations(x)
        weights = top_k_weights.float()
        rows, row_scales, row_weights, ends, row_map = ops.moe_permute(
            data, top_k_index, weights, num_experts=experts, x_sf=scales, alignment=recipe.alignment
        )
        h = ops.m_grouped_gemm_scaled(
            rows, row_scales, self.gate_up_proj_q, self.gate_up_proj_scale_inv, ends, **products
        )
        if self.gate_up_proj_bias is not None:
            h = h + self.gate_up_proj_bias.to(out)[_expert_of_row(row_map, top_k_index, h.shape[0])]
        # The routing weight goes in before the second product, as in the library: scales follow it.
        data, scales = ops.swiglu_quant(
            h, row_weights, act=self.spec.act, alpha=self.spec.alpha, limit=self.spec.limit,
            interleaved=self.spec.interleaved, gran_k=recipe.group, ue8m0=recipe.ue8m0, sf_format=recipe.sf_format,
        )  # fmt: skip
        y = ops.m_grouped_gemm_scaled(data, scales, self.down_proj_q, self.down_proj_scale_inv, ends, **products)
        result = ops.moe_combine(y, row_map, self._bias_of_tokens(top_k_index, weights, out))
        return result.to(dtype)

    def _bias_of_tokens(self, idx: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor | None:
        """[T, H]: the biases of a token's experts, weighted."""
        if self.down_proj_bias is None:
            return None
        local = (idx >= 0) & (idx < self.num_experts)
        shares = weights.new_zeros(idx.shape[0], self.num_experts)
        shares = shares.scatter_add(1, torch.where(local, idx, 0), torch.where(local, weights, 0.0))
        return (shares @ self.down_proj_bias.float()).to(dtype)

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.spec.describe()}, {self.recipe.describe()}"


def _expert_of_row(row_map: Tensor, idx: Tensor, rows: int) -> Tensor:
    """The expert of every row of the permuted tokens [M]; 0 for rows that hold no token, which nobody reads."""
    places = torch.where(row_map < 0, rows, row_map).flatten().long()
    experts = idx.new_zeros(rows + 1, dtype=torch.int64).scatter(0, places, idx.flatten().long())
    return experts[:rows].clamp_min(0)
