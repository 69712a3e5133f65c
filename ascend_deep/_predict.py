"""Times of our ops in a rewritten graph, for its report: predicted (formula, figure, bound) and measured nearby.

A prediction was never measured and says so; a measured figure is of a calibration (``ascend-deep calibrate``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from ascend_deep.calibration import Calibration, nearest
from ascend_deep.lowering import targets

__all__ = ["measured_notes", "notes", "sizes_of"]

_PRECISION = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "fp8", torch.uint8: "fp4"}
_FP4 = (torch.uint8, torch.int8)  # two codes in a byte


def notes(gm: fx.GraphModule, target: str) -> tuple[str, ...]:
    """One sentence per op and sizes; none for a target without a table, or an op without a formula."""
    table = targets.TARGETS.get(target)
    if table is None:
        return ()
    return _counted(_sentence(name, node, table) for node in gm.graph.nodes if (name := _ours(node)) in _SIZES)


def measured_notes(
    gm: fx.GraphModule, calibration: Calibration | None, device: str, family: str | None
) -> tuple[str, ...]:
    """What a calibration has for the ops of a rewritten graph, or why it has nothing.

    Args:
        device: torch device type that the graph is compiled for.
        family: of the Ascend processor that is planned for.
    """
    if calibration is None:
        return ()
    reason = calibration.fits(device, family)
    if reason is not None:
        return (f"the calibration is not used: {reason}",)
    machine = calibration.machine
    said = []
    now = torch.__version__
    if machine.torch != now:
        said.append(f"the calibration was measured with torch {machine.torch}, and this is {now}; it is used.")
    if device == "cpu" and machine.threads != torch.get_num_threads():
        threads = f"{machine.threads} thread{'s' if machine.threads > 1 else ''}"
        said.append(
            f"the calibration was measured with {threads}, and these are {torch.get_num_threads()}; it is used."
        )
    return (*said, *_counted(_measured(node, calibration) for node in gm.graph.nodes))


def _counted(sentences: Any) -> tuple[str, ...]:
    found = Counter(text for text in sentences if text)
    return tuple(text if n == 1 else f"{n} times: {text}" for text, n in found.items())


def _ours(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "ascend_deep":
        return target._schema.name.split("::")[1]
    return ""


def sizes_of(node: fx.Node) -> dict[str, Any]:
    """The sizes of a call of an op of ours, named as in its cost formula; symbolic ones as sympy symbols."""
    name = _ours(node)
    if name not in _SIZES:
        return {}
    values = [_value(a) for a in node.args]
    sizes = {k: _plain(v) for k, v in _SIZES[name](values, node.kwargs).items()}
    needed = {str(s) for s in targets.cost(name).bytes.free_symbols}
    if "O" in needed:
        out = _value(node)
        sizes["O"] = out.dtype.itemsize
    if "F" in needed:
        sizes["F"] = sympy.Add(*(_bytes(values[i]) for i in (1, 3)))
    for symbol, i in (("W", 0), ("V", 2)):
        if symbol in needed:
            packed = name in _CODES and values[i].dtype in _FP4
            sizes[symbol] = sympy.Rational(1, 2) if packed else values[i].dtype.itemsize
    return sizes


def _sentence(name: str, node: fx.Node, table: targets.Target) -> str:
    sizes = sizes_of(node)
    first = _value(node.args[0])
    # f32 products run on the vector units or as several bf16 ones; there is no rate for them, and that of bf16 is a
    # lower bound of the time.
    precision = _PRECISION.get(first.dtype, "bf16")
    if precision not in table.flops_per_cycle:
        precision = "bf16"
    prediction, formula = targets.predict(targets.cost(name, **sizes), table, precision), targets.cost(name)
    return (
        f"{name} on {table.device}: at least {prediction}, from {formula.flops} operations and {formula.bytes} bytes, "
        f"with {_listed(sizes)}."
    )


def _measured(node: fx.Node, calibration: Calibration) -> str:
    sizes = sizes_of(node)
    found = nearest(calibration.measured, _ours(node), sizes) if sizes else None
    if found is None:
        return ""
    here = {k: v for k, v in sizes.items() if k in found.sizes}
    nearby = "" if here == dict(found.sizes) else f", and this is {_listed(here)}"
    return (
        f"{found.op} measured on {calibration.machine.name}: {found.fused * 1e6:.3g} us by {found.provider}, "
        f"{found.ratio:.2f} times as fast as what is written, with {found.at()} in {found.dtype}{nearby}."
    )


def _listed(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} = {v}" for k, v in sizes.items())


def _value(argument: Any) -> Any:
    if not isinstance(argument, fx.Node):
        return argument
    value = argument.meta.get("val", argument.meta.get("example_value"))
    return value[0] if isinstance(value, (tuple, list)) else value


def _plain(size: Any) -> Any:
    """A size as a number, or as the symbol that Dynamo has for it."""
    if isinstance(size, torch.SymInt):
        return sympy.Symbol(str(size.node.expr), positive=True)
    return size if isinstance(size, sympy.Expr) else int(size)


def _bytes(scales: torch.Tensor) -> Any:
    return sympy.Mul(*(_plain(s) for s in scales.shape), scales.dtype.itemsize)


def _experts(v: list[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    x, idx, w2, enk = v[0], v[1], v[5], kwargs["weight_layout"] == "enk"
    return {"T": x.shape[0], "K": idx.shape[1], "E": w2.shape[0], "H": x.shape[1], "I": w2.shape[2 if enk else 1]}


def _product(a: torch.Tensor, b: torch.Tensor, layout: str) -> dict[str, Any]:
    """``layout``: t or n for each operand, as the GEMM ops take it; ``b`` may have groups in front."""
    rows, inner = (_whole(a, d) for d in ((-2, -1) if layout[0] == "n" else (-1, -2)))
    return {"M": rows, "N": _whole(b, -2 if layout[1] == "t" else -1), "K": inner}


def _whole(x: torch.Tensor, dim: int) -> Any:
    """The size in numbers; FP4 packs two of the last dimension in a byte."""
    return _plain(x.shape[dim]) * (2 if dim == -1 and x.dtype in _FP4 else 1)


def _groups(a: torch.Tensor, b: torch.Tensor, layout: str) -> dict[str, Any]:
    return {**_product(a, b, layout), "G": b.shape[0]}


def _einsum(v: list[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A letter of both operands and the result is a batch, of both alone summed over, of one a row or a column."""
    inputs, out = kwargs["eq"].replace(" ", "").split("->")
    first, second = inputs.split(",")
    of = {**dict(zip(first, v[0].shape, strict=True)), **dict(zip(second, v[1].shape, strict=True))}
    parts: dict[str, Any] = dict.fromkeys("BMNK", sympy.Integer(1))
    for letter, size in of.items():
        both = letter in first and letter in second
        part = ("B" if letter in out else "K") if both else "M" if letter in first else "N"
        parts[part] = parts[part] * _plain(size)
    return {k: int(x) if x.is_number else x for k, x in parts.items()}


def _queries(v: list[Any]) -> dict[str, Any]:
    q, kv = v[0], v[2]
    return {"S": _plain(q.shape[0]) * _plain(q.shape[1]), "T": kv.shape[1], "N": q.shape[2], "D": q.shape[3]}


def _last(x: torch.Tensor) -> dict[str, Any]:
    rows = sympy.Mul(*(_plain(s) for s in x.shape[:-1]))
    return {"M": int(rows) if rows.is_number else rows, "K": x.shape[-1]}


def _gated(h: torch.Tensor) -> dict[str, Any]:
    rows = sympy.Mul(*(_plain(s) for s in h.shape[:-1]))
    return {"T": int(rows) if rows.is_number else rows, "I": h.shape[-1] // 2}


_CODES = ("gemm_scaled", "m_grouped_gemm_scaled")
_SIZES: Mapping[str, Callable[[list[Any], Mapping[str, Any]], dict[str, Any]]] = {
    "moe_experts": _experts,
    "moe_route": lambda v, k: {"T": v[0].shape[0], "E": v[0].shape[1], "K": k["topk"]},
    "swiglu": lambda v, k: _gated(v[0]),
    "swiglu_quant": lambda v, k: {**_gated(v[0]), "Q": k["gran_k"]},
    "quant_fp8": lambda v, k: {**_last(v[0]), "P": int(k["gran"][0]), "Q": int(k["gran"][1])},
    "gemm_bf16": lambda v, k: _product(v[0], v[1], k["layout"]),
    "einsum_bf16": _einsum,
    "m_grouped_gemm_bf16": lambda v, k: _groups(v[0], v[1], k["layout"]),
    "k_grouped_gemm_bf16": lambda v, k: {
        **{"M": v[0].shape[1], "N": v[1].shape[1], "K": v[0].shape[0]},
        "G": v[2].shape[0],
    },
    "gemm_scaled": lambda v, k: _product(v[0], v[2], k["layout"]),
    "m_grouped_gemm_scaled": lambda v, k: _groups(v[0], v[2], k["layout"]),
    "mqa_logits": lambda v, k: _queries(v),
    "mqa_topk": lambda v, k: {**_queries(v), "K": k["topk"]},
    "sparse_mqa_attention": lambda v, k: {
        **{"S": _plain(v[0].shape[0]) * _plain(v[0].shape[2]), "K": v[3].shape[2], "N": v[0].shape[1]},
        "D": v[0].shape[3],
    },
}
