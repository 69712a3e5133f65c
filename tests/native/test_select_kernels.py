"""The selection of the CUDA top-k, its kernels run in numpy, against the rule of ``mqa_topk``."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numpy")

from tests.native.gluon_numpy import kernels

_rule = importlib.import_module("ascend_deep.ops.mqa_topk").select
launch, space = kernels("select.py", "select_long.py")
RANK_LAST = 0x007FFFFF
LAYOUTS = {"HELD": None, "SPREAD": None}


def pitches(t: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if t is None else tuple(0 if t.shape[d] == 1 else t.stride(d) for d in range(dims))


def array(t: Tensor | None) -> Any:
    return None if t is None else t.numpy()


class Case:
    """Scores [1, S, T] with bounds and a mask, and what the rule chooses from them."""

    def __init__(
        self,
        values: Tensor,
        topk: int,
        ks: Tensor | None = None,
        ke: Tensor | None = None,
        hidden: Tensor | None = None,
        outside: str = "pad",
    ) -> None:
        self.values, self.topk, self.ks, self.ke, self.hidden = values, topk, ks, ke, hidden
        self.rank_last = outside == "rank_last"
        at = torch.arange(values.shape[2])
        eligible = torch.ones_like(values, dtype=torch.bool)
        if ks is not None:
            eligible &= at >= ks.unsqueeze(-1)
        if ke is not None:
            eligible &= at < ke.unsqueeze(-1)
        if hidden is not None:
            eligible &= ~hidden
        known = values.masked_fill(~eligible, -torch.inf)
        self.want = _rule(known, None if self.rank_last else eligible, topk, False)
        self.bits = values.contiguous().view(torch.int32).clone()
        if hidden is not None:
            self.bits[hidden] = -1

    def run(self, long: dict[str, int] | None) -> None:
        """Through one block, or through marks with the sizes of ``long``; checks scores and indices."""
        _, rows, columns = self.values.shape
        scores = torch.full((1, rows, self.topk), 7.0)
        idx = torch.full((1, rows, self.topk), 7, dtype=torch.int32)
        flags = {
            "HAS_KS": self.ks is not None,
            "HAS_KE": self.ke is not None,
            "MASKED": self.hidden is not None,
            "BARRED": RANK_LAST if self.rank_last else 0,
        }
        given = [array(x) for x in (self.bits, self.ks, self.ke)]
        strides = (*pitches(self.bits, 2), *pitches(self.ks, 2), *pitches(self.ke, 2))
        ends = (*pitches(scores, 2), *pitches(idx, 2))
        out = [array(scores), array(idx)]
        if long is None:
            block = 1 << max(columns - 1, 0).bit_length()
            options = {"BLOCK": block, **LAYOUTS, **flags, "SCORES": True, "EVEN": columns == block}
            launch("select_kernel", (rows, 1), (*given, *out, columns, self.topk, rows, *strides, *ends), options)
        else:
            parts = -(-columns // long["mark"])
            words = parts * long["mark"] // 32
            bounds, marks = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, words, dtype=torch.int32)
            names = torch.zeros(rows, long["pick"], dtype=torch.int32)
            work = [array(x) for x in (bounds, marks, names)]
            sample = {"SAMPLE": long["sample"], "CAPACITY": long["pick"], "PAIRS": None, **flags}
            launch("sample_kernel", (rows, 1), (*given, work[0], columns, self.topk, rows, *strides), sample)
            marked = {"WORDS": long["mark"] // 32, "TILE": None, **flags, "EVEN": columns % long["mark"] == 0}
            launch("mark_kernel", (rows, parts), (*given, *work[:2], columns, rows, *strides, words), marked)
            args = (*given, *work, *out, columns, self.topk, rows, words, *strides, words, *ends)
            picked = {"BLOCK": long["pick"], "WORDS": long["words"], "SPARSE": None, **LAYOUTS, **flags, "SCORES": True}
            launch("pick_kernel", (rows, 1), args, picked)
        assert torch.equal(idx.long(), self.want[1])
        assert torch.equal(scores.nan_to_num(nan=1e30), self.want[0].nan_to_num(nan=1e30))


SIZES = {"sample": 64, "mark": 64, "words": 16, "pick": 256}
WAYS = [pytest.param(None, id="block"), pytest.param(SIZES, id="marks")]


@pytest.mark.parametrize("long", WAYS)
@pytest.mark.parametrize("columns", [1000, 1024])
@pytest.mark.parametrize("topk", [1, 60, 200, 256])
def test_smooth_scores(long: dict[str, int] | None, columns: int, topk: int) -> None:
    Case(torch.randn(1, 3, columns), topk).run(long)


@pytest.mark.parametrize("long", WAYS)
def test_ties_and_zeros(long: dict[str, int] | None) -> None:
    few = torch.randint(-2, 3, (1, 3, 700)).float()
    few[0, 0] = 0.0
    few[0, 1, ::3] = -0.0
    few[0, 2] = 0.0
    few[0, 2, torch.randperm(700)[:20]] = 1 + torch.rand(20)
    Case(few, 90).run(long)


@pytest.mark.parametrize("long", WAYS)
def test_infinities_and_nan(long: dict[str, int] | None) -> None:
    values = torch.randn(1, 4, 600)
    values[0, 0, ::5], values[0, 1, ::7], values[0, 2, ::2] = torch.inf, torch.nan, -torch.inf
    values[0, 3] = torch.nan
    Case(values, 100).run(long)
    Case(values * 1e38, 100).run(long)


@pytest.mark.parametrize("long", WAYS)
@pytest.mark.parametrize("outside", ["pad", "rank_last"])
@pytest.mark.parametrize("masked", [False, True])
def test_ranges_and_masks(long: dict[str, int] | None, outside: str, masked: bool) -> None:
    """Empty, short, reversed and overlong ranges; some rows have fewer keys than are asked for."""
    values = torch.randn(1, 7, 900)
    ks = torch.tensor([[0, 100, 895, -5, 400, 0, 300]])
    ke = torch.tensor([[900, 180, 2000, 0, 399, 130, 700]], dtype=torch.int32)
    hidden = torch.rand(1, 7, 900) < 0.3 if masked else None
    for low, high in ((ks, ke), (None, ke), (ks, None)):
        Case(values, 120, low, high, hidden, outside).run(long)


def test_scores_in_one_place_only() -> None:
    """Neighbours alike, and a segment that holds everything: words that are full beside empty ones."""
    values = torch.randn(1, 2, 1024).sort(-1).values
    Case(values, 100).run(SIZES)
    Case(values.flip(-1), 100).run(SIZES)
    alike = torch.randn(1, 2, 64).repeat_interleave(16, -1) + 1e-3 * torch.randn(1, 2, 1024)
    Case(alike, 100).run(SIZES)


def test_marks_do_for_smooth_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of a sample lets enough keys pass, and not too many: no row is counted as a whole."""
    monkeypatch.setitem(space, "_select_whole", lambda *_: pytest.fail("a whole row was counted"))
    sizes = {"sample": 512, "mark": 512, "words": 128, "pick": 1024}
    for topk in (40, 128):
        Case(torch.randn(1, 6, 4096), topk).run(sizes)
        Case(torch.rand(1, 2, 4096).log(), topk).run(sizes)


def test_samples_that_mislead() -> None:
    """Every sampled key is small, or large: too many or too few keys pass, and the whole row is counted instead."""
    values = torch.randn(1, 2, 1024)
    n = torch.arange(64)
    sampled = n // 2 * 32 + n % 2
    for moved in (-50.0, 50.0):
        misleading = values.clone()
        misleading[..., sampled] += moved
        Case(misleading, 150).run(SIZES)


@pytest.mark.parametrize("length", [257, 300, 500])
def test_ranges_between_a_block_and_a_sample(length: int) -> None:
    """A sample larger than the range is the range, once."""
    ke = torch.full((1, 2), length)
    Case(torch.randn(1, 2, 1500), 30, None, ke).run({**SIZES, "sample": 512})
