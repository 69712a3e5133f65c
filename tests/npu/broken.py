"""Invalid calls of vendor ops, made from valid ones by one change."""

from __future__ import annotations

import inspect
import random
from typing import Any

import torch

from ascend_deep.native.torch_npu import rows, soc
from ascend_deep.native.torch_npu.checks import CHECKS, Spec
from tests.npu.calls import VARIANTS, Call, quantised, valid

KINDS = ("rank", "dtype", "size", "scalar")
_A5 = ("950pr", "950dt")

# Sizes that another argument fixes: op, tensor, dimensions. Others may be anything.
_TIED: dict[str, dict[str, tuple[int, ...]]] = {
    "npu_moe_gating_top_k": {"bias": (0,)},
    "npu_moe_init_routing_v2": {"expert_idx": (0,)},
    "npu_moe_finalize_routing": {"scales": (0, 1), "expanded_src_to_dst_row": (0,)},
    "npu_grouped_matmul": {"x": (1,), "weight": (0, 1), "group_list": (0,), "bias": (0, 1)},
    "npu_swiglu": {"input": (1,)},
    "npu_swiglu_backward": {"grad_output": (1,), "input": (1,)},
    "npu_clipped_swiglu": {"x": (1,)},
    "npu_quant_matmul": {"x1": (1,), "x2": (0,), "scale": (0,)},
    "npu_moe_distribute_dispatch_v2": {"expert_ids": (0,)},
    "npu_alltoallv_gmm": {"gmm_x": (0, 1), "gmm_weight": (0, 1)},
    "npu_gmm_alltoallv": {"gmm_x": (0, 1), "gmm_weight": (0, 1)},
    "npu_moe_distribute_combine_v2": {"expert_scales": (0, 1), "expand_scales": (0,)},
}
_TIED_SCALES = {"scale": (0, 1), "per_token_scale": (0,), "pertoken_scale": (0,)}


def _made_for(op: str, family: str) -> bool:
    return any(family in r.value for r in rows.ROWS if (r.op, r.what) == (op, "products"))


def _first(value: Any) -> Spec:
    return value[0] if isinstance(value, list) else value


def _scalar(rng: random.Random, op: str, family: str) -> tuple[str, Any] | None:
    """An argument of which a row lists the accepted numbers, and a number that it does not list."""
    names = inspect.signature(CHECKS[op]).parameters
    listed = [
        r
        for r in rows.ROWS
        if r.op == op
        and family in r.socs
        and r.what in names
        and isinstance(r.value, tuple)
        and all(type(v) is int for v in r.value)
    ]
    if not listed:
        return None
    row = rng.choice(listed)
    wrong = [v for v in range(min(row.value) - 3, max(row.value) + 9) if v not in row.value]
    return row.what, rng.choice(wrong)


def broken(rng: random.Random) -> tuple[str, str, Call, str]:
    """Op, processor family, the whole call, and what is wrong with it, which starts with one of ``KINDS``."""
    while True:
        op = rng.choice(sorted(CHECKS))
        family = rng.choice([f for f in soc.FAMILIES if _made_for(op, f)])
        call, tied = valid(op, family), dict(_TIED.get(op, {}))
        forms = [v for v in VARIANTS if v[0] == op]
        if forms and family in _A5 and rng.random() < 0.6:
            call = quantised(*rng.choice(forms))
            tied = {**{n: d for n, d in tied.items() if n != "bias"}, **_TIED_SCALES}
        kind = rng.choice(KINDS)
        if kind == "scalar":
            found = _scalar(rng, op, family)
            if found is None:
                continue
            name, wrong = found
            return op, family, {**call, name: wrong}, f"scalar {name} = {wrong}"
        if kind == "size":
            names = [n for n in tied if call.get(n) is not None]
            if not names:
                continue
            name = rng.choice(names)
            old = _first(call[name])
            dim = rng.choice([d for d in tied[name] if d < len(old.shape)])
            shape = list(old.shape)
            shape[dim] += rng.choice((1, 3))
        else:
            name = rng.choice([n for n, v in call.items() if isinstance(_first(v) if v else v, Spec)])
            old = _first(call[name])
            shape = [*old.shape, *[3] * (8 if op in ("npu_swiglu", "npu_dynamic_mx_quant") else 5)]
        dtype = old.dtype
        if kind == "dtype":
            shape, dtype = list(old.shape), torch.complex64 if old.dtype.is_floating_point else torch.float16
        if kind == "rank" and op == "npu_clipped_swiglu":  # any rank from 2 on is right there
            shape = [64]
        new = Spec(tuple(shape), dtype, old.swapped)
        what = f"{kind} of {name}, now {new.shape} {new.dtype}"
        return op, family, {**call, name: [new] if isinstance(call[name], list) else new}, what
