"""What is true of the tensors of every op: those that it needs are there, and what it writes overlaps nothing it reads.

The second is about memory and not about shapes, so it is looked at on every call; ops that write are few, and two
tensors that share no storage are told apart at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["check_own_places", "refuse_shared_memory", "required_tensors", "written_tensors"]


def required_tensors(schema: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that are tensors and may not be ``None``."""
    return tuple((i, a.name) for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor")


def written_tensors(schema: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of all tensor arguments, what is written first; nothing if the op writes into none."""
    tensors = [(i, a) for i, a in enumerate(schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]
    written = [(i, a.name) for i, a in tensors if a.alias_info is not None and a.alias_info.is_write]
    if not written:
        return ()
    assert len(written) == 1, schema
    return (*written, *((i, a.name) for i, a in tensors if (i, a.name) not in written))


def refuse_shared_memory(op: str, places: Sequence[tuple[int, str]], args: Sequence[Any]) -> None:
    """Raise ``ValueError`` if the written tensor (the first of ``places``) shares memory with another argument.

    ``c`` may be the written tensor itself, element by element. Tensors of one storage that lie in disjoint ranges, or
    in disjoint columns of one buffer, are told apart; anything else that cannot be is refused.
    """
    (where, name), *others = places
    target = args[where]
    storage = target.untyped_storage()._cdata
    for i, other_name in others:
        other = args[i]
        if not isinstance(other, Tensor) or other.untyped_storage()._cdata != storage:
            continue
        same = (
            other.storage_offset() == target.storage_offset()
            and other.shape == target.shape
            and other.stride() == target.stride()
            and other.dtype == target.dtype
        )
        if (same and other_name == "c") or _apart(target, other):
            continue
        raise ValueError(
            f"{op}: {name} lies in the memory of {other_name}, which is read while {name} is written; "
            f"{name} must share no memory with {other_name}"
            + (" unless it is the same tensor." if other_name == "c" else ".")
        )


def check_own_places(op: str, name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` if elements of a tensor that is written may share a place, as those of an expanded one do.

    Sizes or strides that are symbolic are left to the call that runs.
    """
    dims = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if not isinstance(n, int) or n != 1]
    if not all(isinstance(v, int) for pair in dims for v in pair) or any(n == 0 for n, _ in dims):
        return
    reach = 0  # the largest distance between elements along the dims that were looked at, shortest stride first
    for n, stride in sorted(dims, key=lambda d: d[1]):
        if stride <= reach:
            raise ValueError(
                f"{op}: {name} has sizes {list(tensor.shape)} and strides {list(tensor.stride())}, with which elements "
                f"share a place in memory; it must have a place for each (clone() it before)."
            )
        reach += (n - 1) * stride


def _apart(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage certainly share no byte of it."""
    spans = [_span(t) for t in (a, b)]
    if any(s is None for s in spans):
        return True  # empty, or of symbolic sizes: the call that runs has numbers
    (start_a, end_a, pitch_a, wide_a), (start_b, end_b, pitch_b, wide_b) = spans  # type: ignore[misc]
    if end_a <= start_b or end_b <= start_a:
        return True
    if pitch_a != pitch_b or not pitch_a:
        return False
    left, right = start_a % pitch_a, start_b % pitch_a
    whole = left + wide_a <= pitch_a and right + wide_b <= pitch_a
    return whole and (left + wide_a <= right or right + wide_b <= left)


def _span(t: Tensor) -> tuple[int, int, int, int] | None:
    """Bytes from and to which ``t`` lies in its storage, its longest stride, and how far it reaches within that."""
    values = (*t.shape, *t.stride(), t.storage_offset())
    if not all(isinstance(v, int) for v in values) or t.numel() == 0:
        return None
    size = t.element_size()
    dims = sorted(((s * size, (n - 1) * s * size) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1))
    start = int(t.storage_offset()) * size
    total = sum(reach for _, reach in dims) + size
    pitch, reach = dims[-1] if dims else (0, 0)
    return start, start + total, pitch, total - reach
