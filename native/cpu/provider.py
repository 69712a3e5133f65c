"""The CPU provider: our C++ kernels."""

from __future__ import annotations

from ascend_deep.native._provider import Provider

__all__ = ["CPU"]


def _unavailable() -> str | None:
    return "the C++ kernels are not built."


CPU = Provider(name="native.cpu", device="cpu", unavailable=_unavailable)
