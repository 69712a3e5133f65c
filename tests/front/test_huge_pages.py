"""huge_pages: values stay, the kernel's own count of huge pages grows, everything left has a reason."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ascend_deep

MB = 1 << 20


def in_huge_pages(t: torch.Tensor) -> int:
    """Bytes of huge pages in the mappings that hold the tensor, as the kernel counts them."""
    first, last = t.data_ptr(), t.data_ptr() + t.nbytes
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) < last and int(head[2], 16) > first
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")
def test_weights_move_and_stay_what_they_are() -> None:
    model = nn.Sequential(nn.Linear(2048, 1536), nn.Linear(1536, 16))
    before = [p.detach().clone() for p in model.parameters()]
    places = [p.data_ptr() for p in model.parameters()]
    done = ascend_deep.huge_pages(model)
    assert [p.data_ptr() for p in model.parameters()] == places
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    if done.left or done.later:  # a kernel without them
        assert all(reason.endswith(".") for _, reason in done.left)
        assert done.moved + done.later + len(done.left) > 0
        return
    assert done.moved in (8 * MB, 10 * MB, 12 * MB), "of 12 MB, all but the ends"
    assert in_huge_pages(model[0].weight) >= done.moved
    assert "MiB moved to huge pages" in str(done)
    assert ascend_deep.huge_pages(model).moved == done.moved, "again is the same"


def test_tied_weights_count_once_and_small_ones_do_not() -> None:
    weight = torch.randn(1024, 2048)
    done = ascend_deep.huge_pages([weight, weight.t(), weight[3:], torch.randn(7)])
    assert done.moved + done.later <= weight.nbytes
    assert len(done.left) <= 1


def test_shared_memory_is_left() -> None:
    done = ascend_deep.huge_pages([torch.randn(1024, 2048).share_memory_()])
    assert done.moved == done.later == 0
    assert done.left == (("tensor 0", "it is in memory that processes share."),)


def test_other_devices_are_not_looked_at() -> None:
    done = ascend_deep.huge_pages([torch.empty(1024, 4096, device="meta")])
    assert (done.moved, done.later, done.left) == (0, 0, ())


@pytest.mark.parametrize(
    "wrong,sentence",
    [
        (3, "model is a int; it takes"),
        (torch.randn(3), "model is a Tensor; it takes"),
        ([1.0], "tensor 0 is a float; it"),
    ],
)
def test_wrong_arguments(wrong: object, sentence: str) -> None:
    with pytest.raises(TypeError, match=re.escape(sentence)):
        ascend_deep.huge_pages(wrong)  # type: ignore[arg-type]
