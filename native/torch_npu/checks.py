"""Would the vendor op take this call? Asked before the call is emitted, of the limits in ``rows``.

The vendor's own fakes say yes to almost everything, wrong shapes included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ascend_deep.native.torch_npu import checks_attention, checks_gemm, checks_moe, checks_parallel, rows
from ascend_deep.native.torch_npu._call import Call, Refused, Spec
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["CHECKS", "Spec", "refusal"]

CHECKS: Mapping[str, Callable[..., None]] = {
    **checks_moe.CHECKS,
    **checks_gemm.CHECKS,
    **checks_attention.CHECKS,
    **checks_parallel.CHECKS,
}


def refusal(op: str, target: Target, *args: Any, **kwargs: Any) -> str | None:
    """Why ``torch.ops.npu.<op>(*args, **kwargs)`` would be refused on ``target``, one sentence; ``None``: it is taken.

    Raises:
        KeyError: there are no limits for that op.
        TypeError: the arguments do not fit the op's signature.
    """
    call = Call(op, target)
    products = rows.limit(op, "products", target)
    if products is not None and target.family not in products.value:
        return f"torch_npu's {op} is not made for the Ascend {target.family} ({products.source})."
    eager_only = rows.limit(op, "eager_only", target) if target.graph else None
    if eager_only is not None:
        return f"torch_npu's {op} has no working converter for graphs ({eager_only.source})."
    try:
        CHECKS[op](call, *args, **kwargs)
    except Refused as sentence:
        return str(sentence)
    return None
