"""``huge_pages(model)``: weights on the CPU in pages of 2 MB.

A pass over weights of hundreds of megabytes opens a page of 4 KB every few hundred nanoseconds, and each of them costs
a walk through the page tables, twice as long in a virtual machine. In pages of 2 MB the walks disappear: the same
kernels read the same weights 5-10 % faster (``python -m benchmarks --huge-pages`` measures it). Linux gives such pages
on request (madvise(2): ``MADV_HUGEPAGE``, and ``MADV_COLLAPSE`` from 6.1 on); values, addresses and the amount of
memory stay what they are. Nothing here is done unless it is asked for, because memory that processes share after a fork
would be copied.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["HugePages", "huge_pages"]

_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # the same on x86-64 and aarch64
_PAGE = 2 << 20


@dataclass(frozen=True)
class HugePages:
    """What ``huge_pages`` did.

    Attributes:
        moved: bytes that are in huge pages now.
        later: bytes that the kernel has marked, and moves when it gets to it (Linux before 6.1).
        left: large tensors that were not moved: (name, reason).
        seconds: time it took; the kernel copies the weights once.
    """

    moved: int
    later: int
    left: tuple[tuple[str, str], ...]
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.moved / 2**20:.0f} MiB moved to huge pages in {self.seconds:.2f} s"]
        if self.later:
            lines.append(f"{self.later / 2**20:.0f} MiB marked; this kernel moves them in the background")
        return "\n".join([*lines, *(f"left {name}: {reason}" for name, reason in self.left)])


def huge_pages(model: nn.Module | Iterable[torch.Tensor]) -> HugePages:
    """Ask the kernel to keep the weights of a model in pages of 2 MB.

    Call it after the weights have their final place: after loading, ``prepare`` and conversions, before the processes
    of a server are forked. Calling it again moves what is new.

    Args:
        model: a module, whose parameters and buffers are meant, or tensors. Only what lies on the CPU and spans at
            least one whole huge page is looked at, every storage once.

    Returns:
        What was moved, and what was not and why. Where the system has no huge pages everything is left, with the
        reason.

    Raises:
        TypeError: ``model`` is neither a module nor an iterable of tensors.
    """
    begin = time.perf_counter()
    moved = later = 0
    left: list[tuple[str, str]] = []
    for name, storage in _storages(model):
        first = -(-storage.data_ptr() // _PAGE) * _PAGE
        size = (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE - first
        if size <= 0:
            continue
        reason = "it is in memory that processes share." if storage.is_shared() else _unavailable()
        code = 0 if reason else _advise(first, size, _MADV_HUGEPAGE)
        if reason or code:
            left.append((name, reason or f"the kernel refuses huge pages for it ({_named(code)})."))
            continue
        code = _advise(first, size, _MADV_COLLAPSE)
        if code == 0:
            moved += size
        elif code == errno.EINVAL and _release() < (6, 1):
            later += size
        else:
            left.append((name, f"the kernel did not find the pages for it ({_named(code)})."))
    return HugePages(moved, later, tuple(left), time.perf_counter() - begin)


def _storages(model: nn.Module | Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.UntypedStorage]]:
    named: Iterable[tuple[str, torch.Tensor]]
    if isinstance(model, nn.Module):
        named = [*model.named_parameters(), *model.named_buffers()]
    elif isinstance(model, Iterable) and not isinstance(model, torch.Tensor):
        named = [(f"tensor {i}", t) for i, t in enumerate(model)]
    else:
        raise TypeError(
            f"huge_pages: model is a {type(model).__name__}; it takes a torch.nn.Module or a list of tensors."
        )
    seen: set[int] = set()
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"huge_pages: {name} is a {type(tensor).__name__}; it takes tensors.")
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield name, storage


def _unavailable() -> str | None:
    return None if sys.platform == "linux" else f"huge pages are asked for on Linux only, this is {sys.platform}."


def _advise(address: int, size: int, advice: int) -> int:
    """The error number of madvise(2), 0 if it succeeded."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice))
    return 0 if done == 0 else ctypes.get_errno()


def _named(code: int) -> str:
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"


def _release() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)
