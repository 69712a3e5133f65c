"""Every spelling of an indexer becomes ``mqa_topk`` or ``mqa_logits``, and computes what it computed before."""

from __future__ import annotations

import pytest
import torch

from tests.passes.mqa_spellings import ALL, Spelling, compiled, operands

# Symbolic sizes change where regions are cut and how they are mapped, dtypes what probes are compared by. Each spelling
# meets both kinds of both; spellings in which sizes decide how many products there are, all four pairs.
SIZED = ("loop", "head_chunks", "flat_bmm", "matmul_sum")
CASES = [
    pytest.param(s, dtype, dynamic, id=f"{s.name}-{str(dtype)[6:]}-{'dynamic' if dynamic else 'static'}")
    for s in ALL
    for dtype in (torch.float32, torch.bfloat16)
    for dynamic in (False, True)
    if s.name in SIZED or dynamic == (dtype == torch.float32)
]


@pytest.mark.parametrize(("s", "dtype", "dynamic"), CASES)
def test_spelling(s: Spelling, dtype: torch.dtype, dynamic: bool) -> None:
    run, backend = compiled(s, dynamic)
    for b, queries, keys in ((2, 9, 9), (3, 7, 21)) if dynamic else ((2, 7, 13),):
        tensors = operands(b, queries, keys, dtype)
        with torch.no_grad():
            assert_same(run(*tensors), s(*tensors), s)
    assert backend.found == [s.op], backend.reasons
    assert s.wanted in backend.outcomes[-1].matches[0].spec
    assert backend.ops.count(f"ascend_deep.{s.op}") == 1
    assert not {"aten.matmul", "aten.bmm", "aten.einsum", "aten.relu"} & set(backend.ops)
    ranked = {"aten.topk", "aten.argsort", "aten.sort"} & set(backend.ops)
    assert not ranked or s.op == "mqa_logits"
    assert len(backend.graphs) == 1 or dynamic
    notes = " ".join(backend.outcomes[-1].matches[0].notes)
    assert ("another order" in notes) == (dtype == torch.bfloat16)


def assert_same(got, want, s: Spelling) -> None:
    if not isinstance(got, tuple):
        got, want = (got,), (want,)
    if s.open_order:
        got, want = by_index(*got), by_index(*want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype and g.stride() == w.stride()
        if w.is_floating_point():
            torch.testing.assert_close(g, w, rtol=2e-5, atol=2e-5)
        else:
            assert torch.equal(g, w)


def by_index(values, indices):
    order = indices.argsort(-1)
    return values.gather(-1, order), indices.gather(-1, order)
