"""Parts of a model that look like a mixture of experts and that no recogniser has anything to say about."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ascend_deep.report import Report

__all__ = ["unclaimed_parts"]

# Names of classes. Families put "Moe" into the names of all their classes (Qwen3MoeAttention), hence the endings.
_EXPERTS = re.compile(r"Experts?(MLP|Mlp)?$|ExpertsList$")
_ROUTER = re.compile(r"Router$|M[oO]E?Gate$|TopKGate$|TopkGate$")
_BLOCK = re.compile(
    r"(Moe|MoE|MOE)$|(Moe|MoE|MOE|SparseMoe)Block$|(MoE|MOE)(Layer|FFN)$|SparseM(LP|lp)$|MixtureOfExperts"
)


def unclaimed_parts(report: Report) -> dict[str, str]:
    """Module path to class name of the parts that nothing was fused, refused or called in.

    A block that was claimed in part is not listed, but its experts or its router are, if theirs is the part that was
    not. Only modules that ran ops of a compiled graph count.
    """
    ran = {path: kind for g in report.graphs for path, kind in g.modules.items()}
    found: dict[str, str] = {}
    for path, kind in ran.items():
        # After a graph break Dynamo names modules relative to the frame it resumed in; those have no place here.
        if report.modules and path not in report.modules:
            continue
        of = _kind(kind)
        if of and not any(_covers(where, what, path, of) for where, what in _claims(report)):
            found[path] = kind
    return {p: k for p, k in found.items() if not any(p.startswith(f"{outer}.") for outer in found if outer != p)}


def _kind(name: str) -> str:
    for kind, pattern in (("experts", _EXPERTS), ("router", _ROUTER), ("block", _BLOCK)):
        if pattern.search(name):
            return kind
    return ""


def _claims(report: Report) -> Iterator[tuple[str, str]]:
    """(module path, "experts" | "router" | "other") of everything that the report says about a place."""
    for match in report.matches:
        yield match.module, _claimed(match.recogniser)
    for miss in report.misses:
        yield miss.module, _claimed(miss.recogniser)
    for call in report.own_calls:
        yield call.module, _called(call.op)


def _called(op: str) -> str:
    # Experts are called whole, or as the steps that quantised ones are made of.
    if op in ("moe_experts", "moe_permute", "moe_combine") or op.startswith("m_grouped_gemm"):
        return "experts"
    return "router" if op == "moe_route" else "other"


def _claimed(recogniser: str) -> str:
    return "experts" if recogniser.startswith("experts") else "router" if recogniser == "router" else "other"


def _covers(where: str, what: str, path: str, kind: str) -> bool:
    """Does a claim of kind ``what`` at ``where`` speak about the module at ``path``?"""
    if what == "other":
        return False
    inside = where == path or where.startswith(f"{path}.") or not path
    if kind == "block":
        return inside
    # Code of a router may stand in the block around it, and the other way round.
    parent = path.rpartition(".")[0]
    return what == kind and (inside or where == parent or path.startswith(f"{where}."))
