"""``shadow_select``: run-time comparison of a fused result with the result of what it replaced.

``options={"verify": "shadow"}`` keeps each matched region in the graph beside its replacement and lets this op choose:
the replacement as long as both agree within the op's tolerance, the original otherwise. A site whose replacement
disagreed once is demoted for the rest of the process, with one WARNING that names it. Shadowed models are slower than
unfused ones; the mode is for trust, not for speed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _op

__all__ = ["SCHEMA", "demoted", "register_shadow", "shadow_select"]

log = logging.getLogger("ascend_deep")

SCHEMA = "(Tensor[] fused, Tensor[] original, str site, float rtol, float atol) -> (Tensor[], Tensor)"
_DEMOTED: set[str] = set()


def demoted() -> frozenset[str]:
    """Sites whose replacement disagreed with the original at run time."""
    return frozenset(_DEMOTED)


def shadow_select(
    fused: Sequence[Tensor], original: Sequence[Tensor], site: str, rtol: float, atol: float
) -> tuple[list[Tensor], Tensor]:
    """Choose between two results of one computation.

    Args:
        fused, original: the same shapes and dtypes, pairwise.
        site: name of the place, for the log and for demotion.
        rtol, atol: as in ``passes.probe.compare``: ``|fused - original| <= atol·max|original| + rtol·|original|``.
            Integer tensors must be equal.

    Returns:
        Copies of the chosen tensors, and a bool scalar on the CPU: whether ``fused`` was chosen.
    """
    agreed = site not in _DEMOTED
    if agreed:
        for f, o in zip(fused, original, strict=True):
            difference = _difference(f, o, rtol, atol)
            if difference:
                agreed = False
                _DEMOTED.add(site)
                log.warning("%s: the fused result differs from the original (%s); the original is used from now on.",
                            site, difference)  # fmt: skip
                break
    chosen = fused if agreed else original
    return [t.clone(memory_format=torch.contiguous_format) for t in chosen], torch.tensor(agreed)


def _difference(fused: Tensor, original: Tensor, rtol: float, atol: float) -> str:
    """``""`` if the tensors agree, else what was found."""
    if fused.numel() == 0:
        return ""
    if not original.is_floating_point():
        return "" if torch.equal(fused, original) else "other integers"
    f, o = fused.double(), original.double()
    if not torch.equal(torch.isfinite(f), torch.isfinite(o)):
        return "not finite at other places"
    f, o = torch.nan_to_num(f, 0.0, 0.0, 0.0), torch.nan_to_num(o, 0.0, 0.0, 0.0)
    excess = (f - o).abs() - (atol * o.abs().max() + rtol * o.abs())
    return "" if float(excess.max()) <= 0 else f"by up to {float((f - o).abs().max()):.2e}"


def _fake(
    fused: Sequence[Tensor], original: Sequence[Tensor], site: str, rtol: float, atol: float
) -> tuple[list[Tensor], Tensor]:
    chosen = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in original]
    return chosen, torch.empty((), dtype=torch.bool, device="cpu")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grads: Sequence[Tensor | None], _: Any) -> tuple[Any, ...]:
    (agreed,) = ctx.saved_tensors
    to_fused: list[Tensor | None] = []
    to_original: list[Tensor | None] = []
    for grad in grads:
        if grad is None:
            to_fused.append(None)
            to_original.append(None)
            continue
        use = agreed.to(grad.device, grad.dtype)
        to_fused.append(grad * use)
        to_original.append(grad * (1 - use))
    return to_fused, to_original, None, None, None


def register_shadow() -> None:
    """Register the op, once per process."""
    if hasattr(torch.ops.ascend_deep, "shadow_select"):
        return
    home = _op._LIBRARY
    home.define(f"shadow_select{SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
    home.impl("shadow_select", shadow_select, "CompositeExplicitAutograd")
    torch.library.register_fake("ascend_deep::shadow_select", _fake, lib=home)
    torch.library.register_autograd("ascend_deep::shadow_select", _backward, setup_context=_setup_context, lib=home)
