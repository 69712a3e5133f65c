"""Runs a router region on inputs of our choosing.

A region has the sizes of its model: a static or symbolic number of tokens, one dim of tokens or several. The bench
takes logits [R, E] for any R and hides that. Sizes of experts, chosen experts and groups are never changed; a token
count is, if it is symbolic, or if it is large and its literal stands for nothing else in the region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ascend_deep.passes.region import Dims, Region
from ascend_deep.passes.router_family import Observation

__all__ = ["Bench", "TiedTokens"]

_SMALL = 128  # a static token count up to this is run as it is


class TiedTokens(Exception):
    """The number of tokens is not free: another size of the block depends on it in a way that cannot be undone."""


class Bench:
    """A region of ``router_cut`` on a test bench.

    Attributes:
        experts, chosen: E and K.
        dtype, bias_dtype: of the inputs; ``None``: no bias.
        out_dtype: of the weights; ``None``: ids only.

    Args:
        dtype: run with inputs of this dtype instead of the region's own, to see what its rounding does.
    """

    def __init__(self, region: Region, dtype: torch.dtype | None = None) -> None:
        self.region = region
        logits = region.inputs["logits"].meta["val"]
        bias = region.inputs.get("bias")
        self.returns: tuple[str, ...] = tuple(str(region.hints["returns"]).split(","))
        self.lead: tuple[Any, ...] = tuple(logits.shape[:-1])
        self.experts = int(logits.shape[-1])
        self.chosen = int(region.hints["topk"])
        self.dtype: torch.dtype = dtype or logits.dtype
        self.bias_shape: tuple[int, ...] = tuple(bias.meta["val"].shape) if bias is not None else ()
        self.bias_dtype: torch.dtype | None = (dtype or bias.meta["val"].dtype) if bias is not None else None
        floats = [o.meta["val"].dtype for o in region.outputs if o.meta["val"].is_floating_point()]
        self.out_dtype: torch.dtype | None = floats[0] if floats else None

    @cached_property
    def _observed(self) -> Region:
        """The region with its ids as an output of their own."""
        if "ids" in self.returns:
            return self.region
        name = self.region.hints["ids"]
        ids = next(n for n in self.region.nodes if n.name == name)
        return replace(self.region, outputs=(*self.region.outputs, ids))

    # -- sizes --------------------------------------------------------------------------------------------------
    def plan(self, rows: int) -> tuple[Dims, tuple[int, ...]]:
        """Sizes to run ``rows`` tokens at, or as many as the region insists on, and the token dims of the logits."""
        static = all(isinstance(s, int) for s in self.lead)
        total = 1
        for s in self.lead:
            total *= s if isinstance(s, int) else 1
        if static and total <= _SMALL:
            return Dims(), tuple(int(s) for s in self.lead)
        wanted = self._wanted(rows)
        pairs = list(zip(self.lead, wanted, strict=True))
        if static:
            fixed = self._fixed_literals()
            moved = {s: w for s, w in pairs if s != w}
            count = 1
            for w in wanted:
                count *= w
            moved.update({total * m: count * m for m in sorted(fixed) if m > 0 and total * m not in moved})
            if fixed.isdisjoint(moved) and not set(moved) & {w for s, w in pairs if s == w}:
                return Dims({}, moved), wanted
            return Dims(), tuple(int(s) for s in self.lead)
        dims = Dims.plan(pairs)
        return (dims, wanted) if dims is not None else self._reachable(rows)

    def _reachable(self, rows: int) -> tuple[Dims, tuple[int, ...]]:
        """The smallest sizes with at least ``rows`` tokens: a batch of a fixed size leaves multiples of it only."""
        exprs = [s.node.expr for s in self.lead if isinstance(s, torch.SymInt)]
        names = {str(symbol) for expr in exprs for symbol in expr.free_symbols}
        if len(names) == 1:
            (name,) = names
            for value in range(1, rows + 1):
                dims = Dims({name: value})
                lead = tuple(dims.size(s) for s in self.lead)
                if min(lead) > 0 and torch.Size(lead).numel() >= rows:
                    return dims, lead
        raise TiedTokens

    def _wanted(self, rows: int) -> tuple[int, ...]:
        """``rows`` as token dims: all in the last one, but two in the first if there are several."""
        if len(self.lead) == 1:
            return (rows,)
        first = self.lead[0] if isinstance(self.lead[0], int) and rows % int(self.lead[0]) == 0 else 2 - rows % 2
        return (int(first), *([1] * (len(self.lead) - 2)), rows // int(first))

    def _fixed_literals(self) -> set[int]:
        """Sizes of the region that are not token counts."""
        lead = [int(s) for s in self.lead]
        total = int(torch.Size(lead).numel())
        fixed = {0, 1, self.experts, self.chosen}
        for node in self.region.nodes:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            shape = list(value.shape)
            if shape[: len(lead)] == lead:
                shape = shape[len(lead) :]
            elif shape[:1] == [total]:
                shape = shape[1:]
            fixed.update(s for s in shape if isinstance(s, int) and (s < total or s % total))
        return fixed

    # -- runs ---------------------------------------------------------------------------------------------------
    def tensors(self, logits: Tensor, bias: Tensor | None, lead: Sequence[int]) -> Mapping[str, Tensor]:
        """Inputs by role: f32 [R, E] and [E] in the region's own dtypes and shapes."""
        found = {"logits": logits.to(self.dtype).reshape(*lead, self.experts)}
        if self.bias_dtype is not None:
            assert bias is not None
            found["bias"] = bias.to(self.bias_dtype).reshape(self.bias_shape)
        return found

    def observe(self, logits: Tensor, bias: Tensor | None = None) -> Observation:
        """Run on f32 ``logits`` [R, E] and ``bias`` [E], rounded to the region's dtypes first.

        Raises:
            Exception: whatever the region raises.
        """
        logits = logits.to(self.dtype).float()
        bias = bias.to(self.bias_dtype).float() if bias is not None and self.bias_dtype is not None else None
        rows = logits.shape[0]
        dims, lead = self.plan(rows)
        step = int(torch.Size(lead).numel())
        weights: list[Tensor] = []
        ids: list[Tensor] = []
        for start in range(0, rows, step):
            part = logits[start : start + step]
            missing = step - part.shape[0]
            if missing:  # repeat tokens up to the count that the region insists on
                part = torch.cat([part, logits.repeat(-(-missing // rows), 1)[:missing]])
            w, i = self._split(self._observed.program.run(dims, self.tensors(part, bias, lead)), step)
            ids.append(i)
            if w is not None:
                weights.append(w)
        all_ids = torch.cat(ids)[:rows]
        return Observation(logits, bias, torch.cat(weights)[:rows] if weights else None, all_ids)

    def _split(self, results: Sequence[Tensor], rows: int) -> tuple[Tensor | None, Tensor]:
        """(weights [rows, K] f64 or None, ids [rows, K]) of one run."""
        ids = self._ids(results).reshape(rows, self.chosen)
        if self.returns == ("ids",):
            return None, ids
        if self.returns == ("dense",):
            dense = results[0].reshape(rows, self.experts).double()
            rest = dense.scatter(-1, ids, 0.0)
            weights = dense.gather(-1, ids)
            # Anything but zero beside the chosen experts is no routing: NaN makes every comparison fail.
            return weights.masked_fill((rest != 0).any(-1, keepdim=True), torch.nan), ids
        return results[0].reshape(rows, self.chosen).double(), ids

    @staticmethod
    def _ids(results: Sequence[Any]) -> Tensor:
        """The ids of a run; where they have no node of their own the last result is all that ``topk`` returns."""
        last = results[-1]
        return last if isinstance(last, Tensor) else last[1]

    def differentiate(self, logits: Tensor, bias: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Gradients [R, E] and [E] of ``sum(weights * grad)`` on as many rows as the region takes; f32 ``logits``.

        ``None`` if the weights do not depend on the logits by a differentiable path.
        """
        rows = logits.shape[0]
        dims, lead = self.plan(rows)
        step = int(torch.Size(lead).numel())
        with torch.inference_mode(False), torch.enable_grad():
            part = logits.repeat(-(-step // rows), 1)[:step].clone()
            inputs = dict(self.tensors(part, None if bias is None else bias.clone(), lead))
            for role, tensor in inputs.items():
                inputs[role] = tensor.detach().clone().requires_grad_()
            results = self._observed.program.run(dims, inputs)
            output, ids = results[0], self._ids(results).reshape(step, self.chosen)
            if not output.requires_grad:
                return None
            cotangent = grad.repeat(-(-step // rows), 1)[:step]
            if self.returns == ("dense",):
                cotangent = torch.zeros(step, self.experts).scatter(-1, ids, cotangent)
            found = torch.autograd.grad(
                output, list(inputs.values()), cotangent.reshape(output.shape).to(output.dtype), allow_unused=True
            )
        if found[0] is None:
            return None
        d_logits = found[0].float().reshape(step, self.experts)
        d_bias = found[1] if len(found) > 1 else None
        return d_logits[: min(rows, step)], None if d_bias is None else d_bias.float().reshape(-1)
